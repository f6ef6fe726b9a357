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
        ranks, what = missing, _describe_missing(report, missing)
    else:
        ranks, what = _compare_collectives(report)
    message = f"{format_ranks_by_host(ranks, statuses)} {what}".lstrip()
    return Diagnosis(tuple(ranks), message, stop_signal, format_status_table(report, ranks))


def _describe_missing(report: StatusReport, missing: Sequence[int]) -> str:
    """Return what became of the ranks that did not answer, and how long others waited for them."""
    states = {report.process_states.get(rank, "") for rank in missing}
    state = states.pop() if len(states) == 1 else "mixed"
    _, what, look = _KERNEL_STATES.get(state, _KERNEL_STATES[""])
    # A closed connection to another host, whose processes cannot be looked up, means an exit.
    if state == "" and re.search("closed|reset|refused|broken pipe|exited|aborted", report.reason, re.I):
        what, look = "has ended, or lost the network", _KERNEL_STATES["gone"][2]
    wait = _describe_wait(report.statuses)
    separator = " while " if what.startswith("has ended") else ": "
    return f"{what}{wait and separator + wait}; see logs/rank-{missing[0]:05d}.log{look}"


def _compare_collectives(report: StatusReport) -> tuple[list[int], str]:
    """Return the ranks that did not enter a collective that others entered, and what to say of
    them.
    """
    statuses = report.statuses
    groups = sorted({name for status in statuses.values() for name in status.lines})
    waited = _find_longest_wait(statuses)
    # On a GPU no rank stays inside a collective, since the host runs ahead of it: compare all
    # groups.
    for group in [waited] if waited else groups:
        logs = _get_member_logs(statuses, group)
        first = min(log["entered"] for log in logs.values())
        late = [rank for rank, log in logs.items() if log["entered"] == first]
        if ahead := [log for rank, log in logs.items() if rank not in late]:
            furthest, status = max(ahead, key=lambda log: log["seconds"]), statuses[late[0]]
            others = f"{len(ahead)} of {len(logs)} ranks waited in for {furthest['seconds']:.0f} s"
            where = f"{'it is' if len(late) == 1 else 'they are'} in {status.doing or 'no step'}"
            return late, (
                f"did not enter {_format_collective(furthest, first + 1)} that {others}: {where}, where nothing "
                f"moved for {status.quiet:.0f} s; see logs/stacks/rank-{late[0]:05d}.txt"
            )
    for group in groups:
        logs = _get_member_logs(statuses, group)
        names = {rank: "".join(log["names"][-1:]) for rank, log in logs.items()}
        # In the ranks' order, so that all ranks blame the same ones if two names are equally frequent.
        distinct = list(dict.fromkeys(names.values()))
        if len(distinct) > 1:
            odd = min(distinct, key=[*names.values()].count)
            ranks = [rank for rank, name in names.items() if name == odd]
            rest = ", ".join(sorted({*distinct} - {odd}))
            what = f"entered {odd} as collective no. {logs[ranks[0]]['entered']}, where others entered {rest}"
            return ranks, f"{what}; see logs/stacks"
    wait = _describe_wait(statuses)
    suffix = wait and f": {wait}"
    if not report.reason:
        idle = min(status.quiet for status in statuses.values())
        return [], f"no rank moved for {idle:.0f} s, and none is behind{suffix}; see logs/stacks"
    several = len({status.host for status in statuses.values()}) > 1
    look = "look at the network between the hosts" if several else "see the logs of all ranks"
    return [], f"all ranks answer, but cannot reach each other ({report.reason}){suffix}; {look}"


def _find_longest_wait(statuses: Mapping[int, RankStatus]) -> str | None:
    """Return the group in which a rank has been inside a collective for longest."""
    logs = [(name, log) for _, status in sorted(statuses.items()) for name, log in status.lines.items()]
    waits = [(log["seconds"], name) for name, log in logs if _waits(log)]
    return max(waits)[1] if waits else None


def _describe_wait(statuses: Mapping[int, RankStatus]) -> str:
    """Return `1 of 2 ranks waited 20 s in all_reduce no. 45`, the longest wait; '' if no rank waits."""
    group = _find_longest_wait(statuses)
    if group is None:
        return ""
    inside = [log for log in _get_member_logs(statuses, group).values() if _waits(log)]
    longest = max(inside, key=lambda log: log["seconds"])
    collective = _format_collective(longest, longest["entered"])
    return f"{len(inside)} of {len(longest['ranks'])} ranks waited {longest['seconds']:.0f} s in {collective}"


def _get_member_logs(statuses: Mapping[int, RankStatus], group: str) -> dict[int, Mapping[str, Any]]:
    """Return each member's log of a group; an empty one for a rank that entered nothing in it."""
    members = next(status.lines[group]["ranks"] for status in statuses.values() if group in status.lines)
    empty = {"entered": 0, "left": 0, "seconds": 0.0, "names": [], "ranks": members}
    return {rank: status.lines.get(group, empty) for rank, status in statuses.items() if rank in members}


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
