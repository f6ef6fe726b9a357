"""Status of each rank, requested through files, and one message on why a run hangs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from dstrain.distributed.store import unknown_peer_message
from dstrain.distributed.world import World
from dstrain.errors import first_names
from dstrain.files import atomic_write
from dstrain.host_memory import describe_oom_kill, read_oom_kills
from dstrain.launch.processes import process_state
from dstrain.launch.worker import LAUNCH_ID_ENV, get_workers_dir, read_rank_records

FINAL_KINDS = ("lost", "failed", "stopped", "done")
"""Kinds of a rank's last status: it is about to exit and writes no other."""
MAX_TABLE_ROWS = 32
_STATE_NAMES = {"gone": "ended", "T": "stopped", "D": "in kernel"}
"""Kernel state of a rank that does not answer -> its state in the table; `silent` for all others."""
_LOG = "logs/rank-{rank:05d}.log"
_MESSAGES = {
    "failed": f"failed: {{text}}; see {_LOG}",
    "stopped": "was stopped by {text}",
    "gone": f"has ended without a report{{while_waited}}; {{kill_reason}}see {_LOG} there{{dmesg}}",
    "closed": f"has ended, or lost the network{{while_waited}}; see {_LOG} there, and dmesg for the memory",
    "T": f"is stopped (SIGSTOP, or a debugger){{waited}}; see {_LOG}",
    "D": f"hangs in the kernel, on a disk, a network file system or a device{{waited}}; see {_LOG}",
    "silent": f"went silent{{waited}}; see {_LOG} there, and whether that host answers",
    "late": "did not enter {collective} that {ahead} of {members} ranks waited in for {seconds:.0f} s: {are} in {phase}, "
    "where nothing moved for {idle_seconds:.0f} s; see logs/stacks/rank-{rank:05d}.txt",
    "different": "entered {name} as collective no. {number}, where others entered {others}; see logs/stacks",
    "idle": "no rank moved for {idle_seconds:.0f} s, and none is behind{waited}; see logs/stacks",
    "host": "all ranks answer, but cannot reach each other ({reason}){waited}; see the logs of all ranks",
    "network": "all ranks answer, but cannot reach each other ({reason}){waited}; look at the network between the hosts",
}
"""Cause -> what is said of the ranks to look at, whose names come first."""

Cause = tuple[str, list[int], dict[str, Any]]
"""Key of _MESSAGES, ranks to look at, and fields of the message besides those of the first rank's status."""
Log = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """Status that a rank writes to `.workers/status-TOKEN-RANK.json`; the fields are the file's keys."""

    rank: int
    host: str
    pid_namespace: str
    """Host and pid namespace in which `pid` is valid."""
    pid: int
    kind: Literal["ready", "alive", "lost", "failed", "stopped", "done"] = "ready"
    """lost: another rank went silent. failed: an error of its own. stopped: signal before step 1."""
    requests_seen: int = 0
    """Number of status requests that this rank had read."""
    phase: str = ""
    step: int | None = None
    idle_seconds: float = 0.0
    """Seconds without progress."""
    collectives: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """`GroupLog.snapshot` of each process group, by the group's name."""
    text: str = ""
    """The error, or the signal's name."""


@dataclass(frozen=True)
class Diagnosis:
    """Ranks to look at, the reason, and the status of all ranks."""

    ranks: tuple[int, ...]
    message: str
    stop_signal: str = ""
    """Name of the signal that stopped one of them before the first step."""
    table: str = ""


@dataclass(frozen=True, kw_only=True)
class StatusReport:
    """Statuses of all ranks after a request."""

    statuses: Mapping[int, RankStatus]
    """Newest status of each rank; it may be older than the request."""
    answered_ranks: frozenset[int]
    process_states: Mapping[int, str]
    """Kernel state of the ranks that did not answer: a letter, `gone`, or "" on another host."""
    kill_reason: str = ""
    """Evidence that the kernel of this host killed one of the ended ranks because memory was full."""
    reason: str = ""
    """Message of the error that led to the request; empty if no error was raised yet."""


def diagnose(report: StatusReport) -> Diagnosis:
    """Return the rank that failed, else those that did not answer, else those behind the others."""
    statuses, logs = report.statuses, _get_group_logs(report.statuses)
    group, wait = _find_longest_wait(logs)
    # On a GPU no rank stays inside a collective, since the host runs ahead of it: compare all groups.
    late = _find_late({group: logs[group]} if group else logs)
    several_hosts = len({status.host for status in statuses.values()}) > 1
    unreachable: Cause = ("network" if several_hosts else "host", [], {})
    found = _find_own_end(statuses) or _find_missing(report) or late or _find_different(logs)
    cause, ranks, fields = found or (unreachable if report.reason else ("idle", [], {}))
    status = statuses[ranks[0]] if ranks else min(statuses.values(), key=lambda status: status.idle_seconds)
    waits = {"waited": wait and f": {wait}", "while_waited": wait and f" while {wait}"}
    killed = report.kill_reason
    waits |= {"kill_reason": killed and f"{killed}; ", "dmesg": "" if killed else ", and dmesg for the memory"}
    fields = {**vars(status), "phase": status.phase or "no step", "reason": report.reason} | waits | fields
    message = f"{format_ranks_by_host(ranks, statuses)} {_MESSAGES[cause].format(**fields)}".lstrip()
    stop_signal = status.text if cause == "stopped" else ""
    return Diagnosis(tuple(ranks), message, stop_signal, format_status_table(report, ranks))


def _find_own_end(statuses: Mapping[int, RankStatus]) -> Cause | None:
    """Return the lowest rank with an error of its own, else the lowest that a signal stopped."""
    ended = [(status.kind, rank) for rank, status in statuses.items() if status.kind in ("failed", "stopped")]
    return (min(ended)[0], [min(ended)[1]], {}) if ended else None


def _find_missing(report: StatusReport) -> Cause | None:
    """Return the ranks that did not answer, by the state that their processes have in common."""
    missing = sorted(set(report.statuses) - report.answered_ranks)
    states = {report.process_states.get(rank, "") for rank in missing}
    cause = states.pop() if len(states) == 1 else "silent"
    # A closed connection to another host, whose processes cannot be looked up, means an exit.
    if cause == "" and re.search("closed|reset|refused|broken pipe|exited|aborted", report.reason, re.I):
        cause = "closed"
    return (cause if cause in _MESSAGES else "silent", missing, {}) if missing else None


def _get_group_logs(statuses: Mapping[int, RankStatus]) -> dict[str, dict[int, Log]]:
    """Return each group's logs by member; an empty one for a rank that entered nothing in it."""
    members = {name: log["ranks"] for status in statuses.values() for name, log in status.collectives.items()}
    empty = {"entered": 0, "left": 0, "seconds": 0.0, "names": []}
    # In order, so that all ranks blame the same ones: each has its own status first.
    return {
        name: {rank: statuses[rank].collectives.get(name, empty | {"ranks": ranks}) for rank in sorted(ranks)}
        for name, ranks in sorted(members.items())
    }


def _find_longest_wait(logs: Mapping[str, Mapping[int, Log]]) -> tuple[str, str]:
    """Return the group whose ranks wait for longest and `1 of 2 ranks waited 20 s in all_reduce no. 45`, or two ''."""
    waits = [(log["seconds"], name, log) for name, group in logs.items() for log in group.values() if _waits(log)]
    if not waits:
        return "", ""
    seconds, group, log = max(waits, key=lambda wait: wait[:2])
    inside, collective = sum(name == group for _, name, _ in waits), _format_collective(log, log["entered"])
    return group, f"{inside} of {len(log['ranks'])} ranks waited {seconds:.0f} s in {collective}"


def _find_late(logs: Mapping[str, Mapping[int, Log]]) -> Cause | None:
    """Return the ranks that did not enter a collective that others of their group entered."""
    for group in logs.values():
        first = min(log["entered"] for log in group.values())
        late = [rank for rank, log in group.items() if log["entered"] == first]
        if len(late) < len(group):
            furthest = max((log for rank, log in group.items() if rank not in late), key=lambda log: log["seconds"])
            fields = {"ahead": len(group) - len(late), "members": len(group), "seconds": furthest["seconds"]}
            fields["collective"] = _format_collective(furthest, first + 1)
            return "late", late, fields | {"are": "it is" if len(late) == 1 else "they are"}
    return None


def _find_different(logs: Mapping[str, Mapping[int, Log]]) -> Cause | None:
    """Return the ranks that entered another collective than most of their group did, as the same number."""
    for group in logs.values():
        names = {rank: "".join(log["names"][-1:]) for rank, log in group.items()}
        odd = min(names.values(), key=[*names.values()].count)
        ranks = [rank for rank, name in names.items() if name == odd]
        if others := ", ".join(sorted({*names.values()} - {odd})):
            return "different", ranks, {"name": odd, "number": group[ranks[0]]["entered"], "others": others}
    return None


def format_ranks_by_host(ranks: Sequence[int], statuses: Mapping[int, RankStatus]) -> str:
    """Return `rank 1 on host2`, or `ranks 2, 3 on host2 and rank 5 on host3`."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(statuses[rank].host, []).append(rank)
    return " and ".join(
        f"{'ranks' if len(several) > 1 else 'rank'} {first_names(several, 8)} on {host}"
        for host, several in by_host.items()
    )


def format_status_table(report: StatusReport, first: Sequence[int]) -> str:
    """Return a row per rank, those of `first` at the top; after MAX_TABLE_ROWS the number of the others."""
    ranks = [*first, *sorted(report.statuses.keys() - set(first))]
    rows = [("rank", "host", "state", "doing", "last collective", "idle seconds")]
    for rank in ranks[:MAX_TABLE_ROWS]:
        status, answered = report.statuses[rank], rank in report.answered_ranks
        state = status.kind if answered else _STATE_NAMES.get(report.process_states.get(rank, ""), "silent")
        # The collective that it has been inside for longest, else the one that it left last.
        logs = [log for log in status.collectives.values() if log["entered"]]
        log = max(logs, key=lambda log: log["seconds"] * (1 if _waits(log) else -1), default=None)
        last = _format_collective(log, log["entered"]) + " (inside)" * _waits(log) if log else "-"
        rows.append((str(rank), status.host, state, status.phase or "-", last, f"{status.idle_seconds:.0f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return "\n".join(lines + [f"and {len(ranks) - MAX_TABLE_ROWS} more"] * (len(ranks) > MAX_TABLE_ROWS))


def _waits(log: Log) -> bool:
    return bool(log["entered"] > log["left"])


def _format_collective(log: Log, number: int) -> str:
    """Return `all_reduce no. 45`; `collective no. 45` if its name is no longer remembered."""
    back = log["entered"] - number + 1
    return f"{log['names'][-back] if back <= len(log['names']) else 'collective'} no. {number}"


T = TypeVar("T")

STATUS_TIMEOUT_SECONDS = 5.0
"""Wait for the status of other ranks; a rank known to have ended is not waited for."""
_POLL_SECONDS = 0.1
_STATE_TIMEOUT_SECONDS = {"gone": _POLL_SECONDS, "T": 1.0}
"""Shorter waits for processes of this host that do not answer, by their kernel state."""


class RankStatusBoard:
    """Status requests and answers of a launch's ranks, as files in the run folder.

        .workers/status-requests-TOKEN    grows by one byte per request; TOKEN is unique per launch
        .workers/status-TOKEN-00000.json  last status of a rank

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
                self._status_dir.joinpath(f"status-requests-{token}").write_bytes(b"")
        # A token per launch, so that no file of an earlier launch is taken for an answer.
        self._token = str(world.broadcast(token))
        self._request_file = self._status_dir / f"status-requests-{self._token}"
        own = (socket.gethostname(), _pid_namespace(), os.getpid())
        self._initial_status = {self.rank: RankStatus(rank=self.rank, host=own[0], pid_namespace=own[1], pid=own[2])}
        with contextlib.suppress(OSError):
            # Written before anyone reads it: NFS caches for a while that a file does not exist.
            self._write_status("ready", "")
        self._initial_status |= {
            rank: RankStatus(rank=rank, host=host, pid_namespace=namespace, pid=pid)
            for rank, (host, namespace, pid) in enumerate(world.gather(own))
        }

    def _remove_old_files(self) -> None:
        """Remove the status files of earlier launches."""
        self._status_dir.mkdir(parents=True, exist_ok=True)
        for old in self._status_dir.glob("status-*"):
            old.unlink(missing_ok=True)

    def write_final_status(self, kind: Literal["lost", "failed", "stopped", "done"], text: str = "") -> None:
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
                rank
                for rank, status in statuses.items()
                if status.kind in FINAL_KINDS or status.requests_seen >= num_requests
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
        state = process_state(status.pid) if status.pid_namespace == _pid_namespace() else ""
        return "gone" if state == "Z" else state

    def _write_status(self, kind: Any, text: str) -> None:
        with self._lock:
            # A last status stays: the watchdog's thread may answer once more before the end.
            if self._last_status[0] in FINAL_KINDS:
                kind, text = self._last_status
            self._last_status = (kind if kind in FINAL_KINDS else "alive", text)
            now = {
                "idle_seconds": round(self.log.idle_seconds(), 3),
                "phase": self.log.phase,
                "step": self.log.step,
                "collectives": self.log.snapshot(),
            }
            answer = {"kind": self._last_status[0], "requests_seen": self._requests_seen, "text": text}
            path = self._status_path(self.rank)
            atomic_write(path, json.dumps(asdict(self._initial_status[self.rank]) | answer | now))

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
        return self._status_dir / f"status-{self._token}-{rank:05d}.json"


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
