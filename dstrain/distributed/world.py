"""The only door to torch.distributed: who we are among how many, and agreeing on numbers."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dstrain.distributed.collective_log import COLLECTIVE_LOG, find_connection_error, patch_collectives
from dstrain.errors import PeerFailureError, RunError
from dstrain.files import atomic_write

if TYPE_CHECKING:
    import torch


class World(Protocol):
    """The processes of a run. Host-side, so agreeing on a number never waits for the GPU."""

    rank: int
    size: int
    device: torch.device

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise float64 sum over all ranks, the same on every rank. Collective."""

    def any(self, flag: bool) -> bool:
        """True where any rank says so. Collective."""

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""

    def gather(self, value: Any) -> list[Any]:
        """Every rank's small plain value, by rank, on every rank. Collective."""

    def broadcast(self, value: Any) -> Any:
        """Rank 0's plain value, on every rank; what the others give is not looked at. Collective."""

    def new_group(self) -> World:
        """The same processes, agreeing over a group of their own: for another thread. Collective."""


class SingleProcessWorld:
    """One process that need not ask anyone."""

    rank = 0
    size = 1

    def __init__(self, device: torch.device | None = None) -> None:
        import torch

        self.device = device or torch.device("cpu")

    def sum(self, values: Sequence[float]) -> list[float]:
        return [float(value) for value in values]

    def any(self, flag: bool) -> bool:
        return flag

    def barrier(self) -> None:
        return None

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def broadcast(self, value: Any) -> Any:
        return value

    def new_group(self) -> World:
        return self


class TorchWorld:
    """The ranks of torch.distributed, agreeing over a gloo group of their own."""

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        import torch.distributed as dist

        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        with _rendezvous_errors(timeout):
            self._group, self._timeout = dist.new_group(backend="gloo", timeout=timeout), timeout

    def sum(self, values: Sequence[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        vector = torch.tensor(np.asarray(values, dtype=np.float64))
        dist.all_reduce(vector, group=self._group)
        return vector.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self._group)

    def gather(self, value: Any) -> list[Any]:
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def broadcast(self, value: Any) -> Any:
        import torch.distributed as dist

        values = [value if self.rank == 0 else None]
        dist.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def new_group(self) -> World:
        return TorchWorld(self.device, self._timeout)


def rendezvous_over_store(timeout: timedelta, message: str, port_file: Path | None = None) -> tuple[Any, list[str]]:
    """Meet the other processes over a store, before any process group: the store, and every rank's word, by rank.

    `place`: a file, where all are on one host: rank 0 takes a free port at the moment it listens, and writes it there. One that
    was chosen before the ranks started may be taken by then.

    Reads RANK, WORLD_SIZE and MASTER_*; rank 0 serves the store, or torchrun's agent does. Raises LostError where one
    did not come in time.
    """
    from torch.distributed import rendezvous

    with _rendezvous_errors(timeout):
        store, rank, size = (
            _open_local_store(port_file, timeout) if port_file else next(rendezvous("env://", timeout=timeout))
        )
        store.set_timeout(timeout)
        store.set(f"dstrain/word/{rank}", message)
        words = store.multi_get([f"dstrain/word/{other}" for other in range(size)])
    if port_file and rank == 0:
        port_file.unlink(missing_ok=True)
    return store, [told.decode() for told in words]


def _open_local_store(port_file: Path, timeout: timedelta) -> tuple[Any, int, int]:
    """The store, this rank and how many there are; MASTER_PORT is set to where they meet."""
    from torch.distributed import DistStoreError, TCPStore

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, size, is_master=True, timeout=timeout, wait_for_workers=False)
        port_file.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(port_file, str(store.port))
    else:
        until = time.monotonic() + timeout.total_seconds()
        while not port_file.exists():
            if time.monotonic() > until:
                raise DistStoreError("rank 0 did not listen")
            time.sleep(0.02)
        store = TCPStore("127.0.0.1", int(port_file.read_text()), size, is_master=False, timeout=timeout)
    os.environ["MASTER_PORT"] = str(store.port)
    return store, rank, size


def init_process_group(device: torch.device, timeout: timedelta, store: Any = None) -> None:
    """Start the process group: NCCL between GPUs, gloo between CPUs. Reads RANK, WORLD_SIZE, MASTER_*. Collective.

    `store`: what `meet` gave; a process alone needs none, and no port. From here on collectives are counted, and groups that are made get the timeout. Raises
    LostError where one did not come.
    """
    import torch.distributed as dist

    patch_collectives(timeout)
    if store is None and os.environ.get("WORLD_SIZE") == "1":
        store = dist.HashStore()
    if not dist.is_initialized():
        with _rendezvous_errors(timeout):
            place = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if store is not None else (-1, -1)
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, timeout=timeout, store=store, rank=place[0], world_size=place[1])


_HOST_ERROR_FIXES = {
    "Unable to find interface": "bring its network interface up (`ip link set lo up` for loopback), or name one in GLOO_SOCKET_IFNAME",
    "File name too long": "gloo takes host names of up to 63 characters: shorten it, or name a network interface in GLOO_SOCKET_IFNAME",
    "Resource temporarily unavailable": "raise `ulimit -u`, or the container's limit of process IDs: no more threads can be started",
}
"""What gloo says where this host is at fault and no other process, and what to do."""


@contextlib.contextmanager
def _rendezvous_errors(timeout: timedelta) -> Iterator[None]:
    """Inside, all processes have to come; LostError where one does not."""
    began = time.monotonic()
    try:
        yield
    except RuntimeError as error:
        why = find_connection_error(error)
        if mend := next((mend for text, mend in _HOST_ERROR_FIXES.items() if text in str(error)), ""):
            raise RunError(
                f"the process group cannot start on {socket.gethostname()} ({why or error}); {mend}"
            ) from error
        if why is None:
            raise
        at = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
        mend = f"see the logs of the others, and whether every host reaches {at}"
        what = f"not all came within {timeout.total_seconds():g} s ({why})"
        if time.monotonic() - began < timeout.total_seconds() / 2:  # not for want of time
            what = f"it failed ({why})"
        raise PeerFailureError("meeting the other processes", what, mend) from error


def destroy_process_groups() -> None:
    """Destroy the process groups: ZeRO-3 workers can abort at exit where this is left out."""
    import torch.distributed as dist

    COLLECTIVE_LOG.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
