"""Files of precomputed outputs: a damaged one is computed again, whatever is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dstrain.train.precompute_outputs import read_columns, write_columns

WANTED = {"harmless_chosen": np.arange(3.0), "harmless_rejected": np.arange(3.0, 6.0)}
WRITTEN = {name: column.tolist() for name, column in WANTED.items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    write_columns(tmp_path, 0, WANTED, {})
    return tmp_path / "rows-00000000.npz"


def read(file: Path) -> dict[str, list[float]] | None:
    """Return the columns as lists; None where they are to be computed again."""
    found = read_columns(file.parent, 0, 3)
    return None if found is None else {name: column.tolist() for name, column in found.items()}


def test_a_file_cut_anywhere_is_computed_again(file: Path) -> None:
    whole = file.read_bytes()
    assert read(file) == WRITTEN
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert read(file) is None, f"{size} bytes"


@pytest.mark.parametrize("mask", [0x01, 0x08, 0xFF])
def test_a_file_with_any_byte_changed_gives_all_its_numbers_or_none(mask: int, file: Path) -> None:
    whole = file.read_bytes()
    for at in range(len(whole)):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ mask]) + whole[at + 1 :])
        assert read(file) in (None, WRITTEN), f"byte {at}"


def test_a_file_of_other_columns_or_rows_is_computed_again(tmp_path: Path) -> None:
    write_columns(tmp_path, 0, {"harmless_chosen": np.arange(2.0)}, {})
    assert read_columns(tmp_path, 0, 3) is None
