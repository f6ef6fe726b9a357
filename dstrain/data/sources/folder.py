"""Record source for structure files: a folder of .pdb and .cif files, or one such file."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest
from dstrain.data.sources.base import BaseSource, Columns
from dstrain.errors import DataError
from dstrain.files import display_path

STRUCTURE_EXTENSIONS = (".pdb", ".ent", ".cif", ".mmcif")
"""Ends of the names of structure files; each may be followed by .gz."""


def is_structure_file(path: Path) -> bool:
    """Return whether the name is that of a structure file."""
    return path.name.lower().removesuffix(".gz").endswith(STRUCTURE_EXTENSIONS)


def find_structure_files(path: Path) -> list[Path]:
    """Return a structure file, or those of a folder and its subfolders in the order of their relative paths.

    Hidden files are left out. Raises DataError for a folder that cannot be read.
    """
    if not path.is_dir():
        return [path] if is_structure_file(path) else []
    try:
        found = [one for one in path.rglob("*") if is_structure_file(one) and one.is_file()]
    except OSError as fault:
        raise DataError(f"{display_path(path)} cannot be read ({fault.strerror}); check its permissions") from fault
    return sorted(
        (one for one in found if not any(part.startswith(".") for part in one.relative_to(path).parts)),
        key=lambda one: one.relative_to(path).as_posix(),
    )


class FolderSource(BaseSource):
    """Structure files as records `{"path": ...}`; the digest covers their names and contents."""

    def __init__(self, path: Path, columns: Columns) -> None:
        """Raises DataError for a file that cannot be read."""
        folder = path if path.is_dir() else path.parent
        super().__init__(path.name, folder, columns)
        self.files = find_structure_files(path)
        digest = hashlib.sha256()
        for file in self.files:
            try:
                digest.update(os.fsencode(f"{file.relative_to(folder).as_posix()}\0{file_digest(file)}\n"))
            except OSError as fault:
                problem = f"{display_path(file)} cannot be read ({fault.strerror})"
                raise DataError(f"{problem}; check its permissions") from fault
        self._set_digest(digest.hexdigest(), {"path"})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename_columns({"path": str(self.files[index])})

    def location(self, index: int) -> str:
        return display_path(self.files[index])
