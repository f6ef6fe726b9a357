"""Worker side of a launch: exit with the parent, rank records, and output redirection."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from dstrain.distributed.store import LISTENER_ENV
from dstrain.errors import (
    EXIT_FAILED,
    DstrainError,
    OutOfMemoryError,
    PeerFailureError,
    UsageError,
    describe_unexpected,
    explain_system_error,
    format_traceback,
    is_debug,
    save_traceback,
)
from dstrain.files import atomic_write, make_folder, open_for_writing, parse_json, read_limited
from dstrain.launch.processes import process_state
from dstrain.launch.tee_log import END_OF_COPY
from dstrain.process_setup import log_stderr, set_parent_death_signal
from dstrain.torchvision_fit import explain_import_error

SUPERVISOR_ENV = "DSTRAIN_SUPERVISOR"
"""`HOST PID` of the parent of this launch's ranks on this host: the `dstrain` command, or `host_worker` over ssh."""
HOST_TIMEOUT_ENV = "DSTRAIN_HOST_TIMEOUT"
"""launch.heartbeat_timeout_seconds; set for the ranks of a host that is reached over ssh."""
LAUNCH_ID_ENV = "DSTRAIN_LAUNCH_ID"
"""ID of this launch in the lease of its run folder and in the file names of its rank records."""
HOST_ONLY_VARIABLES = (SUPERVISOR_ENV, HOST_TIMEOUT_ENV, LISTENER_ENV)
"""Variables of the ranks of one launch on one host."""
_POLLS_PER_TIMEOUT = 4
_PRINT_TIMEOUT_SECONDS = 2.0
"""Limit for writing an error line: the log may be on a file system that hangs."""

DUPLICATE_SIGNAL_SECONDS = 0.5
"""A signal repeated within this time counts once: `timeout` and batch systems signal a process and its group."""

SHARED_FILE_PREFIX = "seen-"
"""Prefix of a file that the hosts of a launch look for, to learn whether they share the run folder."""
MAX_RECORD_BYTES = 1 << 20
"""Largest record that is read."""
MAX_ERROR_CHARS = 80_000
"""Characters of an error that are recorded: as JSON, each takes at most 12 bytes."""

_log_copier: subprocess.Popen[bytes] | None = None
_has_terminal_ended = False


@dataclass(frozen=True)
class RankRecord:
    """Content of `.workers/rank-00000.LAUNCH.json`; `rank-00000.json` if no `dstrain` command launched the rank."""

    rank: int
    pid: int
    exit: int | None
    """Exit code; None if the rank runs, or ended before it could write one."""
    error: str | None
    host: str = ""
    error_kind: Literal["own", "memory", "peer"] = "own"
    """memory: out of memory. peer: another rank failed or was lost."""


def get_workers_dir(run_dir: Path) -> Path:
    """Return the folder for files that the processes of a launch exchange."""
    return run_dir / ".workers"


def log_path(run_dir: Path, rank: int) -> Path:
    """Return the file with all output of a rank."""
    return run_dir / "logs" / f"rank-{rank:05d}.log"


def record_start(run_dir: Path, rank: int) -> None:
    """Record that this rank has started. Call it first, before any long import."""
    _write_record(run_dir, RankRecord(rank, os.getpid(), None, None, socket.gethostname()))


def record_end(run_dir: Path, rank: int, code: int, error: str | DstrainError | None = None) -> bool:
    """Record how this rank ended; return False if that failed. This code counts, whatever happens to the process then.

    Keep a handler for SIGTERM until this call: when one rank exits with a code other than 0, DeepSpeed's launcher and
    torchrun send SIGTERM to all others, which may be about to end too.
    """
    message = None if error is None else str(error)[:MAX_ERROR_CHARS]
    try:
        _write_record(run_dir, RankRecord(rank, os.getpid(), code, message, socket.gethostname(), _error_kind(error)))
    except (OSError, UsageError):  # such as a full disk, or a link: the supervisor also reads the exit code
        return False
    return True


def _error_kind(error: str | DstrainError | None) -> Literal["own", "memory", "peer"]:
    if isinstance(error, OutOfMemoryError):
        return "memory"
    return "peer" if isinstance(error, PeerFailureError) else "own"


def run_worker(run_dir: Path, rank: int, fn: Callable[[], int]) -> int:
    """Run `fn` with its output in the run folder's log, and record how it ended.

    `fn` returns an exit code or raises. Returns the exit code for the process; the recorded one counts. Call
    `exit_with_parent` first.
    """
    if (
        not is_debug()
    ):  # before torch is imported: it writes a C++ traceback for each lost connection, which is reported
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    log, has_log = log_path(run_dir, rank), False
    error: str | DstrainError | None = None
    try:
        record_start(run_dir, rank)
        redirect_output(log, copy_to_terminal=rank == 0 and HOST_TIMEOUT_ENV not in os.environ)
        has_log = True
        code = fn()
    except Exception as fault:
        known = fault if isinstance(fault, DstrainError) else explain_system_error(fault) or explain_import_error(fault)
        place = log if has_log else save_traceback(fault)
        error = known or f"{describe_unexpected(fault)}; the full traceback is in {place}"
        code = EXIT_FAILED if known is None else known.exit_code
        # Of an explained one too: a compiler's output may be in it.
        needs_traceback = known is None or not isinstance(fault, DstrainError | OSError)
        with contextlib.suppress(OSError):  # such as a full disk: the record may find room
            if has_log:
                _log_failure(fault, rank, str(error), needs_traceback)
    is_recorded = record_end(run_dir, rank, code, error)
    if not has_log and not (is_recorded and _supervisor_pid() is not None):  # the supervisor prints what is recorded
        print_error(f"error: {error}")
    return code


def _log_failure(fault: Exception, rank: int, error: str, needs_traceback: bool) -> None:
    """Write an error to the log. The terminal gets one line, under `dstrain` from the supervisor; with --debug all."""
    traceback = f"rank {rank} failed:\n{format_traceback(fault)}"
    if is_debug():
        log_stderr(f"{traceback}error: {error}")
        return
    leave_error_to_supervisor(rank)
    log_stderr(f"error: {error}")
    if needs_traceback:
        end_terminal_output(rank)
        log_stderr(traceback)


def leave_error_to_supervisor(rank: int) -> None:
    """Keep the rest of the output off the terminal if a supervisor prints the error that this rank records."""
    if _supervisor_pid() is not None and not is_debug():
        end_terminal_output(rank)


def end_terminal_output(rank: int) -> None:
    """Write the rest of this process's output to the log alone."""
    global _has_terminal_ended
    if rank == 0 and not _has_terminal_ended:
        _has_terminal_ended = True
        log_stderr(END_OF_COPY.decode().rstrip("\n"))


def _write_record(run_dir: Path, record: RankRecord) -> None:
    folder = get_workers_dir(run_dir)
    make_folder(folder)
    path = folder / _record_name(record.rank, os.environ.get(LAUNCH_ID_ENV, ""))
    atomic_write(path, json.dumps(asdict(record)))


def _record_name(rank: int, launch_id: str) -> str:
    return f"rank-{rank:05d}.{launch_id}.json" if launch_id else f"rank-{rank:05d}.json"


def read_rank_records(run_dir: Path, launch_id: str = "") -> dict[int, RankRecord]:
    """Return the records by rank; with no `launch_id`, those of ranks that no `dstrain` command launched."""
    ending = f".{launch_id}.json" if launch_id else ".json"
    records = {}
    for path in sorted(get_workers_dir(run_dir).glob(f"rank-*{ending}")):
        # Without an id, the pattern also matches names that have one.
        record = _read_record(path) if path.name.count(".") == ending.count(".") else None
        if record is not None:
            records[record.rank] = record
    return records


def read_rank_record(run_dir: Path, rank: int, launch_id: str = "") -> RankRecord | None:
    """Return the record of one rank; None where it has written none."""
    return _read_record(get_workers_dir(run_dir) / _record_name(rank, launch_id))


def _read_record(path: Path) -> RankRecord | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return RankRecord(**parse_json(read_limited(path, MAX_RECORD_BYTES)))
    return None


def remove_worker_files(run_dir: Path, ranks: Collection[int]) -> None:
    """Remove the records of these ranks from earlier launches, and what killed launches left.

    Call it before the ranks start, while this launch holds the run folder's lease.
    """
    names = {f"rank-{rank:05d}" for rank in ranks}
    for path in get_workers_dir(run_dir).glob("*"):
        is_record = path.suffix == ".json" and path.name.split(".")[0] in names
        if is_record or path.name.startswith(SHARED_FILE_PREFIX):
            path.unlink(missing_ok=True)


def exit_with_parent() -> None:
    """End this process when its parent ends: `dstrain`, `host_worker`, or another launcher. Call it first.

    The kernel signals the parent's end. A parent that is stopped does not end: on a host that is reached over ssh, a
    thread looks at its state, since nobody else sees it.
    """
    parent = os.getppid()
    set_parent_death_signal()
    if os.getppid() != parent:  # it ended before prctl; init adopted this process
        os.kill(os.getpid(), signal.SIGKILL)
    timeout = os.environ.get(HOST_TIMEOUT_ENV)
    if timeout and parent == _supervisor_pid():
        threading.Thread(
            target=_exit_with_stopped, args=(parent, float(timeout)), name="watch-parent", daemon=True
        ).start()


def end_elastic_agent(env: Mapping[str, str]) -> None:
    """Send SIGTERM to torchrun's agent, the parent, if it would start the ranks again. Call it last.

    Input that was refused (exit code 2) would be refused again; torchrun has no exit code that it does not retry.
    """
    counts = [env.get(f"TORCHELASTIC_{name}", "0") for name in ("RESTART_COUNT", "MAX_RESTARTS")]
    if all(count.isdecimal() for count in counts) and int(counts[0]) < int(counts[1]):
        finish_log_copy()  # the agent ends this process too
        os.kill(os.getppid(), signal.SIGTERM)


def _supervisor_pid() -> int | None:
    """Return the supervisor's pid, None if it is on another host: srun and ssh may forward the variable."""
    host, _, pid = os.environ.get(SUPERVISOR_ENV, "").rpartition(" ")
    return int(pid) if host == socket.gethostname() and pid.isdecimal() else None


def _exit_with_stopped(parent: int, timeout: float) -> None:
    """Kill the parent and this process once the parent was seen stopped, or waiting for a disk, for `timeout` seconds.

    After a pause of the whole machine the parent runs again before the next poll.
    """
    seen = 0
    while seen <= _POLLS_PER_TIMEOUT:
        time.sleep(timeout / _POLLS_PER_TIMEOUT)
        seen = seen + 1 if process_state(parent) in ("T", "t", "D") else 0
    print_error(
        f"error: the process that supervises the ranks of this host has been stopped for {timeout:g} s, or it waits for "
        "a disk. The ranks here are no longer supervised, so they end; start the same command again to resume"
    )
    os.kill(parent, signal.SIGKILL)  # its ssh session ends with it, so that the launching process is told
    os.kill(os.getpid(), signal.SIGKILL)


def print_error(message: str) -> None:
    """Write a line to stderr; give up after 2 s if its reader does not read."""

    def write() -> None:
        with contextlib.suppress(OSError):
            os.write(2, f"{message}\n".encode(errors="backslashreplace"))

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_PRINT_TIMEOUT_SECONDS)


def redirect_output(path: Path, copy_to_terminal: bool) -> None:
    """Append all output of this process, including that of C libraries, to a log; optionally copy it to the terminal.

    The process writes to the file only. A child process copies the file to the terminal, so that neither a closed
    terminal nor the child's end affects this process.
    """
    with open_for_writing(path, append=True) as log:
        # Before the descriptors change: what is buffered belongs to the old ones.
        sys.stdout.flush()
        sys.stderr.flush()
        if copy_to_terminal:
            start_log_copy(path, os.fstat(log.fileno()).st_size)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            # Line by line, so that the log is up to date when the process is killed.
            reconfigure(line_buffering=True)


def finish_log_copy() -> None:
    """Wait up to 2 s until the terminal has all output so far. Registered with atexit."""
    global _log_copier
    copier, _log_copier = _log_copier, None
    if copier is None:
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    # A byte asks it to finish; closing the pipe would not, while a forked data worker has it open too.
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):
        copier.communicate(b".", timeout=2)


def start_log_copy(path: Path, offset: int) -> None:
    """Start a child that copies what is appended to the log to the terminal.

    It has its own session, so that signals to the worker's process group do not end it.
    """
    global _log_copier
    # -E -S: it needs no packages, and starts faster without them.
    command = [sys.executable, "-E", "-S", str(Path(__file__).with_name("tee_log.py")), str(path), str(offset)]
    _log_copier = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    atexit.register(finish_log_copy)
