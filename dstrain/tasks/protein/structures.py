"""Protein structures: chains, the reader of mmCIF and PDB, clusters of similar sequences."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache import get_or_build
from dstrain.data.content import describe_range
from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.sources.base import Columns
from dstrain.data.sources.open import FolderSource, ends_with
from dstrain.errors import one_line
from dstrain.files import load_npy
from dstrain.task import BadRecord, DataError, DatasetConfig, Source, open_source
from dstrain.tasks.protein.structure_files import CIF, StructureText, check_cif_sequence, read_structure_text

# Shapes: L residues, 4 backbone atoms, 3 coordinates in Å.


AMINO_ACIDS = "ACDEFGHIKLMNPQRSTVWY"
"""One-letter codes in the order of the residue types 0 to 19."""
UNKNOWN, MASK, PAD = 20, 21, 22
"""Types of a residue that is none of the 20, of one whose type is hidden, and of padding."""
NUM_TYPES = 23
BACKBONE_ATOMS = ("N", "CA", "C", "O")
COORDINATE_UNIT = 1000
"""Stored integers per Å: PDB files have three digits after the point."""
MAX_COORDINATE = 1.0e6
"""Largest coordinate in Å; a stored integer has 32 bits."""
_MISSING = -(2**31)


@dataclass(frozen=True)
class Chain:
    """The residues of one chain."""

    name: str
    types: np.ndarray
    """(L,) residue types."""
    coordinates: np.ndarray
    """(L, 4, 3) of N, CA, C and O in Å; NaN where an atom is missing."""
    positions: np.ndarray
    """(L,) places in the sequence. They ascend by 1 over a peptide bond and by more over missing residues."""
    unknown: Mapping[str, int] = field(default_factory=dict)
    """Name of a residue of unknown type -> how many there are."""

    @property
    def is_complete(self) -> np.ndarray:
        """(L,) whether N, CA and C are there, which define the residue's frame."""
        return np.asarray(np.isfinite(self.coordinates[:, :3]).all((1, 2)))

    @property
    def is_known(self) -> np.ndarray:
        """(L,) whether the type is one of the 20."""
        return np.asarray(self.types < UNKNOWN)

    def window(self, start: int, length: int) -> Chain:
        """Return the residues from `start` on, at most `length`."""
        part = slice(start, start + length)
        return Chain(self.name, self.types[part], self.coordinates[part], self.positions[part])

    def as_lists(self) -> dict[str, Any]:
        """Return the chain as values of JSON, in which every bit is kept."""
        arrays = {"types": self.types, "coordinates": self.coordinates, "positions": self.positions}
        lists = {name: array.tolist() for name, array in arrays.items()}
        return {"name": self.name, "unknown": dict(self.unknown), **lists}

    @classmethod
    def from_lists(cls, values: Mapping[str, Any]) -> Chain:
        """Return the chain of `as_lists`."""
        types, positions = (np.array(values[name], dtype=np.int32) for name in ("types", "positions"))
        coordinates = np.array(values["coordinates"], dtype=np.float64)
        return cls(values["name"], types, coordinates, positions, values["unknown"])

    def as_columns(self) -> dict[str, Any]:
        """Return the chain as columns of a token store, which holds integers."""
        scaled = np.where(np.isfinite(self.coordinates), np.rint(self.coordinates * COORDINATE_UNIT), _MISSING)
        return {
            "residues": self.types.astype(np.int32),
            "coordinates": scaled.astype(np.int32).reshape(-1),  # (L * 4 * 3,)
            "positions": self.positions.astype(np.int32),
        }


def chain_from_columns(columns: Mapping[str, Any]) -> Chain:
    """Return the chain of `Chain.as_columns`, without its name."""
    stored = np.asarray(columns["coordinates"]).reshape(-1, len(BACKBONE_ATOMS), 3)
    coordinates = np.where(stored == _MISSING, np.nan, stored / COORDINATE_UNIT)
    return Chain("", np.asarray(columns["residues"]), coordinates, np.asarray(columns["positions"]))


READER_VERSION = 3
"""Increase it when the same file gives other chains: cached ones are then ignored."""
PEPTIDE_BOND_LIMIT = 2.0
"""Distance in Å between C and the next N above which residues are missing; the bond has 1.33 Å."""
LIMITS = ResourceLimits(4 << 30, cpu_seconds=120, wall_seconds=600)
"""Limits of reading one file. The largest entry of the PDB has 2.4 million atoms in 350 MB of text."""
_RARE_PARENTS = {"U": "C", "O": "K"}
"""Selenocysteine and pyrrolysine -> the types that they are read as."""
_STATES = {
    "HIS": "HIE HID HIP HSD HSE HSP HISA HISB HISD HISE HISH HISP HIS1 HIS2",
    "CYS": "CYX CYM CYSH CYS1 CYS2",
    "ASP": "ASH ASPH ASPP",
    "GLU": "GLH GLUH GLUP",
    "LYS": "LYN LYSH LSN",
    "ARG": "ARN AR0 ARGN",
    "TYR": "TYM",
}
"""Residue -> the names of its protonation states and bonds in files of AMBER, CHARMM, GROMACS and Maestro."""
SIMULATION_NAMES = {name: parent for parent, names in _STATES.items() for name in names.split()}
BOND_RANGE = (0.8, 3.0)
"""Lengths in Å between which the median bond of a chain's backbone is; N-CA has 1.46 Å and CA-C 1.52 Å."""
NANOMETRE_RANGE = (0.1, 0.25)
MIN_BOND, MIN_NEIGHBOUR = 0.5, 2.0
"""Å below which bonded atoms, and the CA atoms of neighbours, are at one place; a cis peptide has 2.9 Å."""


def read_chains(path: Path) -> list[Chain]:
    """Return the chains of amino acids in the first model of a .pdb, .ent, .cif or .mmcif file, also with .gz.

    Of an NMR entry the first model is used, which depositors choose as the representative one. DNA, RNA, water,
    ligands and caps are left out. A modified residue has the type of its parent (MSE is M), and one of a simulation
    that of its amino acid (HIE is H). Of alternate locations a residue has the one with the highest mean occupancy,
    the first of equal ones. Raises BadRecord for a file that is no structure, that was cut, in which an atom or a
    residue is there twice, or whose coordinates are no molecule's, and DataError without gemmi.

    A damaged or hostile file may take any time or memory, or crash gemmi; so a forked process reads it.
    """
    require_gemmi()  # a process that is forked during another thread's import could wait for ever
    result = run_limited(partial(_read_file, path), LIMITS)
    if result.status != "done":
        raise _to_error(result)
    return [Chain.from_lists(values) for values in result.value]


def _to_error(result: SubprocessResult) -> BadRecord:
    if result.status == "raised":
        kind, text = result.value
        if kind == BadRecord.__name__:
            return BadRecord(text)
        if kind == UnicodeDecodeError.__name__:
            return BadRecord("a name of a chain, residue or atom in it is not valid UTF-8; download it again")
        return BadRecord(f"reading it failed ({kind}: {one_line(text)}); remove it")
    return BadRecord(f"reading it {LIMITS.describe_exceeded(result.status, 'gemmi')}; split or remove it")


def _read_file(path: Path) -> list[dict[str, Any]]:
    text = read_structure_text(path)
    structure = _parse(text)
    if text.format == CIF:
        check_cif_sequence(text.content, structure)
    elif _repeats_residues(structure):
        structure = _parse(text, splits_at_ter=True)
    chains = list[Chain]()
    for number, model in enumerate(structure, 1):
        for name, groups in _list_chains(model):
            _check_chain(name, groups, f"model {number}, " if len(structure) > 1 else "")
            if number == 1:
                chains.append(_read_chain(name, groups))
    return [chain.as_lists() for chain in chains if len(chain.types)]


def require_gemmi() -> Any:
    """Return the module. Raises DataError that names the extra."""
    try:
        import gemmi
    except ImportError as fault:
        raise DataError('structure files need gemmi; pip install "dstrain[protein]"') from fault
    return gemmi


def _parse(text: StructureText, splits_at_ter: bool = False) -> Any:
    """Return gemmi's structure. `splits_at_ter`: a chain of a PDB file ends at TER, whatever the next one is called."""
    import gemmi

    try:
        if text.format == CIF:
            structure = gemmi.read_structure_string(text.content, format=gemmi.CoorFormat.Mmcif)
        else:
            structure = gemmi.read_pdb_string(text.content, split_chain_on_ter=splits_at_ter)
    except (RuntimeError, ValueError, IndexError, UnicodeError) as fault:
        kind = "an mmCIF" if text.format == CIF else "a PDB"
        raise BadRecord(
            f"gemmi cannot read it as {kind} file ({one_line(str(fault))}); fix or remove the file"
        ) from fault
    for residue in (residue for model in structure for chain in model for residue in chain):
        # Before gemmi chooses the residues of the polymer, which it does by their names.
        residue.name = SIMULATION_NAMES.get(residue.name.upper(), residue.name)
    structure.setup_entities()
    return structure


Groups = dict[str, list[Any]]
"""Number with insertion code -> the amino acids there: several where the sequence itself varies."""


def _list_chains(model: Any) -> list[tuple[str, Groups]]:
    """Return name and amino acids of each chain.

    Parts of a chain that was split at TER are one chain again, except where the second repeats a number of the first.
    """
    chains = list[tuple[str, Groups]]()
    for chain in model:
        groups = _group_by_number(chain)
        if chains and groups and chains[-1][0] == chain.name and not chains[-1][1].keys() & groups.keys():
            chains[-1][1].update(groups)
        else:
            chains.append((chain.name, groups))
    return chains


def _repeats_residues(structure: Any) -> bool:
    """Return whether a chain has a residue with an atom twice, as two chains of one name have it."""
    chains = (chain for model in structure for chain in model)
    return any(_is_repeated(residues) for chain in chains for residues in _group_by_number(chain).values())


def _is_repeated(residues: Sequence[Any]) -> bool:
    plain = [atom.name for residue in residues for atom in residue if atom.altloc == "\0"]
    return len(plain) != len({*plain})


def _check_chain(name: str, groups: Groups, place: str) -> None:
    """Raise BadRecord where an atom or a residue of the polymer is there twice without an alternate location."""
    fix = "give alternate locations, or remove one"
    if sum(map(_is_repeated, groups.values())) > 1:
        fix = "if these are two chains, end the first one with a line TER, or rename the second; else remove one"
    for number, residues in groups.items():
        where = f"{place}chain {name}, residue {number}"
        for residue in residues:
            seen = set[tuple[str, str]]()
            for atom in residue:
                if atom.name in BACKBONE_ATOMS and (atom.name, atom.altloc) in seen:
                    raise BadRecord(f"{where} {residue.name} has atom {atom.name} twice; {fix}")
                seen.add((atom.name, atom.altloc))
                if not all(abs(value) <= MAX_COORDINATE for value in atom.pos.tolist()):
                    raise BadRecord(f"{where} {residue.name}: atom {atom.name} has no valid position; correct it")
        plain = [residue.name for residue in residues if any(atom.altloc == "\0" for atom in residue)]
        if len(plain) > 1:
            both = f"is there as {' and as '.join(plain)}" if len({*plain}) > 1 else f"{plain[0]} is there twice"
            raise BadRecord(f"{where} {both}; {fix}")


def _group_by_number(chain: Any) -> Groups:
    groups: Groups = {}
    for residue in chain.get_polymer():
        if _is_amino_acid(residue):
            groups.setdefault(str(residue.seqid), []).append(residue)
    return groups


def _is_amino_acid(residue: Any) -> bool:
    import gemmi

    info = gemmi.find_tabulated_residue(residue.name)
    if info.found():
        return bool(info.is_amino_acid())
    return {"N", "CA", "C"} <= {atom.name for atom in residue}


def _read_chain(name: str, groups: Groups) -> Chain:
    types, coordinates, numbers, names, unknown = [], [], [], [], Counter[str]()
    for at, residues in groups.items():
        residue, atoms = _choose_conformer(residues)
        if residue.seqid.num is None:
            raise BadRecord(f"chain {name}: a residue {one_line(residue.name)} has no number; download it again")
        types.append(_residue_type(residue.name))
        coordinates.append([atoms.get(atom, (math.nan,) * 3) for atom in BACKBONE_ATOMS])
        numbers.append(residue.seqid.num)
        names.append(f"{at} {residue.name}")
        unknown[residue.name] += types[-1] == UNKNOWN
    places = np.array(coordinates, dtype=np.float64).reshape(-1, len(BACKBONE_ATOMS), 3)
    check_geometry(name, names, places)
    positions = _number_residues(places, numbers)
    return Chain(name, np.array(types, dtype=np.int32), places, positions, {**+unknown})


def check_geometry(chain: str, residues: Sequence[str], places: np.ndarray) -> None:
    """Raise BadRecord for a chain whose backbone is no molecule: another unit, or several atoms at one place.

    `residues`: number and name of each; `places`: (L, 4, 3) in Å, NaN where an atom is missing.
    """
    where = f"chain {chain}"
    atoms = places[np.isfinite(places).all(-1)]  # (A, 3)
    if len(atoms) > 1 and np.ptp(atoms, axis=0).max() < MIN_BOND:
        first = ", ".join(f"{value:g}" for value in atoms[0])
        raise BadRecord(f"{where}: all {len(atoms)} backbone atoms are at one place ({first}); give their positions")
    bonds = np.linalg.norm(np.diff(places, axis=1), axis=-1)  # (L, 3): N-CA, CA-C, C-O
    known = bonds[np.isfinite(bonds)]
    middle = float(np.median(known)) if len(known) else BOND_RANGE[0]
    if not BOND_RANGE[0] <= middle <= BOND_RANGE[1]:
        told = f"{where}: the bonds of the backbone have a median length of {middle:.2g} Å, not about 1.4"
        is_nanometre = NANOMETRE_RANGE[0] <= middle <= NANOMETRE_RANGE[1]
        fix = "these are nanometres: multiply the coordinates by 10" if is_nanometre else "write coordinates in Å"
        raise BadRecord(f"{told}; {fix}")
    steps = np.linalg.norm(np.diff(places[:, 1], axis=0), axis=-1)  # (L - 1,) from CA to the next CA
    is_point, is_overlap = (bonds < MIN_BOND).any(1), steps < MIN_NEIGHBOUR
    if is_point.any():
        at, count = int(np.argmax(is_point)), int(is_point.sum())
        more = f" (and {count - 1} more residues)" * (count > 1)
        raise BadRecord(f"{where}, residue {residues[at]} has backbone atoms at one place{more}; remove these residues")
    if is_overlap.any():
        at = int(np.argmax(is_overlap))
        pair = f"residues {residues[at]} and {residues[at + 1]}"
        raise BadRecord(
            f"{where}: the CA atoms of {pair} are {steps[at]:.2g} Å apart, not about 3.8; correct or remove one"
        )


def _choose_conformer(residues: Sequence[Any]) -> tuple[Any, dict[str, Sequence[float]]]:
    """Return the residue, and its backbone atoms of the alternate location with the highest mean occupancy."""
    best, found = -1.0, (residues[0], dict[str, Sequence[float]]())
    for residue in residues:
        backbone = [atom for atom in residue if atom.name in BACKBONE_ATOMS]
        labels = list(dict.fromkeys(atom.altloc for atom in backbone if atom.altloc != "\0"))
        for label in labels or ["\0"]:
            # A labelled atom replaces one without a label.
            chosen = {atom.name: atom for altloc in ("\0", label) for atom in backbone if atom.altloc == altloc}
            occupancy = sum(atom.occ for atom in chosen.values()) / max(len(chosen), 1)
            if occupancy > best:
                best, found = occupancy, (residue, {name: atom.pos.tolist() for name, atom in chosen.items()})
    return found


def _residue_type(name: str) -> int:
    import gemmi

    letter = gemmi.find_tabulated_residue(name).one_letter_code.upper()
    return AMINO_ACIDS.index(letter) if (letter := _RARE_PARENTS.get(letter, letter)) in [*AMINO_ACIDS] else UNKNOWN


def _number_residues(coordinates: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """Return (L,) positions: 1 further over a peptide bond; else as the file numbers the residues, at least 2."""
    if not len(numbers):
        return np.zeros(0, dtype=np.int32)
    bonds = np.linalg.norm(coordinates[1:, 0] - coordinates[:-1, 2], axis=-1)  # (L - 1,) from C to the next N
    steps = np.diff(np.array(numbers, dtype=np.int64))
    is_bond = np.where(np.isfinite(bonds), bonds <= PEPTIDE_BOND_LIMIT, steps <= 1)
    return np.concatenate([[0], np.cumsum(np.where(is_bond, 1, steps.clip(2, 1000)))]).astype(np.int32)


# Shapes: N sequences.


CLUSTER_VERSION = 1
"""Increase it when the same sequences get other clusters: cached ones are then ignored."""

WORD_LENGTH = 4
"""Residues of a word; there are 20^4 words, so that unrelated chains share few."""
MIN_SHARED_WORDS = 3
"""Shared words below this count as chance."""


def cluster_sequences(sequences: Sequence[np.ndarray], identity: float) -> np.ndarray:
    """Return the cluster of each sequence of residue types, (N,); sequences of different clusters are not similar.

    Two sequences are similar if they share at least identity^4 of the shorter one's words of 4 residues, and 3 words:
    the expected share where a fraction `identity` of the residues is equal, at random places. Clusters are the
    connected components of similar sequences (single linkage). Copies are found at any length.
    """
    words = [_find_words(sequence) for sequence in sequences]
    first_copy = dict[bytes, int]()
    # Copies are joined first, so that a chain that many entries repeat costs one comparison.
    parents = [first_copy.setdefault(np.asarray(one, np.int32).tobytes(), at) for at, one in enumerate(sequences)]
    unique = [at for at, parent in enumerate(parents) if at == parent]
    holders: dict[int, list[int]] = {}
    for at in unique:
        for other, shared in _count_shared(words[at], holders).items():
            needed = max(MIN_SHARED_WORDS, math.ceil(identity**WORD_LENGTH * min(len(words[at]), len(words[other]))))
            if shared >= needed:
                a, b = _root(parents, at), _root(parents, other)
                parents[max(a, b)] = min(a, b)
        for word in words[at]:
            holders.setdefault(word, []).append(at)
    return np.array([_root(parents, at) for at in range(len(sequences))], dtype=np.int64)


def load_or_cluster(tokens_digest: str, sequences: Sequence[np.ndarray], identity: float) -> np.ndarray:
    """Return `cluster_sequences`, from the cache where it has the clusters of these tokens.

    The time grows with the square of the number of sequences.
    """

    def build(folder: Path) -> None:
        np.save(folder / "clusters.npy", cluster_sequences(sequences, identity))

    def load(folder: Path) -> np.ndarray:
        return load_npy(folder / "clusters.npy")

    key = {"tokens": tokens_digest, "identity": identity, "version": CLUSTER_VERSION}
    return get_or_build("clusters", key, build, load)


def _find_words(sequence: np.ndarray) -> list[int]:
    """Return the different words of 4 known residues, as numbers."""
    if len(sequence) < WORD_LENGTH:
        return []
    windows = np.lib.stride_tricks.sliding_window_view(np.asarray(sequence, dtype=np.int64), WORD_LENGTH)
    known = windows[(windows < UNKNOWN).all(1)]
    return [int(word) for word in np.unique(known @ UNKNOWN ** np.arange(WORD_LENGTH))]


def _count_shared(words: Sequence[int], holders: dict[int, list[int]]) -> dict[int, int]:
    """Return the earlier sequences that share words -> how many."""
    found = [np.array(holders[word]) for word in words if word in holders]
    if not found:
        return {}
    others, counts = np.unique(np.concatenate(found), return_counts=True)
    enough = counts >= MIN_SHARED_WORDS
    return {int(other): int(count) for other, count in zip(others[enough], counts[enough], strict=True)}


def _root(parents: list[int], at: int) -> int:
    while parents[at] != at:
        parents[at] = parents[parents[at]]
        at = parents[at]
    return at


# ---- files of structures

STRUCTURE_ENDINGS = (".pdb", ".ent", ".cif", ".mmcif")
"""Ends of the names of structure files; each may be followed by .gz."""


def open_structures(item: DatasetConfig, columns: Columns) -> Source:
    """Return a structure file, or those of a folder and its subfolders, as records; other files as `open_source` does.

    Raises DataError.
    """
    path = Path(os.path.expanduser(item.path))
    if not path.is_dir() and not (path.is_file() and ends_with(path, STRUCTURE_ENDINGS)):
        return open_source(item, columns)
    source = FolderSource(path, columns if item.columns is None else item.columns, STRUCTURE_ENDINGS)
    if not len(source):
        raise DataError(f"{path} is a folder without a structure file; name a folder of .pdb or .cif files")
    return source


# ---- what the structures of a file hold, for `dstrain data check`

MAX_LISTED_NAMES = 12
"""Names of unknown residues in a sentence."""


def count_chains(chains: Sequence[tuple[int, Mapping[str, int]]]) -> Mapping[str, int]:
    """Return what `describe_chains` reads: the length of each chain, and the names of its residues of unknown type."""
    counts = Counter[str]()
    for length, unknown in chains:
        counts[f"chain {length}"] += 1
        counts.update({f"unknown {name}": count for name, count in unknown.items()})
    return counts


def describe_chains(counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return (clauses on the chains of a folder, no notes), from the sums of `count_chains`."""
    lengths, unknown = Counter[int](), Counter[str]()
    for key, count in counts.items():
        kind, value = key.split(" ")
        if kind == "chain":
            lengths[int(value)] += count
        else:
            unknown[value] += count
    clauses = []
    if lengths:
        plural = "s" if lengths.total() != 1 else ""
        clauses.append(f"{lengths.total()} chain{plural}: {describe_range(lengths, 'residues')}")
    if unknown:
        clauses.append(describe_unknown(unknown, sum(length * count for length, count in lengths.items())))
    return clauses, []


def describe_unknown(unknown: Counter[str], residues: int) -> str:
    """Return the names of residues of unknown type with their numbers, the most frequent first."""
    names = [f"{name} {count}" for name, count in unknown.most_common(MAX_LISTED_NAMES)]
    more = f" and {len(unknown) - len(names)} other names" if len(unknown) > len(names) else ""
    return f"unknown types: {', '.join(names)}{more} ({unknown.total()} of {residues} residues, never a target)"
