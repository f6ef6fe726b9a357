"""One message on why a run hangs or has lost a rank, from the status of all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from dstrain.distributed.collective_log import parse_ranks
from dstrain.errors import EXIT_FAILED, first_names

FINAL_KINDS = ("lost", "failed", "stopped", "done")
"""Kinds of a rank's last status: it is about to exit and writes no other."""
MAX_TABLE_ROWS = 32
_STATE_NAMES = {"gone": "ended", "T": "stopped", "D": "in kernel"}
"""Kernel state of a rank that does not answer -> its state in the table; `silent` for all others."""
_LOG = "logs/rank-{rank:05d}.log"
_MESSAGES = {
    "failed": f"failed: {{text}}; see {_LOG}",
    "stopped": "was stopped by {text}",
    "gone": f"has ended without a report{{while_waited}}; {{kill_reason}}see {_LOG} there{{dmesg}}",
    "closed": f"has ended, or lost the network{{while_waited}}; see {_LOG} there, and dmesg for the memory",
    "T": f"is stopped (SIGSTOP, or a debugger){{waited}}; see {_LOG}",
    "D": f"hangs in the kernel, on a disk, a network file system or a device{{waited}}; see {_LOG}",
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


Kind = Literal["alive", "lost", "failed", "stopped", "done"]
"""lost: another rank went silent. failed: an error of its own. stopped: signal before step 1."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status that a rank writes to the store when it is asked; the fields are the keys of its JSON."""

    rank: int
    host: str
    kind: Kind = "alive"
    attention: int = 0
    """Number of status requests and failures of which this rank knew."""
    phase: str = ""
    step: int | None = None
    idle_seconds: float = 0.0
    """Seconds without progress."""
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`GroupLog.snapshot` of each process group, by the group's name."""
    text: str = ""
    """The error, or the signal's name."""
    peer_states: Mapping[int, str] = field(default_factory=dict)
    """Kernel state of the ranks of its host that do not run: `gone`, or a letter."""
    kill_reason: str = ""
    """Evidence that the kernel of its host killed one of the ended ranks because memory was full."""


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
    process_states: Mapping[int, str]
    """Kernel state of the ranks that did not answer: a letter, `gone`, or "" where no rank of their host tells."""
    kill_reason: str = ""
    """Evidence that a kernel killed one of the ended ranks because memory was full."""
    reason: str = ""
    """Message of the error that led to the request; empty if no error was raised yet."""


def diagnose(report: StatusReport, rank: int) -> Failure:
    """Return the failure that this rank publishes: of a rank that failed, else of those without an answer, else behind."""
    statuses, logs = report.statuses, _get_group_logs(report.statuses)
    group, wait = _find_longest_wait(logs)
    # On a GPU no rank stays inside a collective, since the host runs ahead of it: compare all groups.
    late = _find_late({group: logs[group]} if group else logs)
    several_hosts = len({status.host for status in statuses.values()}) > 1
    unreachable: Cause = ("network" if several_hosts else "host", [], {})
    found = _find_own_end(statuses) or _find_missing(report) or late or _find_different(logs)
    cause, ranks, fields = found or (unreachable if report.reason else ("idle", [], {}))
    status = statuses[ranks[0]] if ranks else min(statuses.values(), key=lambda status: status.idle_seconds)
    waits = {"waited": wait and f": {wait}", "while_waited": wait and f" while {wait}"}
    killed = report.kill_reason
    waits |= {"kill_reason": killed and f"{killed}; ", "dmesg": "" if killed else ", and dmesg for the memory"}
    fields = {**vars(status), "phase": status.phase or "no step", "reason": report.reason} | waits | fields
    message = f"{format_ranks_by_host(ranks, statuses)} {_MESSAGES[cause].format(**fields)}".lstrip()
    stop_signal = status.text if cause == "stopped" else ""
    table = format_status_table(report, ranks)
    return Failure(
        rank=rank, error=message, stop_signal=stop_signal, is_peer_lost=True, table=table, ranks=tuple(ranks)
    )


def _find_own_end(statuses: Mapping[int, RankStatus]) -> Cause | None:
    """Return the lowest rank with an error of its own, else the lowest that a signal stopped."""
    ended = [(status.kind, rank) for rank, status in statuses.items() if status.kind in ("failed", "stopped")]
    return (min(ended)[0], [min(ended)[1]], {}) if ended else None


def _find_missing(report: StatusReport) -> Cause | None:
    """Return the ranks that did not answer, by the state that their processes have in common."""
    missing = sorted(set(report.statuses) - report.answered_ranks)
    states = {report.process_states.get(rank, "") for rank in missing}
    cause = states.pop() if len(states) == 1 else "silent"
    # A closed connection to another host, whose processes cannot be looked up, means an exit.
    if cause == "" and re.search("closed|reset|refused|broken pipe|exited|aborted", report.reason, re.I):
        cause = "closed"
    return (cause if cause in _MESSAGES else "silent", missing, {}) if missing else None


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
        if others := ", ".join(sorted({*names.values()} - {odd})):
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
        status, answered = report.statuses[rank], rank in report.answered_ranks
        state = status.kind if answered else _STATE_NAMES.get(report.process_states.get(rank, ""), "silent")
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
