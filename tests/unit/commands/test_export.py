"""An export never touches what another command has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.commands.export import _rename_synced
from dstrain.errors import UsageError


def test_a_folder_that_another_export_has_filled_meanwhile_stays(tmp_path: Path) -> None:
    for name in ("partial", "to"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(name)
    with pytest.raises(UsageError, match=r"to: another command has written into it meanwhile.*choose another folder"):
        _rename_synced(tmp_path / "partial", tmp_path / "to")
    assert (tmp_path / "to" / "config.json").read_text() == "to"
