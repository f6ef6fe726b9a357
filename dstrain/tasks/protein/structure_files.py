"""The text of a structure file: unpacked, its format by content, and the checks that it is whole."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.errors import one_line
from dstrain.task import BadRecord

PDB, CIF = "PDB", "mmCIF"
_GZIP_MAGIC = b"\x1f\x8b"
_COORDINATE_COLUMNS = (30, 38, 46)
"""Where x, y and z begin in a line of a PDB file; each has 8 characters."""
_LINE_LENGTH = 54
"""Characters of a line up to z. gemmi refuses shorter ones."""
_ATOM_KINDS = (b"ATOM", b"HETATM")
_END_KINDS = (b"TER", b"ENDMDL", b"END", b"MASTER", b"CONECT")
"""Records of a PDB file after its last atom: one of them shows that no atom was cut off."""
_WHOLE_KINDS = (*_ATOM_KINDS, *_END_KINDS, b"ANISOU")
_ENTRY_KINDS = (b"HEADER", b"SEQRES")
"""Records of an entry of the PDB, which always ends with MASTER and END."""
_FIRST_KINDS = (
    *_ATOM_KINDS, *_ENTRY_KINDS, b"TITLE", b"COMPND", b"SOURCE", b"KEYWDS", b"EXPDTA", b"AUTHOR", b"REMARK", b"CRYST1",
    b"MODEL", b"NUMMDL", b"OBSLTE", b"SPLIT", b"CAVEAT", b"DBREF", b"ORIGX1", b"SCALE1",
)  # fmt: skip
"""Records that a PDB file may begin with."""
_CHAIN, _RESIDUE, _ATOM_NAME = slice(21, 22), slice(21, 27), slice(12, 16)
"""Columns of an atom: its chain; chain, number and insertion code of its residue; its name."""
MIN_SHARE = 0.5
"""Share of a sequence below which the end of a file is taken for a cut; disordered ends are shorter."""


@dataclass(frozen=True)
class StructureText:
    """The unpacked content of a structure file, and its format."""

    content: bytes
    format: str
    """PDB or CIF."""


def read_structure_text(path: Path) -> StructureText:
    """Return the content of a file that is whole, with the format that it has whatever its name. Raises BadRecord."""
    content = read_content(path)
    text = StructureText(content, find_format(content, path.name))
    if text.format == PDB:
        check_pdb_coordinates(content)
        check_pdb_end(content)
    else:
        check_cif_end(content)
    return text


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


def find_format(content: bytes, name: str) -> str:
    """Return the format that the first line shows, else that of the name. Raises BadRecord for HTML or XML."""
    first = next((line for line in content[: 1 << 16].split(b"\n") if line.strip() and not line.startswith(b"#")), b"")
    if first.lstrip().startswith(b"<"):
        raise BadRecord("it is HTML or XML, not a structure; download it again")
    if first[:5].lower() == b"data_":
        return CIF
    if first[:6].strip().upper() in _FIRST_KINDS and len(first) > 6:
        return PDB
    return PDB if name.lower().removesuffix(".gz").endswith((".pdb", ".ent")) else CIF


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


def check_pdb_end(content: bytes) -> None:
    """Raise BadRecord for a PDB file whose end was cut off.

    It ends inside of a line; or it has the header or the sequence of an entry, or several models, and nothing after its
    last atom; or its last residue lacks its C, and nothing follows.
    """
    lines = content.split(b"\n")
    kinds = [line[:6].strip().upper() for line in lines]
    atoms = [at for at, kind in enumerate(kinds) if kind in _ATOM_KINDS]
    if not atoms:
        return
    last, fix = atoms[-1], "download it again, or, if it is whole, end it with a line END"
    after = {*kinds[last + 1 :]} & {*_END_KINDS}
    missing = find_missing_chains(lines, kinds, atoms) if after == {b"TER"} else []
    if missing:
        raise BadRecord(
            f"it is cut: SEQRES names chain {missing[0]}, which has no atoms, and no line END follows; {fix}"
        )
    if after:
        return
    is_short = last == len(lines) - 1 and len(atoms) > 1 and len(lines[last]) < len(lines[atoms[-2]].rstrip())
    is_fragment = kinds[-1] not in (b"", *_WHOLE_KINDS) and any(kind.startswith(kinds[-1]) for kind in _WHOLE_KINDS)
    if is_short or is_fragment:
        raise BadRecord(f"it is cut in line {len(lines)}; download it again")
    if any(kind in _ENTRY_KINDS for kind in kinds[:last]):
        told = describe_sequence(lines, kinds, atoms)
        raise BadRecord(f"it is cut: nothing follows its last atom, in line {last + 1}{told}; {fix}")
    if b"ENDMDL" in kinds:
        raise BadRecord(f"it is cut in a model, whose last atom is in line {last + 1}; {fix}")
    names = dict[bytes, set[bytes]]()
    for at in reversed(atoms[-200:]):
        names.setdefault(lines[at][_RESIDUE], set()).add(lines[at][_ATOM_NAME].strip())
        if len(names) > 2:
            break
    backbones = [{b"N", b"CA", b"C"} & found for found in names.values()][:2]
    if len(backbones) == 2 and len(backbones[1]) == 3 and backbones[0] and b"C" not in backbones[0]:
        raise BadRecord(f"it is cut in its last residue, in line {last + 1}; {fix}")


def find_missing_chains(lines: list[bytes], kinds: list[bytes], atoms: list[int]) -> list[str]:
    """Return the chains that SEQRES names and that have no atom."""
    named = {line[11:12] for line, kind in zip(lines, kinds, strict=True) if kind == b"SEQRES"}
    return sorted(chain.decode("ascii", "replace") for chain in named - {lines[at][_CHAIN] for at in atoms})


def describe_sequence(lines: list[bytes], kinds: list[bytes], atoms: list[int]) -> str:
    """Return how many residues SEQRES names and how many have atoms; empty without SEQRES."""
    lengths = {
        line[11:12]: int(line[13:17])
        for line, kind in zip(lines, kinds, strict=True)
        if kind == b"SEQRES" and line[13:17].strip().isdigit()
    }
    if not lengths:
        return ""
    residues = {lines[at][_RESIDUE] for at in atoms if lines[at][_CHAIN] in lengths and kinds[at] == b"ATOM"}
    return f" (SEQRES names {sum(lengths.values())} residues, and {len(residues)} have atoms)"


_CATEGORY = re.compile(rb"^_([\w-]+)\.", re.MULTILINE)


def check_cif_end(content: bytes) -> None:
    """Raise BadRecord for an mmCIF file whose categories each end with a line #, except for the last one."""
    lines = [line.strip() for line in content.split(b"\n") if line.strip()]
    if lines.count(b"#") > 1 and lines[-1] != b"#":
        fix = "download it again, or, if it is whole, end it with a line #"
        raise BadRecord(f"it is cut in its last category, {find_last_category(content)}, which no line # ends; {fix}")


def find_last_category(content: bytes) -> str:
    """Return the name of the last category, such as `_atom_site`."""
    names = _CATEGORY.findall(content)
    return f"_{names[-1].decode().lower()}" if names else "which has no name"


def check_cif_sequence(content: bytes, structure: Any) -> None:
    """Raise BadRecord where the atoms come last in the file, and its sequences go far beyond them."""
    if find_last_category(content) != "_atom_site" or content.rstrip().endswith(b"\n#") or not len(structure):
        return
    fix = "download it again, or, if it is whole, end it with a line #"
    present = {residue.subchain for chain in structure[0] for residue in chain}
    for entity in structure.entities:
        if not entity.full_sequence:
            continue
        missing = [name for name in entity.subchains if name not in present]
        if missing:
            told = f"its last atoms come before chain {missing[0]} of {len(entity.full_sequence)} residues"
            raise BadRecord(f"it is cut: {told}; {fix}")
        for name in entity.subchains:
            last = max(residue.label_seq or 0 for residue in structure[0].get_subchain(name))
            if 0 < last < MIN_SHARE * len(entity.full_sequence):
                told = f"chain {name} has {len(entity.full_sequence)} residues, and its atoms end at residue {last}"
                raise BadRecord(f"it is cut: {told}; {fix}")
