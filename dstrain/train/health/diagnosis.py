"""Who is missing and what for: from what the ranks say of themselves to one sentence."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

FINAL = ("lost", "failed", "stopped", "done")
"""Words of a rank that has no more to say: it is about to leave."""


@dataclass(frozen=True, kw_only=True)
class Word:
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
class Verdict:
    """Whom to look at and why."""

    ranks: tuple[int, ...]
    what: str
    stopped: str = ""
    """The signal, where one was stopped by it before the first step."""


@dataclass(frozen=True, kw_only=True)
class Roll:
    """What came of a roll call."""

    words: Mapping[int, Word]
    """Newest word of each rank, whether it answered or not."""
    answered: frozenset[int]
    states: Mapping[int, str]
    """The kernel's letter of those that did not, or `gone`, as far as this host knows."""
    why: str = ""
    """What the error said; empty where nothing was raised yet."""


def judge(roll: Roll) -> Verdict:
    """The rank that failed, else those that did not answer, else those that did not enter what the others wait in."""
    words = roll.words
    for kind in ("failed", "stopped"):
        for rank, word in sorted(words.items()):
            if word.kind == kind and kind == "stopped":
                return Verdict((rank,), f"{name_ranks([rank], words)} was stopped by {word.text}", word.text)
            if word.kind == kind:
                return Verdict((rank,), f"{name_ranks([rank], words)} failed: {word.text}; {_log([rank])} says more")
    missing = sorted(set(words) - roll.answered)
    if missing:
        return Verdict(tuple(missing), _missing(missing, roll))
    return _behind(words) or _elsewhere(words) or _nobody(roll)


def name_ranks(ranks: Sequence[int], words: Mapping[int, Word]) -> str:
    """`rank 1 on host2`, `ranks 2 and 3 on host2 and rank 5 on host3`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(words[rank].host, []).append(rank)
    return " and ".join(f"{_ranks(of_host)} on {host}" for host, of_host in by_host.items())


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 4 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _log(ranks: Sequence[int], stacks: bool = False) -> str:
    return f"logs/{'stacks/' * stacks}rank-{ranks[0]:05d}.{'txt' if stacks else 'log'}"


def _missing(missing: Sequence[int], roll: Roll) -> str:
    """Ended, stopped, hanging in the kernel, or silent."""
    who, states = name_ranks(missing, roll.words), {roll.states.get(rank, "") for rank in missing}
    wait = _waiting(roll.words)
    cut_off = re.search(r"closed|reset|refused|broken pipe|exited|aborted", roll.why, re.IGNORECASE)
    if states <= {"gone", "Z"} or (states == {""} and cut_off):
        how = "ended without a word" if "" not in states else "ended, or lost the network"
        return f"{who} has {how}{wait and f' while {wait}'}; see {_log(missing)} there, and dmesg for the memory"
    if states == {"T"}:
        return f"{who} is stopped (SIGSTOP, or a debugger){wait and f': {wait}'}; see {_log(missing)}"
    if states == {"D"}:
        return f"{who} hangs in the kernel, on a disk, a network file system or a device{wait and f': {wait}'}"
    return f"{who} went silent{wait and f': {wait}'}; see {_log(missing)} there, and whether that host answers"


def _waiting(words: Mapping[int, Word]) -> str:
    """`1 of 2 ranks waited 20 s in all_reduce no. 45`: the longest wait that is told of."""
    group = _waited_in(words)
    if group is None:
        return ""
    told = _members(words, group)
    inside = [line for line in told.values() if line["entered"] > line["left"]]
    longest = max(inside, key=lambda line: line["seconds"])
    name, number = longest["names"][-1], longest["entered"]
    return f"{len(inside)} of {len(longest['ranks'])} ranks waited {_seconds(longest)} in {name} no. {number}"


def _waited_in(words: Mapping[int, Word]) -> str | None:
    """The group in which a rank is for longest."""
    lines = [(name, line) for _, word in sorted(words.items()) for name, line in word.lines.items()]
    inside = [(line["seconds"], name) for name, line in lines if line["entered"] > line["left"]]
    return max(inside)[1] if inside else None


def _members(words: Mapping[int, Word], group: str) -> dict[int, Mapping[str, Any]]:
    """Each member's line of a group; a rank that never entered anything in it has an empty one."""
    known = next(word.lines[group] for word in words.values() if group in word.lines)
    empty = {"entered": 0, "left": 0, "seconds": 0.0, "names": [], "ranks": known["ranks"]}
    return {rank: word.lines.get(group, empty) for rank, word in words.items() if rank in known["ranks"]}


def _seconds(line: Mapping[str, Any]) -> str:
    return f"{line['seconds']:.0f} s"


def _behind(words: Mapping[int, Word]) -> Verdict | None:
    """Those that did not enter what others are in. On a GPU nobody stays in one: the host runs ahead of it."""
    waited = _waited_in(words)
    groups = [waited] if waited else sorted({name for word in words.values() for name in word.lines})
    for group in groups:
        told = _members(words, group)
        first = min(line["entered"] for line in told.values())
        ahead = {rank: line for rank, line in told.items() if line["entered"] > first}
        late = [rank for rank in told if rank not in ahead]
        if not ahead:
            continue
        furthest = max(ahead.values(), key=lambda line: line["seconds"])
        what = _named(furthest, first + 1)
        others = f"{len(ahead)} of {len(told)} ranks waited in for {_seconds(furthest)}"
        pronoun = "it is" if len(late) == 1 else "they are"
        where = (
            f"{pronoun} in {words[late[0]].doing or 'no step'}, where nothing moved for {words[late[0]].quiet:.0f} s"
        )
        sentence = f"{name_ranks(late, words)} did not enter {what} that {others}: {where}; see {_log(late, True)}"
        return Verdict(tuple(late), sentence)
    return None


def _named(line: Mapping[str, Any], number: int) -> str:
    """`all_reduce no. 45`; a collective, where its name is not remembered any more."""
    back = line["entered"] - number
    names = line["names"]
    return f"{names[-1 - back] if back < len(names) else 'collective'} no. {number}"


def _elsewhere(words: Mapping[int, Word]) -> Verdict | None:
    """Ranks that met in one collective and mean different ones by it."""
    for group in sorted({name for word in words.values() for name in word.lines}):
        told = _members(words, group)
        by_name: dict[str, list[int]] = {}
        for rank, line in told.items():
            by_name.setdefault(line["names"][-1] if line["names"] else "", []).append(rank)
        if len(by_name) > 1:
            few = min(by_name.values(), key=len)
            number = told[few[0]]["entered"]
            turns = ", ".join(f"{_ranks(ranks)} entered {name}" for name, ranks in by_name.items())
            return Verdict(tuple(few), f"the ranks went different ways at collective no. {number}: {turns}")
    return None


def _nobody(roll: Roll) -> Verdict:
    """All answer, and none is behind."""
    wait = _waiting(roll.words)
    if not roll.why:
        quiet = min(word.quiet for word in roll.words.values())
        return Verdict(
            (), f"no rank moved for {quiet:.0f} s, and none is behind{wait and f': {wait}'}; see logs/stacks"
        )
    hosts = len({word.host for word in roll.words.values()})
    look = "look at the network between the hosts" if hosts > 1 else "see the logs of all ranks"
    return Verdict((), f"all ranks answer, but cannot reach each other ({roll.why}){wait and f': {wait}'}; {look}")
