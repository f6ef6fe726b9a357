"""What a run asks of memory: shape of the model, batch, settings, processes on hosts."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from math import prod
from typing import Any, Literal

from dstrain.config.resolve import BatchPlan
from dstrain.config.rules import check_dtype
from dstrain.config.schema import ModelConfig, OptimConfig, RunConfig
from dstrain.errors import Fault, RecipeError, UsageError
from dstrain.models.attention.model_types import (
    NO_MASK_MODEL_TYPES,
    PACKED_MODEL_TYPES,
    PACKED_VISION_MODEL_TYPES,
)
from dstrain.models.quantization import OPTIMIZERS_8BIT, zero3_fault
from dstrain.preset import Device, Precision, Preset, RunSettings, resolve_precision
from dstrain.tasks import make_task

Part = Literal["embedding", "layers", "head", "vision", "projector", "lora", "other"]
PARTS: tuple[Part, ...] = ("embedding", "layers", "head", "vision", "projector", "lora", "other")


@dataclass(frozen=True)
class ParamTensor:
    """A parameter of the model; tied weights appear once."""

    name: str
    shape: tuple[int, ...]
    part: Part
    is_trainable: bool = True

    @property
    def numel(self) -> int:
        """Return the number of values."""
        return prod(self.shape)

    @property
    def is_linear_weight(self) -> bool:
        """Return True for a matrix of a linear layer inside the layers, vision tower or projector."""
        return len(self.shape) == 2 and self.part in ("layers", "vision", "projector") and "embed" not in self.name


@dataclass(frozen=True, kw_only=True)
class VisionShape:
    """Sizes of a vision encoder."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    patches: int
    """Positions of one image in the encoder: its patches, and the class token of CLIP."""
    patch_values: int
    """Pixel values of one patch, over its channels and frames."""
    tokens: int
    """Tokens of one image in the language model."""
    is_gated: bool = False
    """True for an MLP with a gate (Qwen2.5-VL)."""
    stored_layers: int = 0
    """Layers that run; LLaVA leaves the last one out, whose weights exist."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelShape:
    """Sizes of a decoder, with or without a vision encoder, and all its parameters. Compared by identity."""

    model_type: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    """True where the head is the embedding."""
    tensors: tuple[ParamTensor, ...]
    has_qk_norm: bool = False
    norms_per_layer: int = 2
    has_softcap: bool = False
    """True where attention caps its logits, which only the eager implementation does."""
    vision: VisionShape | None = None
    param_source: str = "config"
    """config, safetensors headers, or meta device."""

    @property
    def has_fp32_norms(self) -> bool:
        """Return True where norms multiply with their weight in fp32, as Gemma's do."""
        return self.model_type.startswith("gemma")

    @cached_property
    def kinds(self) -> tuple[tuple[ParamTensor, int], ...]:
        """One tensor of each size, part and role, and how many there are: sums over 80 equal layers need one of them."""
        found: dict[tuple[Any, ...], tuple[ParamTensor, int]] = {}
        for tensor in self.tensors:
            key = tensor.shape, tensor.part, tensor.is_trainable, tensor.is_linear_weight
            first, count = found.get(key, (tensor, 0))
            found[key] = first, count + 1
        return tuple(found.values())

    def count(self, part: Part | None = None, trainable: bool | None = None) -> int:
        """Return the number of parameters of a part (None: all), trainable or frozen ones (None: both)."""
        return sum(
            tensor.numel * count
            for tensor, count in self.kinds
            if part in (None, tensor.part) and trainable in (None, tensor.is_trainable)
        )

    def largest(self, trainable: bool | None = None) -> int:
        """Return the number of values of the largest tensor, trainable or frozen (None: any)."""
        return max((tensor.numel for tensor, _ in self.kinds if trainable in (None, tensor.is_trainable)), default=0)


def with_adapters(shape: ModelShape, lora: Any, heads: Iterable[str] = ()) -> ModelShape:
    """Return the shape with LoRA adapters on its linear layers; all but them and `heads` is frozen.

    A weight of (out, in) gets A (rank, in) and B (out, rank); DoRA adds a magnitude (out,). `lora`: the recipe's
    LoraConfig. Hu et al., arXiv 2106.09685, section 4.1; Liu et al., arXiv 2402.09353, eq. 5.
    """
    adapters, kept = [], []
    for tensor in shape.tensors:
        module = tensor.name.rpartition(".")[0]
        is_head = any(module.endswith(head) for head in heads)
        kept.append(replace(tensor, is_trainable=is_head))
        if not tensor.is_linear_weight or is_head or not _is_target(module, lora.targets):
            continue
        rows, columns = tensor.shape
        parts: list[tuple[str, tuple[int, ...]]] = [("lora_A", (lora.rank, columns)), ("lora_B", (rows, lora.rank))]
        parts += [("lora_magnitude_vector", (rows,))] if lora.dora else []
        adapters += [ParamTensor(f"{module}.{name}.weight", size, "lora") for name, size in parts]
    return replace(shape, tensors=(*kept, *adapters))


def _is_target(module: str, targets: str | list[str]) -> bool:
    if isinstance(targets, str):  # a regular expression of the whole name, as peft reads it
        try:
            return targets == "all-linear" or re.fullmatch(targets, module) is not None
        except re.error as error:
            problem = f"{targets!r} is not a regular expression ({error})"
            raise RecipeError(Fault("model.lora.targets", problem, "correct it, or write a list of names")) from None
    return any(module == target or module.endswith(f".{target}") for target in targets)


def with_frozen(shape: ModelShape, patterns: Iterable[str]) -> ModelShape:
    """Return the shape with the parameters of `model.freeze` frozen: names, prefixes, globs, or components."""
    patterns = tuple(patterns)

    def is_frozen(tensor: ParamTensor) -> bool:
        component = tensor.part if tensor.part in ("vision", "projector") else "language"
        names = (tensor.name, tensor.name.removeprefix("model."))
        return any(
            (pattern == component and shape.vision is not None)
            or any(name == pattern or name.startswith(f"{pattern}.") or fnmatch(name, pattern) for name in names)
            for pattern in patterns
        )  # fmt: skip

    return replace(
        shape,
        tensors=tuple(replace(tensor, is_trainable=False) if is_frozen(tensor) else tensor for tensor in shape.tensors),
    )


def with_score_head(shape: ModelShape) -> ModelShape:
    """Return the shape of a reward model: a linear score of one value instead of the language-model head."""
    body = tuple(tensor for tensor in shape.tensors if tensor.part != "head")
    return replace(shape, tensors=(*body, ParamTensor("score.weight", (1, shape.hidden), "head")))


def part_of(name: str) -> Part:
    """Return the part of a parameter by its name in a model file."""
    words = {
        "lora": ("lora_",),
        "projector": ("multi_modal_projector", "merger", "connector", "mm_projector"),
        "vision": ("vision", "visual"),
        "head": ("lm_head", "score.", "embed_out"),
        "embedding": ("embed_tokens", "wte", "wpe", "embeddings", "embed_in"),
        "layers": ("layers.", ".h.", "blocks.", "layer."),
    }
    found = next((part for part, marks in words.items() if any(mark in name for mark in marks)), "other")
    return found  # type: ignore[return-value]


def from_tensors(shapes: Mapping[str, tuple[int, ...]], shape: ModelShape, param_source: str) -> ModelShape:
    """Return the shape with tensors counted by name, in place of those derived from the config."""
    tensors = tuple(ParamTensor(name, size, part_of(name)) for name, size in shapes.items())
    return replace(shape, tensors=tensors, param_source=param_source)


QUERY_BLOCK, SAVED_BYTES = 128, 64 * 2**20
"""Constants of dstrain/models/attention/by_group.py, which imports torch; a test compares them."""


@dataclass(frozen=True, kw_only=True)
class TaskProperties:
    """What the planner has to know of a task, read from the task itself."""

    rows_per_sample: int = 1
    """2 for tasks on pairs of answers."""
    is_scored: bool = False
    """True for a score head instead of a language-model head."""
    heads: tuple[str, ...] = ()
    """New parts that are trained in full next to adapters."""
    reference: str = "none"
    """Kind of the reference: none, model, adapter or cached."""
    reference_model: ModelConfig | None = None
    """Another model as reference; None: the policy's own."""
    reward_models: tuple[ModelConfig, ...] = ()
    """Frozen reward models that score in each step; those that score before the training are gone by then."""
    packs_batches: bool = False
    is_known: bool = True
    """False for a task whose model is not a transformers model with a language-model or score head."""


def read_properties(config: RunConfig) -> TaskProperties:
    """Return the properties of a recipe's task. Imports no torch; of a user's task file, its own imports."""
    task = make_task(config)
    if not task.is_planned or task.loads_own_model:
        return TaskProperties(is_known=False)
    inputs = task.loss_inputs
    return TaskProperties(
        rows_per_sample=2 if task.has_pairs else 1,
        is_scored=not task.can_generate,
        heads=task.export.modules_to_save,
        reference=inputs.reference.kind,
        reference_model=inputs.reference.config if inputs.reference.recipe_key else None,
        reward_models=tuple(scorer.config for scorer in inputs.scorers if not scorer.is_cached),
        packs_batches=task.packs_batches,
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The largest forward pass of a step, on one process."""

    rows: int
    tokens: int
    """Tokens that the decoder computes."""
    targets: int
    """Tokens in the loss; all of them where their number is not known."""
    images: int = 0
    is_packed: bool = False
    has_mask: bool = False
    """True where attention gets an explicit mask, and each query head a copy of its keys."""
    is_eager: bool = False
    """True where attention keeps the logits of all pairs of tokens."""
    checkpointed: float = 1.0
    """Share of the layers that recompute their activations."""
    is_scored: bool = False
    device: str = "cuda"
    keys: float | None = None
    """Keys that attention on a CPU computes for a query, on average; None: those of sequences of `length`."""

    @property
    def length(self) -> int:
        """Return the tokens of one sequence on average."""
        return self.tokens // max(self.rows, 1)

    def attention_weights(self, heads: int, width: int) -> float:
        """Return the bytes per token of the attention weights that a packed batch on a CPU keeps for its gradient."""
        if not self.is_packed or self.device != "cpu":
            return 0.0
        keys = mean_block_keys(self.length) if self.keys is None else self.keys
        return min(width * heads * keys, SAVED_BYTES / max(self.tokens, 1))

    @property
    def positions(self) -> int:
        """Return the positions of one row: a packed batch has one row."""
        return self.tokens if self.is_packed else self.length


def mean_block_keys(length: int) -> float:
    """Return the keys of a query on average: each block of queries computes all keys up to its last query."""
    blocks, rest = divmod(length, QUERY_BLOCK)
    return (QUERY_BLOCK**2 * blocks * (blocks + 1) / 2 + rest * length) / max(length, 1)


def make_workload(
    config: RunConfig, shape: ModelShape, properties: TaskProperties, batch: BatchPlan, device: str
) -> Workload:
    """Return the pass with as many tokens as the recipe allows: each row has data.max_length."""
    micro, length = batch.micro, config.data.max_length
    rows = micro * properties.rows_per_sample
    tokens = rows * length
    if batch.tokens is not None:
        # A longer sample is a pass of its own.
        tokens = min(tokens, max(batch.tokens, properties.rows_per_sample * length))
        rows = max(1, tokens // length)
    packed = bool(config.batch.packing) and properties.packs_batches and takes_packed(shape, config)
    return Workload(
        rows=rows, tokens=tokens, targets=tokens, images=rows if shape.vision else 0, is_packed=packed,
        is_eager=config.model.attn_implementation == "eager" or shape.has_softcap or shape.model_type == "gpt_oss",
        has_mask=not packed and shape.model_type not in NO_MASK_MODEL_TYPES,
        checkpointed=float(config.model.gradient_checkpointing), is_scored=properties.is_scored, device=device,
    )  # fmt: skip


def takes_packed(shape: ModelShape, config: RunConfig) -> bool:
    """Return True where models of this type are known to take packed batches."""
    own_code = config.model.trust_remote_code
    return not own_code and shape.model_type in (PACKED_MODEL_TYPES | PACKED_VISION_MODEL_TYPES.keys())


def make_run_settings(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, device: Device, nvme_path: str
) -> RunSettings:
    """Return the settings with which `complete_preset` completes a preset.

    Raises PresetError, or RecipeError if the recipe contradicts the preset or its precision.
    """
    precision = resolve_precision(preset, config.precision, device)
    check_recipe_fits(config, preset, precision)
    return RunSettings(
        precision=precision,
        micro=batch.largest_micro(world_size),
        accumulate=batch.ds_accumulate,
        world_size=world_size,
        total=batch.total,
        clip=config.optim.clip,
        nvme_path=nvme_path,
        device_kind=device.kind,
        # Only adamw with offload is DeepSpeed's own CPU Adam (see make_optimizer).
        uses_custom_optimizer=config.optim.name != "adamw" or preset.offload_optimizer is None,
        uses_muon=config.optim.name == "muon",
    )


def check_recipe_fits(config: RunConfig, preset: Preset, precision: Precision) -> None:
    """Raise RecipeError for a recipe that cannot be trained with the preset in this precision."""
    if faults := [Fault(".".join(key), *rest) for key, *rest in check_dtype(config, precision)]:
        raise RecipeError(faults)  # `precision: auto` is resolved only here
    if (
        preset.block.get("activation_checkpointing", {}).get("cpu_checkpointing")
        and not config.model.gradient_checkpointing
    ):
        problem = "is false, but the preset's activation_checkpointing.cpu_checkpointing needs recomputed layers"
        raise RecipeError(Fault("model.gradient_checkpointing", problem, "write true, or remove cpu_checkpointing"))
    if config.model.quantize is not None and preset.stage == 3:
        raise RecipeError(zero3_fault(preset.name))
    check_optimizer(config.optim, preset, precision)


def check_optimizer(optim: OptimConfig, preset: Preset, precision: Precision) -> None:
    """Raise RecipeError for an optimizer that would compute something else at the preset's ZeRO stage.

    DeepSpeed itself accepts all of these silently.
    """
    faults, stage = [], f"ZeRO stage {preset.stage}"
    if optim.name == "adafactor" and preset.stage:
        problem = f"adafactor needs whole matrices, but {stage} partitions them into flat ranges"
        faults.append(Fault("optim.name", problem, "use ds_config: zero0, or optim.name: adamw"))
    if optim.name in OPTIMIZERS_8BIT and preset.offload_optimizer is not None:
        problem = f"{optim.name} runs on the GPU, but {preset.name} keeps the optimizer's state on the host"
        fix = "write adamw, DeepSpeed's CPUAdam there; or a preset without offload, such as zero2 or zero2_bf16"
        faults.append(Fault("optim.name", problem, fix))
    if optim.name == "muon" and precision == "fp16":
        problem = "muon keeps a momentum of gradients, but the loss scale of fp16 changes between steps"
        faults.append(Fault("optim.name", problem, "use precision: bf16, or optim.name: adamw"))
    if optim.name == "muon" and preset.stage and optim.clip:
        problem = f"is {optim.clip:g}, but at {stage} DeepSpeed clips Muon's updates instead of the gradient"
        fix = "remove it (Muon's updates all have the same norm), or use ds_config: zero0"
        faults.append(Fault("optim.clip", problem, fix))
    if faults:
        raise RecipeError(faults)


GPU_MEMORY_ENV = "DSTRAIN_GPU_MEMORY"
"""Environment variable with the memory that a run may use per GPU, or per process on a CPU: `24GiB`."""
COMMON_GPU_BYTES = tuple(size * 2**30 for size in (8, 12, 16, 24, 40, 80))
"""Sizes of a plan on a machine without a GPU."""
MAX_NUMBER = 1e18
_UNITS = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Processes of a run: one per GPU, the same number on each host."""

    gpus_per_node: int = 1
    nodes: int = 1
    kind: Literal["cuda", "cpu"] = "cuda"
    bf16: bool = True
    """True where the GPUs support bfloat16."""

    @property
    def world_size(self) -> int:
        """Return the number of processes."""
        return self.gpus_per_node * self.nodes


MIN_BYTES = 2**20
"""A number without a unit below this was meant in GiB or MiB."""


def parse_bytes(text: str, option: str) -> int:
    """Return `24GiB`, `24G` or `24 GB` as bytes; units are powers of 1024. Raises UsageError naming the option."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", text, re.IGNORECASE)
    if match is None or not 0 < float(match[1]) < MAX_NUMBER:
        raise UsageError(f"{option}: {text!r} is not a size of memory; write it like 24GiB")
    size = int(float(match[1]) * _UNITS[match[2].lower()])
    if size < MIN_BYTES:
        what = "means bytes, less than any GPU has" if not match[2] else "is less than any GPU has"
        raise UsageError(f"{option}: {text!r} {what}; write {match[1]}GiB")
    return size


def detect_gpu_bytes(env: Mapping[str, str]) -> tuple[list[int], str]:
    """Return the free bytes of each visible GPU, and where they were read.

    DSTRAIN_GPU_MEMORY stands for any GPU. Without a driver the list is empty. Raises UsageError for a wrong variable.
    """
    if capped := env.get(GPU_MEMORY_ENV):
        return [parse_bytes(capped, GPU_MEMORY_ENV)], GPU_MEMORY_ENV
    if env.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return [], "no visible GPU"
    found, source = _ask_nvml() or (_ask_nvidia_smi(), "nvidia-smi")
    return _visible(found, env.get("CUDA_VISIBLE_DEVICES")), source


def _visible(found: list[int], devices: str | None) -> list[int]:
    """Return the sizes of the GPUs whose indices CUDA_VISIBLE_DEVICES lists; all of them for UUIDs and without it."""
    names = [name.strip() for name in (devices or "").split(",")]
    if not all(name.isdecimal() and int(name) < len(found) for name in names):
        return found
    return [found[int(name)] for name in names]


def host_bytes() -> int:
    """Return the host's available memory in bytes."""
    import psutil

    return int(psutil.virtual_memory().available)


def _ask_nvml() -> tuple[list[int], str] | None:
    """Return the free bytes of the GPUs through pynvml; None without the package or a driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [int(pynvml.nvmlDeviceGetMemoryInfo(handle).free) for handle in handles], "pynvml"
    except Exception:  # NVMLError derives from Exception, and its subclasses depend on the driver
        return None


def _ask_nvidia_smi() -> list[int]:
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=dict(os.environ))
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [int(line) * 2**20 for line in done.stdout.split() if line.isdecimal()] if done.returncode == 0 else []
