"""Liveness of the ranks over the store of the run: heartbeats, status requests, and one failure that all report."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.store import sign, unknown_peer_message, verify
from dstrain.errors import EXIT_FAILED, EXIT_USAGE, PeerFailureError, RunError, UsageError, escape_controls
from dstrain.host_memory import describe_oom_kill, read_oom_kills
from dstrain.launch.processes import process_state
from dstrain.training.health.diagnosis import FINAL_KINDS, Failure, Kind, RankStatus, StatusReport, diagnose
from dstrain.training.health.signals import StoppedBySignal

# Keys of the store, after `dstrain/`:
#
#     beat/RANK       a number that grows while a rank is alive       failure            why the run ends, of the first rank
#     status/RANK     its last status                                 failure/claims     number of ranks that wanted to set it
#     attention       grows with every status request and failure     failure/known      number of ranks that know of it
#     stall/PHASE     number of ranks that found rank 0 silent        diagnosis/claims   number of ranks that lost another
#
# One rank asks for the status of all and publishes what it concludes; the others wait for that. The store is in rank
# 0's process. Without it, the ranks know that rank 0 is lost.
INTERVAL_SECONDS = 0.5
"""Time between two heartbeats of a rank; in runs of more than RANKS_PER_SECOND ranks it grows with their number."""
RANKS_PER_SECOND = 1000
STATUS_TIMEOUT_SECONDS = 5.0
"""Wait for the status of other ranks; a rank known to have ended is not waited for."""
FAILURE_WAIT_SECONDS = 5.0
"""Time for the others to learn of a rank's failure before it exits; the store ends with rank 0."""
EXIT_SECONDS = 1.0
"""Wait for the end of a process of this host whose connections are closed: the kernel closes them first."""
_POLL_SECONDS = 0.1
_STATE_TIMEOUT_SECONDS = {"gone": _POLL_SECONDS, "T": 1.0}
"""Shorter waits for processes that do not answer, by their kernel state."""
_BLOCKED_STATES = ("gone", "T", "t", "D")

T = TypeVar("T")


@dataclass(frozen=True)
class Member:
    """Where a rank runs. The pid is known of the ranks on this host."""

    host: str
    pid: int = 0


class Liveness:
    """Heartbeats of this rank, and what it knows of the others.

    A thread sends the heartbeats, answers status requests and reads a failure of another rank as soon as it is
    published, since the store may end before this rank's main thread asks for it.
    """

    def __init__(self, store: Any, rank: int, members: Sequence[Member], timeout: timedelta) -> None:
        self.rank, self.size, self.members = rank, len(members), members
        self.log = CollectiveLog()
        """Progress and collectives of this rank, for its status; the world's log once there is one."""
        self.failure: Failure | None = None
        """Why the run ends, once this rank knows."""
        self.interval = max(min(INTERVAL_SECONDS, timeout.total_seconds() / 20), self.size / RANKS_PER_SECOND)
        # A connection of its own: a request of the main thread may block for long.
        self._store = store.clone() if self.size > 1 else store
        self._num_beats, self._attention_seen = 0, 0
        self._last_words: tuple[Kind, str] = ("alive", "")
        self._lock = threading.RLock()
        self._oom_kills = read_oom_kills()
        self._stop_event = threading.Event()
        self._thread = threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Write the first status, and start the thread."""
        self._write_status()
        if self.size > 1:
            self._thread.start()

    def close(self) -> None:
        """End the thread. Nothing is sent or read afterwards."""
        self._stop_event.set()
        if self._thread.is_alive():
            self._thread.join(FAILURE_WAIT_SECONDS)  # bounded: a request may hang

    def describe_rank(self, rank: int) -> str:
        """Return `rank 1 on host2`; `rank 7` if there is no such rank."""
        return f"rank {rank} on {self.members[rank].host}" if 0 <= rank < self.size else f"rank {rank}"

    def to_exception(self, failure: Failure, phase: str, fix: str) -> BaseException:
        """Return the failure of another rank as an exception with the same exit code."""
        if failure.stop_signal:
            return StoppedBySignal(failure.stop_signal)
        who = "" if failure.is_peer_lost else f"{self.describe_rank(failure.rank)} failed: "
        what = f"{who}{failure.error}"
        return UsageError(what) if failure.exit_code == EXIT_USAGE else PeerFailureError(phase, what, fix)

    def read_heartbeats(self, ranks: Sequence[int]) -> list[bytes]:
        """Return the newest heartbeat of each rank."""
        return list(self._store.multi_get([f"beat/{rank}" for rank in ranks]))

    def read_failure(self) -> Failure | None:
        """Return why the run ends, None if no rank has published anything."""
        with self._lock:
            if self.failure is None and self._store.check(["failure"]):
                self.failure = parse_failure(self._store.get("failure"))
                self._store.add("failure/known", 1)
        return self.failure

    def report_failure(self, failure: Failure, num_readers: int | None = None) -> None:
        """Publish why this rank ends, unless another rank was first; give the others time to read it. Never raises.

        `num_readers`: ranks that are alive; None for all.
        """
        call_with_timeout(lambda: self._publish(failure, num_readers or self.size), None, FAILURE_WAIT_SECONDS)

    def _publish(self, failure: Failure, num_readers: int) -> None:
        with self._lock:
            if self.failure is not None:  # all ranks know of one already
                return
            if self._store.add("failure/claims", 1) == 1:
                self.failure = failure
                set_value(self._store, "failure", asdict(failure))
                self._store.add("attention", 1)
                self._store.add("failure/known", 1)
        while self.read_failure() is None or self._store.add("failure/known", 0) < num_readers:
            if self._stop_event.wait(_POLL_SECONDS / 2):
                return

    def write_last_status(self, kind: Kind, text: str = "") -> None:
        """Write the last status of this rank; other ranks do not wait for a newer one. Never raises."""
        call_with_timeout(lambda: self._write_status(kind, text), None, STATUS_TIMEOUT_SECONDS)

    def diagnose_failure(self, reason: str) -> Failure:
        """Return why the connection to another rank was lost, the same on all ranks. Never raises and never hangs.

        `reason`: the message of the connection's error.
        """
        limit = 2 * STATUS_TIMEOUT_SECONDS
        agreed = call_with_timeout(lambda: self._agree_on_failure(reason, limit), None, limit)
        return agreed or self.failure or self._diagnose_alone(reason)

    def diagnose_stall(self, timeout: float) -> Failure | None:
        """Return which ranks hold up the others; None if another rank reports it. Never raises and never hangs.

        Rank 0 does, or the first rank that finds it silent.
        """

        def ask() -> Failure | None:
            if self.rank != 0:
                before = self.read_heartbeats([0])
                time.sleep(2 * self.interval)
                if self.read_heartbeats([0]) != before:
                    return None
                if self._store.add(f"stall/{self.log.phase}", 1) != 1:
                    return None
            return diagnose(self._collect_statuses("", timeout), self.rank)

        return call_with_timeout(ask, None, timeout + STATUS_TIMEOUT_SECONDS)

    def _send_heartbeats(self) -> None:
        while True:
            try:
                self._num_beats += 1
                self._store.set(f"beat/{self.rank}", str(self._num_beats))
                attention = self._store.add("attention", 0)
                if attention > self._attention_seen:
                    self._attention_seen = attention
                    self._write_status()
                    self.read_failure()
            except RuntimeError:  # rank 0 has ended, and the store with it: the main thread raises on its next request
                return
            if self._stop_event.wait(self.interval):
                return

    def _agree_on_failure(self, reason: str, limit: float) -> Failure | None:
        """Return the published failure; the first rank that asks makes it."""
        if found := self.read_failure():
            return found
        if self._store.add("diagnosis/claims", 1) == 1:
            report = self._collect_statuses(reason, STATUS_TIMEOUT_SECONDS)
            readers = [rank for rank in report.answered_ranks if report.statuses[rank].kind not in FINAL_KINDS]
            self.report_failure(diagnose(report, self.rank), num_readers=len(readers) or 1)
            return self.failure
        deadline = time.monotonic() + limit
        while (found := self.read_failure()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return found

    def _diagnose_alone(self, reason: str) -> Failure:
        """Return what this host alone tells: the store does not answer, or the rank that asks all others does not."""
        is_store_alive = call_with_timeout(lambda: self._store.add("attention", 0) >= 0, False, 1.0)
        states = self._read_peer_states()
        if not is_store_alive and self.rank != 0:
            deadline = time.monotonic() + EXIT_SECONDS
            while 0 not in states and self.members[0].pid and time.monotonic() < deadline:
                time.sleep(_POLL_SECONDS)
                states = self._read_peer_states()
            states.setdefault(0, "")
        if not states:
            return Failure(rank=self.rank, error=unknown_peer_message(reason), is_peer_lost=True)
        statuses = {rank: RankStatus(rank=rank, host=member.host) for rank, member in enumerate(self.members)}
        statuses[self.rank] = self._make_status()
        answered = frozenset(statuses.keys() - states.keys())
        report = StatusReport(
            statuses=statuses, answered_ranks=answered, process_states=states, reason=reason,
            kill_reason=self._find_kill_reason(states),
        )  # fmt: skip
        return replace(diagnose(report, self.rank), table="")  # of the others it would show guesses

    def _collect_statuses(self, reason: str, timeout: float) -> StatusReport:
        """Request the status of all ranks, and wait for those that may still answer."""
        request = self._store.add("attention", 1)
        self._attention_seen = max(request, self._attention_seen)
        self._write_status("lost" if reason else "alive", reason)
        keys = [f"status/{rank}" for rank in range(self.size)]
        started_at = time.monotonic()
        while True:
            statuses = dict(enumerate(map(_parse_status, self._store.multi_get(keys))))
            answered = {
                rank for rank, status in statuses.items() if status.kind in FINAL_KINDS or status.attention >= request
            }
            states = self._read_peer_states()
            killed = self._find_kill_reason(states)
            for rank in sorted(answered):
                states = dict(statuses[rank].peer_states) | states
                killed = killed or statuses[rank].kill_reason
            missing = {rank: states.get(rank, "") for rank in statuses if rank not in answered}
            limits = [_STATE_TIMEOUT_SECONDS.get(state, timeout) for state in missing.values()]
            if not missing or time.monotonic() - started_at > min(max(limits), timeout):
                return StatusReport(
                    statuses=statuses, answered_ranks=frozenset(answered), process_states=missing, reason=reason,
                    kill_reason=killed if "gone" in missing.values() else "",
                )  # fmt: skip
            time.sleep(_POLL_SECONDS)

    def _read_peer_states(self) -> dict[int, str]:
        """Return the kernel state of the ranks of this host that do not run: `gone`, or a letter."""
        peers = [(rank, member.pid) for rank, member in enumerate(self.members) if member.pid and rank != self.rank]
        states = {rank: process_state(pid).replace("Z", "gone") for rank, pid in peers}
        return {rank: state for rank, state in states.items() if state in _BLOCKED_STATES}

    def _find_kill_reason(self, states: Mapping[int, str]) -> str:
        """Return the evidence that the kernel killed one of these ranks because memory was full; empty without one."""
        gone = [self.members[rank].pid for rank, state in states.items() if state == "gone" and self.members[rank].pid]
        return next(filter(None, (describe_oom_kill(pid, self._oom_kills) for pid in gone)), "")

    def _write_status(self, kind: Kind = "alive", text: str = "") -> None:
        with self._lock:
            # A last status stays: the thread may answer once more before the end.
            if self._last_words[0] not in FINAL_KINDS:
                self._last_words = (kind, text)
            set_value(self._store, f"status/{self.rank}", asdict(self._make_status()))

    def _make_status(self) -> RankStatus:
        states = self._read_peer_states()
        return RankStatus(
            rank=self.rank, host=self.members[self.rank].host, kind=self._last_words[0], text=self._last_words[1],
            attention=self._attention_seen, phase=self.log.phase, step=self.log.step,
            idle_seconds=round(self.log.idle_seconds(), 3), collectives=self.log.snapshot(), peer_states=states,
            kill_reason=self._find_kill_reason(states),
        )  # fmt: skip


def _parse_status(content: bytes) -> RankStatus:
    with foreign_values():
        found = dict(decode(content, dict))
        found["peer_states"] = {int(rank): str(state) for rank, state in found["peer_states"].items()}
        return RankStatus(**found)


def parse_failure(content: bytes) -> Failure:
    """Return a published failure; one that says so for a value that no rank wrote."""
    try:
        found = decode(content, dict)
        with foreign_values():
            texts = {name: escape_controls(found[name]) for name in ("error", "stop_signal", "table")}
            code = EXIT_USAGE if found["exit_code"] == EXIT_USAGE else EXIT_FAILED
            ranks, is_peer_lost = tuple(map(int, found["ranks"])), bool(found["is_peer_lost"])
            return Failure(rank=int(found["rank"]), exit_code=code, is_peer_lost=is_peer_lost, ranks=ranks, **texts)
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
        if not isinstance(value := json.loads(content), kind):
            raise TypeError(type(value).__name__)
        return value


@contextlib.contextmanager
def foreign_values() -> Iterator[None]:
    """Raise PeerFailureError for a value that no rank can have written: without a key, everyone can sign."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError) as fault:
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
