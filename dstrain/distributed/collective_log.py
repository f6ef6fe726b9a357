"""Which collective this process is in: the functions of torch.distributed that ranks wait in, counted by group."""

from __future__ import annotations

import inspect
import re
import time
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

WAITED_IN = (
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
REMEMBERED = 64
"""Names of the newest collectives that a group keeps."""


class Line:
    """The collectives of one group, in the order in which this process entered them, counted from 1."""

    __slots__ = ("entered", "left", "moved", "names", "ranks")

    def __init__(self, ranks: tuple[int, ...] = ()) -> None:
        self.entered = 0
        """Number of the last one entered."""
        self.left = 0
        """Number of the last one that returned; one that was asked for with `async_op` returns at once."""
        self.moved = time.monotonic()
        """When the last was entered or left."""
        self.names = [""] * REMEMBERED
        """Name of number n at n % REMEMBERED."""
        self.ranks = ranks
        """Of the whole world, in the group."""

    def told(self) -> dict[str, Any]:
        """The same as JSON has it; `names` of the newest, the last is that of `entered`."""
        entered = self.entered
        newest = [self.names[number % REMEMBERED] for number in range(max(1, entered - REMEMBERED + 2), entered + 1)]
        seconds = round(time.monotonic() - self.moved, 3)
        return {"entered": entered, "left": self.left, "seconds": seconds, "names": newest, "ranks": list(self.ranks)}


class Ledger:
    """What this process is doing, for others to read when it is missed."""

    def __init__(self) -> None:
        self.doing = ""
        """`step 13`; empty where nothing is under way that could stall."""
        self.step: int | None = None
        self._moved = time.monotonic()
        self._lines: dict[Any, Line] = {}

    def mark(self, doing: str | None = None, step: int | None = None) -> None:
        """There was progress; `doing`: with this from now on."""
        if doing is not None:
            self.doing, self.step = doing, step
        self._moved = time.monotonic()

    def quiet(self) -> float:
        """Seconds since anything moved."""
        return time.monotonic() - max([self._moved, *(line.moved for line in list(self._lines.values()))])

    def line(self, group: Any) -> Line:
        """A group's line; None for the whole world's."""
        line = self._lines.get(group)
        return self._open(group) if line is None else line

    def told(self) -> dict[str, Any]:
        """Each group's line by torch's name for the group, which is the same on all its ranks."""
        lines = list(self._lines.items())
        return {_name(group): line.told() for group, line in lines if group is not None and line.ranks}

    def forget(self) -> None:
        """Let go of the groups, which are about to be destroyed."""
        self._lines.clear()

    def _open(self, group: Any) -> Line:
        from torch.distributed import distributed_c10d as c10d

        if group is None:
            self._lines[None] = self.line(c10d._get_default_group())
        elif group is c10d.GroupMember.NON_GROUP_MEMBER:
            return Line()  # the call does nothing
        else:
            self._lines[group] = Line(tuple(c10d.get_process_group_ranks(group)))
        return self._lines[group]


LEDGER = Ledger()
"""This process's."""


class _Timeout:
    """How long the groups made from now on let a rank wait; None: as torch has it."""

    value: timedelta | None = None


def count_collectives(timeout: timedelta) -> None:
    """Count from now on, and give each group made without a timeout this one.

    DeepSpeed clones the world without passing one on, so that ZeRO would wait 30 minutes for a dead rank
    (deepspeed/comm/torch.py, `new_group`). It looks all names up when it calls, or when it is initialized; those it
    takes from the inner module are replaced there too.
    """
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    _Timeout.value = timeout
    if hasattr(dist.all_reduce, "counted"):
        return
    for name in WAITED_IN:
        if hasattr(dist, name):
            setattr(dist, name, _counted(name, getattr(dist, name)))
    c10d.all_gather_into_tensor = dist.all_gather_into_tensor
    dist.new_group = c10d.new_group = _timed(_counted("new_group", dist.new_group))


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which notes that it was entered and left. It keeps nothing of what it is given."""
    names = list(inspect.signature(function).parameters)
    place = names.index("group") if "group" in names else len(names)
    get, now = LEDGER.line, time.monotonic

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        line = get(kwargs["group"] if "group" in kwargs else args[place] if len(args) > place else None)
        line.entered = number = line.entered + 1
        line.names[number % REMEMBERED] = name
        line.moved = now()
        result = function(*args, **kwargs)
        line.left = number
        line.moved = now()
        return result

    counted.counted = True  # type: ignore[attr-defined]
    return counted


def _timed(make: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(make)
    def new_group(ranks: Any = None, timeout: timedelta | None = None, *args: Any, **kwargs: Any) -> Any:
        return make(ranks, timeout or _Timeout.value, *args, **kwargs)

    return new_group


def _name(group: Any) -> str:
    return str(group.group_name)


def lost(error: BaseException | None) -> str | None:
    """Why processes lost each other, in a few words; None where the error is another one.

    Gloo raises plain RuntimeErrors that begin with the place in its source, NCCL and the store errors of their own.
    """
    while error is not None:
        kinds = {kind.__name__ for kind in type(error).__mro__}
        if "DistError" in kinds or ("RuntimeError" in kinds and re.match(r"\[\S*gloo/\S+\] ", str(error))):
            return re.sub(r"^\[\S+\] ", "", re.split(r"\. |\n", str(error))[0])
        error = error.__cause__
    return None
