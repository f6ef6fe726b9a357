"""Versions of other libraries, and helpers for patches of them."""

from __future__ import annotations

import importlib.metadata
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of those packages that are installed, by name."""
    versions = {package: installed_version(package) for package in packages}
    return {package: version for package, version in versions.items() if version is not None}


_RELEASE = re.compile(r"\d+(?:\.\d+)*")


@cache  # one warning per process, and patches may be applied for each image
def check_version(library: str, first: str, below: str) -> None:
    """Warn where the installed version is not one that the patches of the library were tested with.

    `first` is tested, `below` is not: check_version("deepspeed", "0.19", "0.20").
    """
    version = importlib.metadata.version(library)
    if not _parse(first) <= _parse(version) < _parse(below):
        warnings.warn(
            f"{library} {version} is installed; dstrain replaces private functions of {library} and was tested with "
            f"{first} up to, not including, {below}: install one of these, or run `pytest tests/unit -k patches`",
            stacklevel=2,
        )


def _parse(version: str) -> tuple[int, ...]:
    """Return the release of a version: (2, 13, 0) of `2.13.0+cpu`."""
    release = _RELEASE.match(version)
    return tuple(int(part) for part in release[0].split(".")) if release else ()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module, class or object inside, and put the old one back."""
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)
