"""Lines of a memory plan: tables of rows, each with its name, place, moment, formula and source, for one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from math import ceil
from typing import Any, Literal, NamedTuple

from dstrain.models.chunk_sizes import BLOCK_SHARE, KEPT_SHARE, MAX_CHUNK_BYTES, SLICE_SHARE
from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.planner.shapes import PARTS, ModelShape, ParamTensor, Part, VisionShape, part_of
from dstrain.planner.workload import Workload

Place = Literal["gpu", "host", "nvme"]
Kind = Literal["state", "buffer", "activation", "reserve"]
Moment = Literal["encoder", "scores", "head", "last norm", "layer", "reduction", "embedding", "all-reduce", "update"]
MOMENTS: dict[Moment, str] = {
    "encoder": "a frozen encoder computes the features of the images",
    "scores": "the head computes the scores of the targets",
    "head": "the backward pass of the head",
    "last norm": "the backward pass of the last norm",
    "layer": "the backward pass of the last layer",
    "reduction": "a bucket of gradients is reduced for the first time, in the backward pass of a layer",
    "embedding": "the end of the backward pass: the embedding, or a trained encoder",
    "all-reduce": "processes sum all gradients at once",
    "update": "the optimizer updates the weights",
}
"""Moments of the last pass of a step at which most memory may be in use, in their order."""
Span = tuple[Moment, Moment]
"""First and last moment."""
ALWAYS: Span = ("encoder", "update")


@dataclass(frozen=True)
class MemoryLine:
    """Memory of one process."""

    name: str
    num_bytes: int
    place: Place
    """`gpu` means the memory of the process's own device, on a CPU run its host memory."""
    kind: Kind
    formula: str
    source: str
    """Paper and equation, or file of DeepSpeed, torch or dstrain, from which the formula follows."""
    first: Moment = "encoder"
    last: Moment = "update"
    """The moments from and to which the memory is in use; the peak is at the moment of the largest sum."""

    @property
    def moments(self) -> tuple[Moment, ...]:
        """Return the moments at which the memory is in use."""
        every = tuple(MOMENTS)
        return every[every.index(self.first) : every.index(self.last) + 1]

    @property
    def when(self) -> str:
        """Return the moments as a phrase; empty for all of them."""
        if (self.first, self.last) == ALWAYS:
            return ""
        return self.first if self.first == self.last else f"{self.first} to {self.last}"


def sum_bytes(lines: Iterable[MemoryLine], place: Place, moment: Moment | None = None) -> int:
    """Return the bytes of lines at a place and a moment (None: at the peak)."""
    sums = dict.fromkeys(MOMENTS, 0)
    for line in lines:
        for at in line.moments if line.place == place else ():
            sums[at] += line.num_bytes
    return max(sums.values()) if moment is None else sums[moment]


DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class OptimizerBytes:
    """Bytes of an optimizer's state per trained parameter, without the fp32 master weights."""

    per_param: float
    states: str
    """The tensors it keeps, for the formula of a plan."""
    source: str
    has_momentum: bool = False
    """True where the hidden matrices have one momentum, in the type of the gradients where ZeRO holds it."""
    is_factored: bool = False
    """True where a matrix of R rows and C columns keeps R + C values instead of `per_param` bytes per value."""


OPTIMIZERS: dict[str, OptimizerBytes] = {
    "adamw": OptimizerBytes(8, "two fp32 moments", "Kingma and Ba, arXiv 1412.6980, algorithm 1"),
    "sgd": OptimizerBytes(0, "no state", "torch.optim.SGD without momentum"),
    # Codes of 8 bits, and an fp32 scale of every 256.
    "adamw_8bit": OptimizerBytes(2 + 8 / 256, "two 8-bit moments", "Dettmers et al., arXiv 2110.02861, section 2"),
    "paged_adamw_8bit": OptimizerBytes(
        2 + 8 / 256, "two 8-bit moments; paged to the host where the GPU is full", "arXiv 2305.14314, section 3"
    ),
    "lion": OptimizerBytes(4, "one fp32 average", "Chen et al., arXiv 2302.06675, algorithm 2"),
    "muon": OptimizerBytes(
        8, "two fp32 moments; one momentum for hidden matrices", "DeepSpeed runtime/zero/muon", has_momentum=True
    ),
    "adafactor": OptimizerBytes(
        4, "row and column means of matrices", "Shazeer and Stern, arXiv 1804.04235, algorithm 4", is_factored=True
    ),
}
"""optim.name -> bytes of state."""
QUANTIZED_WEIGHTS = {
    # Blocks of 64 with an 8-bit constant each, and an fp32 constant of every 256 of these: Dettmers et al., arXiv
    # 2305.14314, section 3.
    "nf4": 0.5 + 1 / 64 + 4 / (64 * 256),
    # One fp32 scale per row, which is less than 0.1 % of a matrix with 4096 columns: arXiv 2208.07339, section 2.
    "int8": 1.0,
}
"""model.quantize -> bytes per value of a frozen linear weight, its constants included. Embeddings, norms, the head and
adapters keep the run's precision."""
QUANTIZED_CODES = {"nf4": 0.5, "int8": 1.0}
"""Those without constants: what stage 3 shards and gathers."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What the rows are computed from: the model, its largest pass, the settings, for one of equal processes."""

    shape: ModelShape
    workload: Workload
    precision: str = "bf16"
    zero: Mapping[str, Any] = field(default_factory=dict)
    """The block zero_optimization of the completed DeepSpeed JSON."""
    grad_bytes: int = 2
    """Bytes of an accumulated gradient."""
    comm_bytes: int = 2
    """Bytes of a gradient in the bucket of stage 3."""
    master_bytes: int = 4
    """Bytes of a master weight and of each value of the optimizer: 2 with bf16_master_weights_and_grads."""
    accumulate: int = 1
    """Forward passes per step; any number above 1 where it varies."""
    world_size: int = 1
    optimizer: str = "adamw"
    quantize: str | None = None
    has_fused_kernels: bool = False
    """True where norms, gated MLPs and rotary embeddings are computed by liger-kernel (dstrain/models/fused_kernels.py)."""
    checkpoints_on_host: bool = False
    """True with cpu_checkpointing: the inputs of recomputed layers are in host memory."""
    reference_params: int = 0
    """Parameters of a reference that is a model of its own in memory."""
    reward_params: int = 0
    """Parameters of the reward models that score in each step."""
    prefetch: int = 0
    """Steps whose batches are loaded in advance."""
    saves_in_background: bool = False
    has_bf16: bool = True
    """False where the GPU has no bf16: compute capability below 8.0."""
    expandable_segments: bool = True
    """False where the allocator of the GPU is set otherwise."""
    tensor_bytes: int = 0
    """Peak of the tensors on the device, once it is known."""

    @cached_property
    def stage(self) -> int:
        """ZeRO stage."""
        return int(self.zero.get("stage", 0))

    @property
    def width(self) -> int:
        """Bytes of a value in the run's precision."""
        return DTYPE_BYTES[self.precision]

    @property
    def is_16_bit(self) -> bool:
        """True in bf16 and fp16."""
        return self.width == 2

    @property
    def device(self) -> str:
        """The kind of device: cuda or cpu."""
        return self.workload.device

    @cached_property
    def trained(self) -> int:
        """Trained parameters."""
        return self.shape.count(trainable=True)

    @cached_property
    def largest_trained(self) -> int:
        """Values of the largest trained tensor."""
        return max((one.numel for one, _ in self.shape.kinds if one.is_trainable), default=0)

    @cached_property
    def embedding_numel(self) -> int:
        """Values of the embedding, if it is trained and has a head to match it."""
        return self._count_trained("embedding")

    @cached_property
    def head_numel(self) -> int:
        """Values of the matrix of the head, if it is trained; that of the embedding where both are one."""
        return self.embedding_numel * self.has_head if self.shape.tied else self._count_trained("head")

    def _count_trained(self, part: Part) -> int:
        sizes = (one.numel for one, _ in self.shape.kinds if one.is_trainable and one.part == part)
        return max(sizes, default=0)

    @cached_property
    def largest_inside(self) -> int:
        """Values of the largest trained tensor that is neither the embedding nor the head."""
        others = (one for one, _ in self.shape.kinds if one.part not in ("embedding", "head"))
        return max((one.numel for one in others if one.is_trainable), default=0)

    @cached_property
    def sharded(self) -> int:
        """Trained values of one process at stage 3, where each tensor is padded to a multiple of N."""
        return sum(ceil(one.numel / self.world_size) * count for one, count in self.shape.kinds if one.is_trainable)

    @cached_property
    def sub_group(self) -> float:
        """Values of one process in the largest sub-group, which is closed by the tensor that exceeds its size."""
        return min(self.sharded, self.setting("sub_group_size", 1e9) + ceil(self.largest_trained / self.world_size))

    @property
    def largest_partition(self) -> int:
        """Values of the largest tensor that the optimizer gets: a parameter, a partition of the matrices, a sub-group."""
        if self.stage == 0:
            return self.largest_trained
        if self.stage == 3:
            return int(self.sub_group)
        chosen = (one.numel * count for one, count in self.shape.kinds if one.is_trainable and len(one.shape) > 1)
        return ceil(sum(chosen) / self.world_size)

    @cached_property
    def small(self) -> int:
        """Values of the tensors that stage 3 keeps whole."""
        threshold = self.setting("stage3_param_persistence_threshold", 1e5)
        sizes = ((self.gathered_values(one), count) for one, count in self.shape.kinds)
        return sum(size * count for size, count in sizes if size <= threshold)

    @cached_property
    def gathered(self) -> int:
        """Values that stage 3 shards and gathers, in the run's precision."""
        return sum(self.gathered_values(one) * count for one, count in self.shape.kinds)

    def gathered_values(self, tensor: ParamTensor) -> int:
        """Return the values that DeepSpeed sees of a tensor: codes are stored as values of the run's precision."""
        return ceil(tensor.numel * self.code_bytes(tensor) / self.width)

    @property
    def optimizer_device(self) -> str | None:
        """cpu or nvme where the optimizer is offloaded, or None."""
        return self._offload("offload_optimizer")

    @property
    def offloaded_share(self) -> float:
        """Share of the offloaded optimizer's values that is off the GPU, by `offload_optimizer.ratio`.

        Whole subgroups stay on the GPU, the first ones, and all but the last are full: DeepSpeed rounds their number
        down (`DeepSpeedZeroOptimizer_Stage3._create_fp32_partitions`, 0.19).
        """
        ratio = float((self.zero.get("offload_optimizer") or {}).get("ratio", 1.0))
        if self.device != "cuda" or self.stage != 3 or not self.sharded:
            return 1.0
        size = max(1, self.setting("sub_group_size", 1e9))
        kept = int((1 - ratio) * ceil(self.sharded / size)) * size
        return 1 - min(1.0, kept / self.sharded)

    @property
    def weights_device(self) -> str | None:
        """cpu or nvme where the weights are offloaded, or None."""
        return self._offload("offload_param") if self.stage == 3 else None

    def _offload(self, name: str) -> str | None:
        device = (self.zero.get(name) or {}).get("device", "none")
        return None if device == "none" else str(device)

    def setting(self, name: str, default: float) -> float:
        """Return a number of the block zero_optimization."""
        return float(self.zero.get(name, default))

    @property
    def bucket(self) -> float:
        """Values of a reduce bucket; 0 where gradients are not copied into one."""
        size = self.setting("reduce_bucket_size", 5e8) if self.zero.get("contiguous_gradients", True) else 0
        # Host memory has no pages that nothing was written to.
        return min(size, self.trained) if self.device == "cpu" else size

    @property
    def nccl_bytes(self) -> int:
        """Memory of NCCL: of groups of all processes, and of those that share a second partition or a sequence."""
        if self.world_size == 1:
            return 0
        has_inner = 1 < self.setting("zero_hpz_partition_size", 1) < self.world_size
        # Quantized gradients are exchanged by an all-to-all (deepspeed runtime/comm/coalesced_collectives.py).
        has_all_to_all = bool(self.zero.get("zero_quantized_gradients"))
        groups = 1 + has_inner + (self.workload.sequence > 1)
        return groups * COMMUNICATOR_BYTES + has_all_to_all * ALL_TO_ALL_BYTES

    @property
    def buckets(self) -> int:
        """Reduce buckets of stages 1 and 2."""
        return 2 if self.zero.get("overlap_comm") else 1

    @property
    def is_gathered(self) -> bool:
        """True where stage 3 copies weights to gather them; else the gathered weight is the partition itself."""
        return self.world_size > 1 or (self.weights_device is not None and self.device == "cuda")

    @property
    def sums_in_wider_type(self) -> bool:
        """True where gradients are added in another type than they are computed in."""
        return self.grad_bytes != self.width

    def is_quantized(self, tensor: ParamTensor) -> bool:
        """Return True for a tensor that is stored in its quantized form: a frozen linear weight of the language model."""
        return (
            self.quantize is not None
            and tensor.part == "layers"
            and tensor.is_linear_weight
            and not tensor.is_trainable
        )

    def weight_bytes(self, tensor: ParamTensor) -> float:
        """Return the bytes of one value of a tensor: those of its quantized form where it has one."""
        return QUANTIZED_WEIGHTS[str(self.quantize)] if self.is_quantized(tensor) else self.width

    def code_bytes(self, tensor: ParamTensor) -> float:
        """Return `weight_bytes` without the constants of a quantized form."""
        return QUANTIZED_CODES[str(self.quantize)] if self.is_quantized(tensor) else self.width

    @cached_property
    def scale_bytes(self) -> float:
        """Bytes of the constants of all quantized weights."""
        return sum(
            (self.weight_bytes(one) - self.code_bytes(one)) * one.numel * count for one, count in self.shape.kinds
        )

    @cached_property
    def largest_quantized(self) -> int:
        """Values of the largest quantized weight; 0 where there is none."""
        return max((one.numel for one, _ in self.shape.kinds if self.is_quantized(one)), default=0)

    @cached_property
    def part_bytes(self) -> dict[tuple[Part, bool], float]:
        """(part, whether it is trained) -> bytes of its weights in one process."""
        found: dict[tuple[Part, bool], float] = {}
        for tensor, count in self.shape.kinds:
            size = tensor.numel * self.weight_bytes(tensor)
            if self.stage == 3:
                size = ceil(self.gathered_values(tensor) / self.world_size) * self.width
            key = tensor.part, tensor.is_trainable
            found[key] = found.get(key, 0) + size * count
        return found

    @cached_property
    def hidden(self) -> int:
        """Trained values of the hidden matrices, which Muon updates."""
        return sum(one.numel * count for one, count in self.shape.kinds if one.is_trainable and _is_hidden(one))

    @property
    def momentum_bytes(self) -> int:
        """Bytes of a value of Muon's momentum."""
        if self.stage == 0 or self.optimizer_device:
            return self.master_bytes
        return self.width if self.stage == 3 else self.grad_bytes

    @cached_property
    def state_bytes(self) -> float:
        """Bytes of the optimizer's states, of all processes."""
        known, size = OPTIMIZERS[self.optimizer], 0.0
        for tensor, count in self.shape.kinds:
            per_param = known.per_param * self.master_bytes / 4
            if known.has_momentum and _is_hidden(tensor):
                per_param = self.momentum_bytes
            values = sum(tensor.shape) if known.is_factored and len(tensor.shape) > 1 else tensor.numel
            size += per_param * values * count * tensor.is_trainable
        return size

    @cached_property
    def layers(self) -> tuple[LayerGraph, ...]:
        """The graph of each decoder layer, from the first to the last."""
        return read_graphs(self.shape, self.workload.has_adapter_dropout)

    @cached_property
    def layer_sizes(self) -> list[LayerBytes]:
        """What each layer keeps per token between its own forward and backward pass."""
        return [layer_bytes(self, *one) for one in zip(self.layers, self.recomputed, strict=True)]

    @cached_property
    def recomputed(self) -> list[bool]:
        """Whether each layer is recomputed."""
        return choose_layers(len(self.layers), self.workload.checkpointed)

    @cached_property
    def layers_at_reduction(self) -> int:
        """Layers whose backward pass is not over when the first bucket of gradients is full.

        The backward pass begins with the last layer. At stage 0 and 3 all layers count.
        """
        numels = [0] * len(self.layers)
        for tensor in self.shape.tensors:
            index = layer_index(tensor.name)
            if tensor.is_trainable and index is not None and part_of(tensor.name) == "layers":
                numels[index] += tensor.numel
        # A head of its own comes first. A tied one comes last, with the embedding.
        left = self.bucket - (0 if self.shape.tied else self.head_numel)
        if self.stage not in (1, 2) or left < 0:
            return len(numels)
        remaining = len(numels)
        while remaining > 0 and numels[remaining - 1] <= left:
            left -= numels[remaining - 1]
            remaining -= 1
        return remaining

    def has_tiles(self, is_recomputed: bool) -> bool:
        """Return True where norms and dense MLPs run in tiles: in recomputed layers, and in others if the recipe says so."""
        workload = self.workload
        return 0 < workload.tile_tokens < workload.tokens and (is_recomputed or workload.tiles_all_layers)

    @cached_property
    def trained_parts(self) -> set[Part]:
        """Parts of the model in which anything is trained; adapters count for the part that they adapt."""
        return {part_of(one.name.replace(".lora_", ".")) for one in self.shape.tensors if one.is_trainable}

    @property
    def vision(self) -> VisionShape | None:
        """The vision encoder, if a pass has images."""
        return self.shape.vision if self.workload.images else None

    @property
    def positions(self) -> int:
        """Positions of all images of a pass in the encoder."""
        if self.vision is None:
            return 0
        if self.workload.image_tokens:
            return self.workload.image_tokens * self.vision.patches // self.vision.tokens
        return self.vision.patches * self.workload.images

    @property
    def has_head(self) -> bool:
        """True where logits are computed."""
        return not self.workload.is_scored and self.shape.vocab > 1

    @property
    def chunk(self) -> int:
        """Bytes of the largest chunk of logits."""
        return MAX_CHUNK_BYTES[self.device]

    @cached_property
    def kept_targets(self) -> int:
        """Targets whose errors are kept for the gradient of the head; 0 where the backward pass computes them again."""
        limit = int(self.chunk * KEPT_SHARE[self.device]) // (self.width * self.shape.vocab)
        return self.workload.targets if self.trains_head and self.workload.targets <= max(1, limit) else 0

    @property
    def recomputes_errors(self) -> bool:
        """True where the backward pass computes the logits of all targets once more."""
        return self.trains_head and self.kept_targets < self.workload.targets

    @cached_property
    def trains_head(self) -> bool:
        """True where the weight of the head has a gradient."""
        part = "embedding" if self.shape.tied else "head"
        return self.has_head and any(kind.is_trainable for kind, _ in self.shape.kinds if kind.part == part)


class Row(NamedTuple):
    """A row of a table; it makes no line where its size is 0."""

    name: str
    place: Place | Literal["optimizer", "weights", "inputs"]
    """optimizer, weights, inputs: where the DeepSpeed JSON puts the optimizer's states, the weights, or the inputs of
    recomputed layers."""
    kind: Kind
    span: Span | Callable[[PlanInputs], Span]
    size: Callable[[PlanInputs], float]
    """Bytes of one process."""
    formula: str | Callable[[PlanInputs], str]
    source: str | Callable[[PlanInputs], str]

    def lines(self, run: PlanInputs) -> Iterator[MemoryLine]:
        """Yield the line of a run, two for an optimizer that is offloaded in part; none where it needs nothing."""
        size = round(self.size(run))
        if not size:
            return
        kind, place = self.kind, self.place
        first, last = self.span(run) if callable(self.span) else self.span
        if place == "inputs":
            place, (first, last) = ("host", ALWAYS) if run.checkpoints_on_host else ("gpu", (first, last))
        elif place == "optimizer" or place == "weights":
            device = run.optimizer_device if place == "optimizer" else run.weights_device
            place = "nvme" if device == "nvme" and run.stage == 3 else "host" if device else "gpu"
        formula, source = (text if isinstance(text, str) else text(run) for text in (self.formula, self.source))
        if place == "host" and self.place == "optimizer" and run.offloaded_share < 1:
            stays = round(size * (1 - run.offloaded_share))
            yield MemoryLine(self.name, stays, "gpu", kind, f"(1 - ratio) x ({formula})", TWIN_FLOW, first, last)
            size, formula = size - stays, f"ratio x ({formula})"
        yield MemoryLine(self.name, size, place, kind, formula, source, first, last)


KEPT: Span = ("scores", "reduction")
"""Of what autograd keeps until the first reduction."""
HEAD: Span = ("scores", "head")
LAYER: Span = ("layer", "reduction")
BACKWARD: Span = ("layer", "embedding")
EMBEDDING: Span = ("embedding", "embedding")
ALL_REDUCE: Span = ("all-reduce", "all-reduce")
UPDATE: Span = ("update", "update")

ZERO_PAPER = "Rajbhandari et al., arXiv 1910.02054, section 5"
ENGINE = "DeepSpeed runtime/engine.py"
STAGE_1_2 = "DeepSpeed runtime/zero/stage_1_and_2.py"
STAGE_3 = "DeepSpeed runtime/zero/stage3.py"
TWIN_FLOW = f"{STAGE_3}, subgroup_to_device"
BF16_OPTIMIZER = "DeepSpeed runtime/bf16_optimizer.py"
HEADS = "dstrain/models/heads.py"
ALLREDUCE_NUMEL = 500_000_000
"""Gradients that stage 0 copies into one message (DeepSpeed runtime/engine.py, allreduce_no_retain)."""


def _message(run: PlanInputs) -> int:
    return min(run.trained, max(ALLREDUCE_NUMEL, run.largest_trained)) if run.world_size > 1 else 0


def _stage_0_source(run: PlanInputs) -> str:
    return "DeepSpeed runtime/fp16/unfused_optimizer.py" if run.is_16_bit else ENGINE


def _state_formula(run: PlanInputs) -> str:
    known = OPTIMIZERS[run.optimizer]
    is_whole = run.stage == 0 or run.world_size == 1
    return f"{known.per_param * run.master_bytes / 4:g} T{'' if is_whole else ' / N'}: {known.states}"


def _state_source(run: PlanInputs) -> str:
    where = {0: _stage_0_source(run), 3: f"{ZERO_PAPER}.3"}.get(run.stage, f"{ZERO_PAPER}.1")
    return f"{OPTIMIZERS[run.optimizer].source}; {where}"


def _swap_buffers(run: PlanInputs) -> float:
    block = run.zero["offload_param"] if run.weights_device == "nvme" else {}
    return float(block.get("buffer_count", 5)) * float(block.get("buffer_size", 1e8)) if block else 0


def _buffer_count(run: PlanInputs) -> int:
    return int(run.zero["offload_optimizer"].get("buffer_count", 4)) if run.optimizer_device == "nvme" else 0


def _gathered(run: PlanInputs) -> float:
    """Return the values of gathered weights: a module's own weights are gathered whatever the limit is."""
    limit = max(
        run.setting("stage3_max_live_parameters", 1e9),
        run.shape.largest_module + run.setting("stage3_prefetch_bucket_size", 5e7),
    )
    return min(run.gathered - run.small, limit) if run.is_gathered else 0


def gradient_overlaps(run: PlanInputs) -> dict[int, int]:
    """Return process -> gradient values that it keeps of other partitions at stages 1 and 2.

    A tensor across the end of a partition has its whole gradient in both processes, whose parts are views of it.
    Partitions are equal parts of the matrices in their order; vectors form a small group of their own. Of the processes
    whose partition is inside one tensor, which are equal, the first one is in the result.
    """
    matrices = [one.numel for one in run.shape.tensors if one.is_trainable and len(one.shape) > 1]
    share, start = ceil(sum(matrices) / run.world_size), 0
    overlaps: dict[int, int] = {0: 0}
    for size in matrices:
        end = start + size
        first, last = start // share, (end - 1) // share
        for rank in {first, min(first + 1, last), last}:
            overlap = size - (min(end, (rank + 1) * share) - max(start, rank * share))
            overlaps[rank] = overlaps.get(rank, 0) + overlap
        start = end
    return overlaps


def _span_of_gradients(run: PlanInputs) -> Span:
    """Return when the gradients of a step exist: with several passes also in the forward pass of the last one.

    At stages 1 and 2 their buffer is made as a whole when the first bucket is full. At stage 0 each gradient takes the
    place of activations, so that most of both is there at the beginning or at the end of the backward pass.
    """
    if run.accumulate > 1:
        return ALWAYS
    is_reduced_at_end = run.stage == 0 or (run.trained <= run.bucket and run.largest_trained <= run.bucket)
    return ("embedding" if is_reduced_at_end else "reduction", "update")


def _span_of_head_gradient(run: PlanInputs) -> Span:
    """Return when the gradient of the head exists: until that of the embedding is added to it, where both are one.

    Else it is copied into a bucket at once, or, where it is larger than one, reduced before the next gradient is.
    """
    if run.shape.tied:
        return ("head", "embedding")
    return ("head", "reduction" if run.accumulate == 1 and run.head_numel > run.bucket else "head")


def _embedding_gradient(run: PlanInputs) -> float:
    """Return the gradient of the embedding, and its sum with that of the head where both are one.

    At stage 0 the gradient of a step's only pass is the one that the rows of gradients count.
    """
    is_counted = run.stage == 0 and run.accumulate == 1
    return run.width * run.embedding_numel * (1 + run.shape.tied - is_counted)


def _is_hidden(tensor: ParamTensor) -> bool:
    return len(tensor.shape) == 2 and tensor.part not in ("embedding", "head")


def _optimizer_temporaries(run: PlanInputs) -> float:
    """Return what an optimizer without a fused kernel makes of the largest tensor that it gets."""
    if run.optimizer == "lion":  # its direction; at stages 1 and 2 the gradients are free once their flat copy is made
        freed = (
            run.trained / run.world_size * run.grad_bytes if run.stage in (1, 2) and not run.sums_in_wider_type else 0
        )
        return max(0, run.largest_partition * run.master_bytes - freed)
    if run.optimizer == "adafactor":  # its squared gradient
        return run.largest_trained * 4
    if run.optimizer != "muon":
        return 0
    if run.stage == 0:
        others = (one.numel for one, _ in run.shape.kinds if one.is_trainable and not _is_hidden(one))
        return 16 * max(others, default=0)
    # Four temporaries of AdamW's part, as large as its gradients. Flat gradients of the two parts are never there together.
    size = (run.trained - run.hidden) / run.world_size
    if run.stage < 3 and run.sums_in_wider_type:
        return 4 * size * run.master_bytes
    flat = run.sub_group if run.stage == 3 else run.trained / run.world_size
    return max(0, 5 * size - flat) * run.master_bytes


def _part_size(part: Part, is_trained: bool) -> Callable[[PlanInputs], float]:
    return lambda run: run.part_bytes.get((part, is_trained), 0)


# In formulas: N processes, P parameters, T trained ones, w bytes of a weight, g bytes of an accumulated gradient, m bytes
# of a master weight.
# fmt: off
WEIGHTS = tuple(
    Row(f"{word}: {part}", "weights", "state", ALWAYS, _part_size(part, is_trained),
        lambda run: "w P / N" if run.stage == 3 else "w P", lambda run: f"{ZERO_PAPER}.{3 if run.stage == 3 else 1}")
    for is_trained, word in ((True, "weights"), (False, "frozen weights")) for part in PARTS
)
OPTIMIZER_STATES = Row(
    "optimizer states", "optimizer", "state", ALWAYS,
    lambda run: run.state_bytes * {0: 1.0, 3: run.sharded / max(run.trained, 1)}.get(run.stage, 1 / run.world_size),
    _state_formula, _state_source,
)
OPTIMIZER_TEMPORARIES = Row(
    "temporaries of the optimizer", "optimizer", "buffer", UPDATE, _optimizer_temporaries,
    lambda run: "4 x largest tensor" if run.optimizer != "muon" else "5 x gradients of AdamW's part, less flat gradients",
    "dstrain/training/engine/optimizers.py; DeepSpeed runtime/zero/muon",
)
BACKWARD_ROWS = (
    Row("gradient of the head", "gpu", "buffer", _span_of_head_gradient, lambda run: run.width * run.head_numel,
        "w V H", f"{HEADS}, _parameter_gradient"),
    Row("gradient of one weight", "gpu", "buffer", LAYER, lambda run: run.width * run.largest_inside,
        "w x largest tensor of a layer", "torch/csrc/autograd/input_buffer.cpp"),
    Row("gradient of the embedding", "gpu", "buffer", EMBEDDING, _embedding_gradient,
        lambda run: "2 w V H: its own, and the sum with the head's" if run.shape.tied else "w V H",
        "torch/csrc/autograd/input_buffer.cpp"),
)
"""Gradients on their way from autograd to DeepSpeed."""
STAGE_0_ROWS = (
    *WEIGHTS,
    Row("gradients", "gpu", "state", _span_of_gradients, lambda run: run.trained * run.width, "w T", _stage_0_source),
    Row("master weights", "gpu", "state", ALWAYS, lambda run: 4 * run.trained * run.is_16_bit, "4 T", _stage_0_source),
    Row("fp32 gradients", "gpu", "buffer", UPDATE, lambda run: 4 * run.trained * run.is_16_bit, "4 T",
        lambda run: f"{_stage_0_source(run)}, step"),
    OPTIMIZER_STATES,
    Row("all-reduce message", "gpu", "buffer", ALL_REDUCE, lambda run: _message(run) * run.width,
        "w min(T, 500 million), 0 with one process", f"{ENGINE}, allreduce_no_retain"),
)
MASTER_WEIGHTS = Row(
    "master weights", "optimizer", "state", ALWAYS, lambda run: run.trained / run.world_size * run.master_bytes,
    "4 T / N, 2 T / N in bf16", f"{STAGE_1_2}, single_partition_of_fp32_groups",
)
BF16_OPTIMIZER_ROWS = (
    *WEIGHTS,
    MASTER_WEIGHTS,
    OPTIMIZER_STATES,
    Row("gradients", "gpu", "state", ALWAYS, lambda run: 6 * run.trained, "2 T, and 4 T for the fp32 sum", BF16_OPTIMIZER),
    # A flat gradient that fills a message of its own is sent without a copy.
    Row("all-reduce message", "gpu", "buffer", ALL_REDUCE, lambda run: 4 * run.trained * (run.trained <= ALLREDUCE_NUMEL and run.world_size > 1),
        "4 T, up to 500 million; 0 with one process", f"{ENGINE}, allreduce_no_retain"),
)
"""Of bf16 at stage 1 with sums in fp32, which DeepSpeed gives to an optimizer of its own."""
OFFLOADED_GRADIENTS = (
    Row("gradients", "host", "state", ALWAYS, lambda run: run.trained / run.world_size * run.master_bytes,
        "4 T / N", f"{STAGE_1_2}, initialize_optimizer_states"),
    Row("copy of the weights", "host", "buffer", ALWAYS, lambda run: run.trained / run.world_size * run.width,
        "w T / N", f"{STAGE_1_2}, param_buffer_of_bit16"),
    Row("gradient of one tensor", "host", "buffer", ALWAYS, lambda run: run.largest_trained * run.width,
        "w x largest tensor", f"{STAGE_1_2}, temp_grad_buffer"),
    Row("copied gradient", "gpu", "buffer", ALWAYS, lambda run: run.largest_trained * run.width,
        "w x largest tensor", f"{STAGE_1_2}, temp_grad_buffer"),
    Row("sum of gradients", "gpu", "state", ALWAYS,
        lambda run: run.trained / run.world_size * run.grad_bytes * (run.accumulate > 1 and run.sums_in_wider_type),
        "g T / N, on the GPU also with offload", f"{STAGE_1_2}, _build_compact_grad_partition_buffer"),
    Row("sum of gradients", "host", "buffer", ALWAYS,
        lambda run: run.trained / run.world_size * run.width * (run.accumulate > 1 and not run.sums_in_wider_type),
        "w T / N", f"{STAGE_1_2}, accumulated_grads_in_cpu"),
)
GRADIENTS = (
    Row("gradients", "gpu", "state", _span_of_gradients, lambda run: run.trained / run.world_size * run.grad_bytes,
        "g T / N", f"{ZERO_PAPER}.2"),
    Row("gradients of a pass", "gpu", "buffer", ("reduction", "embedding"),
        lambda run: run.trained / run.world_size * run.width * (run.accumulate > 1 and not run.sums_in_wider_type),
        "w T / N, beside their sum", f"{STAGE_1_2}, grads_in_partition"),
    Row("gradients across partitions", "gpu", "buffer", _span_of_gradients,
        lambda run: 0 if run.sums_in_wider_type else max(gradient_overlaps(run).values()) * run.width,
        "w (n - own part of n), tensors n across an end of a partition", f"{STAGE_1_2}, get_flat_partition"),
    Row("staged momentum and complete gradients", "gpu", "state", ALWAYS,
        lambda run: 2 * run.hidden / run.world_size * run.grad_bytes if run.optimizer == "muon" else 0,
        "2 g hidden matrices / N", f"{STAGE_1_2}, _muon_staging_momentum"),
    # A flat copy in the type of the master weights; the fp32 sum of 16-bit gradients is already flat.
    Row("flat gradients of the step", "gpu", "buffer", UPDATE,
        lambda run: 0 if run.sums_in_wider_type else run.trained / run.world_size * run.master_bytes,
        "m T / N", "dstrain/distributed/patches.py, flatten_gradients_in_fp32"),
)
BUCKETS = (
    # Whole until the last pass of a step, which reduces and frees them.
    Row("sum of gradients", "gpu", "buffer", ("encoder", "embedding"),
        lambda run: run.trained * (1 - 1 / run.world_size) * run.width * (run.stage == 1 and run.accumulate > 1),
        "w T (1 - 1 / N)", f"{STAGE_1_2}, param.grad"),
    Row("reduce buckets", "gpu", "buffer", BACKWARD, lambda run: run.bucket * run.buckets * run.width,
        lambda run: f"w x reduce_bucket_size{' x 2 (overlap_comm)' if run.buckets == 2 else ''}",
        f"{STAGE_1_2}, setup_buckets"),
)
STAGE_3_ROWS = (
    *WEIGHTS,
    # Whole in each process, also where the codes are offloaded.
    Row("scales of quantized weights", "gpu", "state", ALWAYS, lambda run: run.scale_bytes,
        "(1 / 64 + 4 / (64 x 256)) P", "dstrain/models/quantization.py, _shard_layer"),
    Row("swap buffers of the weights", "host", "buffer", ALWAYS, lambda run: _swap_buffers(run) * run.width,
        "buffer_count x buffer_size x w", "DeepSpeed runtime/swap_tensor/partitioned_param_swapper.py"),
    # Also in fp32: DeepSpeed compares a torch.device with a name, and so always copies the partition.
    Row("master weights", "optimizer", "state", ALWAYS, lambda run: run.sharded * run.master_bytes,
        "4 T / N, 2 T / N in bf16", f"{STAGE_3}, fp32_partitioned_groups_flat"),
    OPTIMIZER_STATES,
    Row("gradients", "gpu", "state", ALWAYS, lambda run: 0 if run.optimizer_device else run.sharded * run.grad_bytes,
        "g T / N", f"{STAGE_3}, grad_partitions_flat_buffer"),
    Row("gradients", "host", "state", ALWAYS, lambda run: run.sharded * run.grad_bytes if run.optimizer_device else 0,
        "g T / N", f"{STAGE_3}, grad_partitions_flat_buffer"),
    Row("gradients of a sub-group", "gpu", "buffer", UPDATE,
        lambda run: 0 if run.optimizer_device else run.sub_group * run.master_bytes,
        "m x largest sub-group", "dstrain/distributed/patches.py, flatten_gradients_in_fp32"),
    Row("gradients of the optimizer", "optimizer", "state", ALWAYS,
        lambda run: run.sharded * run.master_bytes if run.optimizer_device else 0,
        "4 T / N", f"{STAGE_3}, initialize_optimizer_states"),
    Row("swap buffers of the optimizer", "host", "buffer", ALWAYS, lambda run: _buffer_count(run) * run.sub_group * 4,
        lambda run: f"{_buffer_count(run)} (buffer_count) x 4 x largest sub-group",
        "DeepSpeed runtime/swap_tensor/optimizer_utils.py"),
    Row("small weights kept whole", "gpu", "buffer", ALWAYS, lambda run: run.small * run.width if run.is_gathered else 0,
        "w x tensors up to stage3_param_persistence_threshold", f"{STAGE_3}, persistent_parameters"),
    Row("gathered weights", "gpu", "buffer", KEPT, lambda run: _gathered(run) * run.width,
        "w x min(P, max(stage3_max_live_parameters, largest module + prefetch))",
        "DeepSpeed runtime/zero/partitioned_param_coordinator.py"),
    Row("secondary partition of the weights", "gpu", "buffer", ALWAYS,
        lambda run: 0 if run.setting("zero_hpz_partition_size", 1) <= 1
        else run.gathered / run.setting("zero_hpz_partition_size", 1) * run.width,
        "w P / zero_hpz_partition_size", "Wang et al., arXiv 2306.10209, section 3.2"),
    Row("reduce bucket", "gpu", "buffer", ALWAYS, lambda run: run.bucket * run.comm_bytes,
        "reduce_bucket_size x bytes", f"{STAGE_3}, ipg_buckets"),
)
# fmt: on


def state_rows(run: PlanInputs) -> tuple[Row, ...]:
    """Return the rows of weights, gradients, master weights, moments and ZeRO's buffers of the run's stage."""
    gradients = OFFLOADED_GRADIENTS if run.optimizer_device else GRADIENTS
    rows: tuple[Row, ...] = (*WEIGHTS, MASTER_WEIGHTS, OPTIMIZER_STATES, *gradients, *BUCKETS)
    if run.stage == 0:
        rows = STAGE_0_ROWS
    elif run.stage == 3:
        rows = STAGE_3_ROWS
    elif run.stage == 1 and run.precision == "bf16" and run.grad_bytes == 4:
        rows = BF16_OPTIMIZER_ROWS
    return (*rows, *BACKWARD_ROWS, OPTIMIZER_TEMPORARIES)


_GROUPS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "output": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""Linear layers by their common input."""


class Adapters(NamedTuple):
    """Adapters of a part of a layer."""

    rank: int
    """Sum of their ranks."""
    dropped_inputs: int
    """Sum of the widths of their inputs, where dropout gives each adapter an input of its own."""
    scaled_outputs: int
    """Sum of the widths of their outputs, where DoRA scales them."""


@dataclass(frozen=True)
class LayerGraph:
    """Which inputs of one decoder layer autograd keeps."""

    is_recorded: bool
    """False where neither the layer nor anything before it is trained."""
    input_needs_grad: bool
    norms_trained: bool
    kept_inputs: frozenset[str]
    """Groups of linear layers that need their input: for the gradient of their weight, or of an adapter's."""
    attention_adapters: Adapters
    mlp_adapters: Adapters
    merged_weights: int = 0
    """Values of weights to which adapters are added in the forward pass: those of experts."""
    dora_weights: int = 0
    """Values of weights with DoRA, which multiplies a dropped input with them once more."""


def read_graphs(shape: ModelShape, has_dropout: bool = False) -> tuple[LayerGraph, ...]:
    """Return the graph of each decoder layer, from the first to the last. `has_dropout`: of the adapters."""
    found: dict[int, list[ParamTensor]] = {index: [] for index in range(shape.layers)}
    before = False
    for tensor in shape.tensors:
        is_language = tensor.part in ("layers", "lora") and "vision" not in tensor.name and "visual" not in tensor.name
        index = layer_index(tensor.name) if is_language else None
        if index in found:
            found[index].append(tensor)
        elif tensor.part in ("embedding", "vision", "projector", "lora"):
            before = before or tensor.is_trainable
    graphs = []
    for index in range(shape.layers):
        graphs.append(_read_graph(found[index], before, has_dropout))
        before = graphs[-1].is_recorded
    return tuple(graphs)


def _read_graph(tensors: list[ParamTensor], before: bool, has_dropout: bool) -> LayerGraph:
    trained = [one.name for one in tensors if one.is_trainable]
    pairs = [one for one in tensors if ".lora_A" in one.name and ".experts." not in one.name]
    dropped = any(one.is_trainable for one in pairs) and has_dropout
    scales = [one for one in tensors if ".lora_magnitude_vector" in one.name]
    inputs = {one.name.partition(".lora_")[0]: one.shape[1] for one in pairs}
    dora = sum(one.numel * inputs.get(one.name.partition(".lora_")[0], 0) for one in scales) * dropped
    attention, mlp = (
        Adapters(
            rank=sum(one.shape[0] for one in pairs if one.is_of_mlp is is_of_mlp),
            dropped_inputs=sum(
                one.shape[1] for one in pairs if one.is_of_mlp is is_of_mlp and one.is_trainable and has_dropout
            ),
            scaled_outputs=sum(one.numel for one in scales if one.is_of_mlp is is_of_mlp),
        )
        for is_of_mlp in (False, True)
    )
    experts = [one for one in tensors if one.is_expert_weight]
    has_expert_adapters = any(".experts." in name and ".lora_" in name for name in trained)
    merged = sum(one.numel for one in experts) if has_expert_adapters else 0
    need_input = [name for name in trained if not (has_dropout and ".lora_" in name)]
    kept = {
        group for group, names in _GROUPS.items() if any(f".{name}." in one for name in names for one in need_input)
    }
    if any(".experts." in name for name in need_input):
        kept |= {"mlp", "down"}
    norms = any("norm" in name and "_norm." not in name.replace("layernorm", "") for name in trained)
    # Of families without these names: all inputs, if anything is trained.
    if trained and not kept and not norms and not dropped:
        kept, norms = set(_GROUPS), True
    return LayerGraph(bool(trained) or before, before, norms, frozenset(kept), attention, mlp, merged, dora)


@cache
def layer_index(name: str) -> int | None:
    """Return the number of the layer that a parameter belongs to; None for one outside of the layers."""
    words = name.split(".")
    at = next((i for i, word in enumerate(words[:-1]) if word in ("layers", "h", "layer", "blocks")), None)
    return int(words[at + 1]) if at is not None and words[at + 1].isdecimal() else None


@dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes per token that one decoder layer keeps for its backward pass, and the most that the backward pass adds."""

    norms: float
    attention: float
    mlp: float
    """Without its input."""
    mlp_input: float
    gradients: float
    """Of the moment at which most exists, beyond what is kept."""

    @property
    def kept(self) -> float:
        """Bytes that autograd keeps."""
        return self.norms + self.attention + self.mlp + self.mlp_input


def layer_bytes(run: PlanInputs, graph: LayerGraph, is_recomputed: bool) -> LayerBytes:
    """Return the bytes per token of one decoder layer."""
    shape, width = run.shape, run.width
    if not graph.is_recorded:
        return LayerBytes(norms=0, attention=0, mlp=0, mlp_input=0, gradients=0)
    has_tiles = run.has_tiles(is_recomputed)
    is_mlp_tiled = has_tiles and shape.has_dense_mlp
    norms = _norm_bytes(run, graph, is_recomputed)
    attention = _attention_bytes(run, graph, graph.kept_inputs)
    mlp = 0.0 if is_mlp_tiled else _mlp_bytes(run, graph, graph.kept_inputs)
    mlp_input = width * shape.hidden * (is_mlp_tiled or "mlp" in graph.kept_inputs)
    # Three moments: the backward pass of the MLP, of the norm before it, of attention.
    hidden, inner = width * shape.hidden, width * shape.intermediate
    # Gate, activation and up exist beside their gradients; the product of them is free by then.
    # A fused kernel writes both gradients over gate and up.
    mlp_gradients = 1 if run.has_fused_kernels else 3 - ("down" in graph.kept_inputs)
    in_mlp = 2 * hidden if is_mlp_tiled else hidden + inner * mlp_gradients
    in_norm = 2 * hidden - mlp - mlp_input + (0 if has_tiles else norm_gradients(run) * shape.hidden)
    wide, narrow = width * shape.heads * shape.head_dim, width * shape.kv_heads * shape.head_dim
    # The gradient of attention's output, or, where processes exchange it, four copies: as it comes, by receiver, by
    # sender, and by heads (dstrain/models/attention/sequence.py).
    around_attention = max(2 * wide + 2 * narrow, 4 * wide * (run.workload.sequence > 1))
    in_attention = hidden - mlp - mlp_input - norms * (1 - 1 / shape.norms_per_layer) + around_attention
    return LayerBytes(
        norms=norms, attention=attention, mlp=mlp, mlp_input=mlp_input, gradients=max(in_mlp, in_norm, in_attention)
    )


NORM_GRADIENTS = 20
"""Bytes per value that the backward pass of an RMSNorm of transformers makes: five fp32 tensors."""


def norm_gradients(run: PlanInputs) -> int:
    """Return the bytes per value that the backward pass of an RMSNorm makes: with a fused kernel its gradient alone."""
    return run.width if run.has_fused_kernels else NORM_GRADIENTS


def _norm_bytes(run: PlanInputs, graph: LayerGraph, is_recomputed: bool) -> float:
    """Return what the norms keep of a token: in tiles their input, otherwise an fp32 copy and what their weight needs.

    A fused kernel keeps its input and 1 / root mean square (liger_kernel/ops/rms_norm.py, fused_add_rms_norm.py).
    """
    shape, width = run.shape, run.width
    heads = shape.heads * shape.head_dim + shape.kv_heads * shape.head_dim
    if run.has_tiles(is_recomputed):
        # The first norm's input is the layer's, which the rows of inputs count, or a copy from the host.
        is_counted = is_recomputed and not run.checkpoints_on_host
        return width * (shape.hidden * (shape.norms_per_layer - is_counted) + heads * shape.has_qk_norm)
    if run.has_fused_kernels:
        size = float(shape.norms_per_layer * (width * shape.hidden + 4))
        if is_recomputed and not run.checkpoints_on_host:
            size -= width * shape.hidden  # the layer's input, which the rows of inputs count
        elif not graph.input_needs_grad and not graph.norms_trained:
            size -= width * shape.hidden + 4
        return size + (width * heads + 4 * (shape.heads + shape.kv_heads)) * shape.has_qk_norm
    norm_input = 4 * shape.hidden + 4  # its fp32 copy and 1 / root mean square
    normed = (4 if shape.has_fp32_norms else width) * shape.hidden if graph.norms_trained else 0
    size = float(shape.norms_per_layer * (norm_input + normed))
    # In fp32 there is no copy: of a recomputed layer it is the layer's input.
    if not graph.input_needs_grad or (is_recomputed and width == 4 and not run.checkpoints_on_host):
        size -= norm_input
    if shape.has_qk_norm:
        size += (4 + (normed and width)) * heads + 4 * (shape.heads + shape.kv_heads)
    return size


def _attention_bytes(run: PlanInputs, graph: LayerGraph, kept_inputs: frozenset[str]) -> float:
    """Return what attention keeps of a token, with its input and adapters."""
    shape, workload, width = run.shape, run.workload, run.width
    wide, narrow = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    size = float(width * shape.hidden * ("attention" in kept_inputs))
    # Each query head gets a copy of its keys; one key head for all of them is expanded without a copy.
    keys = wide if (workload.has_mask or workload.is_eager) and shape.kv_heads > 1 else narrow
    if workload.sequence > 1:
        # Each process has a part of the key-value heads: repeated, where the number of processes does not divide them.
        # The output of attention, of a part of the heads, is not the input of o_proj, of a part of the tokens.
        repeats = 1
        if shape.kv_heads % workload.sequence:
            repeats = (shape.heads if workload.sequence % shape.kv_heads else workload.sequence) // shape.kv_heads
        keys = narrow * repeats
        size += width * wide * ("output" in kept_inputs and workload.device != "cpu")
    if workload.has_mask:
        size += width * workload.length  # each call converts the boolean mask
    if workload.is_packed and workload.device == "cpu" and not workload.is_eager:
        # Queries, keys, values and weights; the output is the input of o_proj.
        size += width * (wide + 2 * keys) + workload.attention_weights(shape.heads, width)
        size += width * wide * ("output" in kept_inputs)
    else:
        # Queries, keys, values and output of attention, and the fp32 normalizer of each head.
        size += width * (wide + 2 * keys + wide) + 4 * shape.heads
        if workload.is_packed and workload.device == "cpu":
            size += width * wide * ("output" in kept_inputs)  # outputs of blocks, concatenated
    if workload.is_eager:
        # tanh of the soft cap, softmax in fp32, and its 16-bit copy, for each pair of tokens of a row.
        copies = 4 + (width if width == 2 else 0) + (width if shape.has_softcap else 0)
        size += copies * shape.heads * workload.length
    return size + _adapter_bytes(run, graph.attention_adapters)


def _mlp_bytes(run: PlanInputs, graph: LayerGraph, kept_inputs: frozenset[str]) -> float:
    """Return what the MLP, or the experts, keep of a token besides their input."""
    shape, workload, width = run.shape, run.workload, run.width
    # Gate, its activation, up; a fused kernel keeps gate and up (liger_kernel/ops/swiglu.py, geglu.py).
    size = float(width * (2 if run.has_fused_kernels else 3) * shape.intermediate)
    size += width * shape.intermediate * ("down" in kept_inputs)
    # Of experts: their outputs, which are multiplied with the weights of the router, and a copy of each token's input.
    size += width * shape.hidden * shape.experts_per_token * (1 + ("mlp" in kept_inputs))
    # Not of each token: the sum of an expert's weight and its adapter, which the gradient of the input needs (peft,
    # ParamWrapper).
    size += width * graph.merged_weights / max(workload.tokens, 1)
    if run.quantize:  # autograd keeps the dequantized weights
        size += width * graph.dora_weights / max(workload.tokens, 1)
    return size + _adapter_bytes(run, graph.mlp_adapters)


def _adapter_bytes(run: PlanInputs, adapters: Adapters) -> float:
    """Return what adapters keep of a token: the product with A, and the dropped input with its mask, a byte on a GPU.

    DoRA keeps the outputs of the layer and of the adapter, for the gradients of the magnitude and of its scale.
    """
    mask = run.width if run.workload.device == "cpu" else 1
    return run.width * (adapters.rank + 2 * adapters.scaled_outputs) + adapters.dropped_inputs * (run.width + mask)


def _dora_bytes(run: PlanInputs) -> float:
    """Return what the norm of an adapted weight takes, beyond the gradients inside a layer, which come later."""
    scaled = {one.name.partition(".lora_")[0] for one in run.shape.tensors if ".lora_magnitude_vector" in one.name}
    sizes = [
        one.shape for one in run.shape.tensors if one.name.removesuffix(".weight") in scaled and len(one.shape) == 2
    ]
    largest = max((inputs**2 + 3 * inputs * outputs for outputs, inputs in sizes), default=0)
    gradients = max((one.gradients for one in run.layer_sizes), default=0) * run.workload.tokens
    return max(0, run.width * largest - gradients)


def _tile_bytes(run: PlanInputs) -> float:
    """Return what exists of one tile while it is recomputed, and the sums of its gradients in fp32."""
    shape, width = run.shape, run.width
    if not any(run.has_tiles(is_recomputed) for is_recomputed in run.recomputed):
        return 0
    if not shape.has_dense_mlp:
        return run.workload.tile_tokens * (norm_gradients(run) + 8) * shape.hidden
    trained = [one for one in shape.tensors if one.is_trainable and one.is_of_mlp and layer_index(one.name) == 0]
    weights = sum(one.numel for one in trained) * (width + 4 * (width == 2))
    inner = 4 if run.has_fused_kernels else 6
    return run.workload.tile_tokens * width * (inner * shape.intermediate + 2 * shape.hidden) + weights


def _checkpointed_inputs(run: PlanInputs) -> int:
    """Return the layers whose inputs are kept."""
    pairs = zip(run.layers, run.recomputed, strict=True)
    return sum((graph.input_needs_grad or graph.is_recorded) and is_on for graph, is_on in pairs)


def _kept_by_layers(run: PlanInputs, layers: slice) -> float:
    """Return the bytes of activations that those of these layers keep that are not recomputed."""
    pairs = zip(run.layer_sizes[layers], run.recomputed[layers], strict=True)
    return sum(size.kept for size, is_recomputed in pairs if not is_recomputed) * run.workload.tokens


def _sizes(run: PlanInputs, recomputed: bool) -> list[LayerBytes]:
    return [size for size, is_on in zip(run.layer_sizes, run.recomputed, strict=True) if is_on is recomputed]


def _outside_bytes(run: PlanInputs) -> float:
    """Return what autograd keeps of the embedding and the last norm."""
    shape, workload, width = run.shape, run.workload, run.width
    is_norm_trained = any(one.is_trainable and one.name.split(".")[-2:-1] == ["norm"] for one in shape.tensors)
    norm = 4 * shape.hidden + 4 + (4 if shape.has_fp32_norms else width) * shape.hidden * is_norm_trained
    if run.has_fused_kernels:
        norm = width * shape.hidden + 4
    if run.has_tiles(any(run.recomputed)):
        norm = width * shape.hidden
    ids = 8 if any(one.is_trainable and one.part == "embedding" for one in shape.tensors) else 0
    rows = width * shape.hidden if workload.is_scored and not workload.is_packed else 0  # scores of every position
    return workload.tokens * (ids + norm + rows)


def _last_norm_gradients(run: PlanInputs) -> float:
    """Return what the backward pass of the last norm makes; in tiles little."""
    if run.has_tiles(any(run.recomputed)):
        return 0
    return run.workload.tokens * norm_gradients(run) * run.shape.hidden


# In formulas: T tokens, L of them in a row, D width of a head, H width, A heads times head width, K key-value heads times
# head width, I width of the MLP, R rank.
PAPER = "Korthikanti et al., arXiv 2205.05198, section 4, for gated MLPs and RMSNorm"
KERNELS = "liger_kernel/ops/rms_norm.py, fused_add_rms_norm.py and swiglu.py: what save_for_backward gets"
CHECKPOINT = "Chen et al., arXiv 1604.06174, section 3; torch/utils/checkpoint.py"


TILES = "dstrain/models/tiles.py; ALST, arXiv 2506.13996, section 3.1"
NORMS = "transformers models/llama/modeling_llama.py, LlamaRMSNorm"


def _gradient_formula(run: PlanInputs) -> str:
    attention = "4 A" if run.workload.sequence > 1 else "2 A + 2 K"
    if run.has_tiles(any(run.recomputed)) and run.shape.has_dense_mlp:
        return f"T max(2 w H, w (H + {attention}) - w H of the MLP's input)"
    if run.has_fused_kernels:
        return f"T w max(I + H, 3 H, H + {attention}), less what is free by then"
    return f"T max(w (3 I + H), 20 H, w (H + {attention})), less what is free by then"


def _layer_source(run: PlanInputs) -> str:
    return KERNELS if run.has_fused_kernels else PAPER


def _layer_formula(run: PlanInputs) -> str:
    experts = " + 2 w H per expert" if run.shape.experts_per_token else ""
    dropout = " + (1 + w) inputs of adapters" if run.workload.has_adapter_dropout else ""
    dropout += " + 2 w outputs of adapters" if any(one.mlp_adapters.scaled_outputs for one in run.layers) else ""
    if run.has_tiles(any(run.recomputed)) and run.shape.has_dense_mlp:
        return "T w (3 H + 2 A + 2 K): inputs of norms and linear layers, attention"
    if run.has_fused_kernels:
        return f"T (8 + w (4 H + 2 A + 2 K + 3 I){experts}{dropout}) per layer"
    return f"T (8 H + 2 w H + w (2 A + 2 K + 4 I){experts}{dropout}) per layer"


# fmt: off
LAYER_ROWS = (
    Row("inputs of the layers", "inputs", "activation", KEPT,
        lambda run: _checkpointed_inputs(run) * run.width * run.shape.hidden * run.workload.tokens,
        "w T H per layer", CHECKPOINT),
    Row("one recomputed layer", "gpu", "activation", LAYER,
        lambda run: max((one.kept for one in _sizes(run, True)), default=0) * run.workload.tokens, _layer_formula, _layer_source),
    Row("activations of the layers", "gpu", "activation", KEPT,
        lambda run: _kept_by_layers(run, slice(None, run.layers_at_reduction)), _layer_formula, _layer_source),
    Row("activations of the last layers", "gpu", "activation", ("scores", "layer"),
        lambda run: _kept_by_layers(run, slice(run.layers_at_reduction, None)), _layer_formula, _layer_source),
    Row("embedding and last norm", "gpu", "activation", ("scores", "last norm"), _outside_bytes,
        lambda run: "T (8 + w H)" if run.has_fused_kernels or run.has_tiles(any(run.recomputed)) else "T (8 + 4 H + w H)",
        "transformers models/llama/modeling_llama.py"),
    Row("gradients of the last norm", "gpu", "activation", ("last norm", "last norm"), _last_norm_gradients,
        lambda run: "w T H" if run.has_fused_kernels else "20 T H", NORMS),
    Row("rotary angles", "gpu", "activation", KEPT, lambda run: 2 * run.width * run.shape.head_dim * run.workload.positions,
        "2 w L D", "Su et al., arXiv 2104.09864, eq. 34"),
    Row("gradients inside a layer", "gpu", "activation", LAYER,
        lambda run: max((one.gradients for one in run.layer_sizes), default=0) * run.workload.tokens,
        _gradient_formula, "largest set of gradients of the MLP, a norm, or attention, less what is free by then"),
    Row("norm of a weight with DoRA", "gpu", "activation", LAYER, _dora_bytes,
        "w (in^2 + 3 in out) of the largest weight, less the gradients inside a layer",
        "peft/tuners/lora/dora.py, get_lora_weight and get_weight_norm"),
    Row("one tile of a layer", "gpu", "activation", LAYER, _tile_bytes,
        lambda run: f"w n ({4 if run.has_fused_kernels else 6} I + 2 H) for n tokens of a tile, and 4 + w bytes per trained "
        "weight of an MLP", TILES),
    Row("one dequantized weight", "gpu", "activation", LAYER, lambda run: run.largest_quantized * run.width,
        "w x largest quantized weight", "bitsandbytes autograd/_functions.py"),
)
# fmt: on


def _encoder_layer_bytes(run: PlanInputs) -> int:
    """Return the bytes that autograd keeps of one layer of the encoder, for all images."""
    vision, width = run.vision, run.width
    if vision is None:
        return 0
    if not vision.is_gated:
        # Inputs and outputs of two norms with mean and deviation, queries, keys, values and output of attention with
        # the fp32 normalizer of each head, input of fc1's activation, its sigmoid, and the input of fc2.
        size = width * (8 * vision.hidden + 3 * vision.intermediate) + 4 * vision.heads + 16
        return size * run.positions
    # The values are a view that keeps the whole output of the joint projection; rotated queries and keys, output of
    # attention, and its copy in the order of the patches; inputs of three projections. Norms as in the decoder.
    inner = width * (9 * vision.hidden + 4 * vision.intermediate) + 4 * vision.heads
    return (inner + 2 * _rms_norm_bytes(vision.hidden, width)) * run.positions


def _rms_norm_bytes(hidden: int, width: int) -> int:
    """Return an RMSNorm's input in fp32, its normalized input, and 1 / root mean square of a position."""
    return (4 + width) * hidden + 4


def _pixel_bytes(run: PlanInputs) -> int:
    """Return the encoder's copy of its pixels, and what it keeps of them for the gradient of its first weights."""
    kept = run.width if "vision" in run.trained_parts and run.width < 4 else 0
    return (4 + kept) * run.vision.patch_values * run.positions if run.vision else 0


def _recomputed_encoder_layers(run: PlanInputs) -> int:
    is_trained = run.vision is not None and "vision" in run.trained_parts
    return round(run.vision.layers * run.workload.checkpointed) if run.vision and is_trained else 0


def _encoder_activations(run: PlanInputs) -> int:
    vision = run.vision
    if vision is None or "vision" not in run.trained_parts:
        return 0
    # CLIP normalizes its embedded patches before the first layer.
    before = 0 if vision.is_gated else (run.width * vision.hidden + 8) * run.positions
    return _encoder_layer_bytes(run) * (vision.layers - _recomputed_encoder_layers(run)) + before


def _projector_bytes(run: PlanInputs) -> int:
    """Return what autograd keeps of the projector."""
    vision, width = run.vision, run.width
    if vision is None or not run.trained_parts & {"vision", "projector"}:
        return 0
    if not vision.is_gated:
        return width * vision.tokens * run.workload.images * (vision.hidden + 2 * run.shape.hidden)
    # Only the encoder's gradient needs the norm's input.
    norm = _rms_norm_bytes(vision.hidden, width) - (0 if "vision" in run.trained_parts else 4 * vision.hidden + 4)
    return run.positions * (norm + 3 * width * vision.hidden)


# In formulas: S positions of all images of a pass in the encoder, H its width, I width of its MLP, V pixel values of a
# patch, S' image tokens, H' width of the language model.
ENCODERS = "transformers models/clip/modeling_clip.py and models/qwen2_5_vl/modeling_qwen2_5_vl.py"
# fmt: off
IMAGE_ROWS = (
    Row("pixels", "gpu", "activation", ("encoder", "embedding"), _pixel_bytes, "4 V S; trained in 16 bits 6 V S", ENCODERS),
    Row("one layer of the encoder", "gpu", "activation",
        lambda run: EMBEDDING if "vision" in run.trained_parts else ("encoder", "encoder"),
        lambda run: 0 if "vision" in run.trained_parts and not _recomputed_encoder_layers(run) else _encoder_layer_bytes(run),
        "w S (8 H + 3 I), in the forward pass of a frozen one, recomputed in a trained one", ENCODERS),
    Row("inputs of the encoder's layers", "inputs", "activation", ("scores", "embedding"),
        lambda run: run.width * run.positions * run.vision.hidden * _recomputed_encoder_layers(run) if run.vision else 0,
        "w S H per layer", ENCODERS),
    Row("activations of the vision encoder", "gpu", "activation", ("scores", "embedding"), _encoder_activations,
        "S (w (8 H + 3 I) + 4 heads + 16) per layer; Qwen2.5-VL: S (w (11 H + 4 I) + 8 H + 4 heads + 8)", ENCODERS),
    Row("activations of the projector", "gpu", "activation", ("scores", "embedding"), _projector_bytes,
        "w S' (H + 2 H'); Qwen2.5-VL: S (4 H + 4 w H + 4)", ENCODERS),
)
# fmt: on


def _logit_bytes(run: PlanInputs) -> int:
    """Return the bytes of a block of logits in fp32 and of its probabilities, which a fused cross entropy does not make."""
    if not run.has_head or (run.has_fused_kernels and run.precision != "fp16"):
        return 0
    return round(2 * _block_bytes(run, run.workload.targets * run.shape.vocab))


def _block_bytes(run: PlanInputs, values: float) -> float:
    """Return the bytes of a block of so many logits in fp32, or of the largest block."""
    return min(4 * values, run.chunk * BLOCK_SHARE[run.device])


def _recomputed_logit_bytes(run: PlanInputs) -> int:
    """Return the bytes of a block of the vocabulary for all targets, and of its probabilities in fp32."""
    if not run.recomputes_errors:
        return 0
    values = min(run.workload.targets * run.shape.vocab, run.chunk * SLICE_SHARE[run.device] / run.width)
    return round(run.width * values + _block_bytes(run, values))


def _slice_bytes(run: PlanInputs) -> int:
    """Return the bytes of the logits of a slice of the targets whose errors are not kept."""
    others = max(run.workload.targets - run.kept_targets, 0)
    return round(min(others * run.shape.vocab * run.width, run.chunk * SLICE_SHARE[run.device])) if run.has_head else 0


# In formulas: N targets, H width, V vocabulary.
# fmt: off
HEAD_ROWS = (
    Row("inputs of the head", "gpu", "activation", HEAD,
        lambda run: ((1 + run.trains_head) * run.width * run.shape.hidden + 24) * run.workload.targets * run.has_head,
        lambda run: "2 w N H" if run.trains_head else "w N H", f"{HEADS}, _LinearScores"),
    Row("errors of the head", "gpu", "activation", HEAD, lambda run: run.width * run.kept_targets * run.shape.vocab,
        lambda run: f"w V N, where at most {KEPT_SHARE[run.device] * run.chunk / 2**20:g} MiB", f"{HEADS}, KEPT_SHARE"),
    Row("logits of a block", "gpu", "activation",
        ("scores", "scores"), _logit_bytes,
        "2 fp32 blocks", f"{HEADS}, BLOCK_SHARE"),
    Row("logits of a slice", "gpu", "activation", ("scores", "scores"), _slice_bytes,
        "w V x targets of a slice", f"{HEADS}, SLICE_SHARE"),
    Row("recomputed logits of a block", "gpu", "activation", ("head", "head"), _recomputed_logit_bytes,
        "w x targets x tokens of a block, and an fp32 block", f"{HEADS}, _parameter_gradient"),
)
FROZEN_MODEL_ROWS = tuple(
    Row(name, "weights", "state", ALWAYS, size, lambda run: "w P / N" if run.stage == 3 and run.world_size > 1 else "w P", source)
    for name, size, source in (
        ("reference model",
         lambda run: run.reference_params * run.width / (run.world_size if run.stage == 3 else 1),
         "Rafailov et al., arXiv 2305.18290, eq. 7"),
        ("reward models",
         lambda run: run.reward_params * run.width / (run.world_size if run.stage == 3 else 1),
         "docs/safety.md, scoring: online"),
    )
)
HOST_ROWS = (
    Row("batches loaded in advance", "host", "buffer", ALWAYS,
        lambda run: run.prefetch * run.accumulate
        * (32 * run.workload.tokens + (4 * run.vision.patch_values * run.positions if run.vision else 0)),
        "data.prefetch x passes x (32 T + 4 V S)", "dstrain/data/loading/loader.py"),
    Row("copy for background saves", "host", "buffer", ALWAYS,
        lambda run: (4 + OPTIMIZERS[run.optimizer].per_param) * run.trained / run.world_size * run.saves_in_background,
        "(4 + bytes of the states) T / N", "dstrain/training/saver.py"),
)
# fmt: on

WORKSPACE_BYTES = {True: 32 * 2**20, False: 8320 * 2**10}
"""Whether a GPU has bf16 -> torch's workspace of cuBLAS for a thread: 32 MiB is that of compute capability 9.0 and later,
16 MiB less on 8.x, which a plan cannot tell from it (aten/src/ATen/cuda/CublasHandlePool.cpp, getChosenWorkspaceSize)."""
CUDA_CONTEXT_BYTES = 500 * 2**20
"""Of the driver and of cuBLAS, which torch's allocator does not count."""
COMMUNICATOR_BYTES = 700 * 2**20
"""Of NCCL, for each communicator: published are 544 MB (2 A100), 688 MB (4 A100) and about 0.6 GB (8 H100)."""
ALL_TO_ALL_BYTES = 3 * 2**30
"""Of NCCL's first all-to-all: published is 4.34 instead of 1.06 GB (8 H100, 32 channels for each pair)."""
FRAGMENTATION = {True: 0.04, False: 0.15}
"""Whether the allocator has expandable segments -> share of the tensors that it reserves in addition."""
PROCESS_BYTES = {"cuda": 1200 * 2**20, "cpu": 480 * 2**20}
"""Device -> resident memory of Python, torch, DeepSpeed and transformers without tensors, with the libraries of CUDA."""
# fmt: off
WORKSPACE_ROWS = (
    Row("workspaces of cuBLAS", "gpu", "buffer", ALWAYS, lambda run: 2 * WORKSPACE_BYTES[run.has_bf16] * (run.device == "cuda"),
        "one for the forward and one for the backward pass, each with a thread of its own",
        "torch aten/src/ATen/cuda/CublasHandlePool.cpp"),
)
CUDA_RESERVE_ROWS = (
    Row("CUDA context, cuBLAS", "gpu", "reserve", ALWAYS, lambda run: CUDA_CONTEXT_BYTES,
        "0.5 GiB", "driver memory outside torch's allocator"),
    Row("NCCL", "gpu", "reserve", ALWAYS, lambda run: run.nccl_bytes,
        "0.7 GiB for each communicator, 3 GiB for an all-to-all", "github NVIDIA/nccl, issues 964 and 1685"),
    Row("fragmentation", "gpu", "reserve", ALWAYS, lambda run: FRAGMENTATION[run.expandable_segments] * run.tensor_bytes,
        lambda run: f"{FRAGMENTATION[run.expandable_segments]:.0%} of all tensors".replace("%", " %"),
        lambda run: "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" if run.expandable_segments
        else "PYTORCH_ALLOC_CONF is set without expandable_segments:True; torchtune issue 1185"),
    Row("interpreter and libraries", "host", "reserve", ALWAYS, lambda run: PROCESS_BYTES["cuda"],
        "1.2 GiB", "resident memory before a model is built"),
)
CPU_RESERVE_ROWS = (
    Row("interpreter and libraries", "gpu", "reserve", ALWAYS, lambda run: PROCESS_BYTES["cpu"],
        "0.47 GiB", "resident memory before a model is built"),
)
# fmt: on


SAVED_ROWS = (
    "inputs of the layers",
    "one recomputed layer",
    "activations of the layers",
    "activations of the last layers",
    "embedding and last norm",
)
"""Rows of LAYER_ROWS with what autograd keeps of the decoder between the forward and the backward pass."""


def count_saved_bytes(run: PlanInputs) -> int:
    """Return the bytes that autograd keeps of the decoder of one process."""
    return sum(round(row.size(run)) for row in LAYER_ROWS if row.name in SAVED_ROWS)


def plan_lines(run: PlanInputs, rows: Iterable[Row]) -> list[MemoryLine]:
    """Return the lines of some rows, without those that need nothing."""
    return [line for row in rows for line in row.lines(run)]


def all_lines(run: PlanInputs) -> tuple[MemoryLine, ...]:
    """Return all lines of one process, with what a process needs besides its tensors."""
    rows = (*state_rows(run), *FROZEN_MODEL_ROWS, *LAYER_ROWS, *IMAGE_ROWS, *HEAD_ROWS, *WORKSPACE_ROWS, *HOST_ROWS)
    lines = plan_lines(run, rows)
    run = replace(run, tensor_bytes=sum_bytes(lines, "gpu"))
    return (*lines, *plan_lines(run, CPU_RESERVE_ROWS if run.device == "cpu" else CUDA_RESERVE_ROWS))
