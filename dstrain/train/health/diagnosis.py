"""Who is missing and what for: from what the ranks say of themselves to one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FINAL_KINDS = ("lost", "failed", "stopped", "done")
"""Words of a rank that has no more to say: it is about to leave."""


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """What a rank says of itself when one is missed."""

    rank: int
    host: str
    place: str
    """Host and pid namespace: where `pid` means something."""
    pid: int
    kind: Literal["ready", "alive", "lost", "failed", "stopped", "done"] = "ready"
    """lost: another went silent. failed: an error of its own. stopped: a signal came before the first step."""
    seen: int = 0
    """How often it had seen the roll called."""
    doing: str = ""
    step: int | None = None
    quiet: float = 0.0
    """Seconds in which nothing moved."""
    lines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Of each group by name, as `Line.told`."""
    text: str = ""
    """The error, or the signal's name."""


@dataclass(frozen=True)
class Diagnosis:
    """Whom to look at and why."""

    ranks: tuple[int, ...]
    message: str
    stop_signal: str = ""
    """The signal, where one was stopped by it before the first step."""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """What came of a roll call."""

    statuses: Mapping[int, RankStatus]
    """Newest word of each rank, whether it answered or not."""
    answered_ranks: frozenset[int]
    process_states: Mapping[int, str]
    """The kernel's letter of those that did not, or `gone`, as far as this host knows."""
    reason: str = ""
    """What the error said; empty where nothing was raised yet."""


def diagnose(report: StatusReport) -> Diagnosis:
    """The rank that failed, else those that did not answer, else those that did not enter what the others wait in."""
    words = report.statuses
    for kind in ("failed", "stopped"):
        for rank, word in sorted(words.items()):
            if word.kind == kind and kind == "stopped":
                return Diagnosis(
                    (rank,), f"{format_ranks_by_host([rank], words)} was stopped by {word.text}", word.text
                )
            if word.kind == kind:
                return Diagnosis(
                    (rank,), f"{format_ranks_by_host([rank], words)} failed: {word.text}; {_log_path([rank])} says more"
                )
    missing = sorted(set(words) - report.answered_ranks)
    if missing:
        return Diagnosis(tuple(missing), _describe_missing(missing, report))
    return _diagnose_missed_collective(words) or _diagnose_mismatched_collectives(words) or _diagnose_no_rank(report)


def format_ranks_by_host(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """`rank 1 on host2`, `ranks 2 and 3 on host2 and rank 5 on host3`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(statuses[rank].host, []).append(rank)
    return " and ".join(f"{_format_ranks(of_host)} on {host}" for host, of_host in by_host.items())


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _log_path(ranks: Sequence[int], stacks: bool = False) -> str:
    return f"logs/{'stacks/' * stacks}rank-{ranks[0]:05d}.{'txt' if stacks else 'log'}"


def _describe_missing(missing: Sequence[int], report: StatusReport) -> str:
    """Ended, stopped, hanging in the kernel, or silent."""
    who, states = (
        format_ranks_by_host(missing, report.statuses),
        {report.process_states.get(rank, "") for rank in missing},
    )
    wait = _describe_longest_wait(report.statuses)
    cut_off = re.search(r"closed|reset|refused|broken pipe|exited|aborted", report.reason, re.IGNORECASE)
    if states <= {"gone", "Z"} or (states == {""} and cut_off):
        how = "ended without a word" if "" not in states else "ended, or lost the network"
        return f"{who} has {how}{wait and f' while {wait}'}; see {_log_path(missing)} there, and dmesg for the memory"
    if states == {"T"}:
        return f"{who} is stopped (SIGSTOP, or a debugger){wait and f': {wait}'}; see {_log_path(missing)}"
    if states == {"D"}:
        return f"{who} hangs in the kernel, on a disk, a network file system or a device{wait and f': {wait}'}"
    return f"{who} went silent{wait and f': {wait}'}; see {_log_path(missing)} there, and whether that host answers"


def _describe_longest_wait(statuses: Mapping[int, RankStatus]) -> str:
    """`1 of 2 ranks waited 20 s in all_reduce no. 45`: the longest wait that is told of."""
    group = _find_waiting_group(statuses)
    if group is None:
        return ""
    told = _get_group_logs(statuses, group)
    inside = [line for line in told.values() if line["entered"] > line["left"]]
    longest = max(inside, key=lambda line: line["seconds"])
    name, number = longest["names"][-1], longest["entered"]
    return f"{len(inside)} of {len(longest['ranks'])} ranks waited {_format_seconds(longest)} in {name} no. {number}"


def _find_waiting_group(statuses: Mapping[int, RankStatus]) -> str | None:
    """The group in which a rank is for longest."""
    lines = [(name, line) for _, word in sorted(statuses.items()) for name, line in word.lines.items()]
    inside = [(line["seconds"], name) for name, line in lines if line["entered"] > line["left"]]
    return max(inside)[1] if inside else None


def _get_group_logs(statuses: Mapping[int, RankStatus], group: str) -> dict[int, Mapping[str, Any]]:
    """Each member's line of a group; a rank that never entered anything in it has an empty one."""
    known = next(word.lines[group] for word in statuses.values() if group in word.lines)
    empty = {"entered": 0, "left": 0, "seconds": 0.0, "names": [], "ranks": known["ranks"]}
    return {rank: word.lines.get(group, empty) for rank, word in statuses.items() if rank in known["ranks"]}


def _format_seconds(group_log: Mapping[str, Any]) -> str:
    return f"{group_log['seconds']:.0f} s"


def _diagnose_missed_collective(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Those that did not enter what others are in. On a GPU nobody stays in one: the host runs ahead of it."""
    waited = _find_waiting_group(statuses)
    groups = [waited] if waited else sorted({name for word in statuses.values() for name in word.lines})
    for group in groups:
        told = _get_group_logs(statuses, group)
        first = min(line["entered"] for line in told.values())
        ahead = {rank: line for rank, line in told.items() if line["entered"] > first}
        late = [rank for rank in told if rank not in ahead]
        if not ahead:
            continue
        furthest = max(ahead.values(), key=lambda line: line["seconds"])
        what = _format_collective(furthest, first + 1)
        others = f"{len(ahead)} of {len(told)} ranks waited in for {_format_seconds(furthest)}"
        pronoun = "it is" if len(late) == 1 else "they are"
        where = f"{pronoun} in {statuses[late[0]].doing or 'no step'}, where nothing moved for {statuses[late[0]].quiet:.0f} s"
        sentence = f"{format_ranks_by_host(late, statuses)} did not enter {what} that {others}: {where}; see {_log_path(late, True)}"
        return Diagnosis(tuple(late), sentence)
    return None


def _format_collective(group_log: Mapping[str, Any], number: int) -> str:
    """`all_reduce no. 45`; a collective, where its name is not remembered any more."""
    back = group_log["entered"] - number
    names = group_log["names"]
    return f"{names[-1 - back] if back < len(names) else 'collective'} no. {number}"


def _diagnose_mismatched_collectives(statuses: Mapping[int, RankStatus]) -> Diagnosis | None:
    """Ranks that met in one collective and mean different ones by it."""
    for group in sorted({name for word in statuses.values() for name in word.lines}):
        told = _get_group_logs(statuses, group)
        by_name: dict[str, list[int]] = {}
        for rank, line in told.items():
            by_name.setdefault(line["names"][-1] if line["names"] else "", []).append(rank)
        if len(by_name) > 1:
            few = min(by_name.values(), key=len)
            number = told[few[0]]["entered"]
            turns = ", ".join(f"{_format_ranks(ranks)} entered {name}" for name, ranks in by_name.items())
            return Diagnosis(tuple(few), f"the ranks went different ways at collective no. {number}: {turns}")
    return None


def _diagnose_no_rank(report: StatusReport) -> Diagnosis:
    """All answer, and none is behind."""
    wait = _describe_longest_wait(report.statuses)
    if not report.reason:
        quiet = min(word.quiet for word in report.statuses.values())
        return Diagnosis(
            (), f"no rank moved for {quiet:.0f} s, and none is behind{wait and f': {wait}'}; see logs/stacks"
        )
    hosts = len({word.host for word in report.statuses.values()})
    look = "look at the network between the hosts" if hosts > 1 else "see the logs of all ranks"
    return Diagnosis(
        (), f"all ranks answer, but cannot reach each other ({report.reason}){wait and f': {wait}'}; {look}"
    )
