"""Processes that may be killed cheaply: forked, rank by rank, from one that has imported what takes long.

    ForkServer("torch")("tests.faults.save_steps:save", folder=…)     # -> [Ended(code=-9, answer=None), Ended(code=0, …)]

Nothing of torch runs before the fork, so that no thread of it is lost.
"""

from __future__ import annotations

import importlib
import os
import pickle
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from tests.forked import PipedProcess

LIMIT = 60.0
"""Seconds that a pair may take; one takes less than a tenth of a second without DeepSpeed."""


@dataclass(frozen=True)
class Ended:
    """How a process ended."""

    code: int
    """Exit code; minus the signal that killed it."""
    answer: Any
    """What its function returned; None where it was killed."""


class Hung(AssertionError):
    """A pair took longer than its limit."""


class ForkServer:
    """A process that has imported `modules` and forks; started at the first call."""

    def __init__(self, *modules: str) -> None:
        self._process = PipedProcess("tests.faults.fork_server", *modules)

    def __call__(self, function: str, size: int = 2, limit: float = LIMIT, **arguments: Any) -> list[Ended]:
        """Call the function on every rank, with its rank and size; raises Hung, or what it raised."""
        ended = self._process.request(function, size, limit, arguments)
        if isinstance(ended, str):
            raise Hung(ended)
        for rank, one in enumerate(ended):
            if isinstance(one.answer, _Failure):
                raise AssertionError(f"rank {rank} of {function}:\n{one.answer.traceback}")
        return ended

    def start(self) -> None:
        """Start the process now, with the present environment."""
        self._process.start()

    def close(self) -> None:
        self._process.close()


@dataclass(frozen=True)
class _Failure:
    traceback: str


def serve(address: str, modules: list[str]) -> None:
    """The fork_server's side."""
    for module in modules:
        importlib.import_module(module)
    pipe = Client(address, "AF_UNIX", authkey=b"tests")
    while True:
        try:
            function, size, limit, arguments = pipe.recv()
        except EOFError:
            return
        with tempfile.TemporaryDirectory(prefix="dstrain-pair-") as folder:
            children = [_fork(function, rank, size, Path(folder), arguments) for rank in range(size)]
            codes = _wait(children, limit)
            hung = None in codes
            answers = [_answer(Path(folder) / f"{rank}.pickle") for rank in range(size)]
        told = f"{function} with {arguments} took longer than {limit:g} s; ended so far: {codes}"
        pipe.send(told if hung else [Ended(code, answer) for code, answer in zip(codes, answers, strict=True)])


def _fork(function: str, rank: int, size: int, folder: Path, arguments: Mapping[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
        module, _, name = function.partition(":")
        try:
            answer = getattr(importlib.import_module(module), name)(str(folder / "store"), rank, size, **arguments)
        except Exception:
            answer = _Failure(traceback.format_exc())
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))  # a fault's
        partial = folder / f"{rank}.partial"
        partial.write_bytes(pickle.dumps(answer))
        partial.rename(folder / f"{rank}.pickle")
    finally:
        os._exit(0)


def _wait(children: list[int], limit: float) -> list[int | None]:
    """Exit codes by rank; whoever is still there at the limit is killed and has None."""
    until, codes = time.monotonic() + limit, {}
    while len(codes) < len(children) and time.monotonic() < until:
        for pid in set(children) - codes.keys():
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    for pid in set(children) - codes.keys():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return [codes.get(pid) for pid in children]


def _answer(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if path.exists() else None  # noqa: S301  its own child wrote it


if __name__ == "__main__":
    # Under its own name, as what it sends is unpickled under that name.
    importlib.import_module("tests.faults.fork_server").serve(sys.argv[1], sys.argv[2:])
