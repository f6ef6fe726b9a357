"""Diagnosis of a failed collective: the ranks to look at, and a table of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dstrain.errors import first_names

FINAL_KINDS = ("lost", "failed", "stopped", "done")
"""Kinds of a rank's last status: it is about to exit and writes no other."""
MAX_TABLE_ROWS = 32
_KERNEL_STATES = {
    "gone": ("ended", "has ended without a report", " there, and dmesg for the memory"),
    "T": ("stopped", "is stopped (SIGSTOP, or a debugger)", ""),
    "D": ("in kernel", "hangs in the kernel, on a disk, a network file system or a device", ""),
    "": ("silent", "went silent", " there, and whether that host answers"),
}
"""Kernel state letter -> (name in the table, text of the error, further places to look)."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status that a rank writes to `.workers/word-TOKEN-RANK.json`; the fields are the file's keys."""

    rank: int
    host: str
    place: str
    """Host and pid namespace in which `pid` is valid."""
    pid: int
    kind: Literal["ready", "alive", "lost", "failed", "stopped", "done"] = "ready"
    """lost: another rank went silent. failed: an error of its own. stopped: signal before step
    1."""
    seen: int = 0
    """Number of status requests that this rank had read."""
    doing: str = ""
    step: int | None = None
    quiet: float = 0.0
    """Seconds without progress."""
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`GroupLog.snapshot` of each process group, by the group's name."""
    text: str = ""
    """The error, or the signal's name."""


@dataclass(frozen=True)
class Diagnosis:
    """Ranks to look at, the reason, and the status of all ranks."""

    ranks: tuple[int, ...]
    message: str
    stop_signal: str = ""
    """Name of the signal that stopped one of them before the first step."""
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """Statuses of all ranks after a request."""

    statuses: Mapping[int, RankStatus]
    """Newest status of each rank; it may be older than the request."""
    answered_ranks: frozenset[int]
    process_states: Mapping[int, str]
    """Kernel state of the ranks that did not answer: a letter, `gone`, or "" on another host."""
    reason: str = ""
    """Message of the error that led to the request; empty if no error was raised yet."""


def diagnose(report: StatusReport) -> Diagnosis:
    """Return the rank that failed, else those that did not answer, else those behind the others."""
    statuses, missing = report.statuses, sorted(set(report.statuses) - report.answered_ranks)
    by_kind = {status.kind: status for _, status in sorted(statuses.items(), reverse=True)}
    stop_signal = ""
    if status := by_kind.get("failed"):
        ranks, what = [status.rank], f"failed: {status.text}; see logs/rank-{status.rank:05d}.log"
    elif status := by_kind.get("stopped"):
        ranks, what, stop_signal = [status.rank], f"was stopped by {status.text}", status.text
    elif missing:
        states = {report.process_states.get(rank, "") for rank in missing}
        _, what, look = _KERNEL_STATES[states.pop() if len(states) == 1 and states <= {*_KERNEL_STATES} else ""]
        # A closed connection to another host, whose processes cannot be looked up, means an exit.
        if what == "went silent" and re.search("closed|reset|refused|broken pipe|exited|aborted", report.reason, re.I):
            what, look = "has ended, or lost the network", _KERNEL_STATES["gone"][2]
        ranks, what = missing, f"{what}; see logs/rank-{missing[0]:05d}.log{look}"
    else:
        ranks, what = _compare_collectives(report)
    message = f"{format_ranks_by_host(ranks, statuses)} {what}".lstrip()
    return Diagnosis(tuple(ranks), message, stop_signal, format_status_table(report, ranks))


def _compare_collectives(report: StatusReport) -> tuple[list[int], str]:
    """Return the ranks that did not enter a collective that others entered, and what to say of
    them.
    """
    statuses = report.statuses
    members = {name: log["ranks"] for status in statuses.values() for name, log in status.lines.items()}
    waits = [
        (log["seconds"], name) for status in statuses.values() for name, log in status.lines.items() if _waits(log)
    ]
    # On a GPU no rank stays inside a collective, since the host runs ahead of it: compare all
    # groups.
    for group in [max(waits)[1]] if waits else sorted(members):
        logs = {rank: statuses[rank].lines.get(group, {}) for rank in members[group] if rank in statuses}
        first = min(log.get("entered", 0) for log in logs.values())
        late = [rank for rank, log in logs.items() if log.get("entered", 0) == first]
        if ahead := [log for rank, log in logs.items() if rank not in late]:
            collective = _format_collective(max(ahead, key=lambda log: log["seconds"]), first + 1)
            return late, f"did not enter {collective}; see logs/stacks/rank-{late[0]:05d}.txt"
        names = {rank: "".join(log.get("names", [])[-1:]) for rank, log in logs.items()}
        if len(set(names.values())) > 1:
            odd = min(set(names.values()), key=[*names.values()].count)
            others = ", ".join(sorted({*names.values()} - {odd}))
            what = f"entered {odd} as collective no. {first}, where others entered {others}; see logs/stacks"
            return [rank for rank, name in names.items() if name == odd], what
    if not report.reason:
        idle = min(status.quiet for status in statuses.values())
        return [], f"no rank moved for {idle:.0f} s, and none is behind; see logs/stacks"
    several = len({status.host for status in statuses.values()}) > 1
    look = "look at the network between the hosts" if several else "see the logs of all ranks"
    return [], f"all ranks answer, but cannot reach each other ({report.reason}); {look}"


def format_ranks_by_host(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """Return `rank 1 on host2`, or `ranks 2, 3 on host2 and rank 5 on host3`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(statuses[rank].host, []).append(rank)
    return " and ".join(
        f"{'ranks' if len(several) > 1 else 'rank'} {first_names(several, 8)} on {host}"
        for host, several in by_host.items()
    )


def format_status_table(report: StatusReport, first: Sequence[int]) -> str:
    """Return a row per rank, those of `first` at the top; after MAX_TABLE_ROWS the number of the
    others.
    """
    ranks = [*first, *sorted(report.statuses.keys() - set(first))]
    rows = [("rank", "host", "state", "doing", "last collective", "idle seconds")]
    for rank in ranks[:MAX_TABLE_ROWS]:
        status, answered = report.statuses[rank], rank in report.answered_ranks
        kernel_state = report.process_states.get(rank, "")
        state = status.kind if answered else _KERNEL_STATES.get(kernel_state, _KERNEL_STATES[""])[0]
        # The collective that it has been inside for longest, else the one that it left last.
        logs = [log for log in status.lines.values() if log["entered"]]
        log = max(logs, key=lambda log: log["seconds"] * (1 if _waits(log) else -1), default=None)
        last = _format_collective(log, log["entered"]) + " (inside)" * _waits(log) if log else "-"
        rows.append((str(rank), status.host, state, status.doing or "-", last, f"{status.quiet:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"and {len(ranks) - MAX_TABLE_ROWS} more"] * (len(ranks) > MAX_TABLE_ROWS))


def _waits(log: Mapping[str, Any]) -> bool:
    return bool(log["entered"] > log["left"])


def _format_collective(log: Mapping[str, Any], number: int) -> str:
    """Return `all_reduce no. 45`; `collective no. 45` if its name is no longer remembered."""
    back = log["entered"] - number + 1
    return f"{log['names'][-back] if back <= len(log['names']) else 'collective'} no. {number}"
