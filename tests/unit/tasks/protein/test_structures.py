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

from dstrain.errors import BadRecord
from dstrain.tasks.protein import structures
from dstrain.tasks.protein.structures import (
    AMINO_ACIDS,
    SIMULATION_NAMES,
    Chain,
    chain_from_columns,
    cluster_sequences,
    load_or_cluster,
    read_chains,
)
from tests.unit.data.pdb_files import THREE, Atom, helix, pdb_text

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
    far = [(50.0, 0.0, 0.0), (50.0, 1.5, 0.0)]
    high = [atom._replace(altloc="B", occupancy=0.6, place=place) for atom, place in zip(atoms[4:6], far, strict=True)]
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


ENTRY = "HEADER    HYDROLASE                               01-JAN-00   1ABC\n"


def entry_text(sequence: str = "ACDEFGHIKL") -> str:
    """Return a PDB file as the archive has them: header, sequence, atoms, TER, MASTER, END."""
    names = [atom.residue for atom in helix(sequence)[::4]]
    lines = [
        f"SEQRES{row + 1:4} A {len(names):4}  {' '.join(names[start : start + 13])}\n"
        for row, start in enumerate(range(0, len(names), 13))
    ]
    return ENTRY + "".join(lines) + pdb_text(helix(sequence)).replace("END\n", "MASTER        0\nEND\n")


def cut_at_atom(text: str, count: int) -> str:
    """Return the text up to the end of its atom `count`, from 1."""
    return "".join(text.splitlines(True)[: text[: text.index("ATOM  ")].count("\n") + count])


CUTS = {
    "an entry, at the end of a line": (cut_at_atom(entry_text(), 20), r"SEQRES names 10 residues, and 5 have atoms"),
    "an entry, in a column": (cut_at_atom(entry_text(), 20)[:-21], r"it is cut in line \d+; download it again"),
    "an entry, in the name of a record": (cut_at_atom(entry_text(), 20) + "ATO", r"it is cut in line \d+"),
    "a plain file, in a column": (cut_at_atom(pdb_text(helix("ACDEF")), 8)[:-21], r"it is cut in line 8"),
    "a plain file, in a residue": (cut_at_atom(pdb_text(helix("ACDEF")), 10), r"it is cut in its last residue"),
    "a file of models": (
        "MODEL        1\n" + pdb_text(helix("ACDE")).replace("END\n", "ENDMDL\nMODEL        2\n")
        + cut_at_atom(pdb_text(helix("ACDE")), 8), r"it is cut in a model",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CUTS)
def test_a_pdb_file_that_was_cut_is_refused(case: str, tmp_path: Path) -> None:
    text, message = CUTS[case]
    (tmp_path / "x.pdb").write_text(text)
    with pytest.raises(BadRecord, match=message):
        read_chains(tmp_path / "x.pdb")


def test_an_entry_that_was_cut_between_two_chains_is_refused(tmp_path: Path) -> None:
    first = entry_text().replace("MASTER        0\nEND\n", "")
    sequence = "SEQRES   1 B    3  ALA CYS ASP\n"
    (tmp_path / "x.pdb").write_text(ENTRY + sequence + first.removeprefix(ENTRY))
    with pytest.raises(BadRecord, match=r"SEQRES names chain B, which has no atoms, and no line END follows"):
        read_chains(tmp_path / "x.pdb")


@pytest.mark.parametrize("end", ["TER\n", "END\n", "TER\nMASTER        0\nEND", "CONECT    1    2\n"])
def test_an_entry_that_ends_is_whole_whatever_ends_it(end: str, tmp_path: Path) -> None:
    (tmp_path / "x.pdb").write_text(cut_at_atom(entry_text(), 20) + end)
    assert letters(read_chains(tmp_path / "x.pdb")[0]) == "ACDEF"  # the others may be disordered


def test_a_plain_file_needs_no_end(tmp_path: Path) -> None:
    (tmp_path / "x.pdb").write_text(pdb_text(helix("ACDEF")).removesuffix("TER\nEND\n").rstrip())
    assert letters(read_chains(tmp_path / "x.pdb")[0]) == "ACDEF"


def cif_text(style: str = "pdbx") -> str:
    """Return an entry as mmCIF; in the style pdbx a line # ends each category."""
    structure = gemmi.read_pdb_string(entry_text())
    structure.setup_entities()
    structure.assign_label_seq_id()
    document = structure.make_mmcif_document()
    options = gemmi.cif.WriteOptions()
    options.prefer_pairs = True
    text = str(document.as_string(options))
    lines = text.replace("\n\n", "\n#\n") if style == "pdbx" else text
    assert "_entity_poly_seq." in lines
    return lines.rstrip() + ("\n#\n" if style == "pdbx" and not lines.rstrip().endswith("#") else "\n")


@pytest.mark.parametrize("style", ["pdbx", "plain"])
def test_an_mmcif_file_that_was_cut_is_refused(style: str, tmp_path: Path) -> None:
    whole = cif_text(style)
    (tmp_path / "x.cif").write_text(whole)
    assert letters(read_chains(tmp_path / "x.cif")[0]) == "ACDEFGHIKL"
    rows = [at for at, line in enumerate(whole.splitlines()) if line.startswith("ATOM")]
    (tmp_path / "x.cif").write_text("\n".join(whole.splitlines()[: rows[14]]) + "\n")
    with pytest.raises(BadRecord, match=r"it is cut.*; download it again, or, if it is whole, end it with a line #"):
        read_chains(tmp_path / "x.cif")
    with (tmp_path / "x.cif").open("a") as file:
        file.write("#\n")
    assert letters(read_chains(tmp_path / "x.cif")[0]) == "ACDE"  # the reader's word for it


@pytest.mark.parametrize(("name", "kind"), [("x.pdb", "cif"), ("x.cif", "pdb"), ("x.pdb.gz", "pdb")])
def test_the_content_says_the_format_and_not_the_name(name: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(cif_text() if kind == "cif" else entry_text())
    assert letters(read_chains(tmp_path / name)[0]) == "ACDEFGHIKL"


def test_a_web_page_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.pdb").write_text("<html>404</html>")
    with pytest.raises(BadRecord, match=r"it is HTML or XML, not a structure"):
        read_chains(tmp_path / "x.pdb")


@pytest.mark.parametrize(
    ("name", "letter"),
    [
        (name, AMINO_ACIDS[[*THREE.values()].index(parent)])
        for name, parent in SIMULATION_NAMES.items()
        if len(name) == 3
    ],
)
def test_names_of_simulations_are_those_of_amino_acids(name: str, letter: str, tmp_path: Path) -> None:
    atoms = helix(["A", name, "D", "E", name])
    (chain,) = read_chains(write(tmp_path, [atom._replace(is_hetero=False) for atom in atoms]))
    assert (letters(chain), chain.unknown) == (f"A{letter}DE{letter}", {})


def test_long_names_of_simulations_are_known_in_mmcif(tmp_path: Path) -> None:
    text = cif_text().replace("HIS", "HISE").replace("LYS", "LYSH")
    (tmp_path / "x.cif").write_text(text)
    assert letters(read_chains(tmp_path / "x.cif")[0]) == "ACDEFGHIKL"


def test_unknown_types_are_counted_by_name(tmp_path: Path) -> None:
    (chain,) = read_chains(write(tmp_path, helix(["A", "XYZ", "D", "UNK", "XYZ", "E"])))
    assert (letters(chain), chain.unknown) == ("AXDXXE", {"XYZ": 2, "UNK": 1})


def move(atoms: list[Atom], change: Any) -> list[Atom]:
    return [atom._replace(place=change(atom)) for atom in atoms]


GEOMETRIES = {
    "all at the origin": (lambda atom: (0.0, 0.0, 0.0), r"all 40 backbone atoms are at one place \(0, 0, 0\)"),
    "three residues at the origin": (
        lambda atom: (0.0, 0.0, 0.0) if 4 <= atom.number <= 6 else atom.place,
        r"chain A, residue 4 GLU has backbone atoms at one place \(and 2 more residues\)",
    ),
    "nanometres": (
        lambda atom: tuple(value / 10 for value in atom.place),
        r"median length of 0\.15 Å, not about 1\.4; these are nanometres: multiply the coordinates by 10",
    ),
    "picometres": (lambda atom: tuple(value * 100 for value in atom.place), r"write coordinates in Å"),
    "two residues at one place": (
        lambda atom: (
            next(other.place for other in helix("ACDEFGHIKL") if (other.name, other.number) == (atom.name, 4))
            if atom.number == 5
            else atom.place
        ),
        r"the CA atoms of residues 4 GLU and 5 PHE are 0 Å apart",
    ),
}


@pytest.mark.parametrize("case", GEOMETRIES)
def test_coordinates_that_are_no_molecule_are_refused(case: str, tmp_path: Path) -> None:
    change, message = GEOMETRIES[case]
    with pytest.raises(BadRecord, match=message):
        read_chains(write(tmp_path, move(helix("ACDEFGHIKL"), change)))


@pytest.mark.parametrize("name", ["A", " "])
def test_two_chains_of_one_name_are_two_where_ter_is_between(name: str, tmp_path: Path) -> None:
    first, second = helix("ACDEFGH", name), helix("ACDEFGH", name, turn_offset=30)
    text = pdb_text(first).removesuffix("END\n") + pdb_text(second)
    (tmp_path / "x.pdb").write_text(text)
    assert [letters(chain) for chain in read_chains(tmp_path / "x.pdb")] == ["ACDEFGH"] * 2


def test_two_chains_of_one_name_without_ter_are_refused_with_that_fix(tmp_path: Path) -> None:
    first, second = helix("ACDEFGH"), helix("ACDEFGH", turn_offset=30)
    with pytest.raises(BadRecord, match=r"atom N twice; if these are two chains, end the first one with a line TER"):
        read_chains(write(tmp_path, first + second))


def test_a_gap_that_is_written_as_ter_does_not_split_a_chain(tmp_path: Path) -> None:
    text = pdb_text(helix("ACDE")).removesuffix("END\n") + pdb_text(helix("FGHI", first=9, turn_offset=8))
    (tmp_path / "x.pdb").write_text(text)
    (chain,) = read_chains(tmp_path / "x.pdb")
    assert (letters(chain), list(chain.positions)) == ("ACDEFGHI", [0, 1, 2, 3, 8, 9, 10, 11])


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


def test_a_name_that_is_not_utf8_is_damage(tmp_path: Path) -> None:
    content = pdb_text(helix("ACDEF")).encode()
    (tmp_path / "a.pdb").write_bytes(content.replace(b"ASP", b"A\xddP"))
    with pytest.raises(
        BadRecord, match="a name of a chain, residue or atom in it is not valid UTF-8; download it again"
    ):
        read_chains(tmp_path / "a.pdb")


def test_a_residue_without_a_number_is_damage(tmp_path: Path) -> None:
    gemmi = pytest.importorskip("gemmi")
    structure = gemmi.read_pdb_string(pdb_text(helix("ACDEF")))
    structure.setup_entities()
    document = structure.make_mmcif_document()
    table = document.sole_block().find("_atom_site.", ["auth_seq_id"])
    for row in table:
        row[0] = "?" if row[0] == "2" else row[0]
    (tmp_path / "a.cif").write_text(document.as_string())
    with pytest.raises(BadRecord, match="has no number; download it again"):
        read_chains(tmp_path / "a.cif")
