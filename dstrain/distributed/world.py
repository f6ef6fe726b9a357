"""The processes of a run: rank, size, and agreement on small values."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from dstrain.distributed.collective_log import CollectiveLog
from dstrain.distributed.patches import CollectivePatches
from dstrain.distributed.store import rendezvous_errors, sign, verify

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SequenceGroup:
    """Processes that compute the same micro-batch together, each a part of its tokens and of the attention heads.

    DeepSpeed-Ulysses: Jacobs et al. (arXiv 2309.14509).
    """

    rank: int
    size: int
    process_group: Any = field(default=None, repr=False, compare=False)
    """Group of torch.distributed for tensors on the device."""

    def part(self, tokens: int) -> tuple[int, int]:
        """Return the first token of this process and the one after its last; `tokens` is a multiple of the size."""
        share = tokens // self.size
        return self.rank * share, (self.rank + 1) * share


class Ranks(Protocol):
    """Processes that exchange small values, before a process group exists or over one."""

    rank: int
    size: int

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's small picklable value, by rank, on every rank. Collective."""


class World(Ranks, Protocol):
    """Processes of a run. Values go over host memory, so agreeing on a number never waits for the GPU."""

    device: torch.device
    log: CollectiveLog
    """Activity of this process: its collectives and its progress."""
    sequence: SequenceGroup | None
    """The processes that share this one's micro-batches; None: each process has its own."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the element-wise float64 sum over all ranks, the same on every rank. Collective."""

    def any(self, flag: bool) -> bool:
        """Return true if the flag is true on any rank. Collective."""

    def barrier(self) -> None:
        """Wait until every rank is here. Collective."""

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's picklable value on every rank; the values of other ranks are ignored. Collective."""

    def share_sequences(self, size: int) -> None:
        """Let every `size` adjacent ranks compute their micro-batches together. Collective."""

    def new_group(self) -> World:
        """Return the same processes with a process group of their own, for use in another thread. Collective."""

    def without_collectives(self) -> AbstractContextManager[None]:
        """Return a context in which the collectives of this process return at once and exchange nothing."""


class SingleProcessWorld:
    """World of one process without a process group."""

    rank = 0
    size = 1
    sequence: SequenceGroup | None = None

    def __init__(self, device: torch.device | None = None) -> None:
        import torch

        self.device, self.log = device or torch.device("cpu"), CollectiveLog()

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

    def share_sequences(self, size: int) -> None:
        assert size == 1, "one process has no other to share with"

    def new_group(self) -> World:
        return self

    def without_collectives(self) -> AbstractContextManager[None]:
        return nullcontext()


def data_parallel_rank(world: World) -> tuple[int, int]:
    """Return which of how many sets of samples this process computes: one per process, or per group of processes."""
    shared = 1 if world.sequence is None else world.sequence.size
    return world.rank // shared, world.size // shared


class TorchWorld:
    """Ranks of torch.distributed, with a gloo group of their own for values on the host."""

    sequence: SequenceGroup | None = None

    def __init__(self, device: torch.device, timeout: timedelta, patches: CollectivePatches | None = None) -> None:
        """Use the process group that is there. Without `patches`, the log holds progress but no collectives."""
        import torch.distributed as dist

        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self.log, self.patches = patches.log if patches else CollectiveLog(), patches
        with rendezvous_errors(timeout):
            # gloo on GPUs too: a value on the host never waits for the GPU's queue.
            self._group, self._timeout = dist.new_group(backend="gloo", timeout=timeout), timeout

    @classmethod
    def join(cls, device: torch.device, timeout: timedelta, store: Any = None) -> TorchWorld:
        """Start the process group, NCCL between GPUs and gloo between CPUs, and log its collectives. Collective.

        `store` is that of `connect_store`; without one, RANK, WORLD_SIZE and MASTER_* are read, and a single
        process needs no port. From here on every new process group gets `timeout`, DeepSpeed's too. Raises
        PeerFailureError where a rank does not come. Call `close` at the end.
        """
        patches = CollectivePatches(CollectiveLog(), timeout)
        # Before any group exists and before DeepSpeed copies torch's functions.
        patches.apply()
        try:
            _init_process_group(device, timeout, store)
            return cls(device, timeout, patches)
        except BaseException:
            destroy_process_groups()
            patches.undo()
            raise

    def share_sequences(self, size: int) -> None:
        """Let every `size` adjacent ranks compute their micro-batches together. Collective."""
        import torch.distributed as dist

        if size > 1:
            group, _ = dist.new_subgroups(size, timeout=self._timeout)
            self.sequence = SequenceGroup(self.rank % size, size, group)

    def close(self) -> None:
        """Destroy all process groups and put torch's functions back: ZeRO-3 workers can abort at exit otherwise."""
        self.log.clear()
        try:
            destroy_process_groups()
        finally:
            if self.patches is not None:
                self.patches.undo()

    def sum(self, values: Sequence[float]) -> list[float]:
        import torch
        import torch.distributed as dist

        # Through numpy, in float64: torch would make float32 of Python's floats.
        vector = torch.tensor(np.asarray(values, dtype=np.float64))
        dist.all_reduce(vector, group=self._group)
        return vector.tolist()

    def any(self, flag: bool) -> bool:
        return self.sum([float(flag)])[0] > 0

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier(group=self._group)

    def gather(self, value: Any) -> list[Any]:
        import torch
        import torch.distributed as dist

        content = _sign(value)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(content)]), group=self._group)
        width = int(max(sizes))
        padded = torch.zeros(width, dtype=torch.uint8)
        padded[: len(content)] = torch.frombuffer(content, dtype=torch.uint8)
        parts = [torch.zeros(width, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self._group)
        return [_verify(part[: int(size)].numpy().tobytes()) for part, size in zip(parts, sizes, strict=True)]

    def broadcast(self, value: Any) -> Any:
        import torch
        import torch.distributed as dist

        content = _sign(value) if self.rank == 0 else bytearray()
        size = torch.tensor([len(content)])
        dist.broadcast(size, src=0, group=self._group)
        part = torch.frombuffer(content, dtype=torch.uint8) if content else torch.zeros(int(size), dtype=torch.uint8)
        dist.broadcast(part, src=0, group=self._group)
        return _verify(part.numpy().tobytes())

    def new_group(self) -> World:
        return TorchWorld(self.device, self._timeout, self.patches)

    @contextmanager
    def without_collectives(self) -> Iterator[None]:
        assert self.patches is not None, "only a world that has joined can replace torch's functions"
        self.patches.is_disabled = True
        try:
            yield
        finally:
            self.patches.is_disabled = False


def _sign(value: Any) -> bytearray:
    """Return the pickled value, signed with the key of the ranks."""
    return bytearray(sign(pickle.dumps(value)))


def _verify(signed: bytes) -> Any:
    """Return the value of `_sign`; nothing is unpickled that a process without the key sent. Raises RunError."""
    return pickle.loads(verify(signed))  # noqa: S301  # signed by a rank of this run


@contextmanager
def joined_world(device: torch.device, timeout: timedelta, store: Any = None) -> Iterator[TorchWorld]:
    """Join the other processes, and leave at the end. See `TorchWorld.join`. Collective."""
    world = TorchWorld.join(device, timeout, store)
    try:
        yield world
    finally:
        world.close()


def destroy_process_groups() -> None:
    """Destroy all process groups of this process, if there are any, with DeepSpeed's references to them."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return
    comm = sys.modules.get("deepspeed.comm")
    if comm is not None and comm.is_initialized():  # a later run in this process would use its groups
        comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def _init_process_group(device: torch.device, timeout: timedelta, store: Any) -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if store is None and os.environ.get("WORLD_SIZE") == "1":
        store = dist.HashStore()
    # torch reads rank and size from the environment only where it makes the store itself.
    rank, size = (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])) if store is not None else (-1, -1)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with rendezvous_errors(timeout):
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
