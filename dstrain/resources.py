"""Lookup of folders: packaged resources, in the wheel or in a checkout, and kernels that torch compiles."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def find_resource_dir(name: str) -> Path:
    """Return the packaged folder of this name, such as `ds_configs` or `launchers`.

    Raises FileNotFoundError.
    """
    package = Path(__file__).parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"dstrain contains a folder `{name}`, but neither {package} nor {package.parent} has it")


def get_extensions_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder for kernels that torch compiles."""
    if folder := environment.get("TORCH_EXTENSIONS_DIR"):
        return Path(folder).expanduser()
    # As torch does: for a user without a home folder `~` stays as it is, without an error.
    return Path(os.path.expanduser(environment.get("XDG_CACHE_HOME") or "~/.cache")) / "torch_extensions"
