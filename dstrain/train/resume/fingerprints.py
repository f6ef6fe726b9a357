"""The weights that a run needs and that its checkpoints do not hold: under adapters, and in a reference beside the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dstrain.errors import ResumeError
from dstrain.models.weights.fingerprint import OTHER_BASE, fingerprint
from dstrain.models.zero3 import sharded
from dstrain.tasks import Task
from dstrain.train.resume.inputs import check_inputs, is_allowed
from dstrain.train.state.manifest import CheckpointInfo


def fingerprints(task: Task, ds_config: Mapping[str, Any]) -> dict[str, str]:
    """What each checkpoint's run.json records: `base`, where adapters learn on it, and `reference`, where it is a model of its own.

    Reads every byte of files whose hash is not in the cache, so it runs before any process group starts. The reference
    counts also where its answers are remembered: another one would be asked anew. That of adapters is their base.
    """
    model, seed = task.recipe.model, task.recipe.seed
    coarse = drawn_coarsely(ds_config)
    found = {} if model.lora is None else {"base": fingerprint(model, seed, coarse)}
    if task.reference in ("model", "cached"):
        found["reference"] = fingerprint(task.reference_model, seed, coarse)
    return found


def drawn_coarsely(ds_config: Mapping[str, Any]) -> bool:
    """Whether weights that are drawn are drawn in 16 bits, as DeepSpeed does in shards."""
    return sharded(ds_config) and any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))


def check_fingerprints(start: CheckpointInfo, now: Mapping[str, Any], task: Task, allowed: Collection[str]) -> None:
    """Raise ResumeError where a checkpoint's run had other weights or other data; `allowed` as --allow-change has it.

    Adapters are worthless on another base, so that is never allowed. A checkpoint of a version that did not record its
    reference is taken as it is.
    """
    check_inputs(start, now.get("inputs", {}), allowed)
    before = start.record()
    if before.get("base") != now.get("base"):
        raise ResumeError(f"{start.path}: {OTHER_BASE}")
    known, key = before.get("reference"), reference_name(task)
    if known is None or "reference" not in now or known == now["reference"]:
        return
    if is_allowed(key, allowed):
        return
    raise ResumeError(
        f"{start.path}: the run compares its model with a reference, whose weights are not those that {key} names now; "
        f"put the old ones back, choose another --run-dir, or pass --allow-change {key}"
    )


def reference_name(task: Task) -> str:
    """The key of the recipe that names the reference's weights."""
    model, wanted = task.recipe.model, task.reference_model
    if task.recipe.options.get("ref_model"):
        return "options.ref_model"
    if wanted.init is not None and wanted.init == model.init:
        return "model.init"
    return "model.config" if wanted.path is None else "model.path"
