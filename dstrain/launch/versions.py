"""What software a process runs: versions of the packages that must agree between ranks, and digests of dstrain's own files.

Nothing heavy is imported: versions are read from the packages' metadata.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

import dstrain
from dstrain.resources import shipped

PACKAGES = ("torch", "deepspeed", "transformers", "peft")
_DIGITS = 12
_CODE = (".py", ".json", ".yaml")
"""Presets and recipes are read by each rank, from its own host's package."""
_PRESETS, _NOT_READ = "ds_configs", "launchers/"


def versions() -> dict[str, str]:
    """Versions by name; empty where a package is not installed. Of Python the first two numbers."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "dstrain": dstrain.__version__}
    for package in PACKAGES:
        found[package] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@cache
def digests() -> dict[str, str]:
    """A digest of each file of dstrain's own, by its path in the package."""
    root, found = Path(dstrain.__file__).parent, {}
    presets = shipped(_PRESETS)  # beside the package in a checkout
    for base, above in ((root, root), (presets, presets.parent)):
        for path in base.rglob("*"):
            name = path.relative_to(above).as_posix()
            if path.suffix in _CODE and not name.startswith(_NOT_READ) and path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:_DIGITS]
    return dict(sorted(found.items()))


def digest() -> str:
    """One digest of all of them."""
    return hashlib.sha256(repr(sorted(digests().items())).encode()).hexdigest()[:_DIGITS]


def unlike(own: Mapping[str, str], other: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name, version here, version there) of what differs."""
    for name in own:
        if own[name] != other.get(name, ""):
            yield name, own[name] or "none", other.get(name, "") or "none"


def first_unlike(own: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, int]:
    """The first file that differs, and how many do; ("", 0) where the code is the same."""
    differ = sorted(name for name in own.keys() | other.keys() if own.get(name) != other.get(name))
    return (differ[0], len(differ)) if differ else ("", 0)
