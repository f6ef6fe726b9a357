"""Log of the collectives that a process enters, by process group, and of its progress."""

from __future__ import annotations

import time
from typing import Any

HISTORY_SIZE = 64
"""Names of the newest collectives that a group's log holds."""


class GroupLog:
    """Collectives of one process group, numbered from 1 in the order in which this process entered them."""

    # A collective updates these fields each time: slots keep that under a microsecond (benchmarks/counting.py).
    __slots__ = ("last_activity", "last_returned", "last_started", "ranks", "recent_names")

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.last_started = 0
        """Number of the last collective entered."""
        self.last_returned = 0
        """Number of the last collective that returned; with `async_op` it returns at once."""
        self.last_activity = time.monotonic()
        """Time of the last entry or return, in seconds of time.monotonic."""
        self.recent_names = [""] * HISTORY_SIZE
        """Ring buffer: the name of number n is at n % HISTORY_SIZE."""
        self.ranks = ranks
        """Global ranks of the group's members."""

    def snapshot(self) -> dict[str, Any]:
        """Return the log as JSON values; `names` are the newest, the last of them is number `entered`.

        The keys are part of the status that other ranks read.
        """
        entered = self.last_started
        newest = [
            self.recent_names[number % HISTORY_SIZE]
            # Without the oldest: another thread's next collective overwrites its place.
            for number in range(max(1, entered - HISTORY_SIZE + 2), entered + 1)
        ]
        seconds = round(time.monotonic() - self.last_activity, 3)
        return {
            "entered": entered,
            "left": self.last_returned,
            "seconds": seconds,
            "names": newest,
            "ranks": _format_ranks(self.ranks),
        }


class CollectiveLog:
    """Activity of this process, for its watchdog and for other ranks that miss it. Written and read by any thread.

    A TorchWorld owns one and passes it to `CollectivePatches`, which records into it.
    """

    def __init__(self) -> None:
        self.phase = ""
        """Current phase, such as `step 13`; empty while nothing runs that could stall."""
        self.step: int | None = None
        self.activity = ""
        """Part of the phase, such as `the backward pass of micro-batch 2 of 4`, for messages."""
        self._last_activity = time.monotonic()
        self._group_logs: dict[Any, GroupLog] = {}

    def record_progress(self, phase: str | None = None, step: int | None = None) -> None:
        """Record that something moved; `phase` and `step` replace the current ones where given."""
        if phase is not None:
            self.phase, self.step = phase, step
        self._last_activity = time.monotonic()

    def idle_seconds(self) -> float:
        """Return the seconds since the last progress or collective."""
        # list(): another thread may add a group at the same time.
        groups = list(self._group_logs.values())
        return time.monotonic() - max([self._last_activity, *(group.last_activity for group in groups)])

    def group_log(self, group: Any) -> GroupLog:
        """Return the log of a process group; None is the default group of all ranks."""
        group_log = self._group_logs.get(group)
        return self._add_group(group) if group_log is None else group_log

    def snapshot(self) -> dict[str, Any]:
        """Return group name -> its log, as JSON values. torch gives a group the same name on all its ranks."""
        logs = list(self._group_logs.items())
        # Under None is the default group, which is there by its own name too.
        return {_group_name(group): log.snapshot() for group, log in logs if group is not None and log.ranks}

    def clear(self) -> None:
        """Drop the references to groups before they are destroyed."""
        self._group_logs.clear()

    def _add_group(self, group: Any) -> GroupLog:
        from torch.distributed import distributed_c10d as c10d

        # One log under two keys: a call without `group` uses the default group.
        if group is None:
            self._group_logs[None] = self.group_log(c10d._get_default_group())
        elif group is c10d.GroupMember.NON_GROUP_MEMBER:
            return GroupLog()  # torch ignores the call, so there is nothing to log
        else:
            self._group_logs[group] = GroupLog(tuple(c10d.get_process_group_ranks(group)))
        return self._group_logs[group]


def _format_ranks(ranks: tuple[int, ...]) -> list[int] | dict[str, list[int]]:
    """Return the ranks of a group; those at equal distances as {"range": [start, stop, step]}, whatever their number."""
    if len(ranks) > 1:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return {"range": [ranks[0], ranks[-1] + 1, step]}
    return list(ranks)


def parse_ranks(ranks: list[int] | dict[str, list[int]]) -> list[int]:
    """Return the ranks of a group from `GroupLog.snapshot`."""
    return ranks if isinstance(ranks, list) else list(range(*ranks["range"]))


def _group_name(group: Any) -> str:
    return str(group.group_name)
