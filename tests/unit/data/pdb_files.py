"""Structure files for tests, atom by atom."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

THREE = {
    "A": "ALA", "C": "CYS", "D": "ASP", "E": "GLU", "F": "PHE", "G": "GLY", "H": "HIS", "I": "ILE", "K": "LYS",
    "L": "LEU", "M": "MET", "N": "ASN", "P": "PRO", "Q": "GLN", "R": "ARG", "S": "SER", "T": "THR", "V": "VAL",
    "W": "TRP", "Y": "TYR",
}  # fmt: skip


class Atom(NamedTuple):
    """One atom of a PDB file."""

    name: str
    residue: str
    number: int
    place: tuple[float, float, float]
    chain: str = "A"
    altloc: str = " "
    occupancy: float = 1.0
    is_hetero: bool = False


def helix(sequence: Sequence[str], chain: str = "A", first: int = 1, turn_offset: int = 0) -> list[Atom]:
    """Return the backbone of an alpha helix; names of residues have one letter, or three for modified ones."""
    atoms = []
    for index, letter in enumerate(sequence):
        for atom, radius, angle, height in (
            ("N", 1.55, -28, -0.9), ("CA", 2.28, 0, 0.0), ("C", 1.66, 26, 1.1), ("O", 2.0, 22, 2.3),
        ):  # fmt: skip
            turn = math.radians(100 * (index + turn_offset) + angle)
            place = (radius * math.cos(turn), radius * math.sin(turn), height + 1.5 * (index + turn_offset))
            name = THREE.get(letter, letter)
            atoms.append(Atom(atom, name, first + index, place, chain, is_hetero=letter not in THREE))
    return atoms


def pdb_text(atoms: Iterable[Atom]) -> str:
    """Return the atoms as lines of a PDB file, with TER and END."""
    lines = []
    for serial, atom in enumerate(atoms, 1):
        x, y, z = atom.place
        name = atom.name if len(atom.name) > 3 else f" {atom.name:<3}"
        lines.append(
            f"{'HETATM' if atom.is_hetero else 'ATOM  '}{serial:5} {name}{atom.altloc}{atom.residue:>3} {atom.chain}"
            f"{atom.number:4}    {x:8.3f}{y:8.3f}{z:8.3f}{atom.occupancy:6.2f}  0.00          {atom.name[0]:>2}"
        )
    return "\n".join([*lines, "TER", "END", ""])
