"""Measure a step with a frozen vision encoder and gradient checkpointing, with and without gradients of its input.

    python -m benchmarks.frozen_encoder [--shape 3m] [--length 64]

`input gradients`: as transformers enables checkpointing; the encoder's layers are recomputed. The model is that of
benchmarks/vision.py, memory as in benchmarks/checkpointing.py.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.checkpointing import measure_peaks, memory_columns
from benchmarks.common import join_alone, made_batches, made_model, ratio, run, take_turns
from benchmarks.vision import recipe
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task


def measure(*, shape: str = "3m", length: int = 64, micro: int = 4, rounds: int = 5) -> dict[str, Any]:
    """Check that the gradients are equal, then measure memory and time of forward and backward passes."""
    world = join_alone()
    values = recipe(Path(tempfile.mkdtemp(prefix="dstrain-bench-")), shape, length, True)
    values["model"]["freeze"] = ["vision"]
    task = make_task(RunConfig.model_validate(values))
    module, _ = made_model(task)
    module.to(world.device).train()
    (batch,) = made_batches(task, 1, micro)[0]

    def passes(has_input_gradients: bool) -> list[torch.Tensor]:
        if has_input_gradients:
            module.model.enable_input_require_grads()
        total, _ = module(batch)
        total.backward()
        module.model.disable_input_require_grads()
        found = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        module.zero_grad(set_to_none=True)
        return found

    pairs = zip(passes(True), passes(False), strict=True)
    assert all(torch.equal(*pair) for pair in pairs), "the gradients differ"
    base, own = "input gradients", "none"
    runners = {base: lambda turn: passes(True), own: lambda turn: passes(False)}
    memory, seconds = measure_peaks(runners, world.device), take_turns(runners, rounds, 1, world.device)
    rows = [
        {"encoder": name, **ratio(seconds, name, base), **memory_columns(memory, name, base, "pass_memory_mib")}
        for name in runners
    ]
    return {
        "settings": {"shape": shape, "length": length, "micro": micro, "rounds": rounds},
        "checked": "gradients are bit-identical",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
