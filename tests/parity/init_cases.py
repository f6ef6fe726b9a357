"""What the workers of the tests of `model.init` do."""

from __future__ import annotations

from typing import Any

import torch
from safetensors.torch import save_file

from dstrain.models.params.zero3 import zero3_init
from dstrain.models.weights.init_weights import load_init
from tests.parity.cases import ds_config, tiny_task, weights, world


def save_old(path: str, task: str, changes: dict[str, Any], prefix: str = "") -> None:
    """The task's model under another seed, as a run of old would have left it."""
    state = tiny_task(task, {"seed": 7, **changes}).build_model().state_dict()
    if path.endswith(".safetensors"):
        state.pop("lm_head.weight", None)  # tied: one of two names
        save_file(dict(state), path)
    else:
        torch.save({"model": {prefix + name: value for name, value in state.items()}, "step": 3}, path)


def started(task: str, kind: str, path: str, changes: dict[str, Any]) -> dict[str, Any]:
    """The weights and the report of a model that starts from a file; `RANK` in its name is this process's."""
    ranks = world()
    made = tiny_task(task, changes)
    precision = "bf16" if made.recipe.model.dtype == "bfloat16" else "fp32"
    with zero3_init(ds_config(kind, {"world_size": ranks.size, "precision": precision})):
        model = made.build_model()
        sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
        report = load_init(model, path.replace("RANK", str(ranks.rank)))
    return {"weights": weights(model), "report": str(report), "sharded": sharded}
