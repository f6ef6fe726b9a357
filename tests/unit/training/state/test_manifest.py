"""What is read is what was written, or an error that names the file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.errors import CheckpointError
from dstrain.training.state import manifest
from dstrain.training.state.manifest import HashedFileReader, HashedFileWriter, write_hashed_file


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 8)


def content(size: int) -> bytes:
    return bytes(index % 251 for index in range(size))


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 100])
@pytest.mark.parametrize("step", [1, 5, 8, 100])
def test_a_file_is_hashed_block_by_block_however_it_is_written(size: int, step: int, tmp_path: Path) -> None:
    with HashedFileWriter(tmp_path / "deep/file") as file:
        for start in range(0, size, step):
            file.write(content(size)[start : start + step])
    assert (tmp_path / "deep/file").read_bytes() == content(size)
    assert file.entry == write_hashed_file(tmp_path / "other", content(size))
    assert len(file.entry["sha256"]) == max(1, -(-size // 8))


@given(st.integers(0, 60), st.integers(0, 60))
def test_any_range_is_read(begin: int, length: int) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        manifest.BLOCK_BYTES = 8
        opened = HashedFileReader(Path(folder) / "file", write_hashed_file(Path(folder) / "file", content(60)))
        if begin + length <= 60:
            assert opened.read(begin, length) == content(60)[begin : begin + length]
        else:
            with pytest.raises(CheckpointError, match="beyond its end"):
                opened.read(begin, length)


@pytest.mark.parametrize("place", [0, 8, 29])
def test_a_changed_bit_is_found_where_it_is_read_and_only_there(place: int, tmp_path: Path) -> None:
    entry = write_hashed_file(tmp_path / "file", content(30))
    damaged = bytearray(content(30))
    damaged[place] ^= 1
    (tmp_path / "file").write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"file: is not what was written, the sha256 of bytes"):
        HashedFileReader(tmp_path / "file", entry).read(place, 1)
    elsewhere = 16 if place < 16 else 0
    assert HashedFileReader(tmp_path / "file", entry).read(elsewhere, 1) == content(30)[elsewhere : elsewhere + 1]


def test_a_file_cut_after_the_check_of_sizes_is_found(tmp_path: Path) -> None:
    entry = write_hashed_file(tmp_path / "file", content(30))
    (tmp_path / "file").write_bytes(content(20))
    with pytest.raises(CheckpointError, match="is not what was written"):
        HashedFileReader(tmp_path / "file", entry).read(16, 10)
    (tmp_path / "file").unlink()
    with pytest.raises(CheckpointError, match=r"file: cannot be read \(No such file"):
        HashedFileReader(tmp_path / "file", entry).read(0, 1)
