"""Values of a YAML or JSON file, each with the place where it was written."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dstrain.errors import one_line

KeyPath = tuple[str | int, ...]
"""Names of blocks and indices of list items, outermost first."""


@dataclass
class SourceMap:
    """The values that a user wrote, and for each key the place where it was written."""

    name: str
    """Name of the file, or `--set`."""
    values: dict[str, Any] = field(default_factory=dict)
    locations: dict[KeyPath, str] = field(default_factory=dict)
    """Key -> `recipe.yaml:12`, or the option that set it."""

    def get_location(self, key: KeyPath) -> str:
        """Return `recipe.yaml:12 optim.lr`, for messages; of a key without a place, the place of the nearest other."""
        if not key:
            return self.name
        for end in range(len(key), 0, -1):
            if key[:end] in self.locations:
                return f"{self.locations[key[:end]]} {dotted_name(key)}"
        inner = next((place for other, place in self.locations.items() if other[: len(key)] == key), self.name)
        return f"{inner} {dotted_name(key)}"


def lookup(values: Any, key: KeyPath, default: Any = None) -> Any:
    """Return the value at a key, the default where there is none."""
    for name in key:
        in_dict = isinstance(values, dict) and name in values
        if not in_dict and not (isinstance(values, list) and isinstance(name, int) and name < len(values)):
            return default
        values = values[name]
    return values


def dotted_name(key: KeyPath) -> str:
    """Return `optim.lr`."""
    return one_line(".".join(str(part) for part in key))
