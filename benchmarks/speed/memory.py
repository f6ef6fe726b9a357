"""Peak memory of a variant's steps, in a process of its own.

On a GPU: tensors of torch's allocator. On a CPU: the kernel's high-water mark minus what was resident before.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.checkpointing import resident_bytes
from benchmarks.common import LAUNCHER_VARIABLES, ROOT, join_alone
from benchmarks.speed.settings import Setting, find_setting

STEPS = 4


def step_memory_mib(setting: Setting, task: str, variant: str, precision: str, overrides: Sequence[str]) -> float:
    """Return MiB that model, optimizer and steps add to a process that has imported everything and has its data."""
    name, _, seed = setting.name.partition("-") if setting.name.startswith("drawn") else (setting.name, "", "0")
    words = [name, seed, task, variant, precision, *overrides]
    # With those of this process it would join this process's group.
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.speed.memory", *words],
        cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True,
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1]))


def main(name: str, seed: str, task: str, variant: str, precision: str, *overrides: str) -> None:
    """Print the increase in MiB."""
    import torch

    from benchmarks.speed.variants import TRL, made_case, made_variant
    from dstrain.distributed.world import destroy_process_groups

    torch.set_num_threads(1)
    if variant == TRL:
        import trl  # noqa: F401  its code is not part of the increase
    world = join_alone()
    case = made_case(find_setting(name, int(seed)), task, STEPS + 2, world, overrides)
    is_on_gpu = world.device.type == "cuda"
    if is_on_gpu:
        before = torch.cuda.memory_allocated(world.device)
        torch.cuda.reset_peak_memory_stats(world.device)
    else:
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM; man 5 proc
    step = made_variant(variant, case, precision)
    for _ in range(STEPS):
        step()
    peak = torch.cuda.max_memory_allocated(world.device) if is_on_gpu else resident_bytes("VmHWM")
    print(json.dumps((peak - before) / 2**20), flush=True)
    if variant == TRL:
        step.stop()
    destroy_process_groups()


if __name__ == "__main__":
    main(*sys.argv[1:])
