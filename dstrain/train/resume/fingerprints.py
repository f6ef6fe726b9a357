"""Fingerprints of weights outside checkpoints: the LoRA base, the reference and reward models."""

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
    """Return the fingerprints for run.json: `base` with LoRA, `reference` for a separate reference model, and
    one under the recipe key of each reward model.

    Reads every byte of files whose hash is not cached, so it runs before any process group starts. A
    precomputed reference counts too, since its log-probs depend on it. With LoRA the reference is the base.
    """
    model, seed = task.recipe.model, task.recipe.seed
    coarse = is_half_precision_init(ds_config)
    found = {} if model.lora is None else {"base": weights_fingerprint(model, seed, coarse)}
    if task.loss_inputs.reference.kind in ("model", "cached"):
        found["reference"] = weights_fingerprint(task.loss_inputs.reference.config, seed, coarse)
    for scorer in task.loss_inputs.scorers:
        found[scorer.recipe_key] = weights_fingerprint(scorer.config, seed)
    return found


def is_half_precision_init(ds_config: Mapping[str, Any]) -> bool:
    """Return True if new weights are initialized in 16 bits, as DeepSpeed does under ZeRO-3."""
    return is_zero3(ds_config) and any(ds_config.get(name, {}).get("enabled") for name in ("bf16", "fp16"))


def check_fingerprints(
    checkpoint: CheckpointInfo, current: Mapping[str, Any], task: Task, allowed_keys: Collection[str]
) -> None:
    """Raise ResumeError if the checkpoint's run had other weights or data, unless `allowed_keys` permits it.

    Adapters do not fit another base, so that is never allowed. A reference that the run did not have before, by an
    allowed change of its options, is accepted.
    """
    check_inputs_unchanged(checkpoint, current.get("inputs", {}), allowed_keys)
    before = checkpoint.read_run_info()
    if before.get("base") != current.get("base"):
        raise ResumeError(f"{checkpoint.path}: {BASE_CHANGED_MESSAGE}")
    frozen = {"reference": ("reference", get_reference_key(task))}
    frozen |= {scorer.recipe_key: (f"{scorer.name} reward", scorer.recipe_key) for scorer in task.loss_inputs.scorers}
    for name, (what, key) in frozen.items():
        known = before.get(name)
        if known is None or name not in current or known == current[name] or is_change_allowed(key, allowed_keys):
            continue
        raise ResumeError(
            f"{checkpoint.path}: the weights of the run's {what} model are not those that {key} names now; "
            f"restore the old ones, choose another --run-dir, or pass --allow-change {key}"
        )


def get_reference_key(task: Task) -> str:
    """Return the recipe key that names the weights of the reference."""
    model, wanted = task.recipe.model, task.loss_inputs.reference.config
    if task.recipe.options.get("ref_model"):
        return "options.ref_model"
    if wanted.init is not None and wanted.init == model.init:
        return "model.init"
    return "model.config" if wanted.path is None else "model.path"
