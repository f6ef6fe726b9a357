"""Chains of PDB and mmCIF files: what is read, what is left out, what is refused."""

from __future__ import annotations

import gzip
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dstrain.data import structures
from dstrain.data.records import BadRecord
from dstrain.data.structures import (
    AMINO_ACIDS,
    Chain,
    chain_from_columns,
    cluster_sequences,
    load_or_cluster,
    read_chains,
)
from tests.unit.data.pdb_files import Atom, helix, pdb_text

gemmi = pytest.importorskip("gemmi", reason='needs gemmi: pip install "dstrain[protein]"')


def write(folder: Path, atoms: list[Atom], name: str = "x.pdb") -> Path:
    path = folder / name
    path.write_text(pdb_text(atoms))
    return path


def letters(chain: Chain) -> str:
    return "".join((AMINO_ACIDS + "X")[kind] for kind in chain.types)


def test_each_chain_is_read_with_its_backbone(tmp_path: Path) -> None:
    first, second = read_chains(write(tmp_path, helix("ACDEF") + helix("GHIK", "B")))
    assert (first.name, letters(first), second.name, letters(second)) == ("A", "ACDEF", "B", "GHIK")
    assert first.coordinates[1, 1] == pytest.approx(helix("ACDEF")[5].place, abs=6e-4)
    assert list(first.positions) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["x.cif", "x.ent", "x.pdb.gz"])
def test_every_kind_of_file_gives_the_same_chain(name: str, tmp_path: Path) -> None:
    plain = write(tmp_path, helix("ACDEF"))
    other = tmp_path / name
    if name.endswith("cif"):
        gemmi.read_structure(str(plain)).make_mmcif_document().write_file(str(other))
    else:
        other.write_bytes(gzip.compress(plain.read_bytes()) if name.endswith("gz") else plain.read_bytes())
    (wanted,), (found,) = read_chains(plain), read_chains(other)
    assert letters(found) == letters(wanted)
    np.testing.assert_allclose(found.coordinates, wanted.coordinates)


def test_water_ligands_and_dna_are_left_out(tmp_path: Path) -> None:
    water = [Atom("O", "HOH", 101, (9.0, 9.0, 9.0), is_hetero=True)]
    dna = [Atom(name, "DA", number, (20.0 + number, 0.0, 0.0), "D") for number in (1, 2) for name in ("P", "C1'", "N1")]
    text = pdb_text(helix("ACDEF")).replace("END\n", "") + pdb_text(dna).replace("END\n", "") + pdb_text(water)
    (tmp_path / "x.pdb").write_text(text)
    assert [letters(chain) for chain in read_chains(tmp_path / "x.pdb")] == ["ACDEF"]


def test_a_modified_residue_has_the_type_of_its_parent(tmp_path: Path) -> None:
    (chain,) = read_chains(write(tmp_path, helix(["A", "MSE", "SEP", "G", "UNK"])))
    assert letters(chain) == "AMSGX"
    assert list(chain.is_known) == [True] * 4 + [False]


def test_the_alternate_location_with_the_highest_occupancy_is_read_whole(tmp_path: Path) -> None:
    atoms = helix("ACD")
    low = [atom._replace(altloc="A", occupancy=0.4) for atom in atoms[4:8]]
    high = [atom._replace(altloc="B", occupancy=0.6, place=(50.0, 0.0, 0.0)) for atom in atoms[4:6]]
    high += [atom._replace(altloc="B", occupancy=0.6) for atom in atoms[6:8]]
    (chain,) = read_chains(write(tmp_path, [*atoms[:4], *low, *high, *atoms[8:]]))
    assert list(chain.coordinates[1, :2, 0]) == [50.0, 50.0]
    assert np.isfinite(chain.coordinates).all()


def test_a_residue_that_is_two_in_the_crystal_is_read_as_the_more_frequent(tmp_path: Path) -> None:
    atoms = helix("ACD")
    rare = [atom._replace(altloc="A", occupancy=0.3) for atom in atoms[4:8]]
    usual = [atom._replace(altloc="B", occupancy=0.7, residue="SER") for atom in atoms[4:8]]
    (chain,) = read_chains(write(tmp_path, [*atoms[:4], *rare, *usual, *atoms[8:]]))
    assert letters(chain) == "ASD"


def test_the_first_model_is_read(tmp_path: Path) -> None:
    first, second = pdb_text(helix("ACDE")), pdb_text(helix("ACDE", turn_offset=7))
    models = [text.replace("END\n", "ENDMDL\n") for text in (first, second)]
    (tmp_path / "nmr.pdb").write_text(f"MODEL        1\n{models[0]}MODEL        2\n{models[1]}END\n")
    (chain,) = read_chains(tmp_path / "nmr.pdb")
    (wanted,) = read_chains(write(tmp_path, helix("ACDE")))
    np.testing.assert_array_equal(chain.coordinates, wanted.coordinates)


def test_a_missing_atom_makes_its_residue_incomplete_and_keeps_its_type(tmp_path: Path) -> None:
    atoms = helix("ACDEF")
    (chain,) = read_chains(write(tmp_path, [*atoms[:8], *atoms[9:]]))
    assert letters(chain) == "ACDEF"
    assert list(chain.is_complete) == [True, True, False, True, True]
    assert np.isnan(chain.coordinates[2, 0]).all()


def test_missing_residues_leave_a_gap_in_the_positions(tmp_path: Path) -> None:
    atoms = helix("ACD") + helix("EFG", first=9, turn_offset=8)
    assert list(read_chains(write(tmp_path, atoms))[0].positions) == [0, 1, 2, 8, 9, 10]


def test_numbers_that_jump_over_an_intact_bond_leave_no_gap(tmp_path: Path) -> None:
    atoms = helix("ACD") + helix("EFG", first=90, turn_offset=3)
    assert list(read_chains(write(tmp_path, atoms))[0].positions) == [0, 1, 2, 3, 4, 5]


FAULTS = {
    "an atom twice": (lambda atoms: [*atoms[:5], atoms[4], *atoms[5:]], r"chain A, residue 2 CYS has atom N twice"),
    "two names of one residue": (
        lambda atoms: [*atoms[:7], *[one._replace(residue="SER") for one in atoms[7:8]], *atoms[8:]],
        r"residue 2 is there as CYS and as SER",
    ),
    "a position that is no number": (
        lambda atoms: [atoms[0]._replace(place=(float("nan"), 0.0, 0.0)), *atoms[1:]],
        r"residue 1 ALA: atom N has no valid position",
    ),
}


@pytest.mark.parametrize("case", FAULTS)
def test_a_broken_structure_is_refused_with_its_place(case: str, tmp_path: Path) -> None:
    change, message = FAULTS[case]
    with pytest.raises(BadRecord, match=message):
        read_chains(write(tmp_path, change(helix("ACDEF"))))


def test_a_fault_of_a_later_model_is_found(tmp_path: Path) -> None:
    first, second = pdb_text(helix("ACDE")), pdb_text([helix("ACDE")[0], *helix("ACDE")])
    models = [text.replace("END\n", "ENDMDL\n") for text in (first, second)]
    (tmp_path / "nmr.pdb").write_text(f"MODEL        1\n{models[0]}MODEL        2\n{models[1]}END\n")
    with pytest.raises(BadRecord, match=r"model 2, chain A, residue 1 ALA has atom N twice"):
        read_chains(tmp_path / "nmr.pdb")


@pytest.mark.parametrize("name", ["x.pdb", "x.cif", "x.cif.gz"])
def test_a_file_that_is_no_structure_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"ATOM   short\n\xff")
    with pytest.raises(BadRecord, match=r"gemmi cannot read it"):
        read_chains(tmp_path / name)


@pytest.mark.parametrize(("old", "new"), [("   1.369", "********"), ("   1.369", "   1.3x9"), ("   1.369", "        ")])
def test_a_coordinate_that_gemmi_would_read_as_zero_is_refused(old: str, new: str, tmp_path: Path) -> None:
    text = pdb_text(helix("ACDEF"))
    assert text.count(old) == 1
    (tmp_path / "x.pdb").write_text(text.replace(old, new))
    with pytest.raises(BadRecord, match=rf"line 1: the coordinate '{re.escape(new.strip())}' is not a number"):
        read_chains(tmp_path / "x.pdb")


def test_a_truncated_gzip_file_is_refused(tmp_path: Path) -> None:
    text = pdb_text(helix("ACDEF" * 40))
    (tmp_path / "x.pdb.gz").write_bytes(gzip.compress(text.encode(), 0)[: 81 * 300])
    with pytest.raises(BadRecord, match=r"cannot be unpacked \(.*\); download it again"):
        read_chains(tmp_path / "x.pdb.gz")


def test_the_first_line_counts_behind_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "x.pdb").write_text("\ufeff" + pdb_text(helix("ACDEF")), encoding="utf-8")
    assert read_chains(tmp_path / "x.pdb")[0].is_complete.all()


@pytest.mark.parametrize("name", ["x.pdb", "x.cif", "x.cif.gz"])
def test_an_empty_file_is_said_to_be_empty(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"\n") if name.endswith("gz") else b"")
    with pytest.raises(BadRecord, match=r"it is empty; download it again"):
        read_chains(tmp_path / name)


@pytest.mark.parametrize(
    ("work", "limits", "message"),
    [
        ("while True: pass", {"cpu_seconds": 1}, r"reading it takes more than 1 seconds of processor time"),
        ("bytes(3 << 30)", {"memory_bytes": 1 << 30}, r"reading it takes more than 1\.0 GiB of memory"),
        ("os.kill(os.getpid(), 11)", {}, r"or crashes gemmi; split or remove it"),
    ],
)
def test_a_file_that_hangs_or_crashes_gemmi_is_a_bad_record(
    work: str, limits: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structures, "_read_file", lambda path: exec(work, {"os": os}))
    monkeypatch.setattr(structures, "LIMITS", replace(structures.LIMITS, **limits))
    with pytest.raises(BadRecord, match=message):
        read_chains(write(tmp_path, helix("ACDEF")))


def test_a_chain_comes_back_from_the_store_to_a_thousandth_of_an_angstrom(tmp_path: Path) -> None:
    atoms = helix("ACDEF")
    (chain,) = read_chains(write(tmp_path, [*atoms[:8], *atoms[9:]]))
    back = chain_from_columns(chain.as_columns())
    np.testing.assert_allclose(back.coordinates, chain.coordinates, atol=1e-9)
    assert list(back.types) == list(chain.types)
    assert list(back.positions) == list(chain.positions)


# Splits by similarity: a near copy of a held-out chain is never trained on.


def sequence(seed: int, length: int = 150) -> np.ndarray:
    return np.random.RandomState(seed).randint(20, size=length).astype(np.int32)


def mutated(original: np.ndarray, identity: float, seed: int = 0) -> np.ndarray:
    """Return the sequence with this share of residues kept, the others replaced by different ones."""
    random, copy = np.random.RandomState([seed, 9]), original.copy()
    changed = random.permutation(len(copy))[: round((1 - identity) * len(copy))]
    copy[changed] = (copy[changed] + random.randint(1, 20, size=len(changed))) % 20
    return copy


def test_unrelated_sequences_are_clusters_of_their_own() -> None:
    assert len({*cluster_sequences([sequence(seed) for seed in range(80)], 0.4)}) == 80


@pytest.mark.parametrize("identity", [1.0, 0.95, 0.8, 0.6])
def test_a_copy_with_mutations_is_in_the_cluster_of_its_original(identity: float) -> None:
    originals = [sequence(seed) for seed in range(10)]
    copies = [mutated(one, identity, seed) for seed, one in enumerate(originals)]
    found = cluster_sequences([*originals, *copies], 0.4)
    assert list(found[:10]) == list(found[10:]) == list(range(10))


def test_a_part_of_a_chain_is_similar_to_it() -> None:
    assert len({*cluster_sequences([sequence(1, 300), sequence(1, 300)[100:160]], 0.4)}) == 1


def test_a_higher_threshold_tells_more_sequences_apart() -> None:
    pair = [sequence(1), mutated(sequence(1), 0.7)]
    assert len({*cluster_sequences(pair, 0.5)}) == 1
    assert len({*cluster_sequences(pair, 0.95)}) == 2


def test_similarity_is_followed_from_chain_to_chain() -> None:
    chain = [sequence(1)]
    for step in range(6):
        chain.append(mutated(chain[-1], 0.85, step))
    assert len({*cluster_sequences(chain, 0.6)}) == 1


def test_copies_too_short_for_words_are_one_cluster() -> None:
    short = np.array([1, 2, 3], dtype=np.int32)
    assert list(cluster_sequences([short, short.copy(), np.array([1, 2], np.int32)], 0.4)) == [0, 0, 2]


def test_clusters_are_cached_by_tokens_and_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = [*np.random.RandomState(0).randint(0, 20, (6, 40))] * 2
    wanted = cluster_sequences(sequences, 0.4)
    assert list(load_or_cluster("a", sequences, 0.4)) == list(wanted)
    with monkeypatch.context() as patch:
        patch.setattr(structures, "cluster_sequences", lambda *_: pytest.fail("clustered again"))
        assert list(load_or_cluster("a", sequences, 0.4)) == list(wanted)
    assert len(load_or_cluster("b", sequences[:5], 0.4)) == 5
