"""Protein structures: chains, the reader of mmCIF and PDB, clusters of similar sequences."""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.cache import get_or_build
from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.records import BadRecord
from dstrain.errors import DataError, one_line

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
        return {"name": self.name, **{name: array.tolist() for name, array in arrays.items()}}

    @classmethod
    def from_lists(cls, values: Mapping[str, Any]) -> Chain:
        """Return the chain of `as_lists`."""
        types, positions = (np.array(values[name], dtype=np.int32) for name in ("types", "positions"))
        return cls(values["name"], types, np.array(values["coordinates"], dtype=np.float64), positions)

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


READER_VERSION = 2
"""Increase it when the same file gives other chains: cached ones are then ignored."""
PEPTIDE_BOND_LIMIT = 2.0
"""Distance in Å between C and the next N above which residues are missing; the bond has 1.33 Å."""
LIMITS = ResourceLimits(4 << 30, cpu_seconds=120, wall_seconds=600)
"""Limits of reading one file. The largest entry of the PDB has 2.4 million atoms in 350 MB of text."""
_RARE_PARENTS = {"U": "C", "O": "K"}
"""Selenocysteine and pyrrolysine -> the types that they are read as."""


def read_chains(path: Path) -> list[Chain]:
    """Return the chains of amino acids in the first model of a .pdb, .ent, .cif or .mmcif file, also with .gz.

    Of an NMR entry the first model is used, which depositors choose as the representative one. DNA, RNA, water,
    ligands and caps are left out. A modified residue has the type of its parent (MSE is M). Of alternate locations
    a residue has the one with the highest mean occupancy, the first of equal ones. Raises BadRecord for a file that
    is no structure, or in which an atom or a residue is there twice, and DataError without gemmi.

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
        reason = text if kind == BadRecord.__name__ else f"reading it failed ({kind}: {one_line(text)}); remove it"
        return BadRecord(reason)
    return BadRecord(f"reading it {LIMITS.describe_exceeded(result.status, 'gemmi')}; split or remove it")


def _read_file(path: Path) -> list[dict[str, Any]]:
    structure = _read_structure(path)
    for number, model in enumerate(structure, 1):
        for chain in model:
            _check_chain(chain, f"model {number}, " if len(structure) > 1 else "")
    chains = [_read_chain(chain) for chain in structure[0]] if len(structure) else []
    return [chain.as_lists() for chain in chains if len(chain.types)]


def require_gemmi() -> Any:
    """Return the module. Raises DataError that names the extra."""
    try:
        import gemmi
    except ImportError as fault:
        raise DataError('structure files need gemmi; pip install "dstrain[protein]"') from fault
    return gemmi


def _read_structure(path: Path) -> Any:
    import gemmi

    content = read_content(path)
    is_pdb = path.name.lower().removesuffix(".gz").endswith((".pdb", ".ent"))
    if is_pdb:
        check_pdb_coordinates(content)
    try:
        file_format = gemmi.CoorFormat.Pdb if is_pdb else gemmi.CoorFormat.Mmcif
        structure = gemmi.read_structure_string(content, format=file_format)
    except (RuntimeError, ValueError, IndexError, UnicodeError) as fault:
        raise BadRecord(f"gemmi cannot read it ({one_line(str(fault))}); fix or remove the file") from fault
    structure.setup_entities()
    return structure


def _check_chain(chain: Any, place: str) -> None:
    """Raise BadRecord where an atom or a residue of the polymer is there twice without an alternate location."""
    fix = "give alternate locations, or remove one"
    for number, residues in _group_by_number(chain).items():
        where = f"{place}chain {chain.name}, residue {number}"
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


def _group_by_number(chain: Any) -> dict[str, list[Any]]:
    """Return number with insertion code -> the amino acids there: several where the sequence itself varies."""
    groups: dict[str, list[Any]] = {}
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


def _read_chain(chain: Any) -> Chain:
    types, coordinates, numbers = [], [], []
    for residues in _group_by_number(chain).values():
        residue, atoms = _choose_conformer(residues)
        types.append(_residue_type(residue.name))
        coordinates.append([atoms.get(name, (math.nan,) * 3) for name in BACKBONE_ATOMS])
        numbers.append(residue.seqid.num)
    places = np.array(coordinates, dtype=np.float64).reshape(-1, len(BACKBONE_ATOMS), 3)
    return Chain(chain.name, np.array(types, dtype=np.int32), places, _number_residues(places, numbers))


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


_GZIP_MAGIC = b"\x1f\x8b"
_COORDINATE_COLUMNS = (30, 38, 46)
"""Where x, y and z begin in a line of a PDB file; each has 8 characters."""
_LINE_LENGTH = 54
"""Characters of a line up to z. gemmi refuses shorter ones."""


def read_content(path: Path) -> bytes:
    """Return the content of a file without a byte order mark, unpacked if it is a gzip file. Raises BadRecord."""
    try:
        content = path.read_bytes()
        # gemmi reads what it can unpack of a truncated file, and reports nothing.
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise BadRecord(f"it cannot be unpacked ({one_line(str(fault))}); download it again") from fault
    except OSError as fault:
        raise BadRecord(f"it cannot be read ({fault.strerror}); check its permissions") from fault
    # gemmi would not recognize the first line behind it.
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        raise BadRecord("it is empty; download it again, or remove it")
    return content


def check_pdb_coordinates(content: bytes) -> None:
    """Raise BadRecord where a coordinate of a PDB file is not a number, such as `********`; gemmi reads it as 0."""
    for number, line in enumerate(content.split(b"\n"), 1):
        kind = line[:6].upper()
        if kind.rstrip() == b"END":
            return
        if kind[:4] in (b"ATOM", b"HETA") and len(line) >= _LINE_LENGTH:
            for start in _COORDINATE_COLUMNS:
                text = line[start : start + 8]
                try:
                    float(text)
                except ValueError:
                    written = text.decode("ascii", "replace").strip()
                    raise BadRecord(f"line {number}: the coordinate '{written}' is not a number; correct it") from None


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
        return np.asarray(np.load(folder / "clusters.npy", allow_pickle=False))

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
