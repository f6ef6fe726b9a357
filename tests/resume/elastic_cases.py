"""Worker functions of the elastic tests: an engine's state before and after, read by DeepSpeed's functions."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F

from dstrain.batch import Batch
from dstrain.config import BatchPlan, RunConfig
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.errors import CheckpointError
from dstrain.models.load import load_model, read_config
from dstrain.models.params import build_param_groups, full_numel, zero3_init
from dstrain.preset import Preset, read_preset
from dstrain.tasks import Task
from dstrain.tasks.common.task import Loss
from dstrain.training.build_model import build_train_module
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.state.engine_state import open_checkpoint
from dstrain.training.state.files import CheckpointReader
from tests.parity.cases import world
from tests.save_and_load import go_on, keep

SHAPE = {"model_type": "llama", "vocab_size": 61, "hidden_size": 28, "intermediate_size": 37, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}  # fmt: skip
"""No size that three processes share evenly; the embedding is the head too."""
KINDS: Mapping[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora": {"rank": 3, "alpha": 6.0}},
    "frozen": {"freeze": ["model.layers.0", "model.layers.1.mlp.up_proj"]},
}
SMALL = {"stage3_param_persistence_threshold": 500, "sub_group_size": 3000, "stage3_prefetch_bucket_size": 2000}
"""So that stage 3 keeps some parameters whole, and has several groups."""
NVME = {"stage3_param_persistence_threshold": 0, "sub_group_size": 100_000_000}
SAMPLES = 7
"""Of a step: no number of processes but one shares them evenly."""
BEFORE, AFTER = 3, 3
"""Steps on either side of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Guess(Task):
    """Predicts the next of some numbers; its model has a persistent buffer."""

    def examples(self, split: str) -> Sequence[int]:
        return range(200)

    def collate(self, examples: Sequence[int]) -> Batch:
        rows = [np.random.default_rng(sample).integers(0, 61, 9) for sample in examples]
        return Batch(
            tensors={"ids": torch.tensor(np.stack(rows))},
            weight=8.0 * len(examples),
            samples=tuple(examples),
            tokens=9 * len(examples),
        )

    def build_model(self) -> torch.nn.Module:
        import transformers

        model = load_model(
            transformers.AutoModelForCausalLM, self.recipe.model, read_config(self.recipe.model), self.recipe.seed
        )
        model.register_buffer("seen", torch.arange(7.0).view(1, 7))
        model.register_buffer("count", torch.tensor(5))
        model.scale = torch.nn.Parameter(torch.ones(1, dtype=model.dtype))  # fewer values than processes
        return model

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        ids = batch.tensors["ids"]
        logits = model(input_ids=ids).logits[:, :-1].float() * model.scale  # (B, 8, 61)
        return Loss(F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))


def save_model(folder: str, shape: Mapping[str, Any] = SHAPE) -> None:
    """Save a model that is initialized once, so that all processes share it."""
    import transformers

    torch.manual_seed(0)
    values = {**shape}
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def engine(model: str, kind: str, preset: str, precision: str = "fp32", **more: Any) -> DeepSpeedEngine:
    """Return an engine on the model in a folder. `more`: `optim`, `accumulate`, `more_model` for the recipe, `zero` for the JSON.

    Collective."""
    values = {
        "task": "guess",
        "model": {"path": model, "gradient_checkpointing": False, **KINDS[kind], **more.get("more_model", {})},
        "optim": {"lr": 3e-3, "weight_decay": 0.01, **more.get("optim", {})},
        "precision": precision,
    }
    recipe = RunConfig.model_validate(values)
    config = ds_config(recipe, preset, more.get("accumulate", 2), more.get("zero", SMALL))
    with zero3_init(config):
        objective = build_train_module(Guess(recipe=recipe))
    return DeepSpeedEngine(objective, build_param_groups(objective.model, recipe.optim), recipe.optim, config, world())


def ds_config(recipe: RunConfig, preset: str, accumulate: int, zero: Mapping[str, Any]) -> dict[str, Any]:
    """Return a preset with changed keys; `zero1_offload`: stage 1 with its optimizer on the host."""
    read = read_preset("zero1" if preset == "zero1_offload" else preset)
    block = {**read.block["zero_optimization"]} | {
        k: v for k, v in zero.items() if k in read.block["zero_optimization"]
    }
    if preset == "zero1_offload":
        block["offload_optimizer"] = {"device": "cpu"}
    if "buffer_size" in block.get("offload_param", {}):
        block["offload_param"] = {
            **block["offload_param"],
            "buffer_size": 1_000_000,
        }  # instead of 2 GB of locked memory
    size = world().size
    found = Preset(preset, read.path, {**read.block, "zero_optimization": block})
    batch = BatchPlan(SAMPLES, -(-SAMPLES // (accumulate * size)), accumulate)
    return resolve_ds_config(recipe, found, batch, size, Device("cpu", True), Path(tempfile.mkdtemp()))


def take(made: DeepSpeedEngine, first: int, number: int, accumulate: int = 2) -> list[float]:
    """Take steps from `first` on; return the mean loss of each. Collective."""
    ranks, task, losses = made.world, made.train_module.task, []
    for step in range(first, first + number):
        ids = np.arange(SAMPLES) + step * SAMPLES
        chunks = np.array_split(ids, ranks.size * accumulate)[ranks.rank * accumulate :][:accumulate]
        batches = [task.collate(chunk.tolist()) if len(chunk) else filler(task, ids) for chunk in chunks]
        result = made.step(batches, lr=3e-3)
        losses.append(np.divide(*ranks.sum([float(result.loss), result.weight])))
    return [float(loss) for loss in losses]


def filler(task: Task, ids: np.ndarray) -> Batch:
    """Return a batch of weight 0, for a rank without a sample."""
    full = task.collate([int(ids[0])])
    return Batch(tensors=full.tensors, weight=0.0, samples=(), tokens=0, is_filler=True)


def mark(made: DeepSpeedEngine) -> None:
    """Change frozen weights, so that they can only come from the checkpoint; the base of adapters is unchanged. Collective."""
    import deepspeed

    model, noise = made.train_module.model, torch.Generator().manual_seed(7)
    for parameter in model.parameters():
        if parameter.requires_grad or made.train_module.stored_model.adapters_only:
            continue
        with torch.no_grad(), _gathered(deepspeed, parameter, 0):
            parameter.add_(torch.randn(parameter.shape, generator=noise).to(parameter), alpha=0.05)
    for name, buffer in model.named_buffers():
        if name.endswith(("seen", "count")):
            buffer.mul_(-3)


@contextmanager
def _gathered(deepspeed: Any, parameter: Any, modifier: int | None = None) -> Iterator[None]:
    if not hasattr(parameter, "ds_id"):
        yield
        return
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier):
        yield


def state(made: DeepSpeedEngine) -> dict[str, str]:
    """Return NAME/KEY -> hash of the full tensor, and the counters. Collective."""
    import deepspeed

    told: dict[str, str] = {}
    optimizer, model = made.engine.optimizer, made.train_module.model
    if hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"):
        # DeepSpeed 0.19.8 does it once, when the first of several groups has stepped: what the others keep is never found.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    for name, parameter in model.named_parameters():
        with _gathered(deepspeed, parameter):
            told[f"{name}/low"] = digest(parameter)
        if parameter.requires_grad:
            told |= {f"{name}/{key}": digest(value) for key, value in _learnt(optimizer, parameter).items()}
    told |= {f"{name}/buffer": digest(value) for name, value in model.named_buffers()}
    inner = getattr(optimizer, "optimizer", optimizer)
    steps = {float(kept["step"]) for kept in inner.state.values() if "step" in kept}
    return told | {"steps": str(sorted(steps)), "counted": str(made.engine.global_steps)}


def _learnt(optimizer: Any, parameter: Any) -> dict[str, torch.Tensor]:
    """Return key -> (full shape), fp32: the master weight and its optimizer state."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    if not (hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping")):
        inner, master = getattr(optimizer, "optimizer", optimizer), parameter
        for lows, masters in zip(*(getattr(optimizer, f"{kind}_groups", []) for kind in ("fp16", "fp32")), strict=True):
            master = next((high for low, high in zip(lows, masters, strict=True) if low is parameter), master)
        kept = {k: v for k, v in inner.state[master].items() if isinstance(v, torch.Tensor) and v.dim()}
        return {"master": master, **kept}
    master = safe_get_full_fp32_param(parameter)
    kept = {key for state in optimizer.optimizer.state.values() for key, v in state.items() if _many(v)}
    return {"master": master} | {key: safe_get_full_optimizer_state(parameter, key) for key in sorted(kept)}


def _many(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def digest(tensor: torch.Tensor) -> str:
    """Return a hash of the values in fp32."""
    values = tensor.detach().float().contiguous().view(-1).cpu()
    assert values.isfinite().all()
    return f"{hashlib.sha256(values.numpy().tobytes()).hexdigest()[:20]} {int(values.count_nonzero()) > 0}"


def source(folder: str, after: int = AFTER, **made: Any) -> dict[str, Any]:
    """Train, save a checkpoint, and continue for `after` steps. Collective."""
    began = engine(**made)
    mark(began)
    accumulate = made.get("accumulate", 2)
    take(began, 0, BEFORE, accumulate)
    checkpoint = keep(began, Path(folder), BEFORE)
    told = state(began)
    return {"state": told, "losses": take(began, BEFORE, after, accumulate), "checkpoint": str(checkpoint)}


def target(checkpoint: str, first: int = BEFORE, to: str | None = None, **made: Any) -> dict[str, Any]:
    """Continue from the checkpoint; `to`: save another one after these steps. Collective."""
    goes_on = engine(**made)
    go_on(goes_on, Path(checkpoint))
    told = {"state": state(goes_on), "losses": take(goes_on, first, AFTER, made.get("accumulate", 2))}
    if to is None:
        return told
    return told | {"checkpoint": str(keep(goes_on, Path(to), first + AFTER)), "left": state(goes_on)}


def refused(checkpoint: str, fails: str | None = None, **made: Any) -> str:
    """Return the error of loading a checkpoint; `fails`: what fails on rank 1 only. Collective."""
    goes_on = engine(**made)
    broken = {"open": ("__init__", OSError("stale file handle")), "read": ("read_into", KeyError("no such range"))}
    name, error = broken[fails or "open"]
    here = fails is not None and goes_on.world.rank == 1
    with mock.patch.object(CheckpointReader, name, side_effect=error) if here else nullcontext():
        try:
            goes_on.load(open_checkpoint(Path(checkpoint), goes_on.world))
        except CheckpointError as refusal:
            return str(refusal)
    return ""


def footprint(checkpoint: str, **made: Any) -> dict[str, int]:
    """Return bytes of resident memory before a load, at its peak, at the peak of a step, and of the state. Collective."""
    goes_on = engine(**made)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before = _resident()["VmRSS"]
    go_on(goes_on, Path(checkpoint))
    peak, parts = _resident()["VmHWM"], [part for parts in goes_on.state_slices() for part in parts]
    tensors = [tensor for part in parts for tensor in part.elementwise_state().values()]
    take(goes_on, BEFORE, 1)
    return {
        "before": before,
        "peak": peak,
        "step": _resident()["VmHWM"],
        "weights": sum(part.tensor.nbytes for part in parts),
        "held": sum(tensor.nbytes for tensor in tensors),
        "largest": max(full_numel(parameter) * 4 for parameter in goes_on.train_module.parameters()),
    }


def _resident() -> dict[str, int]:
    """Return this process's memory in bytes by the names in /proc."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: int(line.split()[1]) << 10 for line in lines if (name := line.split(":")[0]) in ("VmRSS", "VmHWM")}
