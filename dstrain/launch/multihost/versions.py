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
from dstrain.resources import find_resource_dir

CHECKED_PACKAGES = ("torch", "deepspeed", "transformers", "peft")
_HASH_LENGTH = 12
_SOURCE_SUFFIXES = (".py", ".json", ".yaml")
"""Presets and recipes are read by each rank, from its own host's package."""
_PRESETS_DIR, _EXCLUDED_PREFIX = "ds_configs", "launchers/"


def read_package_versions() -> dict[str, str]:
    """Versions by name; empty where a package is not installed. Of Python the first two numbers."""
    found = {"Python": ".".join(platform.python_version_tuple()[:2]), "dstrain": dstrain.__version__}
    for package in CHECKED_PACKAGES:
        found[package] = ""
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


@cache
def hash_source_files() -> dict[str, str]:
    """A digest of each file of dstrain's own, by its path in the package."""
    root, found = Path(dstrain.__file__).parent, {}
    presets = find_resource_dir(_PRESETS_DIR)  # beside the package in a checkout
    for base, above in ((root, root), (presets, presets.parent)):
        for path in base.rglob("*"):
            name = path.relative_to(above).as_posix()
            if path.suffix in _SOURCE_SUFFIXES and not name.startswith(_EXCLUDED_PREFIX) and path.is_file():
                found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:_HASH_LENGTH]
    return dict(sorted(found.items()))


def hash_source_tree() -> str:
    """One digest of all of them."""
    return hashlib.sha256(repr(sorted(hash_source_files().items())).encode()).hexdigest()[:_HASH_LENGTH]


def iter_version_diffs(expected: Mapping[str, str], actual: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """(name, version here, version there) of what differs."""
    for name in expected:
        if expected[name] != actual.get(name, ""):
            yield name, expected[name] or "none", actual.get(name, "") or "none"


def find_source_diff(expected: Mapping[str, str], actual: Mapping[str, str]) -> tuple[str, int]:
    """The first file that differs, and how many do; ("", 0) where the code is the same."""
    differ = sorted(name for name in expected.keys() | actual.keys() if expected.get(name) != actual.get(name))
    return (differ[0], len(differ)) if differ else ("", 0)
