"""Lookup of packaged resource folders, in the wheel or in a checkout."""

from __future__ import annotations

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
