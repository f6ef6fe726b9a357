"""What a worker does about its launcher: end with it, leave word of how it ended, keep its output."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path

from dstrain.errors import EXIT_DONE, EXIT_STOPPED, DstrainError, mask_passwords
from dstrain.files import atomic_write
from dstrain.launch.heartbeat import watch_heartbeat

SUPERVISOR_ENV = "DSTRAIN_SUPERVISOR"
"""`HOST PID` of what supervises this launch on this host: the `dstrain` command, or its agent."""
LAUNCH_ID_ENV = "DSTRAIN_LAUNCH_ID"
"""What this launch is called in the lease of its run folder and in the names of its ranks' records."""
LAUNCH_FILE_ENV = "DSTRAIN_LAUNCH"
"""Path of the launch file, for ranks that an agent watches; the launching host copies rank 0's log to its terminal."""

DUPLICATE_SIGNAL_SECONDS = 0.5
"""A signal that comes again within these is the same one: `timeout` and batch systems send it to a process and to its group."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded here, since a child between fork and exec may not import.
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None

_close_log_copy: Callable[[], None] | None = None


@dataclass(frozen=True)
class RankRecord:
    """What a rank left in `.workers/rank-00000.LAUNCH.json`; without LAUNCH where no `dstrain` command launched it."""

    rank: int
    pid: int
    exit: int | None
    """None: it has not ended, or had no time to say so."""
    error: str | None
    host: str = ""


def get_workers_dir(run_dir: Path) -> Path:
    return run_dir / ".workers"


def log_path(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank:05d}.log"


def record_start(run_dir: Path, rank: int) -> None:
    """Say that this rank lives. Call it first, before any long import."""
    _write_record(run_dir, RankRecord(rank, os.getpid(), None, None, socket.gethostname()))


def record_end(run_dir: Path, rank: int, code: int, error: str | None = None) -> None:
    """Say how this rank ended. This code counts, whatever happens to the process afterwards.

    Keep a handler for SIGTERM until here: as soon as one rank is gone with another code than 0,
    DeepSpeed's launcher and torchrun send it to all others, which may be just about to end.
    """
    with contextlib.suppress(OSError):  # a full disk: the exit code tells too
        _write_record(run_dir, RankRecord(rank, os.getpid(), code, error, socket.gethostname()))


def exit_code_for_launcher(code: int) -> int:
    """The code to leave the process with after `record_end`.

    Launchers take everything but 0 for a failure and end the other ranks over it. Where `dstrain`
    supervises it reads the record, so that a rank that stopped as asked may leave quietly.
    """
    return EXIT_DONE if code == EXIT_STOPPED and _supervisor_pid() is not None else code


def run_worker(run_dir: Path, rank: int, fn: Callable[[], int]) -> int:
    """A supervised worker's life after `follow_parent`: output into the folder's logs, the end into its records.

    `work` gives an exit code, or raises. Returns the code to leave the process with; the recorded one counts.
    """
    record_start(run_dir, rank)
    redirect_output(log_path(run_dir, rank), copy_to_terminal=rank == 0 and LAUNCH_FILE_ENV not in os.environ)
    code, error = 1, None
    try:
        code = fn()
    except DstrainError as fault:
        code, error = fault.exit_code, str(fault)
        print(f"error: {fault}", file=sys.stderr, flush=True)
    except Exception as fault:
        error = mask_passwords(f"{type(fault).__name__}: {fault}")
        print(f"rank {rank} failed:\n{mask_passwords(traceback.format_exc())}", file=sys.stderr, flush=True)
    record_end(run_dir, rank, code, error)
    return exit_code_for_launcher(code)


def _write_record(run_dir: Path, record: RankRecord) -> None:
    folder = get_workers_dir(run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _record_name(record.rank, os.environ.get(LAUNCH_ID_ENV, ""))
    atomic_write(path, json.dumps(asdict(record)))


def _record_name(rank: int, launch_id: str) -> str:
    return f"rank-{rank:05d}.{launch_id}.json" if launch_id else f"rank-{rank:05d}.json"


def read_rank_records(run_dir: Path, launch_id: str = "") -> dict[int, RankRecord]:
    """The records of a launch by rank; without LAUNCH those of ranks that no `dstrain` command launched."""
    records = {}
    ending = f".{launch_id}.json" if launch_id else ".json"
    for path in sorted(get_workers_dir(run_dir).glob(f"rank-*{ending}")):
        if path.name.count(".") != ending.count("."):
            continue
        with contextlib.suppress(OSError, ValueError, TypeError):
            record = RankRecord(**json.loads(path.read_text()))
            records[record.rank] = record
    return records


def remove_rank_records(run_dir: Path, ranks: Collection[int]) -> None:
    """Remove what these ranks recorded in earlier launches. Call it before they start."""
    get_workers_dir(run_dir).mkdir(parents=True, exist_ok=True)
    for path in get_workers_dir(run_dir).glob("rank-*.json"):
        if path.name.split(".")[0] in {f"rank-{rank:05d}" for rank in ranks}:
            path.unlink(missing_ok=True)


def remove_port_files(run_dir: Path) -> None:
    """Remove the files in which killed launches told their ranks a port. Call it while the run folder is held."""
    for path in get_workers_dir(run_dir).glob("port-*"):
        path.unlink(missing_ok=True)


def set_parent_death_signal() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it is gone. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_child_subreaper(enabled: bool) -> None:
    """Have descendants whose parent ended come to this process instead of to init. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def exit_with_parent() -> None:
    """End this worker when its launcher, or the `dstrain` command above that, is gone. Call it first.

    The launcher is our parent and the kernel tells. `dstrain` is further up, and DeepSpeed's launcher
    outlives it when it is killed: a thread sleeps on its pidfd. An agent that is there, but stopped, no longer beats.
    """
    parent = os.getppid()
    set_parent_death_signal()
    supervisor = _supervisor_pid()
    if os.getppid() != parent or parent == supervisor:  # it ended meanwhile, or before, and we were adopted
        os.kill(os.getpid(), signal.SIGKILL)
    if supervisor is None:
        return
    watch_heartbeat()
    if not hasattr(os, "pidfd_open"):
        return
    try:
        watched = os.pidfd_open(supervisor)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
    except OSError:  # a kernel before 5.3, or a sandbox without the call
        return
    threading.Thread(target=_exit_with_process, args=(watched,), name="follow-parent", daemon=True).start()


def _supervisor_pid() -> int | None:
    """Its pid, where it runs on this host: srun and ssh may carry the variable elsewhere."""
    host, _, pid = os.environ.get(SUPERVISOR_ENV, "").rpartition(" ")
    return int(pid) if host == socket.gethostname() and pid.isdecimal() else None


def _exit_with_process(pidfd: int) -> None:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def redirect_output(path: Path, copy_to_terminal: bool) -> bool:
    """Send all output of this process, C libraries' too, to the end of `path`; with `terminal`, to the terminal as well.

    Returns whether it went to a real terminal before: decide about progress bars by that.

    The file is what the process writes to. A child copies what arrives there to the terminal, so neither
    a dead terminal nor the death of the child can reach the process.
    """
    was_terminal = os.isatty(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    if copy_to_terminal:
        start_log_copy(path, os.fstat(log).st_size)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(line_buffering=True)
    return was_terminal and copy_to_terminal


def finish_log_copy() -> None:
    """Wait up to 2 s until the terminal has all output so far. Runs by itself at a normal exit."""
    global _close_log_copy
    if _close_log_copy is not None:
        close, _close_log_copy = _close_log_copy, None
        close()


def start_log_copy(path: Path, offset: int) -> None:
    """Start the child that copies what is appended to a log to the terminal. It sits in its own session: signals to the worker's group are not for it."""
    import atexit

    global _close_log_copy
    command = [sys.executable, "-E", "-S", str(Path(__file__).with_name("tee_log.py")), str(path), str(offset)]
    copier = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        # A byte tells it to finish; the end of the pipe would not while a forked data worker holds it too.
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            copier.communicate(b".", timeout=2)

    _close_log_copy = close
    atexit.register(finish_log_copy)
