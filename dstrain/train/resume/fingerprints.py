"""The weights that a run needs and that its checkpoints do not hold: under adapters, and in a reference beside the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from dstrain.errors import ResumeError
from dstrain.models.params.zero3 import is_zero3
from dstrain.models.weights.fingerprint import BASE_CHANGED_MESSAGE, weights_fingerprint
from dstrain.tasks import Task
from dstrain.train.resume.inputs import check_inputs_unchanged
from dstrain.train.resume.recorded import is_change_allowed
from dstrain.train.state.manifest import CheckpointInfo


def fingerprint_weights(task: Task, ds_config: Mapping[str, Any]) -> dict[str, str]:
    """What each checkpoint's run.json records: `base`, where adapters learn on it, and `reference`, where it is a model of its own.

    Reads every byte of files whose hash is not in the cache, so it runs before any process group starts. The reference
    counts also where its answers are remembered: another one would be asked anew. That of adapters is their base.
    """
    model, seed = task.recipe.model, task.recipe.seed
    coarse = is_half_precision_init(ds_config)
    found = {} if model.lora is None else {"base": weights_fingerprint(model, seed, coarse)}
    if task.reference_kind in ("model", "cached"):
        found["reference"] = weights_fingerprint(task.reference_config, seed, coarse)
    return found


def is_half_precision_init(ds_config: Mapping[str, Any]) -> bool:
    """Whether weights that are drawn are drawn in 16 bits, as DeepSpeed does in shards."""
    return is_zero3(ds_config) and any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))


def check_fingerprints(
    checkpoint: CheckpointInfo, current: Mapping[str, Any], task: Task, allowed_keys: Collection[str]
) -> None:
    """Raise ResumeError where a checkpoint's run had other weights or other data; `allowed` as --allow-change has it.

    Adapters are worthless on another base, so that is never allowed. A checkpoint of a version that did not record its
    reference is taken as it is.
    """
    check_inputs_unchanged(checkpoint, current.get("inputs", {}), allowed_keys)
    before = checkpoint.read_run_info()
    if before.get("base") != current.get("base"):
        raise ResumeError(f"{checkpoint.path}: {BASE_CHANGED_MESSAGE}")
    known, key = before.get("reference"), get_reference_key(task)
    if known is None or "reference" not in current or known == current["reference"]:
        return
    if is_change_allowed(key, allowed_keys):
        return
    raise ResumeError(
        f"{checkpoint.path}: the run compares its model with a reference, whose weights are not those that {key} names now; "
        f"put the old ones back, choose another --run-dir, or pass --allow-change {key}"
    )


def get_reference_key(task: Task) -> str:
    """The key of the recipe that names the reference's weights."""
    model, wanted = task.recipe.model, task.reference_config
    if task.recipe.options.get("ref_model"):
        return "options.ref_model"
    if wanted.init is not None and wanted.init == model.init:
        return "model.init"
    return "model.config" if wanted.path is None else "model.path"
