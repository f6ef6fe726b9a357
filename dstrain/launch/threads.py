"""How many threads each process computes with: the same under every launcher, so that sums do not differ."""

from __future__ import annotations

import os
from collections.abc import Mapping


def count_available_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(local_world_size: int, cores: int) -> int:
    """An equal share of the cores. torchrun would give 1 and DeepSpeed all of them, so neither is asked."""
    return max(1, cores // max(1, local_world_size))


def thread_environment(env: Mapping[str, str], local_world_size: int, cores: int) -> dict[str, str]:
    """The environment with the libraries' thread counts set, for those that read them when they are loaded.

    The worker still calls torch.set_num_threads: under torchrun or srun it is not dstrain who starts it.
    """
    threads = str(threads_per_process(local_world_size, cores))
    return {**env, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
