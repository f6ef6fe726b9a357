"""A small made-up structure, for the tiny recipe of task protein."""

from __future__ import annotations

import math
import random


def tiny_structure(name: str) -> str:
    """Return a made-up helix of 6 to 30 residues as a PDB file."""
    draw = random.Random(name)
    lines: list[str] = []
    for index in range(draw.randint(6, 30)):
        residue = draw.choice(("ALA", "LEU", "GLY", "SER", "LYS", "GLU"))
        # Radius, angle in degrees and height in Å of an atom in an alpha helix: 100 degrees and 1.5 Å per residue.
        for atom, radius, angle, height in (
            ("N", 1.55, -28, -0.9), ("CA", 2.28, 0, 0.0), ("C", 1.66, 26, 1.1), ("O", 2.0, 22, 2.3),
        ):  # fmt: skip
            turn = math.radians(100 * index + angle)
            place = (radius * math.cos(turn), radius * math.sin(turn), height + 1.5 * index)
            x, y, z = (value + draw.gauss(0, 0.05) for value in place)
            head = f"ATOM  {len(lines) + 1:5}  {atom:<3} {residue} A{index + 1:4}"
            lines.append(f"{head}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}")
    return "\n".join([*lines, "TER", "END", ""])
