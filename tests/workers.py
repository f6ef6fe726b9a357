"""Worker processes shared by tests: joining a process group and building engines needs several.

`Workers(2)("tests.parity.cases:gradient", stage=3)` calls the function on every rank and returns the results by rank.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import time
from collections.abc import Mapping
from datetime import timedelta
from multiprocessing.connection import Client, Connection, Listener
from typing import TYPE_CHECKING, Any

from dstrain.launch.probe import free_port
from tests.forked import ROOT, Forked, fork, new_socket_path

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import TorchWorld

__all__ = ["ROOT", "Process", "WorkerError", "Workers", "serve", "worker_world"]

Process = Forked | subprocess.Popen[bytes]


class WorkerError(AssertionError):
    """A call failed on a rank; the message is its traceback."""


class Workers:
    """Processes with a process group over gloo, started at the first call and again after a hang.

    The timeout allows for DeepSpeed's kernels, whose compilation at the first use takes minutes.
    """

    def __init__(self, size: int, timeout: float = 560.0) -> None:
        self.size, self._timeout = size, timeout
        self._pipes: list[Connection] = []
        self._processes: list[Process] = []

    def __call__(self, function: str, **arguments: Any) -> list[Any]:
        if any(process.poll() is not None for process in self._processes):
            self.close()  # one died between two calls: killed for memory, say
        if not self._pipes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, arguments))
        results = self._collect(function)
        for rank, (ok, value) in enumerate(results):
            if not ok:
                self.close()  # the other ranks may be anywhere
                raise WorkerError(f"rank {rank} of {self.size} in {function}:\n{value}")
        return [value for _, value in results]

    def _collect(self, function: str) -> list[tuple[bool, Any]]:
        """Return all results, or the first failure."""
        until, results = time.monotonic() + self._timeout, {}
        while len(results) < self.size:
            for rank, pipe in enumerate(self._pipes):
                if rank in results or not pipe.poll(0.01):
                    continue
                try:
                    results[rank] = pipe.recv()
                except EOFError:
                    results[rank] = (False, f"the process died with code {self._processes[rank].wait()}")
                if not results[rank][0]:
                    return [results.get(other, (True, None)) for other in range(self.size)]
            if time.monotonic() > until:
                self.close()
                raise WorkerError(
                    f"{function} hung: no answer in {self._timeout:g} s from ranks {set(range(self.size)) - set(results)}"
                )
        return [results[rank] for rank in range(self.size)]

    def _start(self) -> None:
        port, address = free_port(), new_socket_path()
        with Listener(address, "AF_UNIX", authkey=b"tests") as listener:
            for rank in range(self.size):
                ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.size, "LOCAL_WORLD_SIZE": self.size}
                env = {**os.environ, **{name: str(value) for name, value in ranks.items()}}
                env |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "DS_ACCELERATOR": "cpu",
                    "OMP_NUM_THREADS": "1",
                }
                self._processes.append(self._start_rank(rank, address, env))
            by_rank: dict[int, Connection] = {}
            while len(by_rank) < self.size:
                pipe = listener.accept()
                by_rank[pipe.recv()] = pipe
        self._pipes = [by_rank[rank] for rank in range(self.size)]

    def _start_rank(self, rank: int, address: str, env: Mapping[str, str]) -> Process:
        return fork(rank, "tests.workers:serve", address, env=env)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        for pipe in self._pipes:
            pipe.close()
        self._pipes, self._processes = [], []


def worker_world() -> TorchWorld:
    """Return the world that this worker process joined."""
    return _joined[0]


_joined: list[TorchWorld] = []


def serve(address: str, device: torch.device | None = None, timeout: timedelta = timedelta(minutes=9)) -> None:
    """Take calls until the tests are gone; the worker's side."""
    import gc
    import importlib
    import logging
    import traceback
    import warnings

    import torch

    from dstrain.distributed.world import TorchWorld
    from dstrain.launch.worker import exit_with_parent

    exit_with_parent()
    torch.set_num_threads(1)
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    pipe = Client(address, "AF_UNIX", authkey=b"tests")
    pipe.send(int(os.environ["RANK"]))
    _joined.append(TorchWorld.join(device or torch.device("cpu"), timeout))
    import deepspeed  # noqa: F401  here, once

    while True:
        try:
            function, arguments = pipe.recv()
        except EOFError:
            return
        module, _, name = function.partition(":")
        try:
            answer = (True, getattr(importlib.import_module(module), name)(**arguments))
            pickle.dumps(answer)
        except BaseException:
            answer = (False, traceback.format_exc())
        gc.collect()  # engines hang in cycles, with all their memory
        pipe.send(answer)
