"""A folder of structure files as records."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.data.sources.open import open_source
from dstrain.errors import DataError


def fill(folder: Path) -> Path:
    (folder / "ab").mkdir(parents=True)
    for name in ("2.pdb", "1.CIF", "ab/3.ent.gz", ".hidden.pdb", "notes.txt"):
        (folder / name).write_text(name)
    return folder


def test_structure_files_are_records_in_the_order_of_their_paths(tmp_path: Path) -> None:
    source = open_source(fill(tmp_path / "pdb"))
    names = [Path(source[index]["path"]).name for index in range(len(source))]
    assert names == ["1.CIF", "2.pdb", "3.ent.gz"]
    assert source.location(2).endswith("ab/3.ent.gz")


def test_a_single_structure_file_is_one_record(tmp_path: Path) -> None:
    source = open_source(fill(tmp_path / "pdb") / "2.pdb")
    assert [source[index]["path"] for index in range(len(source))] == [str(tmp_path / "pdb/2.pdb")]


def test_the_digest_is_of_names_and_contents_and_not_of_the_place(tmp_path: Path) -> None:
    digests = {open_source(fill(tmp_path / name)).digest for name in ("one", "two")}
    assert len(digests) == 1
    (tmp_path / "one/2.pdb").write_text("2.pdc")  # of the same size
    assert open_source(tmp_path / "one").digest not in digests
    (tmp_path / "two/2.pdb").rename(tmp_path / "two/4.pdb")
    assert open_source(tmp_path / "two").digest not in digests


def test_a_folder_without_structures_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(DataError, match=r"is a folder; name a \.jsonl, .* or a folder of \.pdb or \.cif files"):
        open_source(tmp_path)
