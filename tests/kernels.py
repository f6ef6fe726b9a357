"""Compile the DeepSpeed kernels that tests need, while tests that need none run.

python -m tests.kernels
"""

from __future__ import annotations

import ctypes.util
import os

os.environ.update(DS_ACCELERATOR="cpu", MAX_JOBS="1")

if __name__ == "__main__":
    from deepspeed.accelerator import get_accelerator

    os.nice(5)
    disk = ["AsyncIOBuilder", "PinMemoryBuilder"] if ctypes.util.find_library("aio") else []
    for name in ("CPUAdamBuilder", *disk):
        builder = get_accelerator().create_op_builder(name)
        if builder is not None:
            builder.load(verbose=False)
