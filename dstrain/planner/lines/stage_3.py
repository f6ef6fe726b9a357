"""Memory of weights, gradients and optimizer states at ZeRO stage 3, and of its buffers."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from dstrain.planner.line import MemoryLine, Place
from dstrain.planner.lines.state_settings import (
    BUFFER,
    PASS,
    STATE,
    STEP,
    ZERO_PAPER,
    StateSettings,
    make_line,
    optimizer_line,
    weight_bytes,
)

STAGE_3 = "DeepSpeed runtime/zero/stage3.py"


def stage_3_lines(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the lines of one process."""
    trained = settings.sharded(True)
    optimizer, params = settings.offload("offload_optimizer"), settings.offload("offload_param")
    place = _place(optimizer)
    yield from _sharded_weights(settings, params)
    # Also in fp32: DeepSpeed compares a torch.device with a name, and so always copies the partition.
    yield make_line(
        "master weights", (trained, settings.master_bytes), place, STATE,
        ("4 T / N, 2 T / N in bf16", f"{STAGE_3}, fp32_partitioned_groups_flat"),
    )  # fmt: skip
    yield optimizer_line(settings, trained / max(settings.trained, 1), place, f"{ZERO_PAPER}.3")
    yield from _gradients(settings, optimizer)
    yield from _stage_3_buffers(settings, params)


def _gradients(settings: StateSettings, optimizer: str | None) -> Iterator[MemoryLine]:
    trained, group, width = settings.sharded(True), _largest_sub_group(settings), settings.master_bytes
    on_host: Place = "host" if optimizer else "gpu"
    sums = ("g T / N", f"{STAGE_3}, grad_partitions_flat_buffer")
    yield make_line("gradients", (trained, settings.grad_bytes), on_host, STATE, sums)
    if optimizer is None:
        own = ("4 x largest sub-group", f"{STAGE_3}, step")
        yield make_line("gradients of a sub-group", (group, width), "gpu", STEP, own)
        return
    source = f"{STAGE_3}, initialize_optimizer_states"
    yield make_line("gradients of the optimizer", (trained, width), _place(optimizer), STATE, ("4 T / N", source))
    if optimizer == "nvme":
        count = int(settings.zero["offload_optimizer"].get("buffer_count", 4))
        swap = (f"{count} (buffer_count) x 4 x largest sub-group", "DeepSpeed runtime/swap_tensor/optimizer_utils.py")
        yield make_line("swap buffers of the optimizer", (count * group, 4), "host", BUFFER, swap)


def _place(offload: str | None) -> Place:
    return "nvme" if offload == "nvme" else "host" if offload else "gpu"


def _largest_sub_group(settings: StateSettings) -> float:
    """Return the values of one process in the largest sub-group, which is closed by the tensor that exceeds its size."""
    largest = ceil(settings.largest_trained / settings.world_size)
    return min(settings.sharded(True), float(settings.zero.get("sub_group_size", 1e9)) + largest)


def _sharded_weights(settings: StateSettings, offload: str | None) -> Iterator[MemoryLine]:
    for trainable, word in ((True, "weights"), (False, "frozen weights")):
        chosen = [one for one in settings.shape.kinds if one[0].is_trainable == trainable]
        for part in dict.fromkeys(tensor.part for tensor, _ in chosen):
            own = [one for one in chosen if one[0].part == part]
            numbers = ((ceil(tensor.numel / settings.world_size) * count, tensor) for tensor, count in own)
            size = sum(number * weight_bytes(settings, tensor) for number, tensor in numbers)
            yield make_line(f"{word}: {part}", (size, 1), _place(offload), STATE, ("w P / N", f"{ZERO_PAPER}.3"))
    if offload == "nvme":
        block = settings.zero["offload_param"]
        count = float(block.get("buffer_count", 5)) * float(block.get("buffer_size", 1e8))
        yield make_line(
            "swap buffers of the weights", (count, settings.weight_bytes), "host", BUFFER,
            ("buffer_count x buffer_size x w", "DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py"),
        )  # fmt: skip


def _stage_3_buffers(settings: StateSettings, offload: str | None) -> Iterator[MemoryLine]:
    zero, shape, width = settings.zero, settings.shape, settings.weight_bytes
    threshold = float(zero.get("stage3_param_persistence_threshold", 1e5))
    small = sum(tensor.numel * count for tensor, count in shape.kinds if tensor.numel <= threshold)
    total = shape.count()
    # Else the gathered weight is the partition itself.
    is_copied = settings.world_size > 1 or (offload is not None and settings.device == "cuda")
    if is_copied:
        yield make_line(
            "small weights kept whole", (small, width), "gpu", BUFFER,
            ("w x tensors up to stage3_param_persistence_threshold", f"{STAGE_3}, persistent_parameters"),
        )  # fmt: skip
        limit = float(zero.get("stage3_max_live_parameters", 1e9))
        # A module's own weights are gathered whatever the limit is.
        live = min(total - small, max(limit, shape.largest() + float(zero.get("stage3_prefetch_bucket_size", 5e7))))
        yield make_line(
            "gathered weights", (max(live, 0), width), "gpu", PASS,
            ("w x min(P, max(stage3_max_live_parameters, largest tensor + prefetch))",
             "DeepSpeed runtime/zero/partitioned_param_coordinator.py"),
        )  # fmt: skip
    if (group := int(zero.get("zero_hpz_partition_size", 1))) > 1:
        yield make_line(
            "secondary partition of the weights", (total / group, width), "gpu", BUFFER,
            ("w P / zero_hpz_partition_size", "Wang et al., arXiv 2306.10209, section 3.2"),
        )  # fmt: skip
    if zero.get("contiguous_gradients", True):
        yield make_line(
            "reduce bucket", (float(zero.get("reduce_bucket_size", 5e8)), settings.comm_bytes), "gpu", BUFFER,
            ("reduce_bucket_size x bytes", f"{STAGE_3}, ipg_buckets"),
        )  # fmt: skip
    yield make_line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_3}, reduce_independent_p_g_buckets"),
    )  # fmt: skip
