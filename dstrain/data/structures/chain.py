"""A protein chain as arrays, and as columns of the token store."""

# Shapes: L residues, 4 backbone atoms, 3 coordinates in Å.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

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
