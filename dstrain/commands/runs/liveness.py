"""State of the launch that holds a run folder: its lease, its processes and how its ranks ended."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dstrain.files import get_host_id
from dstrain.launch.lease import LEASE_TIMEOUT_SECONDS
from dstrain.launch.lease_file import RELEASED_HEARTBEAT, LeaseHolder, parse_holder, read_latest_lease
from dstrain.launch.processes import is_process_alive, process_state
from dstrain.launch.worker import RankRecord, get_workers_dir, read_rank_records
from dstrain.report.progress import State, find_end
from dstrain.report.run_history import RunHistory

_POLL_SECONDS = 0.25


@dataclass(frozen=True, kw_only=True)
class Liveness:
    """A launch, as far as this host can see it."""

    state: State
    holder: LeaseHolder | None
    """The last launch in this folder; None if its lease is gone, or the folder is a copy."""
    ranks: dict[int, RankRecord]
    alive_ranks: tuple[int, ...] | None
    """Ranks on this host whose process runs; None if the ranks are on other hosts."""
    reason: str = ""
    """Why the run failed, if a rank said so."""


def find_liveness(history: RunHistory, timeout: float = LEASE_TIMEOUT_SECONDS) -> Liveness:
    """Return the state of a run. Waits up to `timeout` seconds for a heartbeat of a launch on another host."""
    run_dir = history.run_dir
    holder = _read_holder(run_dir)
    if holder is not None and _is_copy(holder, run_dir):
        holder = None
    ranks = _read_ranks(run_dir, holder)
    is_alive = False if holder is None else _is_alive(holder, lambda: _read_holder(run_dir), timeout)
    here = [
        rank
        for rank, record in ranks.items()
        if holder is not None and holder.machine == get_host_id() and record.host == holder.host
    ]
    alive_ranks = tuple(rank for rank in here if ranks[rank].exit is None and _runs(ranks[rank].pid)) if here else None
    failed = next((record for _, record in sorted(ranks.items()) if record.exit not in (None, 0, 75)), None)
    if is_alive:
        state: State = "running" if len(history.train) and find_end(history) is None else "starting"
    else:
        state = find_end(history) or ("failed" if failed else "unknown" if holder is None else "killed")
        if state == "stopped" and failed is not None:
            state = "failed"
    reason = failed.error if failed is not None and failed.error and state == "failed" else ""
    return Liveness(state=state, holder=holder, ranks=ranks, alive_ranks=alive_ranks, reason=reason)


def _read_holder(run_dir: Path) -> LeaseHolder | None:
    with contextlib.suppress(OSError):  # the folder of no launch, or one that this user may not read
        return parse_holder(read_latest_lease(get_workers_dir(run_dir))[1] or b"")
    return None


def _is_copy(holder: LeaseHolder, run_dir: Path) -> bool:
    """Return True if the folder is a copy of the one that the launch held: its inode is another one."""
    return holder.machine == get_host_id() and holder.folder != run_dir.stat().st_ino


def _read_ranks(run_dir: Path, holder: LeaseHolder | None) -> dict[int, RankRecord]:
    """Return the records of the ranks of this launch, or of one without a `dstrain` command."""
    found = read_rank_records(run_dir, holder.launch) if holder is not None else {}
    return found or read_rank_records(run_dir)


def _is_alive(holder: LeaseHolder, read: Callable[[], LeaseHolder | None], timeout: float) -> bool:
    """Return True if the process of the holder runs, or its heartbeat changes within `timeout` seconds."""
    if holder.beat == RELEASED_HEARTBEAT:
        return False
    if holder.machine == get_host_id() and (known := is_process_alive(holder.pid, holder.started)) is not None:
        return known
    until = time.monotonic() + timeout
    while time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        current = read()
        if current is None or current.beat == RELEASED_HEARTBEAT:
            return False
        if current != holder:
            return True
    return False


def _runs(pid: int) -> bool:
    return process_state(pid) not in ("gone", "Z")
