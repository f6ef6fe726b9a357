"""Worker processes on GPUs, one each, over NCCL: `tests.workers` with another device.

DSTRAIN_GPU_REHEARSAL=1 runs the same tests on a CPU over gloo, as far as a CPU goes: to try the tests themselves.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from tests.workers import ROOT, Workers, serve

if TYPE_CHECKING:
    import torch

REHEARSAL = bool(os.environ.get("DSTRAIN_GPU_REHEARSAL"))
ACCELERATOR = "cpu" if REHEARSAL else "cuda"
IS_EMULATED = "EMU_VALUES" in os.environ
"""True on the emulated device (tools/cuda_emulator), whose kernels of Triton compute nothing."""
IS_SLOW = REHEARSAL or IS_EMULATED
"""True where a CPU computes: models of 100 million parameters are tiny there."""


def environment() -> dict[str, str]:
    """What the processes of these tests need in theirs. cuBLAS reads its own once, before anyone can ask for determinism."""
    return {**os.environ, "DS_ACCELERATOR": ACCELERATOR, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def device() -> torch.device:
    """This worker's."""
    import torch

    return torch.device("cpu") if REHEARSAL else torch.device("cuda", int(os.environ["LOCAL_RANK"]))


class GpuWorkers(Workers):
    """Workers whose processes run this module, with a GPU each."""

    def _start_rank(self, rank: int, address: str, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tests.gpu.workers", address]
        return subprocess.Popen(command, env={**env, **_only_ours()}, cwd=ROOT)


def _only_ours() -> dict[str, str]:
    ours = environment()
    return {name: ours[name] for name in ("DS_ACCELERATOR", "CUBLAS_WORKSPACE_CONFIG")}


def main(address: str) -> None:
    import torch

    torch.set_float32_matmul_precision("highest")  # no TF32: fp32 is compared to 1e-5
    if not REHEARSAL:
        torch.cuda.set_device(device())
    serve(address, device(), timedelta(minutes=4))


if __name__ == "__main__":
    from tests.gpu import workers

    workers.main(sys.argv[1])
