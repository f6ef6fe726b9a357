"""Worker functions of the tests of `model.init`."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

from dstrain.models.init_weights import load_init
from dstrain.models.params import zero3_init
from tests.parity.cases import ds_config, tiny_task, weights, world


def save_old(path: str, task: str, changes: dict[str, Any], prefix: str = "") -> None:
    """Save the task's model with another seed, as an earlier run would."""
    state = tiny_task(task, {"seed": 7, **changes}).build_model().state_dict()
    if path.endswith(".safetensors"):
        state.pop("lm_head.weight", None)  # tied: one of two names
        save_file(dict(state), path)
    else:
        torch.save({"model": {prefix + name: value for name, value in state.items()}, "step": 3}, path)


def started(task: str, kind: str, path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return weights and report of a model initialized from a file; `RANK` in its name is replaced by the rank."""
    ranks = world()
    made = tiny_task(task, changes)
    precision = "bf16" if made.recipe.model.dtype == "bfloat16" else "fp32"
    with zero3_init(ds_config(kind, {"world_size": ranks.size, "precision": precision})):
        model = made.build_model()
        sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        report = load_init(model, path.replace("RANK", str(ranks.rank)))
    return {"weights": weights(model), "report": str(report), "sharded": sharded}
