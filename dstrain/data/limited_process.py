"""Work that somebody else's file decides the size of, tried in a process of its own under the kernel's limits.

Nothing inside of Python stops `9 ** (9 ** 9)` or an allocation of gigabytes, and no thread can be ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn

_PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY_CODE = 3
"""How a process ends where memory ran out."""


@dataclass(frozen=True)
class ResourceLimits:
    """What a process may take."""

    memory_bytes: int
    """Bytes beside what the process has that forks it."""
    cpu_seconds: int | None = None
    """Of processor time."""
    wall_seconds: float | None = None
    """Seconds after which a process is given up that does not compute either."""


@dataclass(frozen=True)
class SubprocessResult:
    """What came of it."""

    status: Literal["done", "raised", "memory", "time", "lost"]
    """lost: nothing is known, the process was ended by somebody or waits for something."""
    value: Any = None
    """What the work returned, which JSON must hold; of an exception that it raised the type's name and the text."""


def run_limited(func: Callable[[], Any], limits: ResourceLimits) -> SubprocessResult:
    """Run `work` in a forked process, on Linux; elsewhere here, without limits. What it returns or raises is sent back."""
    if sys.platform != "linux":
        return _parse_result(_serialize_result(func)) or SubprocessResult("lost")
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the child computes, and takes no lock that a thread may hold.
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
    found = _parse_result(sent) if code in (0, None) else None
    return found or SubprocessResult("lost")


def _parse_result(payload: bytes) -> SubprocessResult | None:
    """What `_result` wrote; None where it was not written to its end."""
    try:
        how, value = json.loads(payload)
    except (ValueError, TypeError):
        return None
    return SubprocessResult(how, value)


def _wait_for_child(child: int, reader: int, wall_seconds: float | None) -> tuple[int | None, bytes]:
    """(how the process ended, what it sent). It is ended where this one is interrupted.

    How it ended is None where somebody else heard of it, as the system does where SIGCHLD is ignored.
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
    """The life of the process that tries."""
    import resource

    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if limits.cpu_seconds is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (limits.cpu_seconds, limits.cpu_seconds + 1))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + limits.memory_bytes
        with suppress(ValueError, OSError):  # a lower one is set already
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        sent = _serialize_result(func)
        while sent:
            sent = sent[os.write(writer, sent) :]
        code = 0
    except MemoryError:
        os.write(writer, b'["memory", null]')  # where nobody hears of the code
        code = OUT_OF_MEMORY_CODE
    finally:
        os._exit(code)


def _serialize_result(func: Callable[[], Any]) -> bytes:
    """How the work went, and its value. No pickle: an exception of two arguments cannot be read back from one."""
    try:
        return json.dumps(["done", func()]).encode()
    except MemoryError:
        raise
    except Exception as fault:
        return json.dumps(["raised", [type(fault).__name__, str(fault)]]).encode()
