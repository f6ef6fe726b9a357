"""Untrusted work run in a forked process under memory, CPU-time and wall-time limits."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

from dstrain.process_setup import set_parent_death_signal
from dstrain.units import format_bytes

OUT_OF_MEMORY_CODE = 3
"""Exit code of a process that ran out of memory."""


@dataclass(frozen=True)
class ResourceLimits:
    """Limits of a forked process."""

    memory_bytes: int
    """Bytes in addition to the memory of the parent."""
    cpu_seconds: int | None = None
    """Processor time."""
    wall_seconds: float | None = None
    """Time after which the process is killed even if it uses no processor time."""

    def describe_exceeded(self, status: str, library: str) -> str:
        """Return `takes more than 2 GiB of memory`, or the like for another status of SubprocessResult.

        `library`: the one in C that the process calls, and that may have crashed.
        """
        memory = f"takes more than {format_bytes(self.memory_bytes)} of memory"
        if status == "memory":
            return memory
        if status == "time":
            return f"takes more than {self.cpu_seconds} seconds of processor time"
        # Libraries in C end the process where they get no memory.
        return f"{memory} or {self.wall_seconds:g} seconds, or crashes {library}"


@dataclass(frozen=True)
class SubprocessResult:
    """Status and value of limited work."""

    status: Literal["done", "raised", "memory", "time", "lost"]
    """lost: the result is unknown; the process was killed from outside or waits for something."""
    value: Any = None
    """Return value of the function, as JSON; for an exception [name of its type, text]."""


def run_limited(func: Callable[[], Any], limits: ResourceLimits) -> SubprocessResult:
    """Run `func` in a forked process.

    A process, because nothing inside of Python stops `9 ** (9 ** 9)` or an allocation of gigabytes,
    and a thread cannot be killed. What `func` returns or raises is in the result.
    """
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork in a process with threads; the child only computes, and takes
        # no lock that another thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(reader)
        _run_child(func, limits, writer)
    os.close(writer)
    try:
        code, sent = _wait_for_child(child, reader, limits.wall_seconds)
    finally:
        os.close(reader)
    if code == -signal.SIGXCPU:
        return SubprocessResult("time")
    if code == OUT_OF_MEMORY_CODE:
        return SubprocessResult("memory")
    if code in (0, None):
        with suppress(ValueError):  # it is incomplete
            return SubprocessResult(*json.loads(sent))  # noqa: TID251  of a fork of this process
    return SubprocessResult("lost")


def _wait_for_child(child: int, reader: int, wall_seconds: float | None) -> tuple[int | None, bytes]:
    """Return (exit code, bytes sent) of the child; kill it if this process is interrupted.

    The exit code is None if it is unknown: where SIGCHLD is ignored, the system reaps children.
    """
    began, sent = time.monotonic(), b""
    os.set_blocking(reader, False)
    try:
        while True:
            try:
                ended, status = os.waitpid(child, os.WNOHANG)
            except ChildProcessError:
                ended, status = child, None
            with suppress(BlockingIOError):
                while piece := os.read(reader, 1 << 16):
                    sent += piece
            if ended:
                child = 0
                return (None if status is None else os.waitstatus_to_exitcode(status)), sent
            if wall_seconds is not None and time.monotonic() - began > wall_seconds:
                return -signal.SIGKILL, b""
            time.sleep(0.001)
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _run_child(func: Callable[[], Any], limits: ResourceLimits, writer: int) -> NoReturn:
    """Run in the child: set the limits, run the function, send the result, exit."""
    import resource

    code = 1
    try:
        set_parent_death_signal()
        # Handlers of the parent would run Python code in the child.
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # A crash of untrusted work is reported by the parent; its stack is of no use.
        faulthandler.disable()
        # A core dump of a large process would fill the disk.
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limits.cpu_seconds is not None:
            # The soft limit sends SIGXCPU, which the parent recognizes; the hard one SIGKILL.
            resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
        # RLIMIT_AS counts the address space, most of which is shared with the parent.
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory_bytes
        with suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        sent = _serialize_result(func)
        while sent:
            sent = sent[os.write(writer, sent) :]
        code = 0
    except MemoryError:
        os.write(writer, b'["memory", null]')  # for a parent that cannot see the exit code
        code = OUT_OF_MEMORY_CODE
    finally:
        # Skip the parent's exit handlers and buffered output, which the fork has copied.
        os._exit(code)


def _serialize_result(func: Callable[[], Any]) -> bytes:
    """Return status and value as JSON.

    Not as pickle: an exception whose constructor takes two arguments cannot be unpickled.
    """
    try:
        return json.dumps(["done", func()]).encode()
    except MemoryError:
        raise
    except Exception as fault:
        return json.dumps(["raised", [type(fault).__name__, str(fault)]]).encode()
