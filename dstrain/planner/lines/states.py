"""Memory of weights, gradients and optimizer states, and of ZeRO's buffers, at each stage."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from dstrain.planner.line import MemoryLine, Place
from dstrain.planner.lines.stage_3 import stage_3_lines
from dstrain.planner.lines.state_settings import (
    BUFFER,
    PASS,
    STATE,
    STEP,
    ZERO_PAPER,
    StateSettings,
    make_line,
    optimizer_line,
    replicated_weights,
)

STAGE_1_2 = "DeepSpeed runtime/zero/stage_1_and_2.py"
ALLREDUCE_NUMEL = 500_000_000
"""Gradients that stage 0 copies into one message (DeepSpeed runtime/engine.py, allreduce_no_retain)."""


def state_lines(settings: StateSettings) -> list[MemoryLine]:
    """Return the lines of weights, gradients, master weights, moments and ZeRO's buffers, of one process."""
    if settings.stage == 0:
        return [line for line in _stage_0(settings) if line.num_bytes]
    parts = stage_3_lines(settings) if settings.stage == 3 else _stage_1_and_2(settings)
    return [line for line in parts if line.num_bytes]


def _stage_0(settings: StateSettings) -> Iterator[MemoryLine]:
    trained, width, is_16_bit = settings.trained, settings.weight_bytes, settings.weight_bytes == 2
    source = "DeepSpeed runtime/fp16/unfused_optimizer.py" if is_16_bit else "DeepSpeed runtime/engine.py"
    yield from replicated_weights(settings)
    yield make_line("gradients", (trained, width), "gpu", STATE, ("w T", source))
    if is_16_bit:
        yield make_line("master weights", (trained, 4), "gpu", STATE, ("4 T", source))
        yield make_line("fp32 gradients", (trained, 4), "gpu", STEP, ("4 T", f"{source}, step"))
    yield optimizer_line(settings, 1.0, "gpu", source)
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield make_line(
        "all-reduce message", (message, width), "gpu", PASS,
        ("w min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _stage_1_and_2(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width = 1 / settings.world_size, settings.trained, settings.weight_bytes
    offload = settings.offload("offload_optimizer")
    place: Place = "host" if offload else "gpu"
    yield from replicated_weights(settings)
    yield make_line(
        "master weights", (trained * share, settings.master_bytes), place, STATE,
        ("4 T / N, 2 T / N in bf16", f"{STAGE_1_2}, single_partition_of_fp32_groups"),
    )  # fmt: skip
    yield optimizer_line(settings, share, place, f"{ZERO_PAPER}.1")
    if settings.uses_bf16_optimizer:
        yield from _bf16_optimizer_gradients(settings)
        return
    yield from _offloaded_gradients(settings) if offload else _gradients_on_device(settings)
    if settings.stage == 1 and settings.accumulate > 1:
        # Whole until the last pass of a step, which reduces and frees them.
        yield make_line(
            "sum of gradients",
            (trained * (1 - share), width),
            "gpu",
            PASS,
            ("w T (1 - 1 / N)", f"{STAGE_1_2}, param.grad"),
        )
    zero, copies = settings.zero, 2 if settings.zero.get("overlap_comm") else 1
    if zero.get("contiguous_gradients", True):
        yield make_line(
            "reduce buckets", (float(zero.get("reduce_bucket_size", 5e8)) * copies, width), "gpu", PASS,
            (f"w x reduce_bucket_size{' x 2 (overlap_comm)' if copies == 2 else ''}", f"{STAGE_1_2}, setup_buckets"),
        )  # fmt: skip
    yield make_line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_1_2}, reduce_independent_p_g_buckets_and_remove_grads"),
    )  # fmt: skip


def _bf16_optimizer_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the gradients of bf16 at stage 1 with sums in fp32, which DeepSpeed gives to another optimizer."""
    source, trained = "DeepSpeed runtime/bf16_optimizer.py", settings.trained
    yield make_line("gradients", (trained, 6), "gpu", STATE, ("2 T, and 4 T for the fp32 sum", source))
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield make_line(
        "all-reduce message", (message, 4), "gpu", PASS,
        ("4 min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _gradients_on_device(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width, wide = 1 / settings.world_size, settings.trained, settings.weight_bytes, settings.grad_bytes
    yield make_line("gradients", (trained * share, wide), "gpu", STATE, ("g T / N", f"{ZERO_PAPER}.2"))
    if wide == width:
        yield make_line(
            "gradients across partitions", (max(gradient_overlaps(settings)), width), "gpu", BUFFER,
            ("w (n - own part of n), tensors n across an end of a partition", f"{STAGE_1_2}, get_flat_partition"),
        )  # fmt: skip
    # A flat copy in the type of the master weights; the fp32 sum of 16-bit gradients is already flat.
    yield make_line(
        "flat gradients of the step", (trained * share, 0 if wide != width else settings.master_bytes), "gpu", STEP,
        ("m T / N", "dstrain/distributed/deepspeed_patches.py, flatten_gradients_in_fp32"),
    )  # fmt: skip
    if wide == width and settings.zero.get("contiguous_gradients", True):
        bucket = float(settings.zero.get("reduce_bucket_size", 5e8))
        yield make_line(
            "bucket of the last gradients", (min(bucket, trained), width), "gpu", STEP,
            ("w min(T, reduce_bucket_size): gradients are views of it", f"{STAGE_1_2}, param.grad"),
        )  # fmt: skip


def gradient_overlaps(settings: StateSettings) -> list[int]:
    """Return, for each process, the gradient values that it keeps of other partitions at stages 1 and 2.

    A tensor across the end of a partition has its whole gradient in both processes, whose parts are views of it.
    Partitions are equal parts of the matrices in their order; vectors form a small group of their own.
    """
    matrices = [one.numel for one in settings.shape.tensors if one.is_trainable and len(one.shape) > 1]
    share, overlaps, start = ceil(sum(matrices) / settings.world_size), [0] * settings.world_size, 0
    for size in matrices:
        end = start + size
        for rank in range(start // share, (end - 1) // share + 1):
            overlaps[rank] += size - (min(end, (rank + 1) * share) - max(start, rank * share))
        start = end
    return overlaps


def _offloaded_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    width, largest, own = settings.weight_bytes, settings.largest_trained, settings.trained / settings.world_size
    one = ("w x largest tensor", f"{STAGE_1_2}, temp_grad_buffer")
    yield make_line(
        "gradients",
        (own, settings.master_bytes),
        "host",
        STATE,
        ("4 T / N", f"{STAGE_1_2}, initialize_optimizer_states"),
    )
    yield make_line(
        "copy of the weights", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, param_buffer_of_bit16")
    )
    yield make_line("gradient of one tensor", (largest, width), "host", BUFFER, one)
    yield make_line("copied gradient", (largest, width), "gpu", BUFFER, one)
    if settings.accumulate > 1 and settings.grad_bytes != width:
        formula = ("g T / N, on the GPU also with offload", f"{STAGE_1_2}, _build_compact_grad_partition_buffer")
        yield make_line("sum of gradients", (own, settings.grad_bytes), "gpu", STATE, formula)
    elif settings.accumulate > 1:
        yield make_line(
            "sum of gradients", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, accumulated_grads_in_cpu")
        )
