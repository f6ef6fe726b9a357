"""Memory plan of a run: what each process needs on its GPU, in host memory and on disk, line by line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dstrain.config import BatchPlan, RunConfig, resolve_batch
from dstrain.planner.lines import (
    DTYPE_BYTES,
    MemoryLine,
    Place,
    StateSettings,
    When,
    activation_lines,
    state_lines,
    vision_lines,
)
from dstrain.planner.read_shape import read_base_shape, read_shape, reference_shape
from dstrain.planner.workload import (
    Cluster,
    ModelShape,
    TaskProperties,
    Workload,
    make_run_settings,
    make_workload,
    read_properties,
    with_score_head,
)
from dstrain.preset import Device, Preset, complete_preset

__all__ = ["MemoryLine", "MemoryPlan", "plan_memory"]

CHECKPOINTED_INPUTS = ("inputs of the layers", "inputs of the encoder's layers")
"""Lines of what cpu_checkpointing keeps in host memory."""


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What one process of a run needs, at its peak."""

    preset: str
    precision: str
    batch: BatchPlan
    cluster: Cluster
    workload: Workload
    shape: ModelShape
    lines: tuple[MemoryLine, ...]

    def total(self, place: Place, *when: When) -> int:
        """Return the bytes of one process at a place, of lines at these times (none: at the peak)."""
        if when:
            return sum(line.num_bytes for line in self.lines if line.place == place and line.when in when)
        inside = max(self.total(place, "head"), self.total(place, "layer"))
        return self.total(place, "always") + max(self.total(place, "pass") + inside, self.total(place, "step"))

    @property
    def gpu_bytes(self) -> int:
        """Return the peak of one GPU; of one process on a CPU run."""
        return self.total("gpu")

    @property
    def tensor_bytes(self) -> int:
        """Return the peak of tensors on the device: what torch.cuda.max_memory_allocated reports."""
        return self.gpu_bytes - sum(
            line.num_bytes for line in self.lines if line.kind == "reserve" and line.place == "gpu"
        )

    @property
    def host_bytes_per_node(self) -> int:
        """Return the host memory of all processes of a host; on a CPU run their devices' memory too."""
        own = self.total("gpu") if self.cluster.kind == "cpu" else 0
        return (self.total("host") + own) * self.cluster.gpus_per_node

    @property
    def nvme_bytes_per_node(self) -> int:
        """Return the disk space of offloaded states on a host."""
        return self.total("nvme") * self.cluster.gpus_per_node

    def find(self, name: str) -> MemoryLine | None:
        """Return the first line of this name."""
        return next((line for line in self.lines if line.name == name), None)

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, with all lines."""
        return {
            "preset": self.preset,
            "precision": self.precision,
            "micro": self.batch.micro,
            "accumulate": self.batch.accumulate,
            "total": self.batch.total,
            "tokens_per_pass": self.workload.tokens,
            "gpu_bytes": self.gpu_bytes,
            "host_bytes_per_node": self.host_bytes_per_node,
            "nvme_bytes_per_node": self.nvme_bytes_per_node,
            "lines": [asdict(line) for line in self.lines],
        }


def plan_memory(
    config: RunConfig,
    preset: Preset,
    cluster: Cluster,
    shape: ModelShape | None = None,
    properties: TaskProperties | None = None,
) -> MemoryPlan:
    """Return the memory plan of a recipe with a preset on these machines. Imports no torch.

    `shape`: the model with its head and adapters as `read_shape` returns it; None: it is read from the recipe. `properties`:
    those of the recipe's task, which take a few milliseconds to read. Rows are taken to have data.max_length tokens,
    all of them targets. Raises RecipeError where the model cannot be read, or the batch does not fit the processes, and
    PresetError where the preset does not fit the precision or optimizer.
    """
    properties = properties or read_properties(config)
    shape = shape or read_shape(config, properties)
    batch = resolve_batch(config.batch, cluster.world_size, preset.micro, preset.accumulate)
    device = Device(cluster.kind, cluster.bf16 or cluster.kind == "cpu")
    settings = make_run_settings(config, preset, batch, cluster.world_size, device, "nvme")
    ds_config = complete_preset(preset, settings=settings)
    states = make_state_settings(config, shape, ds_config, cluster)
    largest = replace(batch, micro=batch.largest_micro(cluster.world_size))
    workload = make_workload(config, shape, properties, largest, cluster.kind)
    width = states.weight_bytes
    lines = [*state_lines(states), *_frozen_model_lines(config, properties, states)]
    on_host = ds_config.get("activation_checkpointing", {}).get("cpu_checkpointing", False)
    layers = [*activation_lines(shape, workload, width), *vision_lines(shape, workload, width)]
    lines += (_on_host(line) if on_host else line for line in layers)
    lines += head_lines(shape, workload, width)
    lines += host_lines(states, workload, config.data.prefetch, config.save.background)
    made = MemoryPlan(
        preset=preset.name, precision=states.precision, batch=batch, cluster=cluster, workload=workload, shape=shape,
        lines=tuple(line for line in lines if line.num_bytes),
    )  # fmt: skip
    return replace(made, lines=(*made.lines, *reserve_lines(made.gpu_bytes, cluster.kind)))


def _on_host(line: MemoryLine) -> MemoryLine:
    """Return the inputs of checkpointed layers as they are with cpu_checkpointing; another line as it is."""
    return replace(line, place="host", when="always") if line.name in CHECKPOINTED_INPUTS else line


def make_state_settings(
    config: RunConfig, shape: ModelShape, ds_config: dict[str, Any], cluster: Cluster
) -> StateSettings:
    """Return what the states depend on, from a completed DeepSpeed JSON."""
    precision = next((name for name in ("bf16", "fp16") if ds_config[name]["enabled"]), "fp32")
    own = DTYPE_BYTES[precision]
    summed = ds_config.get("data_types", {}).get("grad_accum_dtype")
    sent = ds_config.get("communication_data_type")
    grad_bytes = _dtype_bytes(summed) or own
    matrices = (
        (tensor.numel * count) for tensor, count in shape.kinds if tensor.is_trainable and len(tensor.shape) == 2
    )
    hidden = sum(matrices) - shape.count("embedding", True) - shape.count("head", True)
    return StateSettings(
        shape=shape, precision=precision, zero=ds_config["zero_optimization"], grad_bytes=grad_bytes,
        comm_bytes=_dtype_bytes(sent) or own, accumulate=ds_config["gradient_accumulation_steps"], world_size=cluster.world_size,
        device=cluster.kind, master_bytes=2 if ds_config.get("bf16", {}).get("bf16_master_weights_and_grads") is True else 4,
        optimizer=config.optim.name, quantize=config.model.quantize, hidden_matrices=hidden,
    )  # fmt: skip


def _dtype_bytes(name: str | None) -> int | None:
    """Return the bytes of a dtype as a DeepSpeed JSON writes it."""
    if name is None:
        return None
    return 4 if "32" in name or name == "float" else 2


def _frozen_model_lines(config: RunConfig, properties: TaskProperties, states: StateSettings) -> Iterator[MemoryLine]:
    """Yield the weights of frozen models beside the policy: whole on each GPU below stage 3."""
    reference = reference_shape(config, properties, states.shape)
    found = (read_base_shape(model) for model in properties.reward_models)
    rewards = [with_score_head(shape) for shape in found if shape is not None]
    share = states.world_size if states.stage == 3 else 1
    offload = states.offload("offload_param") if states.stage == 3 else None
    place: Place = "nvme" if offload == "nvme" else "host" if offload else "gpu"
    for name, shapes, source in (
        ("reference model", [] if reference is None else [reference], "Rafailov et al., arXiv 2305.18290, eq. 7"),
        ("reward models", rewards, "docs/safety.md, scoring: online"),
    ):
        size = round(sum(shape.count() for shape in shapes) * states.weight_bytes / share)
        yield MemoryLine(name, size, place, "state", "w P / N" if share > 1 else "w P", source)


CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""MAX_CHUNK_BYTES of models/heads.py, which imports torch; a test compares."""
KEPT_SHARE, SLICE_SHARE, BLOCK_SHARE = 3.0, 0.5, {"cpu": 1 / 64, "cuda": 0.5}
"""Those of models/heads/linear_head.py."""
_HEAD_SOURCE = "dstrain/models/heads.py"
CHUNK_COPIES = 3
"""Copies of a chunk of fp32 logits that autograd holds where the head is not a plain linear layer."""


def head_lines(shape: ModelShape, workload: Workload, width: int) -> Iterator[MemoryLine]:
    """Yield the lines of the head."""
    if workload.is_scored or shape.vocab <= 1:
        return
    targets, vocab, limit = workload.targets, shape.vocab, CHUNK_BYTES[workload.device]
    yield MemoryLine(
        "inputs of the head", 2 * width * targets * shape.hidden + 24 * targets, "gpu", "activation", "2 w N H",
        f"{_HEAD_SOURCE}, _LinearScores", "pass",
    )  # fmt: skip
    kept = num_rows(shape, workload, width)
    if kept:
        yield MemoryLine(
            "errors of the head", width * kept * vocab, "gpu", "activation",
            f"w V min(N, {KEPT_SHARE:g} x {limit >> 20} MiB / (w V))", f"{_HEAD_SOURCE}, KEPT_SHARE", "head",
        )  # fmt: skip
    block = min(targets * vocab * 4, limit * BLOCK_SHARE[workload.device])
    slices = min(max(targets - kept, 0) * vocab * width, limit * SLICE_SHARE)
    yield MemoryLine(
        "logits of a slice", round(3 * block + slices), "gpu", "activation", "3 fp32 blocks and a slice",
        f"{_HEAD_SOURCE}, SLICE_SHARE and BLOCK_SHARE", "head",
    )  # fmt: skip
    if kept and kept < targets:
        # The gradient itself is counted with the gradients, or as the gradient of one tensor.
        yield MemoryLine(
            "fp32 sum of the head's gradient", 4 * vocab * shape.hidden, "gpu", "activation",
            "4 V H where errors are recomputed", f"{_HEAD_SOURCE}, _parameter_gradient", "head",
        )  # fmt: skip


def num_rows(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return the targets whose errors are kept for the gradient of the head."""
    if not trains_head(shape):
        return 0
    return min(workload.targets, max(1, int(CHUNK_BYTES[workload.device] * KEPT_SHARE) // (width * shape.vocab)))


def trains_head(shape: ModelShape) -> bool:
    """Return True where the head's weight, or the embedding that it is tied to, is trained."""
    part = "embedding" if shape.tied else "head"
    return any(tensor.is_trainable for tensor in shape.tensors if tensor.part == part)


def saved_head_bytes(shape: ModelShape, workload: Workload, width: int) -> int:
    """Return what autograd keeps of the head between forward and backward pass."""
    if workload.is_scored:
        return 0
    inputs = 2 * width * workload.targets * shape.hidden + 8 * workload.targets
    return inputs + width * num_rows(shape, workload, width) * shape.vocab


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
        from dstrain.planner.lines import OPTIMIZERS

        size = (4 + OPTIMIZERS[settings.optimizer].per_param) * settings.trained / settings.world_size
        yield MemoryLine(
            "copy for background saves",
            round(size),
            "host",
            "buffer",
            "(4 + bytes of the states) T / N",
            "dstrain/train/saver.py",
        )
