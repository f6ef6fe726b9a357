"""Liveness of the ranks over the store of the run: heartbeats, status requests, and one failure that all report."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, TypeVar

from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.store import sign, unknown_peer_message, verify
from dstrain.errors import EXIT_FAILED, EXIT_USAGE, PeerFailureError, RunError, UsageError, escape_controls
from dstrain.files import parse_json
from dstrain.launch.worker import print_error
from dstrain.training.health.diagnosis import Failure, RankState, RankStatus, StatusReport, diagnose
from dstrain.training.health.signals import StoppedBySignal

# Keys of the store, after `dstrain/`:
#
#     heartbeat/RANK   a number that grows while a rank is alive    failure          why the run ends, of the first rank
#     status/RANK      its newest status                            failure/known    number of ranks that know of it
#     requests         grows with every request for statuses,       asking/lost      number of ranks that lost another
#                      and with the failure                         asking/PHASE     number that found rank 0 silent
#
# One rank asks for the status of all and publishes what it concludes; the others wait for that. The store is in rank
# 0's process. Without it, the ranks know that rank 0 is lost.
INTERVAL_SECONDS = 0.5
"""Time between two heartbeats of a rank; in runs of more than RANKS_PER_SECOND ranks it grows with their number."""
RANKS_PER_SECOND = 1000
STATUS_TIMEOUT_SECONDS = 5.0
"""Wait for the status of other ranks."""
FAILURE_WAIT_SECONDS = 5.0
"""Time for the others to learn of a rank's failure before it exits; the store ends with rank 0."""
_POLL_SECONDS = 0.1
_GUARD_POLL_SECONDS = 0.5

T = TypeVar("T")


class Liveness:
    """Heartbeats of this rank, and what it knows of the others.

    A thread sends the heartbeats, answers status requests and reads a failure of another rank as soon as it is
    published, since the store may end before this rank's main thread asks for it.
    """

    def __init__(self, store: Any, rank: int, hosts: Sequence[str], timeout: timedelta) -> None:
        """`hosts`: of each rank."""
        self.rank, self.size, self.hosts = rank, len(hosts), hosts
        self.collectives = CollectiveLog()
        """Progress and collectives of this rank, for its status; the world's log once there is one."""
        self.failure: Failure | None = None
        """Why the run ends, once this rank knows."""
        self.interval = max(min(INTERVAL_SECONDS, timeout.total_seconds() / 20), self.size / RANKS_PER_SECOND)
        # A connection of its own: a request of the main thread may block for long.
        self._store = store.clone() if self.size > 1 else store
        self._num_heartbeats, self._request_number = 0, 0
        self._state: RankState = "alive"
        self._lock = threading.RLock()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)
        # The main thread notices a collective's timeout by itself, and takes so long to say why.
        self._max_silent_seconds = timeout.total_seconds() + 2 * STATUS_TIMEOUT_SECONDS + FAILURE_WAIT_SECONDS
        self._guard = threading.Thread(target=self._end_without_store, name="guard-store", daemon=True)

    def start(self) -> None:
        """Write the first status, and start the thread."""
        self._write_status()
        if self.size > 1:
            self._thread.start()
        if self.rank != 0:
            self._guard.start()

    def finish(self) -> None:
        """Tell the others that this rank is done, and close. Never raises."""
        call_with_timeout(lambda: self._write_status("done"), None, STATUS_TIMEOUT_SECONDS)
        self.close()

    def close(self) -> None:
        """End the thread. Nothing is sent or read afterwards."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(FAILURE_WAIT_SECONDS)  # bounded: a request may hang

    def describe_rank(self, rank: int) -> str:
        """Return `rank 1 on host2`; `rank 7` if there is no such rank."""
        return f"rank {rank} on {self.hosts[rank]}" if 0 <= rank < self.size else f"rank {rank}"

    def to_exception(self, failure: Failure, phase: str, fix: str) -> BaseException:
        """Return the failure of another rank as an exception with the same exit code."""
        if failure.stop_signal:
            return StoppedBySignal(failure.stop_signal)
        subject = "" if failure.is_peer_lost else f"{self.describe_rank(failure.rank)} failed: "
        problem = f"{subject}{failure.error}"
        return UsageError(problem) if failure.exit_code == EXIT_USAGE else PeerFailureError(phase, problem, fix)

    def read_heartbeats(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the newest heartbeat of each rank."""
        return list(self._store.multi_get([f"heartbeat/{rank}" for rank in ranks]))

    def read_failure(self) -> Failure | None:
        """Return why the run ends, None if no rank has published anything."""
        with self._lock:
            if self.failure is None and self._store.check(["failure"]):
                self.failure = parse_failure(self._store.get("failure"))
                self._store.add("failure/known", 1)
        return self.failure

    def report_failure(self, failure: Failure) -> None:
        """Publish why this rank ends, unless another rank was first; give the others time to read it. Never raises."""
        call_with_timeout(lambda: self._publish(failure, self.size), None, FAILURE_WAIT_SECONDS)

    def _publish(self, failure: Failure, num_readers: int) -> None:
        with self._lock:
            if self.failure is not None:  # all ranks know of one already
                return
            # An empty value stands for none; the answer is that of the first rank.
            published = self._store.compare_set("failure", "", sign(json.dumps(asdict(failure)).encode()))
            self.failure = parse_failure(published)
            self._store.add("requests", 1)
            self._store.add("failure/known", 1)
        while self._store.add("failure/known", 0) < num_readers:
            if self._stop_event.wait(_POLL_SECONDS / 2):
                return

    def diagnose_failure(self, reason: str) -> Failure:
        """Return why the connection to another rank was lost, the same on all ranks. Never raises and never hangs.

        `reason`: the message of the connection's error.
        """
        failure = call_with_timeout(lambda: self._diagnose_with_store(reason), None, 2 * STATUS_TIMEOUT_SECONDS)
        return failure or self.failure or self._diagnose_without_store(reason)

    def _diagnose_with_store(self, reason: str) -> Failure:
        """Return the published failure; the first rank that asks makes it."""
        deadline = time.monotonic() + 1.5 * STATUS_TIMEOUT_SECONDS
        if self.read_failure() is None and self._is_first_to_ask("lost"):
            report = self._collect_statuses(reason, STATUS_TIMEOUT_SECONDS)
            readers = [rank for rank in report.answered_ranks if report.statuses[rank].state != "done"]
            self._publish(diagnose(report, self.rank), num_readers=len(readers))
        while self.read_failure() is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        # None: the rank that asks all others was lost too.
        return self.failure or Failure(rank=self.rank, error=unknown_peer_message(reason), is_peer_lost=True)

    def _diagnose_without_store(self, reason: str) -> Failure:
        """Return that rank 0 is lost, whose store does not answer."""
        if self.rank == 0:
            return Failure(rank=0, error=unknown_peer_message(reason), is_peer_lost=True)
        statuses = {rank: RankStatus(rank=rank, host=host) for rank, host in enumerate(self.hosts)}
        statuses[self.rank] = self._make_status()
        report = StatusReport(statuses=statuses, answered_ranks=frozenset(statuses) - {0}, reason=reason)
        return replace(diagnose(report, self.rank), table="")  # of the others it would show guesses

    def diagnose_stall(self, timeout: float) -> Failure | None:
        """Return which ranks hold up the others; None if another rank reports it. Never raises and never hangs.

        Rank 0 does, or the first rank that finds it silent.
        """

        def ask() -> Failure | None:
            if self.rank != 0:
                before = self.read_heartbeats([0])
                time.sleep(2 * self.interval)
                if self.read_heartbeats([0]) != before or not self._is_first_to_ask(self.collectives.phase):
                    return None
            return diagnose(self._collect_statuses("", timeout), self.rank)

        return call_with_timeout(ask, None, timeout + STATUS_TIMEOUT_SECONDS)

    def _is_first_to_ask(self, occasion: str) -> bool:
        return bool(self._store.add(f"asking/{occasion}", 1) == 1)

    def _end_without_store(self) -> None:
        """End this process when rank 0, which has the store, is silent for longer than the run's timeout.

        A request to a process that is stopped waits in C code without a limit, in the heartbeat's thread and in the main
        thread, which may build a process group. Polls are counted, not the time: this process may be stopped too.
        """
        silent_polls, last_heartbeat = 0, 0
        while not self._stop_event.wait(_GUARD_POLL_SECONDS):
            silent_polls = silent_polls + 1 if self._num_heartbeats == last_heartbeat else 0
            last_heartbeat = self._num_heartbeats
            seconds = silent_polls * _GUARD_POLL_SECONDS
            if self._thread.is_alive() and seconds > self._max_silent_seconds + self.interval:
                print_error(
                    f"error: {self.describe_rank(0)} has not answered for {seconds:.0f} s; see its log, and whether the "
                    "process is stopped; fix the cause and start again"
                )
                os._exit(EXIT_FAILED)

    def _send_heartbeats(self) -> None:
        while True:
            try:
                self._num_heartbeats += 1
                self._store.set(f"heartbeat/{self.rank}", str(self._num_heartbeats))
                request_number = self._store.add("requests", 0)
                if request_number > self._request_number:
                    self._request_number = request_number
                    self._write_status()
                    self.read_failure()
            except RuntimeError:  # rank 0 has ended, and the store with it: the main thread raises on its next request
                return
            if self._stop_event.wait(self.interval):
                return

    def _collect_statuses(self, reason: str, timeout: float) -> StatusReport:
        """Request the status of all ranks, and wait for those that may still answer."""
        request_number = self._store.add("requests", 1)
        self._request_number = max(request_number, self._request_number)
        self._write_status("lost" if reason else "alive")
        keys = [f"status/{rank}" for rank in range(self.size)]
        deadline = time.monotonic() + timeout
        while True:
            statuses = dict(enumerate(map(_parse_status, self._store.multi_get(keys))))
            answered = {
                rank
                for rank, status in statuses.items()
                if status.state == "done" or status.request_number >= request_number
            }
            if len(answered) == self.size or time.monotonic() > deadline:
                return StatusReport(statuses=statuses, answered_ranks=frozenset(answered), reason=reason)
            time.sleep(_POLL_SECONDS)

    def _write_status(self, state: RankState = "alive") -> None:
        with self._lock:
            # What comes after `alive` stays: the thread may answer once more before the end.
            self._state = state if self._state == "alive" else self._state
            set_value(self._store, f"status/{self.rank}", asdict(self._make_status()))

    def _make_status(self) -> RankStatus:
        return RankStatus(
            rank=self.rank, host=self.hosts[self.rank], state=self._state, request_number=self._request_number,
            phase=self.collectives.phase, idle_seconds=round(self.collectives.idle_seconds(), 3),
            collectives=self.collectives.snapshot(),
        )  # fmt: skip


def _parse_status(content: bytes) -> RankStatus:
    with foreign_values():
        return RankStatus(**decode(content, dict))


def parse_failure(content: bytes) -> Failure:
    """Return a published failure; one that says so for a value that no rank wrote."""
    try:
        values = decode(content, dict)
        with foreign_values():
            return Failure(
                rank=int(values["rank"]),
                error=escape_controls(values["error"]),
                exit_code=EXIT_USAGE if values["exit_code"] == EXIT_USAGE else EXIT_FAILED,
                stop_signal=escape_controls(values["stop_signal"]),
                is_peer_lost=bool(values["is_peer_lost"]),
                table=escape_controls(values["table"]),
                ranks=tuple(map(int, values["ranks"])),
            )
    except RunError as error:
        return Failure(rank=-1, error=str(error), is_peer_lost=True)


def set_value(store: Any, key: str, value: Any) -> None:
    """Set a JSON value in the store, signed with the ranks' key."""
    store.set(key, sign(json.dumps(value).encode()))


def get_value(store: Any, key: str, kind: type) -> Any:
    """Return a JSON value of the store. Blocks until it is there. Raises RunError for one that no rank wrote."""
    return decode(store.get(key), kind)


def decode(content: bytes, kind: type = object) -> Any:
    """Return the JSON value, of type `kind`, that a rank has signed. Raises RunError: the store has no authentication."""
    content = verify(content)
    with foreign_values():
        value = parse_json(content)
        if not isinstance(value, kind):
            raise TypeError(type(value).__name__)
        return value


@contextlib.contextmanager
def foreign_values() -> Iterator[None]:
    """Raise PeerFailureError for a value that no rank can have written: without a key, everyone can sign."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as fault:
        problem = "the rendezvous store holds a value that no rank wrote"
        raise PeerFailureError("preparing the data", problem, "see docs/launch.md, Trust") from fault


def call_with_timeout(function: Callable[[], T], fallback: T, timeout: float) -> T:
    """Return `function()`, or `fallback` if it raises or takes longer: a store or a file system may hang."""
    result = [fallback]

    def run() -> None:
        with contextlib.suppress(Exception):
            result[0] = function()

    thread = threading.Thread(target=run, name="call-with-timeout", daemon=True)
    thread.start()
    thread.join(timeout)
    return result[0]
