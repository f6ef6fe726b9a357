"""A rank of a small launch of its own, over gloo and without deepspeed: it may hang or die as the test likes.

python -m tests.faults.rank_with_fault FOLDER FAULT    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from dstrain.distributed.world import World, joined_world
from dstrain.launch.topology import Worker
from dstrain.launch.worker import run_worker
from dstrain.training.health.signals import SignalHandler, run_with_signals
from dstrain.training.health.watchdog import peer_watchdog
from dstrain.training.rendezvous import Rendezvous

STEPS = 3
"""Before anything happens."""
ON_GPU = "RANK_FAULT_GPU" in os.environ
TIMEOUT = timedelta(seconds=float(os.environ.get("RANK_FAULT_TIMEOUT", "4")))


def hang_here() -> None:
    """What the stacks have to show."""
    time.sleep(600)


def hold_the_lock() -> None:
    """A call into C that keeps the interpreter's lock."""
    import ctypes

    ctypes.PyDLL(None).sleep(600)


def act(fault: str, world: World) -> None:
    """What goes wrong on rank 1 in step 3."""
    if world.rank != 1:
        return
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
        time.sleep(0.1)
    elif fault == "hang":
        hang_here()
    elif fault == "lock":
        hold_the_lock()
    elif fault == "raise":
        raise ValueError("of its own")


def train(world: World, fault: str) -> int:
    vector = torch.ones(4, device=world.device)
    for step in range(1, STEPS + 1):
        world.log.record_progress(f"step {step}", step)
        world.sum([1.0])
        if step == STEPS:
            act(fault, world)
        if not (fault == "skip" and step == STEPS and world.rank == 1):
            dist.all_reduce(vector)
            vector.sum().item()  # where the host waits for the GPU
        if fault == "skip" and step == STEPS and world.rank == 1:
            hang_here()
        world.barrier()
    world.log.record_progress("")
    return 0


def main(folder: Path, fault: str) -> int:
    def work(interrupt: SignalHandler) -> int:
        torch.set_num_threads(1)
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
        if ON_GPU:
            torch.cuda.set_device(device)
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        with Rendezvous(Worker(rank, rank, size, "tests", size), TIMEOUT) as together:
            pass
        with (
            joined_world(device, TIMEOUT, together.store) as world,
            peer_watchdog(together.liveness, folder, world, TIMEOUT),
        ):
            if fault == "early":
                return load(world)
            interrupt.begin_training()
            return train(world, fault)

    with SignalHandler() as interrupt:
        return run_worker(folder, int(os.environ["RANK"]), lambda: run_with_signals(work, interrupt, folder))


def load(world: World) -> int:
    """Rank 1 is asked to stop before the first step, while the other waits for it."""
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    world.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
