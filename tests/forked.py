"""Processes forked from one that has imported torch, DeepSpeed and transformers, which takes a process five seconds.

    fork(0, "tests.workers:serve", address, env=environment)     # -> Forked, used like a subprocess.Popen

Nothing of torch runs before the fork, so that no thread of it is lost. Even ranks and odd ones come from two origins,
since processes of one origin have the same hash seed, and ranks of a launch do not.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from functools import cache
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent

MUON = "deepspeed.runtime.zero.muon.muon_optimizer"
"""Each engine imports it, and with it torch's compiler."""
IMPORTED = ("torch", "deepspeed", MUON, "transformers", "peft", "dstrain.training.build_run", "dstrain.training.run")
"""Modules that take long, and what imports most of the others."""


class Forked:
    """A forked process, with the methods of subprocess.Popen that tests use."""

    def __init__(self, origin: PipedProcess, pid: int) -> None:
        self._origin, self.pid = origin, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._origin.request("poll", self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, minus the signal of one that was killed; raise subprocess.TimeoutExpired."""
        until = time.monotonic() + (float("inf") if timeout is None else timeout)
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # until then its process ID is not given to another
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class PipedProcess:
    """A process of a module of these tests, which connects to the address in its first argument; started when needed."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module]
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def request(self, *request: Any) -> Any:
        """Send a request, and return the answer."""
        self.start()
        assert self._pipe is not None
        self._pipe.send(request)
        return self._pipe.recv()

    def start(self) -> None:
        """Start the process if it does not run; return when it takes requests."""
        if self._pipe is not None:
            return
        address = new_socket_path()
        env = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        with Listener(address, "AF_UNIX", authkey=b"tests") as listener:
            self._process = subprocess.Popen([*self._command, address, *self._arguments], env=env, cwd=ROOT)
            self._pipe = listener.accept()

    def close(self) -> None:
        if self._pipe is not None and self._process is not None:
            self._pipe.close()
            self._process.wait(10)
        self._pipe = self._process = None


_origins = (PipedProcess("tests.forked"), PipedProcess("tests.forked"))
"""The processes that fork."""
for _origin in _origins:
    atexit.register(_origin.close)


def new_socket_path() -> str:
    """Return a new path for a Unix socket: one has at most 107 bytes, and TMPDIR may be longer."""
    path = tempfile.mktemp(prefix="dstrain-tests-")
    return path if len(os.fsencode(path)) < 108 else tempfile.mktemp(prefix="dstrain-tests-", dir="/tmp")


def start_origins() -> None:
    """Start both processes that fork. Call it before ranks that wait for each other for a few seconds only."""
    for origin in _origins:
        origin.start()


def fork(rank: int, function: str, *arguments: Any, env: Mapping[str, str], quiet: bool = False) -> Forked:
    """Call a function in a new process, which ends with what it returns. `quiet`: without standard output."""
    origin = _origins[rank % 2]
    return Forked(origin, origin.request("fork", function, arguments, dict(env), quiet))


def serve(address: str) -> int:
    """Take requests until the tests are gone; the origin's side."""
    for module in IMPORTED:
        importlib.import_module(module)
    cpuinfo = importlib.import_module("cpuinfo")
    # DeepSpeed asks three times for each kernel that it loads, and each time a process finds it out.
    cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)
    cpuinfo.get_cpu_info()
    gc.freeze()  # a collection goes through 400,000 objects of these modules: 0.25 s after each call of a worker
    with Client(address, "AF_UNIX", authkey=b"tests") as pipe:
        while True:
            try:
                request, *arguments = pipe.recv()
            except EOFError:
                return 0
            if request == "poll":
                found, status = os.waitpid(arguments[0], os.WNOHANG)
                pipe.send(os.waitstatus_to_exitcode(status) if found else None)
            elif pid := os.fork():
                pipe.send(pid)
            else:
                break
    _call(*arguments)
    return 0


def _call(function: str, arguments: tuple[Any, ...], env: Mapping[str, str], quiet: bool) -> None:
    """End this process with what the function returns, as Python does, but leave its memory to the kernel.

    Python frees each object of all these modules, which takes longer than most tests.
    """
    code = 1
    try:
        os.environ.clear()
        os.environ.update(env)
        if quiet:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        module, _, name = function.partition(":")
        code = getattr(importlib.import_module(module), name)(*arguments) or 0
    except BaseException:
        traceback.print_exc()
    finally:
        for thread in threading.enumerate():
            if not thread.daemon and thread is not threading.current_thread():
                thread.join()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    sys.exit(importlib.import_module("tests.forked").serve(sys.argv[1]))
