"""Where the folders that ship beside the code are: in the package (wheel) or at the repository's root (checkout)."""

from __future__ import annotations

from pathlib import Path


def find_resource_dir(name: str) -> Path:
    """The shipped folder of this name, such as `ds_configs` or `launchers`."""
    package = Path(__file__).parent
    for folder in (package / name, package.parent / name):
        if folder.is_dir():
            return folder
    raise FileNotFoundError(f"dstrain ships a folder `{name}`, but neither {package} nor {package.parent} has it")
