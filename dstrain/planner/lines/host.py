"""Memory of a process outside its tensors: CUDA context, fragmentation, the interpreter, batches, background saves."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.planner.line import MemoryLine
from dstrain.planner.lines.state_settings import StateSettings
from dstrain.planner.workload import Workload

CUDA_CONTEXT_BYTES = 700 * 2**20
"""Driver, cuBLAS, NCCL: memory that torch's allocator does not count."""
FRAGMENTATION = 0.04
"""Share of the tensors that the allocator reserves in addition, with expandable segments."""
PROCESS_BYTES = 1200 * 2**20
"""Resident memory of Python, torch, DeepSpeed and transformers, without tensors."""


def reserve_lines(tensor_bytes: int, device: str) -> Iterator[MemoryLine]:
    """Yield what a GPU needs besides tensors; on a CPU run, the interpreter."""
    if device == "cpu":
        yield MemoryLine(
            "interpreter and libraries",
            PROCESS_BYTES,
            "gpu",
            "reserve",
            "1.2 GiB",
            "resident memory before a model is built",
        )
        return
    yield MemoryLine(
        "CUDA context, cuBLAS, NCCL",
        CUDA_CONTEXT_BYTES,
        "gpu",
        "reserve",
        "0.7 GiB",
        "driver memory outside torch's allocator",
    )
    size = round(FRAGMENTATION * tensor_bytes)
    yield MemoryLine(
        "fragmentation",
        size,
        "gpu",
        "reserve",
        "4 % of all tensors",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
    )
    yield MemoryLine(
        "interpreter and libraries",
        PROCESS_BYTES,
        "host",
        "reserve",
        "1.2 GiB",
        "resident memory before a model is built",
    )


def host_lines(
    settings: StateSettings, workload: Workload, prefetch: int, background_saves: bool
) -> Iterator[MemoryLine]:
    """Yield batches that are loaded in advance, and the copy from which a background save is written."""
    vision = settings.shape.vision
    pixels = vision.patches * vision.patch_values if vision else 0
    batch = workload.tokens * 8 * 4 + workload.images * 4 * pixels
    ahead = prefetch * settings.accumulate * batch
    yield MemoryLine(
        "batches loaded in advance",
        ahead,
        "host",
        "buffer",
        "data.prefetch x passes x (32 T + 4 V S)",
        "dstrain/data/loading/loader.py",
    )
    if background_saves:
        from dstrain.planner.byte_tables import OPTIMIZERS

        size = (4 + OPTIMIZERS[settings.optimizer].per_param) * settings.trained / settings.world_size
        yield MemoryLine(
            "copy for background saves",
            round(size),
            "host",
            "buffer",
            "(4 + bytes of the states) T / N",
            "dstrain/train/checkpoint/saver.py",
        )
