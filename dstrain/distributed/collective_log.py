"""Which collective this process is in: the functions of torch.distributed that ranks wait in, counted by group."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

LOGGED_COLLECTIVES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_coalesced",
    "all_gather_object",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "reduce",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "monitored_barrier",
)
"""Those that DeepSpeed's engine and this package call; all take `group`."""
HISTORY_SIZE = 64
"""Names of the newest collectives that a group keeps."""


class GroupLog:
    """The collectives of one group, in the order in which this process entered them, counted from 1."""

    __slots__ = ("last_activity", "last_returned", "last_started", "ranks", "recent_names")

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.last_started = 0
        """Number of the last one entered."""
        self.last_returned = 0
        """Number of the last one that returned; one that was asked for with `async_op` returns at once."""
        self.last_activity = time.monotonic()
        """When the last was entered or left."""
        self.recent_names = [""] * HISTORY_SIZE
        """Name of number n at n % REMEMBERED."""
        self.ranks = ranks
        """Of the whole world, in the group."""

    def snapshot(self) -> dict[str, Any]:
        """The same as JSON has it; `names` of the newest, the last is that of `entered`."""
        entered = self.last_started
        newest = [
            self.recent_names[number % HISTORY_SIZE]
            for number in range(max(1, entered - HISTORY_SIZE + 2), entered + 1)
        ]
        seconds = round(time.monotonic() - self.last_activity, 3)
        return {
            "entered": entered,
            "left": self.last_returned,
            "seconds": seconds,
            "names": newest,
            "ranks": list(self.ranks),
        }


class CollectiveLog:
    """What this process is doing, for others to read when it is missed."""

    def __init__(self) -> None:
        self.phase = ""
        """`step 13`; empty where nothing is under way that could stall."""
        self.step: int | None = None
        self._last_activity = time.monotonic()
        self._group_logs: dict[Any, GroupLog] = {}

    def record_progress(self, phase: str | None = None, step: int | None = None) -> None:
        """There was progress; `doing`: with this from now on."""
        if phase is not None:
            self.phase, self.step = phase, step
        self._last_activity = time.monotonic()

    def idle_seconds(self) -> float:
        """Seconds since anything moved."""
        return time.monotonic() - max(
            [self._last_activity, *(line.last_activity for line in list(self._group_logs.values()))]
        )

    def group_log(self, group: Any) -> GroupLog:
        """A group's line; None for the whole world's."""
        line = self._group_logs.get(group)
        return self._add_group(group) if line is None else line

    def snapshot(self) -> dict[str, Any]:
        """Each group's line by torch's name for the group, which is the same on all its ranks."""
        lines = list(self._group_logs.items())
        return {_group_name(group): line.snapshot() for group, line in lines if group is not None and line.ranks}

    def clear(self) -> None:
        """Let go of the groups, which are about to be destroyed."""
        self._group_logs.clear()

    def _add_group(self, group: Any) -> GroupLog:
        from torch.distributed import distributed_c10d as c10d

        if group is None:
            self._group_logs[None] = self.group_log(c10d._get_default_group())
        elif group is c10d.GroupMember.NON_GROUP_MEMBER:
            return GroupLog()  # the call does nothing
        else:
            self._group_logs[group] = GroupLog(tuple(c10d.get_process_group_ranks(group)))
        return self._group_logs[group]


COLLECTIVE_LOG = CollectiveLog()
"""This process's."""


class _DefaultTimeout:
    """How long the groups made from now on let a rank wait; None: as torch has it."""

    value: timedelta | None = None


def patch_collectives(timeout: timedelta) -> None:
    """Count from now on, and give each group made without a timeout this one.

    DeepSpeed clones the world without passing one on, so that ZeRO would wait 30 minutes for a dead rank
    (deepspeed/comm/torch.py, `new_group`). It looks all names up when it calls, or when it is initialized; those it
    takes from the inner module are replaced there too.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    _DefaultTimeout.value = timeout
    if hasattr(dist.all_reduce, "is_logged"):
        return
    for name in LOGGED_COLLECTIVES:
        if hasattr(dist, name):
            setattr(dist, name, _log_calls(name, getattr(dist, name)))
    c10d.all_gather_into_tensor = dist.all_gather_into_tensor
    dist.new_group = c10d.new_group = _with_default_timeout(_log_calls("new_group", dist.new_group))


def _log_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes that it was entered and left. It keeps nothing of what it is given."""
    names = list(inspect.signature(function).parameters)
    place = names.index("group") if "group" in names else len(names)
    get, now = COLLECTIVE_LOG.group_log, time.monotonic

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        line = get(kwargs["group"] if "group" in kwargs else args[place] if len(args) > place else None)
        line.last_started = number = line.last_started + 1
        line.recent_names[number % HISTORY_SIZE] = name
        line.last_activity = now()
        result = function(*args, **kwargs)
        line.last_returned = number
        line.last_activity = now()
        return result

    wrapper.is_logged = True  # type: ignore[attr-defined]
    return wrapper


def _with_default_timeout(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def new_group(ranks: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any) -> Any:
        return function(ranks, timeout or _DefaultTimeout.value, *args, **kwargs)

    return new_group


def _group_name(group: Any) -> str:
    return str(group.group_name)


def find_connection_error(error: BaseException | None) -> str | None:
    """Why processes lost each other, in a few words; None where the error is another one.

    Gloo raises plain RuntimeErrors that begin with the place in its source, NCCL and the store errors of their own.
    """
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "DistError" in kinds or ("RuntimeError" in kinds and re.match(r"\[\S*gloo/\S+\] ", str(error))):
            return re.sub(r"^\[\S+\] ", "", re.split(r"\. |\n", str(error))[0])
        error = error.__cause__
    return None
