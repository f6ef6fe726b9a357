"""CPU threads per process, the same under every launcher, so that sums do not differ."""

from __future__ import annotations

import os
from collections.abc import Mapping


def count_available_cores() -> int:
    """Return the number of CPU cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(local_world_size: int, cores: int) -> int:
    """Return an equal share of the cores.

    Set explicitly: torchrun would use 1 thread, DeepSpeed all cores.
    """
    return max(1, cores // max(1, local_world_size))


def thread_environment(env: Mapping[str, str], local_world_size: int, cores: int) -> dict[str, str]:
    """Return the environment with the thread counts of the libraries that read them when they are
    loaded.

    The worker also calls torch.set_num_threads: under torchrun or srun dstrain does not set its
    environment.
    """
    threads = str(threads_per_process(local_world_size, cores))
    return {**env, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
