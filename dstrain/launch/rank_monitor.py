"""Monitor of this host's ranks: start from their record files, exit from /proc."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterable
from pathlib import Path

from dstrain.host_memory import describe_oom_kill, read_oom_kills
from dstrain.launch.processes import exit_status, process_state
from dstrain.launch.worker import read_rank_records

_READ_INTERVAL_SECONDS = 0.1


class RankMonitor:
    """Monitor of this host's ranks: starts are read from their record files, exits from /proc."""

    def __init__(self, run_dir: Path, ranks: Collection[int], launch_id: str = "") -> None:
        self._run_dir, self._ranks, self._launch_id = run_dir, frozenset(ranks), launch_id
        self.alive_pids: dict[int, int] = {}
        """Pid by rank."""
        self.exit_codes: dict[int, int | None] = {}
        """Exit code by rank, or minus the signal, in the order seen; None if the parent reaped it
        first."""
        self.kill_reasons: dict[int, str] = {}
        """Evidence that the kernel killed a rank's process because memory was full, by rank."""
        self._oom_kills = read_oom_kills()
        self._pidfds: dict[int, int] = {}
        self._read_at = float("-inf")

    def poll(self, force: bool = False) -> None:
        """Update `alive_pids` and `exit_codes`.

        The first rank in `exit_codes` is the one to blame.
        """
        # Records are files, perhaps on a network: not read at every poll, nor once all ranks are known.
        missing = len(self.alive_pids) + len(self.exit_codes) < len(self._ranks)
        if force or (missing and time.monotonic() - self._read_at > _READ_INTERVAL_SECONDS):
            self._read_at = time.monotonic()
            for rank, record in read_rank_records(self._run_dir, self._launch_id).items():
                if rank in self._ranks and rank not in self.exit_codes and rank not in self.alive_pids:
                    self.alive_pids[rank] = record.pid
                    with contextlib.suppress(OSError, AttributeError):  # it has ended, or a kernel before 5.3
                        self._pidfds[rank] = os.pidfd_open(record.pid)
        ended: dict[int, int | None] = {}
        for rank, pid in self.alive_pids.items():
            state = process_state(pid)
            if state in ("gone", "Z"):
                ended[rank] = exit_status(pid) if state == "Z" else None
        # Of those seen in one poll killed ranks come first: the others lost their connection to
        # them.
        for rank in sorted(ended, key=lambda rank: (ended[rank] or 0) >= 0):
            self.exit_codes[rank] = ended[rank]
            pid = self.alive_pids.pop(rank)
            if ended[rank] in (None, -signal.SIGKILL) and (reason := describe_oom_kill(pid, self._oom_kills)):
                self.kill_reasons[rank] = reason
            if rank in self._pidfds:
                os.close(self._pidfds.pop(rank))

    def wait_for_event(self, timeout: float, extra_fds: Collection[int] = ()) -> None:
        """Sleep until a rank ends or an extra descriptor is readable, at most `timeout` seconds.

        A fast wake-up matters: its parent may reap a rank within milliseconds, and then its exit
        code is lost.
        """
        wait_readable((*self._pidfds.values(), *extra_fds), timeout)


def wait_readable(fds: Iterable[int], timeout: float) -> None:
    """Sleep until a descriptor is readable, at most `timeout` seconds."""
    poll = select.poll()
    for descriptor in fds:
        poll.register(descriptor, select.POLLIN)
    poll.poll(1000 * timeout)
