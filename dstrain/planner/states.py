"""Memory of weights, gradients and optimizer states, and of ZeRO's buffers, at each stage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from dstrain.planner.byte_tables import DTYPE_BYTES, OPTIMIZERS, QUANTIZED_WEIGHTS
from dstrain.planner.line import Kind, MemoryLine, Place, When
from dstrain.planner.shape import ModelShape, ParamTensor

# In formulas: N processes, P parameters, T trained ones, w bytes of a weight, g bytes of an accumulated gradient.

ZERO_PAPER = "Rajbhandari et al., arXiv 1910.02054, section 5"
STAGE_1_2, STAGE_3 = "DeepSpeed runtime/zero/stage_1_and_2.py", "DeepSpeed runtime/zero/stage3.py"
ALLREDUCE_NUMEL = 500_000_000
"""Gradients that stage 0 copies into one message (DeepSpeed runtime/engine.py, allreduce_no_retain)."""


@dataclass(frozen=True, kw_only=True)
class StateSettings:
    """What weights, gradients and optimizer states depend on."""

    shape: ModelShape
    precision: str
    zero: Mapping[str, Any]
    """The block zero_optimization of the completed DeepSpeed JSON."""
    grad_bytes: int
    """Bytes of an accumulated gradient."""
    comm_bytes: int
    """Bytes of a gradient in the bucket of stage 3."""
    accumulate: int
    """Forward passes per step; any number above 1 where it varies."""
    world_size: int
    optimizer: str
    quantize: str | None = None
    hidden_matrices: int = 0
    """Trained values that Muon updates."""

    @property
    def stage(self) -> int:
        """Return the ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of a weight in the run's precision."""
        return DTYPE_BYTES[self.precision]

    @property
    def trained(self) -> int:
        """Return the number of trained parameters."""
        return self.shape.count(trainable=True)

    @property
    def largest_trained(self) -> int:
        """Return the number of values of the largest trained tensor."""
        return self.shape.largest(trainable=True)

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Return True where DeepSpeed replaces ZeRO's optimizer: bf16 at stage 1, with sums in fp32."""
        return self.stage == 1 and self.precision == "bf16" and self.grad_bytes == 4

    def offload(self, name: str) -> str | None:
        """Return the device of offload_optimizer or offload_param: cpu, nvme or None."""
        device = (self.zero.get(name) or {}).get("device", "none")
        return None if device == "none" else str(device)

    def sharded(self, trainable: bool | None = None) -> int:
        """Return the values of one process's partitions at stage 3, where each tensor is padded to a multiple of N."""
        chosen = (one for one in self.shape.kinds if trainable in (None, one[0].is_trainable))
        return sum(ceil(tensor.numel / self.world_size) * count for tensor, count in chosen)


def state_lines(settings: StateSettings) -> list[MemoryLine]:
    """Return the lines of weights, gradients, master weights, moments and ZeRO's buffers, of one process."""
    if settings.stage == 0:
        return [line for line in _stage_0(settings) if line.num_bytes]
    parts = _stage_3(settings) if settings.stage == 3 else _stage_1_and_2(settings)
    return [line for line in parts if line.num_bytes]


def _line(
    name: str, count: tuple[float, float], place: Place, about: tuple[Kind, When], formula_and_source: tuple[str, str]
) -> MemoryLine:
    """Return a line of `count`: a number of values and the bytes of each."""
    return MemoryLine(name, round(count[0] * count[1]), place, about[0], *formula_and_source, when=about[1])


STATE: tuple[Kind, When] = ("state", "always")
BUFFER: tuple[Kind, When] = ("buffer", "always")
PASS: tuple[Kind, When] = ("buffer", "pass")
STEP: tuple[Kind, When] = ("buffer", "step")


def weight_bytes(settings: StateSettings, tensor: ParamTensor) -> float:
    """Return the bytes of one value of a tensor: those of its quantized form where it has one."""
    is_quantized = settings.quantize is not None and tensor.is_linear_weight and not tensor.is_trainable
    return QUANTIZED_WEIGHTS[str(settings.quantize)].per_param if is_quantized else settings.weight_bytes


def _replicated_weights(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the weights by part, trained and frozen, where each process has all of them."""
    for trainable, word in ((True, "weights"), (False, "frozen weights")):
        chosen = [one for one in settings.shape.kinds if one[0].is_trainable == trainable]
        for part in dict.fromkeys(tensor.part for tensor, _ in chosen):
            own = [one for one in chosen if one[0].part == part]
            size = sum(tensor.numel * count * weight_bytes(settings, tensor) for tensor, count in own)
            yield _line(f"{word}: {part}", (size, 1), "gpu", STATE, ("w P", f"{ZERO_PAPER}.1"))


def _moments(settings: StateSettings, share: float, place: Place, source: str) -> MemoryLine:
    known, trained = OPTIMIZERS[settings.optimizer], settings.trained
    size = known.per_param * trained
    if known.per_hidden_param is not None:
        size -= (known.per_param - known.per_hidden_param) * settings.hidden_matrices
    if known.is_factored:
        chosen = [(tensor.shape, count) for tensor, count in settings.shape.kinds if tensor.is_trainable]
        size = known.per_param * sum(count * (sum(one) if len(one) > 1 else one[0]) for one, count in chosen)
    formula = f"{known.per_param:g} T{'' if share == 1 else ' / N'}: {known.states}"
    return _line("optimizer states", (size * share, 1), place, STATE, (formula, f"{known.source}; {source}"))


def _stage_0(settings: StateSettings) -> Iterator[MemoryLine]:
    trained, width, is_16_bit = settings.trained, settings.weight_bytes, settings.weight_bytes == 2
    source = "DeepSpeed runtime/fp16/unfused_optimizer.py" if is_16_bit else "DeepSpeed runtime/engine.py"
    yield from _replicated_weights(settings)
    yield _line("gradients", (trained, width), "gpu", STATE, ("w T", source))
    if is_16_bit:
        yield _line("fp32 master weights", (trained, 4), "gpu", STATE, ("4 T", source))
        yield _line("fp32 gradients", (trained, 4), "gpu", STEP, ("4 T", f"{source}, step"))
    yield _moments(settings, 1.0, "gpu", source)
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield _line(
        "all-reduce message", (message, width), "gpu", PASS,
        ("w min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _stage_1_and_2(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width = 1 / settings.world_size, settings.trained, settings.weight_bytes
    offload = settings.offload("offload_optimizer")
    place: Place = "host" if offload else "gpu"
    yield from _replicated_weights(settings)
    yield _line(
        "fp32 master weights", (trained * share, 4), place, STATE,
        ("4 T / N", f"{STAGE_1_2}, single_partition_of_fp32_groups"),
    )  # fmt: skip
    yield _moments(settings, share, place, f"{ZERO_PAPER}.1")
    if settings.uses_bf16_optimizer:
        yield from _bf16_optimizer_gradients(settings)
        return
    yield from _offloaded_gradients(settings) if offload else _gradients_on_device(settings)
    if settings.stage == 1 and settings.accumulate > 1:
        # Whole until the last pass of a step, which reduces and frees them.
        yield _line(
            "sum of gradients", (trained * (1 - share), width), "gpu", PASS, ("w T (1 - 1 / N)", f"{STAGE_1_2}, param.grad")
        )
    zero, copies = settings.zero, 2 if settings.zero.get("overlap_comm") else 1
    if zero.get("contiguous_gradients", True):
        yield _line(
            "reduce buckets", (float(zero.get("reduce_bucket_size", 5e8)) * copies, width), "gpu", PASS,
            (f"w x reduce_bucket_size{' x 2 (overlap_comm)' if copies == 2 else ''}", f"{STAGE_1_2}, setup_buckets"),
        )  # fmt: skip
    yield _line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_1_2}, reduce_independent_p_g_buckets_and_remove_grads"),
    )  # fmt: skip


def _bf16_optimizer_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    """Yield the gradients of bf16 at stage 1 with sums in fp32, which DeepSpeed gives to another optimizer."""
    source, trained = "DeepSpeed runtime/bf16_optimizer.py", settings.trained
    yield _line("gradients", (trained, 6), "gpu", STATE, ("2 T, and 4 T for the fp32 sum", source))
    message = min(trained, max(ALLREDUCE_NUMEL, settings.largest_trained))
    yield _line(
        "all-reduce message", (message, 4), "gpu", PASS,
        ("4 min(T, 500 million)", "DeepSpeed runtime/engine.py, allreduce_no_retain"),
    )  # fmt: skip


def _gradients_on_device(settings: StateSettings) -> Iterator[MemoryLine]:
    share, trained, width, wide = 1 / settings.world_size, settings.trained, settings.weight_bytes, settings.grad_bytes
    yield _line("gradients", (trained * share, wide), "gpu", STATE, ("g T / N", f"{ZERO_PAPER}.2"))
    # A flat copy, and one in fp32 if gradients are not; the fp32 sum of 16-bit gradients is already flat and in fp32.
    extra = 0 if wide != width else 4 if wide == 4 else 4 + wide
    yield _line(
        "flat gradients of the step", (trained * share, extra), "gpu", STEP, ("4 T / N, and g T / N", f"{STAGE_1_2}, step")
    )


def _offloaded_gradients(settings: StateSettings) -> Iterator[MemoryLine]:
    width, largest, own = settings.weight_bytes, settings.largest_trained, settings.trained / settings.world_size
    one = ("w x largest tensor", f"{STAGE_1_2}, temp_grad_buffer")
    yield _line("gradients", (own, 4), "host", STATE, ("4 T / N", f"{STAGE_1_2}, initialize_optimizer_states"))
    yield _line("copy of the weights", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, param_buffer_of_bit16"))
    yield _line("gradient of one tensor", (largest, width), "host", BUFFER, one)
    yield _line("copied gradient", (largest, width), "gpu", BUFFER, one)
    if settings.accumulate > 1 and settings.grad_bytes != width:
        formula = ("g T / N, on the GPU also with offload", f"{STAGE_1_2}, _build_compact_grad_partition_buffer")
        yield _line("sum of gradients", (own, settings.grad_bytes), "gpu", STATE, formula)
    elif settings.accumulate > 1:
        yield _line("sum of gradients", (own, width), "host", BUFFER, ("w T / N", f"{STAGE_1_2}, accumulated_grads_in_cpu"))


def _stage_3(settings: StateSettings) -> Iterator[MemoryLine]:
    trained = settings.sharded(True)
    optimizer, params = settings.offload("offload_optimizer"), settings.offload("offload_param")
    place = _place(optimizer)
    yield from _sharded_weights(settings, params)
    # Also in fp32: DeepSpeed compares a torch.device with a name, and so always copies the partition.
    yield _line("fp32 master weights", (trained, 4), place, STATE, ("4 T / N", f"{STAGE_3}, fp32_partitioned_groups_flat"))
    yield _moments(settings, trained / max(settings.trained, 1), place, f"{ZERO_PAPER}.3")
    on_host: Place = "host" if optimizer else "gpu"
    yield _line("gradients", (trained, settings.grad_bytes), on_host, STATE, ("g T / N", f"{STAGE_3}, grad_partitions_flat_buffer"))
    group = _largest_sub_group(settings)
    if optimizer == "cpu":
        yield _line("fp32 gradients", (trained, 4), "host", STATE, ("4 T / N", f"{STAGE_3}, initialize_optimizer_states"))
    elif optimizer == "nvme":
        count = int(settings.zero["offload_optimizer"].get("buffer_count", 4))
        formula = f"{count} (buffer_count) x 4 x largest sub-group"
        yield _line("fp32 gradients", (trained, 4), "nvme", STATE, ("4 T / N", f"{STAGE_3}, swap_out_gradients"))
        yield _line("swap buffers of the optimizer", (count * group, 4), "host", BUFFER, (formula, "DeepSpeed runtime/swap_tensor/optimizer_utils.py"))
    else:
        yield _line("fp32 gradients of a sub-group", (group, 4), "gpu", STEP, ("4 x largest sub-group", f"{STAGE_3}, step"))
    yield from _stage_3_buffers(settings, params)


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
            yield _line(f"{word}: {part}", (size, 1), _place(offload), STATE, ("w P / N", f"{ZERO_PAPER}.3"))
    if offload == "nvme":
        block = settings.zero["offload_param"]
        count = float(block.get("buffer_count", 5)) * float(block.get("buffer_size", 1e8))
        yield _line(
            "swap buffers of the weights", (count, settings.weight_bytes), "host", BUFFER,
            ("buffer_count x buffer_size x w", "DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py"),
        )  # fmt: skip


def _stage_3_buffers(settings: StateSettings, offload: str | None) -> Iterator[MemoryLine]:
    zero, shape, width = settings.zero, settings.shape, settings.weight_bytes
    threshold = float(zero.get("stage3_param_persistence_threshold", 1e5))
    small = sum(tensor.numel * count for tensor, count in shape.kinds if tensor.numel <= threshold)
    total = shape.count()
    is_copied = settings.world_size > 1 or offload is not None  # else the gathered weight is the partition itself
    if is_copied:
        yield _line(
            "small weights kept whole", (small, width), "gpu", BUFFER,
            ("w x tensors up to stage3_param_persistence_threshold", f"{STAGE_3}, persistent_parameters"),
        )  # fmt: skip
        limit = float(zero.get("stage3_max_live_parameters", 1e9))
        # A module's own weights are gathered whatever the limit is.
        live = min(total - small, max(limit, shape.largest() + float(zero.get("stage3_prefetch_bucket_size", 5e7))))
        yield _line(
            "gathered weights", (max(live, 0), width), "gpu", PASS,
            ("w x min(P, max(stage3_max_live_parameters, largest tensor + prefetch))",
             "DeepSpeed runtime/zero/partitioned_param_coordinator.py"),
        )  # fmt: skip
    if zero.get("contiguous_gradients", True):
        yield _line(
            "reduce bucket", (float(zero.get("reduce_bucket_size", 5e8)), settings.comm_bytes), "gpu", BUFFER,
            ("reduce_bucket_size x bytes", f"{STAGE_3}, ipg_buckets"),
        )  # fmt: skip
    yield _line(
        "gradient of one tensor", (settings.largest_trained, width), "gpu", PASS,
        ("w x largest tensor", f"{STAGE_3}, reduce_independent_p_g_buckets"),
    )  # fmt: skip
