"""One message on why a run hangs or has lost a rank, from the status of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dstrain.distributed.collective_log import parse_ranks
from dstrain.errors import EXIT_FAILED, first_names

MAX_TABLE_ROWS = 32
_LOG = "logs/rank-{rank:05d}.log"
_MESSAGES = {
    "closed": f"has ended, or lost the network{{while_waited}}; see {_LOG} there, and dmesg for the memory",
    "silent": f"went silent{{waited}}; see {_LOG} there, and whether that host answers",
    "late": "did not enter {collective} that {ahead} of {members} ranks waited in for {seconds:.0f} s: {are} in {phase}, "
    "where nothing moved for {idle_seconds:.0f} s; see logs/stacks/rank-{rank:05d}.txt",
    "different": "entered {name} as collective no. {number}, where others entered {others}; see logs/stacks",
    "idle": "no rank moved for {idle_seconds:.0f} s, and none is behind{waited}; see logs/stacks",
    "host": "all ranks answer, but cannot reach each other ({reason}){waited}; see the logs of all ranks",
    "network": "all ranks answer, but cannot reach each other ({reason}){waited}; look at the network between the hosts",
}
"""Cause -> what is said of the ranks to look at, whose names come first."""

Cause = tuple[str, list[int], dict[str, Any]]
"""Key of _MESSAGES, ranks to look at, and fields of the message besides those of the first rank's status."""
Log = Mapping[str, Any]
RankState = Literal["alive", "lost", "done"]
"""lost: the rank lost the connection to another one. done: its work is done, and it writes no other status."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status that a rank writes to the store when it is asked; the fields are the keys of its JSON."""

    rank: int
    host: str
    state: RankState = "alive"
    request_number: int = 0
    """Number of status requests and failures of which this rank knew."""
    phase: str = ""
    idle_seconds: float = 0.0
    """Seconds without progress."""
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`GroupLog.snapshot` of each process group, by the group's name."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why the run ends or stands still, as the first rank that knew has published it."""

    rank: int
    """Rank that published it."""
    error: str
    """Message of that rank's error; of a lost peer, what `diagnose` found."""
    exit_code: int = EXIT_FAILED
    stop_signal: str = ""
    """Name of the signal that stopped the rank before the first step."""
    is_peer_lost: bool = False
    """True if the rank lost another one, which `error` names; False if it failed itself."""
    table: str = ""
    """Status of all ranks, where they were asked."""
    ranks: tuple[int, ...] = ()
    """Ranks to look at, where they were asked."""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """Statuses of all ranks after a request."""

    statuses: Mapping[int, RankStatus]
    """Newest status of each rank; it may be older than the request."""
    answered_ranks: frozenset[int]
    reason: str = ""
    """Message of the error that led to the request; empty if no error was raised yet."""


def diagnose(report: StatusReport, rank: int) -> Failure:
    """Return the failure that this rank publishes: the ranks that did not answer, else those that are behind."""
    statuses, logs = report.statuses, _get_group_logs(report.statuses)
    group, wait = _find_longest_wait(logs)
    # On a GPU no rank stays inside a collective, since the host runs ahead of it: compare all groups.
    late = _find_late({group: logs[group]} if group else logs)
    cause, ranks, fields = _find_missing(report) or late or _find_different(logs) or _find_no_rank(report)
    status = statuses[ranks[0]] if ranks else min(statuses.values(), key=lambda status: status.idle_seconds)
    fields = {
        **vars(status),
        "phase": status.phase or "no step",
        "reason": report.reason,
        "waited": f": {wait}" if wait else "",
        "while_waited": f" while {wait}" if wait else "",
        **fields,
    }
    message = f"{format_ranks_by_host(ranks, statuses)} {_MESSAGES[cause].format(**fields)}".lstrip()
    table = format_status_table(report, ranks)
    return Failure(rank=rank, error=message, is_peer_lost=True, table=table, ranks=tuple(ranks))


def _find_missing(report: StatusReport) -> Cause | None:
    """Return the ranks that did not answer. A closed connection means an exit, or a lost network."""
    missing = sorted(set(report.statuses) - report.answered_ranks)
    if not missing:
        return None
    is_closed = re.search("closed|reset|refused|broken pipe|exited|aborted", report.reason, re.I)
    return ("closed" if is_closed else "silent"), missing, {}


def _find_no_rank(report: StatusReport) -> Cause:
    """Return the cause where no rank is to blame."""
    if not report.reason:
        return "idle", [], {}
    hosts = {status.host for status in report.statuses.values()}
    return ("network" if len(hosts) > 1 else "host"), [], {}


def _get_group_logs(statuses: Mapping[int, RankStatus]) -> dict[str, dict[int, Log]]:
    """Return each group's logs by member; an empty one for a rank that entered nothing in it."""
    groups = {name: log["ranks"] for status in statuses.values() for name, log in status.collectives.items()}
    members = {name: parse_ranks(ranks) for name, ranks in groups.items()}
    empty = {"entered": 0, "left": 0, "seconds": 0.0, "names": []}
    # In order, so that all ranks blame the same ones: each has its own status first.
    return {
        name: {rank: statuses[rank].collectives.get(name, empty) for rank in sorted(ranks)}
        for name, ranks in sorted(members.items())
    }


def _find_longest_wait(logs: Mapping[str, Mapping[int, Log]]) -> tuple[str, str]:
    """Return the group whose ranks wait for longest and `1 of 2 ranks waited 20 s in all_reduce no. 45`, or two ''."""
    waits = [(log["seconds"], name, log) for name, group in logs.items() for log in group.values() if _waits(log)]
    if not waits:
        return "", ""
    seconds, group, log = max(waits, key=lambda wait: wait[:2])
    inside, collective = sum(name == group for _, name, _ in waits), _format_collective(log, log["entered"])
    return group, f"{inside} of {len(logs[group])} ranks waited {seconds:.0f} s in {collective}"


def _find_late(logs: Mapping[str, Mapping[int, Log]]) -> Cause | None:
    """Return the ranks that did not enter a collective that others of their group entered."""
    for group in logs.values():
        first = min(log["entered"] for log in group.values())
        late = [rank for rank, log in group.items() if log["entered"] == first]
        if len(late) < len(group):
            furthest = max((log for rank, log in group.items() if rank not in late), key=lambda log: log["seconds"])
            fields = {"ahead": len(group) - len(late), "members": len(group), "seconds": furthest["seconds"]}
            fields["collective"] = _format_collective(furthest, first + 1)
            return "late", late, fields | {"are": "it is" if len(late) == 1 else "they are"}
    return None


def _find_different(logs: Mapping[str, Mapping[int, Log]]) -> Cause | None:
    """Return the ranks that entered another collective than most of their group did, as the same number."""
    for group in logs.values():
        names = {rank: "".join(log["names"][-1:]) for rank, log in group.items()}
        odd = min(names.values(), key=[*names.values()].count)
        ranks = [rank for rank, name in names.items() if name == odd]
        others = ", ".join(sorted({*names.values()} - {odd}))
        if others:
            return "different", ranks, {"name": odd, "number": group[ranks[0]]["entered"], "others": others}
    return None


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
    """Return a row per rank, those of `first` at the top; after MAX_TABLE_ROWS the number of the others."""
    ranks = [*first, *sorted(report.statuses.keys() - set(first))]
    rows = [("rank", "host", "state", "doing", "last collective", "idle seconds")]
    for rank in ranks[:MAX_TABLE_ROWS]:
        status = report.statuses[rank]
        state = status.state if rank in report.answered_ranks else "silent"
        # The collective that it has been inside for longest, else the one that it left last.
        logs = [log for log in status.collectives.values() if log["entered"]]
        log = max(logs, key=lambda log: log["seconds"] * (1 if _waits(log) else -1), default=None)
        last = _format_collective(log, log["entered"]) + " (inside)" * _waits(log) if log else "-"
        rows.append((str(rank), status.host, state, status.phase or "-", last, f"{status.idle_seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"and {len(ranks) - MAX_TABLE_ROWS} more"] * (len(ranks) > MAX_TABLE_ROWS))


def _waits(log: Log) -> bool:
    return bool(log["entered"] > log["left"])


def _format_collective(log: Log, number: int) -> str:
    """Return `all_reduce no. 45`; `collective no. 45` if its name is no longer remembered."""
    back = log["entered"] - number + 1
    return f"{log['names'][-back] if back <= len(log['names']) else 'collective'} no. {number}"
