"""What a launch came to: from what its ranks recorded and how their processes ended to one exit code and a sentence."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE
from dstrain.launch.worker import RankRecord

OUT_OF_MEMORY_HINT = " (is the host's memory full? see dmesg)"


@dataclass(frozen=True)
class LaunchOutcome:
    """The exit code, and for all but 0 and 75 whom to blame."""

    code: int
    message: str = ""
    rank: int | None = None


def compute_outcome(
    records: Mapping[int, RankRecord], exit_codes: Mapping[int, int | None], launcher_code: int, ranks: Collection[int]
) -> LaunchOutcome:
    """`ends`: how the ranks' processes ended, in that order; `launcher`: its return code, which is not to be trusted.

    DeepSpeed's launcher exits 0 when its inner process is killed, and a rank that is done may still die
    while the interpreter shuts down. A rank's own word counts.
    """
    codes = {rank: record.exit for rank, record in records.items()}
    for rank, code in sorted(codes.items()):
        if code == EXIT_USAGE:
            return LaunchOutcome(EXIT_USAGE, _describe_failure(records, rank), rank)
    if not codes:
        if launcher_code == EXIT_USAGE:
            return LaunchOutcome(EXIT_USAGE, "the launcher refused its command line; see its message above")
        cause = OUT_OF_MEMORY_HINT if launcher_code == -signal.SIGKILL else ""
        return LaunchOutcome(
            EXIT_FAILED, f"no worker lived to say so; the launcher {describe_exit(launcher_code)}{cause}"
        )
    if codes.keys() == set(ranks):
        for code in (EXIT_DONE, EXIT_STOPPED):
            if set(codes.values()) == {code}:
                return LaunchOutcome(code)
    return _find_failed_rank(records, exit_codes, launcher_code, ranks)


def _find_failed_rank(
    records: Mapping[int, RankRecord], exit_codes: Mapping[int, int | None], launcher_code: int, ranks: Collection[int]
) -> LaunchOutcome:
    """The rank that ended first and badly; else one that never spoke; else one that stands out."""
    bad = {
        rank: status
        for rank, status in exit_codes.items()
        if rank in records and records[rank].exit not in (EXIT_DONE, EXIT_STOPPED)
    }
    # DeepSpeed's launcher ends with its worker's -9 as 247; 255 is what ssh and pdsh say of anything.
    if 192 < launcher_code < 255 and launcher_code != 256 - signal.SIGTERM:
        bad = {rank: launcher_code - 256 if status is None else status for rank, status in bad.items()}
    # SIGTERM is what launchers send to the innocent others.
    telling = [rank for rank, status in bad.items() if records[rank].exit or status not in (None, -signal.SIGTERM)]
    for rank in [*telling, *bad]:
        if records[rank].exit is not None:
            return LaunchOutcome(EXIT_FAILED, _describe_failure(records, rank), rank)
        if launcher_code <= 0:  # DeepSpeed's runner says 0 where its inner process was killed, and its workers with it
            cause = f", most likely with its launcher; the launcher itself {describe_exit(launcher_code)}"
        else:
            cause = OUT_OF_MEMORY_HINT if bad[rank] == -signal.SIGKILL else ""
        return LaunchOutcome(EXIT_FAILED, f"{_format_rank(records, rank)} {describe_exit(bad[rank])}{cause}", rank)
    for rank in sorted(ranks):
        if rank not in records:
            return LaunchOutcome(
                EXIT_FAILED,
                f"rank {rank} never said that it started; the launcher {describe_exit(launcher_code)}",
                rank,
            )
    told = ", ".join(f"rank {rank} with {record.exit}" for rank, record in sorted(records.items()))
    return LaunchOutcome(EXIT_FAILED, f"the ranks ended differently: {told}")


def _describe_failure(records: Mapping[int, RankRecord], rank: int) -> str:
    record = records[rank]
    return f"{_format_rank(records, rank)} failed with code {record.exit}" + (
        f": {record.error}" if record.error else ""
    )


def _format_rank(records: Mapping[int, RankRecord], rank: int) -> str:
    """`rank 3`, and where several hosts take part its host's name."""
    several = len({record.host for record in records.values()}) > 1
    return f"rank {rank} on {records[rank].host}" if several else f"rank {rank}"


def describe_exit(status: int | None) -> str:
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
