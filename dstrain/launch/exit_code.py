"""What a launch came to: from what its ranks recorded and how their processes ended to one exit code and a sentence."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dstrain.launch.worker import Record

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 75
MEMORY = " (is the host's memory full? see dmesg)"


@dataclass(frozen=True)
class Outcome:
    """The exit code, and for all but 0 and 75 whom to blame."""

    code: int
    message: str = ""
    rank: int | None = None


def outcome(
    records: Mapping[int, Record], ends: Mapping[int, int | None], launcher: int, ranks: Collection[int]
) -> Outcome:
    """`ends`: how the ranks' processes ended, in that order; `launcher`: its return code, which is not to be trusted.

    DeepSpeed's launcher exits 0 when its inner process is killed, and a rank that is done may still die
    while the interpreter shuts down. A rank's own word counts.
    """
    codes = {rank: record.exit for rank, record in records.items()}
    for rank, code in sorted(codes.items()):
        if code == USAGE:
            return Outcome(USAGE, _told(records, rank), rank)
    if not codes:
        if launcher == USAGE:
            return Outcome(USAGE, "the launcher refused its command line; see its message above")
        cause = MEMORY if launcher == -signal.SIGKILL else ""
        return Outcome(FAILED, f"no worker lived to say so; the launcher {describe(launcher)}{cause}")
    if codes.keys() == set(ranks):
        for code in (DONE, STOPPED):
            if set(codes.values()) == {code}:
                return Outcome(code)
    return _blame(records, ends, launcher, ranks)


def _blame(
    records: Mapping[int, Record], ends: Mapping[int, int | None], launcher: int, ranks: Collection[int]
) -> Outcome:
    """The rank that ended first and badly; else one that never spoke; else one that stands out."""
    bad = {
        rank: status for rank, status in ends.items() if rank in records and records[rank].exit not in (DONE, STOPPED)
    }
    # DeepSpeed's launcher ends with its worker's -9 as 247; 255 is what ssh and pdsh say of anything.
    if 192 < launcher < 255 and launcher != 256 - signal.SIGTERM:
        bad = {rank: launcher - 256 if status is None else status for rank, status in bad.items()}
    # SIGTERM is what launchers send to the innocent others.
    telling = [rank for rank, status in bad.items() if records[rank].exit or status not in (None, -signal.SIGTERM)]
    for rank in [*telling, *bad]:
        if records[rank].exit is not None:
            return Outcome(FAILED, _told(records, rank), rank)
        if launcher <= 0:  # DeepSpeed's runner says 0 where its inner process was killed, and its workers with it
            cause = f", most likely with its launcher; the launcher itself {describe(launcher)}"
        else:
            cause = MEMORY if bad[rank] == -signal.SIGKILL else ""
        return Outcome(FAILED, f"{_who(records, rank)} {describe(bad[rank])}{cause}", rank)
    for rank in sorted(ranks):
        if rank not in records:
            return Outcome(FAILED, f"rank {rank} never said that it started; the launcher {describe(launcher)}", rank)
    told = ", ".join(f"rank {rank} with {record.exit}" for rank, record in sorted(records.items()))
    return Outcome(FAILED, f"the ranks ended differently: {told}")


def _told(records: Mapping[int, Record], rank: int) -> str:
    record = records[rank]
    return f"{_who(records, rank)} failed with code {record.exit}" + (f": {record.error}" if record.error else "")


def _who(records: Mapping[int, Record], rank: int) -> str:
    """`rank 3`, and where several hosts take part its host's name."""
    several = len({record.host for record in records.values()}) > 1
    return f"rank {rank} on {records[rank].host}" if several else f"rank {rank}"


def describe(status: int | None) -> str:
    """`was killed by SIGKILL`, `ended with code 3`."""
    if status is None:
        return "ended before it could say why (killed, or its launcher was)"
    if status >= 0:
        return f"ended with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
