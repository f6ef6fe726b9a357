"""Folders that are packaged beside the code are found, or missed by name."""

from __future__ import annotations

import pytest

from dstrain.resources import find_resource_dir


def test_packaged_folders_are_found() -> None:
    assert (find_resource_dir("ds_configs") / "zero2.json").is_file()


def test_a_missing_folder_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"contains a folder `nothing`, but neither"):
        find_resource_dir("nothing")
