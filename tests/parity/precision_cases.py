"""Worker functions of the precision tests: train from weights loaded in different precisions."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from tests.parity.cases import made, tiny_task


def save_base(folder: str, task: str, dtype: str) -> None:
    """Save a model of the task and its tokenizer with weights of this dtype."""
    base = tiny_task(task, {"seed": 11})
    writer = tiny_task("sft", {"seed": 11}) if task == "rm" else base  # a reward model begins with a model that writes
    model: Any = writer.build_model()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    base.export.save_extras(Path(folder))


def trained(task: str, kind: str, dtype: str, changes: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Return losses, gradient norms, and a digest of this rank's state after some bf16 steps."""
    model = {**changes.get("model", {}), "dtype": dtype}
    run = made(task, kind, 2, {**changes, "model": model}, precision="bf16")
    told = []
    for step in range(steps):
        result = run.engine.step(run.batches(list(range(8 * step, 8 * step + 8)), 2), lr=1e-3)
        told += [float(result.loss), float(result.grad_norm)]
    found = hashlib.sha256()
    for parts in run.engine.state_slices():
        for part in parts:
            found.update(_bytes(part.tensor))
    tensors = {**dict(run.model.named_parameters()), **dict(run.model.named_buffers())}
    return {
        "told": told,
        "state": found.hexdigest(),
        "tensors": {
            name: (str(value.dtype), hashlib.sha256(_bytes(getattr(value, "ds_tensor", value))).hexdigest())
            for name, value in tensors.items()
        },
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
