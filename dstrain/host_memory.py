"""Memory of this host and of this process's cgroups (Slurm, containers): what is free, and processes killed for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUP_ROOT, OWN_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
VMSTAT_FILE = Path("/proc/vmstat")


def iter_cgroups() -> Iterator[tuple[Path, bool]]:
    """Yield (folder, True for version 1) of each cgroup of this process that limits memory, from the inside out."""
    try:
        lines = OWN_CGROUP_FILE.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # "": version 2
            root = CGROUP_ROOT / controllers
            inside = root / path.lstrip("/")
            # Each parent group may have a lower limit.
            for group in (inside, *inside.parents):
                if not group.is_relative_to(root):
                    break
                yield group, bool(controllers)


def get_available_memory() -> int:
    """Return the bytes available on the host, or in a cgroup of this process if it has less."""
    import psutil

    return min([int(psutil.virtual_memory().available), *_iter_available_in_cgroups()])


def _iter_available_in_cgroups() -> Iterator[int]:
    """Yield the bytes below the limit of each cgroup with one, of version 2 and 1.

    The page cache counts as used.
    """
    for group, is_v1 in iter_cgroups():
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if is_v1 else ("memory.max", "memory.current")
        try:
            most, used = (int((group / name).read_text()) for name in names)
        except (OSError, ValueError):  # no limit of its own, or "max"
            continue
        yield max(0, most - used)


@dataclass(frozen=True)
class OomKills:
    """Numbers of processes that the kernel has killed because memory ran out."""

    in_cgroups: int | None = None
    """In the cgroups of this process; None where no cgroup counts them."""
    on_host: int | None = None
    """On the whole host; None where the kernel does not tell."""

    def describe_since(self, before: OomKills) -> str:
        """Return which counter grew since `before`, as evidence in a message; empty if none did."""
        if (self.in_cgroups or 0) > (before.in_cgroups or 0):
            return "oom_kill in memory.events of its cgroup grew"
        if (self.on_host or 0) > (before.on_host or 0):
            return "oom_kill in /proc/vmstat grew"
        return ""

    @property
    def is_counted(self) -> bool:
        """True if the kernel counts such kills here."""
        return self.in_cgroups is not None or self.on_host is not None


def read_oom_kills() -> OomKills:
    """Return the counters of this host. Never raises."""
    counts = [count for group, is_v1 in iter_cgroups() if (count := _read_cgroup_kills(group, is_v1)) is not None]
    return OomKills(max(counts, default=None), _read_counter(VMSTAT_FILE))


def _read_cgroup_kills(group: Path, is_v1: bool) -> int | None:
    # memory.events of a parent counts its children too; memory.oom_control (version 1) counts its own group.
    return _read_counter(group / ("memory.oom_control" if is_v1 else "memory.events"))


def _read_counter(path: Path) -> int | None:
    """Return the value of the line `oom_kill N`."""
    try:
        found = re.search(r"^oom_kill (\d+)$", path.read_text(), re.M)
    except (OSError, ValueError):
        return None
    return int(found[1]) if found else None
