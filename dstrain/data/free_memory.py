"""Free memory for this process: of the host and of its cgroups (Slurm, containers)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT, OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def get_available_memory() -> int:
    """Return the bytes available on the host, or in a cgroup of this process if it has less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_iter_available_in_cgroups()])


def _iter_available_in_cgroups() -> Iterator[int]:
    """Yield the bytes below the limit of each cgroup with one, of version 2 and 1.

    The page cache counts as used.
    """
    try:
        lines = OWN_CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # "": version 2
            root = CGROUP_ROOT / controllers
            inside = root / path.lstrip("/")
            names = (
                ("memory.limit_in_bytes", "memory.usage_in_bytes") if controllers else ("memory.max", "memory.current")
            )
            # Each parent group may have a lower limit.
            for group in (inside, *inside.parents):
                if not group.is_relative_to(root):
                    break
                try:
                    most, used = (int((group / name).read_text()) for name in names)
                except (OSError, ValueError):  # no limit of its own, or "max"
                    continue
                yield max(0, most - used)
