"""Time and CPU of the start of many ranks on this host: forked processes that meet over the store, gather twice and leave.

python -m benchmarks.rendezvous [RANKS...]      default: 64 256 1024
"""

from __future__ import annotations

import os
import resource
import sys
import time
from datetime import timedelta

import torch.distributed  # noqa: F401  # imported once, before the forks

from dstrain.launch.command import free_port
from dstrain.launch.topology import Worker
from dstrain.process_setup import raise_open_files_limit
from dstrain.training.rendezvous import Rendezvous

TIMEOUT = timedelta(minutes=5)


def run_rank(rank: int, size: int) -> None:
    """Take part as one rank: meet, gather a small value twice, and send heartbeats for two seconds more."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    together = Rendezvous(Worker(rank, rank, size, "benchmark", size), TIMEOUT)
    with together:
        assert len(together.gather({"rank": rank})) == size
        assert together.gather(rank)[rank] == rank
        time.sleep(2)
    together.liveness.close()
    together.store.add("left", 1)
    while rank == 0 and together.store.add("left", 0) < size:  # it serves the store
        time.sleep(0.1)


def measure(size: int) -> str:
    """Return a row of the table for this number of ranks."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    before, started_at, pids = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic(), []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                run_rank(rank, size)
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    failed = sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return f"| {size} | {failed} | {time.monotonic() - started_at:.1f} | {cpu:.1f} | {1000 * cpu / size:.0f} |"


if __name__ == "__main__":
    raise_open_files_limit()
    print("| ranks | failed | wall s | CPU s of all | CPU ms per rank |\n|---|---|---|---|---|")
    for number in map(int, sys.argv[1:] or ("64", "256", "1024")):
        print(measure(number), flush=True)
