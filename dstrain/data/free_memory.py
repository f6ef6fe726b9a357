"""Memory of the host that this process may still take: of the machine, and of the cgroups that it is in (Slurm, containers)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT, OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def get_available_memory() -> int:
    """Bytes free in the machine, or in a cgroup of this process where it has less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_iter_available_in_cgroups()])


def _iter_available_in_cgroups() -> Iterator[int]:
    """Bytes free below the limit of each cgroup that has one, of version 2 and 1. What a file's cache takes counts as used."""
    try:
        lines = OWN_CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            root = CGROUP_ROOT / controllers
            inside = root / path.lstrip("/")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            for group in (inside, *inside.parents):
                if not group.is_relative_to(root):
                    break
                try:
                    most, used = (int((group / name).read_text()) for name in names)
                except (OSError, ValueError):  # none of its own, or the word max
                    continue
                yield max(0, most - used)
