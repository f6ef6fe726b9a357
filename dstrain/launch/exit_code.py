"""Exit code and error message of a launch, from rank records and process exit codes."""

from __future__ import annotations

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, first_names
from dstrain.host_memory import HOST_MEMORY_FIX
from dstrain.launch.worker import RankRecord

OUT_OF_MEMORY_HINT = " (is the host's memory full? see dmesg)"


@dataclass(frozen=True)
class LaunchOutcome:
    """Exit code; for all but 0 and 75 also the error message and the failed rank."""

    code: int
    message: str = ""
    rank: int | None = None


def compute_outcome(
    records: Mapping[int, RankRecord],
    exit_codes: Mapping[int, int | None],
    launcher_code: int,
    ranks: Collection[int],
    kill_reasons: Mapping[int, str] | None = None,
) -> LaunchOutcome:
    """Return the outcome of a launch. A rank's own record counts more than any exit code.

    `exit_codes` are in the order in which the ranks' processes ended. `kill_reasons` are those of ranks that the kernel
    is known to have killed because memory was full. `launcher_code` is not
    reliable: DeepSpeed's launcher exits with 0 when its inner process is killed. A rank that is
    done may still die in the interpreter's shutdown.
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
            EXIT_FAILED,
            f"no rank reported a result; the launcher {describe_exit(launcher_code)}{cause}; see logs/rank-*.log",
        )
    if codes.keys() == set(ranks):
        for code in (EXIT_DONE, EXIT_STOPPED):
            if set(codes.values()) == {code}:
                return LaunchOutcome(code)
    if found := _find_out_of_memory(records):
        return found
    return _find_failed_rank(records, exit_codes, launcher_code, ranks, kill_reasons or {})


def _find_out_of_memory(records: Mapping[int, RankRecord]) -> LaunchOutcome | None:
    """Return the lowest rank that ran out of memory, in one message for all of them; None if none did.

    Often all ranks do at the same step, and the first one to end says nothing more than the others.
    """
    ranks = [rank for rank, record in sorted(records.items()) if record.is_out_of_memory]
    if not ranks:
        return None
    also = f", and so did rank{'s' * (len(ranks) > 2)} {first_names(ranks[1:], 8)}" if len(ranks) > 1 else ""
    first = f"{_format_rank(records, ranks[0])} ran out of memory{also}"
    return LaunchOutcome(EXIT_FAILED, f"{first}\n{records[ranks[0]].error}", ranks[0])


def _find_failed_rank(
    records: Mapping[int, RankRecord],
    exit_codes: Mapping[int, int | None],
    launcher_code: int,
    ranks: Collection[int],
    kill_reasons: Mapping[int, str],
) -> LaunchOutcome:
    """Return the rank that failed first; else one that never started; else how the ranks differ."""
    bad = {
        rank: status
        for rank, status in exit_codes.items()
        if rank in records and records[rank].exit not in (EXIT_DONE, EXIT_STOPPED)
    }
    # DeepSpeed's launcher returns a worker's -9 as 247; ssh and pdsh return 255 for any error.
    if 192 < launcher_code < 255 and launcher_code != 256 - signal.SIGTERM:
        bad = {rank: launcher_code - 256 if status is None else status for rank, status in bad.items()}
    # Launchers send SIGTERM to the other ranks, which did not fail.
    candidates = [rank for rank, status in bad.items() if records[rank].exit or status not in (None, -signal.SIGTERM)]
    for rank in [*candidates, *bad]:
        if records[rank].exit is not None:
            return LaunchOutcome(EXIT_FAILED, _describe_failure(records, rank), rank)
        if launcher_code <= 0:  # DeepSpeed's runner returns 0 if its inner process was killed, with its workers
            cause = f", most likely with its launcher; the launcher itself {describe_exit(launcher_code)}"
        else:
            cause = OUT_OF_MEMORY_HINT if bad[rank] == -signal.SIGKILL else ""
        if reason := kill_reasons.get(rank):
            cause = f": {reason}; {HOST_MEMORY_FIX}"
        return LaunchOutcome(EXIT_FAILED, f"{_format_rank(records, rank)} {describe_exit(bad[rank])}{cause}", rank)
    for rank in sorted(ranks):
        if rank not in records:
            return LaunchOutcome(
                EXIT_FAILED,
                f"rank {rank} did not start; the launcher {describe_exit(launcher_code)}",
                rank,
            )
    codes_text = ", ".join(f"rank {rank} with {record.exit}" for rank, record in sorted(records.items()))
    return LaunchOutcome(EXIT_FAILED, f"the ranks ended differently: {codes_text}")


def _describe_failure(records: Mapping[int, RankRecord], rank: int) -> str:
    record = records[rank]
    return f"{_format_rank(records, rank)} failed with code {record.exit}" + (
        f": {record.error}" if record.error else ""
    )


def _format_rank(records: Mapping[int, RankRecord], rank: int) -> str:
    """Return `rank 3`; with its host's name if there are several hosts."""
    several = len({record.host for record in records.values()}) > 1
    return f"rank {rank} on {records[rank].host}" if several else f"rank {rank}"


def describe_exit(status: int | None) -> str:
    """Return `was killed by SIGKILL` or `ended with code 3`."""
    if status is None:
        return "ended without a report (killed, or its launcher was)"
    if status >= 0:
        return f"ended with code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}"
