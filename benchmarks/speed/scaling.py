"""Measure weak scaling: samples per second of two processes at zero2, each pinned to a core or on a GPU, over those of one.

    python -m benchmarks.speed.scaling [--setting hh] [--task rm] [--rounds 3]

Each process takes the same samples in a step, so that two do twice the work, none waits for longer samples of the other, and
the losses of all launches must agree. Launches of one and of two processes alternate. The ideal ratio is 2.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.common import LAUNCHER_VARIABLES, ROOT, join_alone, run
from benchmarks.speed.settings import find_setting
from dstrain.launch.probe import free_port

LIMIT = 2**-6
"""Largest relative difference of losses: bf16 sums in another order."""


def measure(
    *, setting: str = "hh", task: str = "rm", precision: str = "bf16", steps: int = 8, rounds: int = 3, seed: int = 7
) -> dict[str, Any]:
    """Take the steps with one process and with two, in turns."""
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) >= 2, f"scaling to two processes needs two cores, and this process may use {len(cores)}"
    words = [setting, str(seed), task, precision, str(steps)]
    found: dict[int, list[list[dict[str, Any]]]] = {1: [], 2: []}
    for _ in range(rounds):
        for size in found:
            found[size].append(_start(words, cores[:size]))
    losses = [rank["loss"] for launches in found.values() for ranks in launches for rank in ranks]
    assert max(losses) - min(losses) <= LIMIT * abs(losses[0]), f"the last losses differ: {losses}"
    rates = {size: [sum(rank["samples"] for rank in ranks) / max(r["seconds"] for r in ranks) for ranks in launches] for size, launches in found.items()}  # fmt: skip
    within = sorted(two / one for one, two in zip(rates[1], rates[2], strict=True))
    rows = [
        {
            "processes": size, "samples_per_second": statistics.median(rates[size]),
            "ratio": statistics.median(within) if size == 2 else 1.0,
            "ratio_low": within[0] if size == 2 else 1.0, "ratio_high": within[-1] if size == 2 else 1.0,
        }
        for size in found
    ]  # fmt: skip
    return {
        "settings": {"setting": str(find_setting(setting, seed)), "task": task, "precision": precision, "steps": steps},
        "checked": f"the loss of the last step is {min(losses):.5f} to {max(losses):.5f} on all ranks of all launches",
        "rows": rows,
    }


def _start(words: list[str], cores: list[int]) -> list[dict[str, Any]]:
    """Start one process for each core; return what each has measured."""
    port, clean = (
        str(free_port()),
        {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES},
    )
    children = []
    for rank, core in enumerate(cores):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(len(cores)), "MASTER_PORT": port}
        children.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.speed.scaling", "--rank", *words],
                cwd=ROOT, env=clean | place | {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                preexec_fn=lambda core=core: os.sched_setaffinity(0, {core}), stdout=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    said = [child.communicate()[0] for child in children]
    assert not any(child.returncode for child in children), f"a process failed: {[c.returncode for c in children]}"
    return [json.loads(text.splitlines()[-1]) for text in said]


def measure_rank(name: str, seed: str, task: str, precision: str, steps: str) -> None:
    """In a rank: take the steps, and print seconds, samples and the last loss. Collective."""
    import torch

    from benchmarks.speed.variants import DSTRAIN, made_case, made_variant
    from dstrain.distributed.world import destroy_process_groups

    torch.set_num_threads(1)
    case = made_case(find_setting(name, int(seed)), task, int(steps) + 2, join_alone())
    step = made_variant(DSTRAIN, case, precision)
    for _ in range(2):
        step()
    case.world.barrier()
    began = time.perf_counter()
    for _ in range(int(steps)):
        step()
    case.world.barrier()
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "samples": int(steps) * case.setting.micro, "loss": step.losses[-1]}))
    destroy_process_groups()


if __name__ == "__main__":
    if "--rank" in sys.argv:
        measure_rank(*sys.argv[sys.argv.index("--rank") + 1 :])
    else:
        run(measure, __doc__ or "")
