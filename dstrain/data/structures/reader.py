"""Protein chains of PDB and mmCIF files, read with gemmi."""

from __future__ import annotations

import codecs
import gzip
import math
import zlib
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.records import BadRecord
from dstrain.data.structures.chain import AMINO_ACIDS, BACKBONE_ATOMS, MAX_COORDINATE, UNKNOWN, Chain
from dstrain.errors import DataError, one_line
from dstrain.units import format_bytes

READER_VERSION = 2
"""Increase it when the same file gives other chains: cached ones are then ignored."""
PEPTIDE_BOND_LIMIT = 2.0
"""Distance in Å between C and the next N above which residues are missing; the bond has 1.33 Å."""
LIMITS = ResourceLimits(4 << 30, cpu_seconds=120, wall_seconds=600)
"""Limits of reading one file. The largest entry of the PDB has 2.4 million atoms in 350 MB of text."""
_RARE_PARENTS = {"U": "C", "O": "K"}
"""Selenocysteine and pyrrolysine -> the types that they are read as."""


def gemmi_version() -> str | None:
    """Return the version of gemmi; None if it is not installed."""
    try:
        return version("gemmi")
    except PackageNotFoundError:
        return None


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
    memory = f"takes more than {format_bytes(LIMITS.memory_bytes)} of memory"
    if result.status == "memory":
        problem = memory
    elif result.status == "time":
        problem = f"takes more than {LIMITS.cpu_seconds} seconds of processor time"
    else:
        problem = f"{memory} or {LIMITS.wall_seconds:g} seconds, or crashes gemmi"
    return BadRecord(f"reading it {problem}; split or remove it")


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
            chosen = {atom.name: atom for atom in _label_last(backbone, label)}
            occupancy = sum(atom.occ for atom in chosen.values()) / max(len(chosen), 1)
            if occupancy > best:
                best, found = occupancy, (residue, {name: atom.pos.tolist() for name, atom in chosen.items()})
    return found


def _label_last(atoms: Iterable[Any], label: str) -> list[Any]:
    return sorted((atom for atom in atoms if atom.altloc in ("\0", label)), key=lambda atom: atom.altloc != "\0")


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
                _check_number(line[start : start + 8], number)


def _check_number(text: bytes, number: int) -> None:
    try:
        float(text)
    except ValueError:
        written = text.decode("ascii", "replace").strip()
        raise BadRecord(f"line {number}: the coordinate '{written}' is not a number; correct it") from None
