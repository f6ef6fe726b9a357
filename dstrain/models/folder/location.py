"""Local model folders, distinguished from Hub ids by their names."""

from __future__ import annotations

import os.path
from pathlib import Path

from dstrain.errors import Fault, RecipeError


def is_local_path(name: str) -> bool:
    """Return True for a name that can only be a path: Hub ids have one slash and do not begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_local_folder(name: str, key: str) -> bool:
    """Return True for a local folder, False for a hub id. Raises RecipeError where a path has no folder.

    `key`: the recipe key that holds the name.
    """
    if not is_local_path(name):
        return False
    if not Path(name).expanduser().is_dir():
        raise RecipeError(missing_folder_fault(name, key))
    return True


def missing_folder_fault(name: str, key: str) -> Fault:
    """Return the fault of a path without a folder."""
    # os.path: Path.exists raises OSError for a path that may not be read, or is too long.
    is_file = os.path.exists(os.path.expanduser(name))
    problem = f"'{name}' is a file, not a folder" if is_file else f"'{name}' is not a folder"
    return Fault(key, problem, f"give an existing folder or a hub id (working directory: {Path.cwd()})")
