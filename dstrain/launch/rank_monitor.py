"""The ranks that run on this host: which started, by their records, and how they ended, by the kernel."""

from __future__ import annotations

import contextlib
import os
import select
import time
from collections.abc import Collection
from pathlib import Path

from dstrain.launch.processes import exit_status, process_state
from dstrain.launch.worker import read_rank_records

_READ_INTERVAL_SECONDS = 0.1


class RankMonitor:
    """What was seen of them so far."""

    def __init__(self, run_dir: Path, ranks: Collection[int], launch_id: str = "") -> None:
        """`launch`: what it is called in the names of records."""
        self._run_dir, self._ranks, self._launch_id = run_dir, frozenset(ranks), launch_id
        self.alive_pids: dict[int, int] = {}
        """Pid by rank."""
        self.exit_codes: dict[int, int | None] = {}
        """How each rank's process ended, in the order seen: as subprocess tells it, None where it was reaped too soon."""
        self._pidfds: dict[int, int] = {}
        self._read_at = float("-inf")

    def poll(self, force: bool = False) -> None:
        """Note which ranks started, until all have, and which ended. The first to end is the one to blame."""
        missing = len(self.alive_pids) + len(self.exit_codes) < len(self._ranks)
        if force or (missing and time.monotonic() - self._read_at > _READ_INTERVAL_SECONDS):
            self._read_at = time.monotonic()
            for rank, record in read_rank_records(self._run_dir, self._launch_id).items():
                if rank in self._ranks and rank not in self.exit_codes and rank not in self.alive_pids:
                    self.alive_pids[rank] = record.pid
                    with contextlib.suppress(OSError, AttributeError):  # gone already, or a kernel without it
                        self._pidfds[rank] = os.pidfd_open(record.pid)
        ended: dict[int, int | None] = {}
        for rank, pid in self.alive_pids.items():
            state = process_state(pid)
            if state in ("gone", "Z"):
                ended[rank] = exit_status(pid) if state == "Z" else None
        # Of those seen at once a killed one goes first: the others lost their connection to it.
        for rank in sorted(ended, key=lambda rank: (ended[rank] or 0) >= 0):
            self.exit_codes[rank] = ended[rank]
            del self.alive_pids[rank]
            if rank in self._pidfds:
                os.close(self._pidfds.pop(rank))

    def wait_for_event(self, timeout: float, extra_fds: Collection[int] = ()) -> None:
        """Sleep, but wake when a rank ends: its parent may reap it within milliseconds, and its status is lost then.

        `beside`: other descriptors that wake it when something can be read there.
        """
        poll = select.poll()
        for descriptor in (*self._pidfds.values(), *extra_fds):
            poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * timeout)
