"""Status files of the ranks, exchanged when a collective fails, to find the failed rank."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from dstrain.distributed.connection_errors import unknown_peer_message
from dstrain.distributed.world import World
from dstrain.files import atomic_write
from dstrain.host_memory import describe_oom_kill, read_oom_kills
from dstrain.launch.processes import process_state
from dstrain.launch.worker import LAUNCH_ID_ENV, get_workers_dir, read_rank_records
from dstrain.train.health.diagnosis import FINAL_KINDS, Diagnosis, RankStatus, StatusReport, diagnose

T = TypeVar("T")

STATUS_TIMEOUT_SECONDS = 5.0
"""Wait for the status of other ranks; a rank known to have ended is not waited for."""
_POLL_SECONDS = 0.1
_STATE_TIMEOUT_SECONDS = {"gone": _POLL_SECONDS, "T": 1.0}
"""Shorter waits for processes of this host that do not answer, by their kernel state."""


class RankStatusBoard:
    """Status requests and answers of a launch's ranks, as files in the run folder.

        .workers/roll-TOKEN              grows by one byte per request; TOKEN is unique per launch
        .workers/word-TOKEN-00000.json   last status of a rank

    A rank answers from the thread of its `Watchdog`, also while it waits in a collective. A rank
    that does not answer has ended, is stopped, or its host is unreachable. Files that cannot be
    read or written are not an error here.
    """

    def __init__(self, run_dir: Path, world: World) -> None:
        """Remove the files of earlier launches and exchange host names and pids. Collective."""
        self.rank, self.size, self.log, self._run_dir = world.rank, world.size, world.log, run_dir
        self._status_dir = get_workers_dir(run_dir)
        self._requests_seen, self._last_status, self._lock = 0, ("ready", ""), threading.Lock()
        self._oom_kills = read_oom_kills()
        token = secrets.token_hex(4)
        if world.rank == 0:
            with contextlib.suppress(OSError):
                self._remove_old_files()
                self._status_dir.joinpath(f"roll-{token}").write_bytes(b"")
        # A token per launch, so that no file of an earlier launch is taken for an answer.
        self._token = str(world.broadcast(token))
        self._request_file = self._status_dir / f"roll-{self._token}"
        own = (socket.gethostname(), _pid_namespace(), os.getpid())
        self._initial_status = {self.rank: RankStatus(rank=self.rank, host=own[0], place=own[1], pid=own[2])}
        with contextlib.suppress(OSError):
            # Written before anyone reads it: NFS caches for a while that a file does not exist.
            self._write_status("ready", "")
        self._initial_status |= {
            rank: RankStatus(rank=rank, host=host, place=place, pid=pid)
            for rank, (host, place, pid) in enumerate(world.gather(own))
        }

    def _remove_old_files(self) -> None:
        """Remove the status files of earlier launches."""
        self._status_dir.mkdir(parents=True, exist_ok=True)
        for old in (*self._status_dir.glob("word-*"), *self._status_dir.glob("roll-*")):
            old.unlink(missing_ok=True)

    def sign_off(self, kind: Literal["lost", "failed", "stopped", "done"], text: str = "") -> None:
        """Write the last status of this rank; other ranks do not wait for a newer one."""
        call_with_timeout(lambda: self._write_status(kind, text), None, STATUS_TIMEOUT_SECONDS)

    def answer_request(self) -> None:
        """Write this rank's status if it was requested since the last one."""
        with contextlib.suppress(OSError):
            size = self._num_requests()
            if size > self._requests_seen:
                self._requests_seen = size
                self._write_status(*self._last_status)

    def request_diagnosis(self, reason: str, timeout: float = STATUS_TIMEOUT_SECONDS) -> Diagnosis:
        """Request the status of all ranks and diagnose it. Never raises and never hangs.

        `reason` is the message of the error; an empty one asks without reporting this rank as
        failed.
        """
        return call_with_timeout(
            lambda: diagnose(self._request_status(reason, timeout)),
            Diagnosis((), unknown_peer_message(reason)),
            timeout + STATUS_TIMEOUT_SECONDS,
        )

    def is_lowest_alive(self, missing: tuple[int, ...]) -> bool:
        """Return True if this rank is the lowest that is not in `missing`: it reports for all."""
        return self.rank == min(set(range(self.size)) - set(missing), default=self.rank)

    def _request_status(self, reason: str, timeout: float) -> StatusReport:
        descriptor = os.open(self._request_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        # Appended, not counted up: two ranks may ask at once, and no request gets lost.
        os.write(descriptor, b".")
        # One byte per request, so the size is their number.
        self._requests_seen = num_requests = os.fstat(descriptor).st_size
        os.close(descriptor)
        self._write_status("lost" if reason else self._last_status[0], reason)
        statuses, answered, states = dict(self._initial_status), frozenset[int](), dict[int, str]()
        started_at = time.monotonic()
        while True:
            statuses |= {
                rank: status
                for rank in statuses
                if rank not in answered and (status := self._read_status(rank)) is not None
            }
            answered = frozenset(
                rank for rank, status in statuses.items() if status.kind in FINAL_KINDS or status.seen >= num_requests
            )
            states = {rank: self._kernel_state(statuses[rank]) for rank in statuses if rank not in answered}
            waited = time.monotonic() - started_at
            wait_seconds = max((_STATE_TIMEOUT_SECONDS.get(state, timeout) for state in states.values()), default=0.0)
            if waited > min(wait_seconds, timeout) or not states:
                gone = [statuses[rank].pid for rank, state in states.items() if state == "gone"]
                killed = next(filter(None, (describe_oom_kill(pid, self._oom_kills) for pid in gone)), "")
                return StatusReport(
                    statuses=statuses, answered_ranks=answered, process_states=states, reason=reason, kill_reason=killed
                )
            time.sleep(_POLL_SECONDS)

    def _kernel_state(self, status: RankStatus) -> str:
        """Return the kernel's state letter of a rank's process, `gone` for a zombie, "" on another
        host.
        """
        state = process_state(status.pid) if status.place == _pid_namespace() else ""
        return "gone" if state == "Z" else state

    def _write_status(self, kind: Any, text: str) -> None:
        with self._lock:
            # A last status stays: the watchdog's thread may answer once more before the end.
            if self._last_status[0] in FINAL_KINDS:
                kind, text = self._last_status
            self._last_status = (kind if kind in FINAL_KINDS else "alive", text)
            now = {
                "quiet": round(self.log.idle_seconds(), 3),
                "doing": self.log.phase,
                "step": self.log.step,
                "lines": self.log.snapshot(),
            }
            said = {"kind": self._last_status[0], "seen": self._requests_seen, "text": text}
            path = self._status_path(self.rank)
            atomic_write(path, json.dumps(asdict(self._initial_status[self.rank]) | said | now))

    def _read_status(self, rank: int) -> RankStatus | None:
        """Return a rank's status file, or a status made of its exit record; None if there is
        neither.
        """
        with contextlib.suppress(OSError, ValueError, TypeError):
            return RankStatus(**json.loads(self._status_path(rank).read_text(encoding="utf-8")))
        record = read_rank_records(self._run_dir, os.environ.get(LAUNCH_ID_ENV, "")).get(rank)
        if record is None or record.pid != self._initial_status[rank].pid or not record.exit:
            return None
        return replace(
            self._initial_status[rank], kind="failed", text=record.error or f"it ended with code {record.exit}"
        )

    def _num_requests(self) -> int:
        """Return the number of requests.

        The file is opened so that NFS asks its server for the size.
        """
        with self._request_file.open("rb") as file:
            return os.fstat(file.fileno()).st_size

    def _status_path(self, rank: int) -> Path:
        return self._status_dir / f"word-{self._token}-{rank:05d}.json"


def call_with_timeout(function: Callable[[], T], fallback: T, timeout: float) -> T:
    """Return `function()`, or `fallback` if it raises or takes longer: a file system may hang."""
    result = [fallback]

    def run() -> None:
        with contextlib.suppress(Exception):
            result[0] = function()

    thread = threading.Thread(target=run, name="call-with-timeout", daemon=True)
    thread.start()
    thread.join(timeout)
    return result[0]


@cache
def _pid_namespace() -> str:
    """Return host name and pid namespace: pids can be compared only within both."""
    try:
        return f"{socket.gethostname()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return f"{socket.gethostname()} {secrets.token_hex(4)}"  # no /proc: never equal
