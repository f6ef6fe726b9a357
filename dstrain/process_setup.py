"""State of the process: closed streams, encoding, signals, its parent, open files, freed memory, slow work."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import resource
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

from dstrain.errors import escape_controls

NEVER_MAP = (-4, 0)
"""M_MMAP_MAX of malloc.h: no allocation gets pages of its own, which go back to the kernel with it."""
NEVER_TRIM = (-1, -1)
"""M_TRIM_THRESHOLD of malloc.h: free memory at the end of the heap stays; -1 is the largest threshold."""

MAX_OPEN_FILES = 65536
SLOW_SECONDS = 2.0
"""Time after which work is announced."""
PARENT_ENV = "DSTRAIN_PARENT"
"""Process ID of the Python script that has started this command, and whose end stops it."""
_PARENT_POLL_SECONDS = 0.2
SPIN_COUNT = "1000"
"""GOMP_SPINCOUNT of a command: rounds of some 10 ns for which a thread of libgomp waits before it sleeps."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Loaded at import: a child between fork and exec must not import.
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""Each of them asks a worker to write a checkpoint and stop; SIGUSR1 to write one and go on."""
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def prepare_process() -> None:
    """Repair streams, signals and limits that a command relies on. Call it first."""
    raise_open_files_limit()
    open_closed_streams()
    escape_unsupported_characters()
    reset_signals()
    stop_with_parent()


def raise_open_files_limit() -> None:
    """Allow as many open files as the hard limit does, up to MAX_OPEN_FILES.

    The usual soft limit of 1024 is too low for a launch on 500 hosts, with two pipes each, and for gloo, which has a
    connection to every other rank in each group.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox that forbids it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def open_closed_streams() -> None:
    """Open /dev/null for each closed standard stream; some supervisors and cron close them.

    Otherwise the next opened file, such as a checkpoint, would become stdout of every child
    process.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(descriptor)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


def escape_unsupported_characters() -> None:
    """Make output streams write `\\xfc` for a letter that their encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding.lower() != "utf-8"):
            stream.reconfigure(errors="backslashreplace")


def reset_signals() -> None:
    """Set an ignored SIGCHLD to its default, and let SIGUSR1, which asks a run for a checkpoint, end no process."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise subprocess reports exit code 0 for every child
    if signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL:
        signal.signal(signal.SIGUSR1, lambda *_: None)  # by a handler: programs started here do not inherit it


@contextlib.contextmanager
def handle_signals(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Context in which a function handles the forwarded signals. An ignored signal stays ignored, for nohup.

    Outside the main thread, where Python sets no handlers, it does nothing.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS} if is_main_thread else {}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def limit_spinning() -> None:
    """Let threads that wait for each other sleep soon, unless the user has set how. Call it before torch is imported.

    While other programs use the cores, a thread that spins waits for one that does not run. libgomp's 300,000 rounds
    make a step many times as long then; threads that never spin need more time than one thread on cores of their own
    (docs/measurements/threads.md).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def stop_with_parent() -> None:
    """If a Python script has started this command (PARENT_ENV), send this process SIGHUP once the script has ended.

    A run then saves and stops. SIGHUP, because a second SIGTERM, after one that the script has handed on, would end the
    ranks at once. The parent's ID is watched: PR_SET_PDEATHSIG would fire when the thread ends that called
    `dstrain.train`, and a pipe would stay open in the processes that the script forks.
    """
    parent = os.environ.pop(PARENT_ENV, "")  # the ranks have another parent
    if parent:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a script under nohup ignores it, and so would this process
        threading.Thread(target=_hang_up_after, args=(parent,), name="watch-parent", daemon=True).start()


def _hang_up_after(parent: str) -> None:
    while str(os.getppid()) == parent:
        time.sleep(_PARENT_POLL_SECONDS)
    os.kill(os.getpid(), signal.SIGHUP)


def discard_closed_output() -> bool:
    """Send stdout and stderr to the null device where their reader has closed the pipe; return True if one had.

    Python flushes both streams at exit: what is still buffered would fail again and change the exit code to 120.
    """
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    closed = [descriptor for descriptor, event in poll.poll(0) if event & (select.POLLERR | select.POLLHUP)]
    for descriptor in closed:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)
    return bool(closed)


def set_parent_death_signal() -> None:
    """Ask the kernel to SIGKILL this process when the thread that started it ends. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def set_child_subreaper(enabled: bool) -> None:
    """Make this process, instead of init, the parent of orphaned descendants. Linux only."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)


def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next allocation; return False where it has no such setting.

    For training on a CPU: glibc gives every freed tensor above 32 MiB back to the kernel, which clears each page of the
    next one, in every step. The process keeps the largest amount of memory that it has needed.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    return mallopt is not None and all(mallopt(*setting) for setting in (NEVER_MAP, NEVER_TRIM))


def log_stdout(message: str) -> None:
    """Print a message to stdout and flush it; of a rank, it is the log, and rank 0's is on the terminal too."""
    print(escape_controls(message), flush=True)


def log_stderr(message: str) -> None:
    """Print a message to stderr and flush it; stdout is reserved for a command's result."""
    print(escape_controls(message), file=sys.stderr, flush=True)


@contextlib.contextmanager
def log_if_slow(text: str, enabled: bool = True) -> Iterator[None]:
    """Context that prints a line to stderr if the work inside takes over SLOW_SECONDS; `enabled` false: never."""
    # os.write: the work inside may fork, and a child must not inherit the lock of a stream.
    timer = threading.Timer(SLOW_SECONDS, _write_line, (f"{text} ...\n".encode(errors="replace"),))
    timer.daemon = True
    if enabled:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _write_line(line: bytes) -> None:
    with contextlib.suppress(OSError):  # the terminal may be closed
        os.write(2, line)
