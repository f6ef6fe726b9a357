"""A rank that prepares its data before a process group starts: it may be slow, fail, stop or die as the test likes.

python -m tests.faults.rank_preparing_data FOLDER FAULT    with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch

from dstrain.distributed.world import joined_world
from dstrain.errors import DataError
from dstrain.launch.topology import Worker
from dstrain.launch.worker import run_worker
from dstrain.training.health.signals import SignalHandler, run_with_signals
from dstrain.training.health.watchdog import peer_watchdog
from dstrain.training.rendezvous import Rendezvous

TIMEOUT = timedelta(seconds=float(os.environ.get("RANK_FAULT_TIMEOUT", "4")))


def act(fault: str, rank: int, folder: Path) -> None:
    """What goes wrong, on rank 1 where a name does not say otherwise."""
    if fault == "bad on 0" and rank == 0:
        raise DataError("train.jsonl:7: is bad; mend it")
    if rank != 1:
        return
    if fault == "slow":
        time.sleep(2.5 * TIMEOUT.total_seconds())
    elif fault == "bad":
        raise DataError("train.jsonl:7: is bad; mend it")
    elif fault == "fork":
        if os.fork() == 0:
            os._exit(0)
        os.wait()


def main(folder: Path, fault: str) -> int:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def work(interrupt: SignalHandler) -> int:
        torch.set_num_threads(1)
        together = Rendezvous(Worker(rank, rank, size, "tests", size), TIMEOUT)
        with together, together.local_main_process_first():
            (folder / f"began-{rank}").write_text(str(time.time()))
            act(fault, rank, folder)
        with (
            joined_world(torch.device("cpu"), TIMEOUT, together.store) as world,
            peer_watchdog(together.liveness, folder, world, TIMEOUT),
        ):
            interrupt.begin_training()
            return 0 if world.sum([1.0]) == [size] else 1

    with SignalHandler() as interrupt:
        return run_worker(folder, rank, lambda: run_with_signals(work, interrupt, folder))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
