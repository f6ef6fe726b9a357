"""Worker functions of the tests of quantized weights in shards."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.models.params import gathered
from tests.parity.cases import Made, made


def codes_and_scales(run: Made) -> dict[str, tuple[bytes, bytes, float]]:
    """Return layer -> its codes, its 8-bit scales and their mean. Collective."""
    found = {}
    for name, layer in run.model.named_modules():
        if hasattr(layer, "codes"):
            with gathered([layer.weight]):
                state = layer.weight.quant_state
                found[name] = layer.codes.numpy().tobytes(), state.absmax.numpy().tobytes(), float(state.offset)
    return found


def stored_bytes(run: Made) -> dict[str, int]:
    """Return the bytes of codes in this process between the steps, and those that all processes have together."""
    weights = [layer.weight for layer in run.model.modules() if hasattr(layer, "codes")]
    own = [getattr(weight, "ds_tensor", weight) for weight in weights]
    return {
        "own": sum(part.untyped_storage().nbytes() for part in own),
        "whole": sum((weight.quant_state.shape.numel() + 1) // 2 for weight in weights),
        "left": sum(weight.data.untyped_storage().nbytes() for weight in weights if hasattr(weight, "ds_tensor")),
    }


def quantized_model(
    task: str, kind: str, changes: dict[str, Any] | None = None, precision: str = "fp32"
) -> dict[str, Any]:
    """Return the quantized values of a run's model, and what this process holds of them."""
    run = made(task, kind, 1, changes, precision)
    return {"values": codes_and_scales(run), "bytes": stored_bytes(run)}


def values_kept_for_the_backward_pass(kind: str) -> int:
    """Return the bytes of codes that are alive between the forward and the backward pass."""
    run = made("sft", kind, 1, {"model": {"lora": {"rank": 4}, "quantize": "nf4", "gradient_checkpointing": False}})
    weights = [layer.weight for layer in run.model.modules() if hasattr(layer, "codes")]
    seen: list[torch.UntypedStorage] = []
    raise NotImplementedError(weights, seen)
