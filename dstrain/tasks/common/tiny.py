"""Recipes that train in seconds, for tests of every task."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def tiny_recipe(folder: Path, task: str, make_record: Callable[[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Return a recipe that trains in seconds, with `make_record(split, index)` written as its data."""
    for name, count in (("train", 64), ("eval", 16)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(make_record(name, i)) + "\n" for i in range(count)))
    return {
        "task": task,
        "model": {
            "config": {
                "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
                "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            }
        },
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 48},
        "batch": {"total": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": 4,
        "log": {"every": 1, "tensorboard": False},
        "ds_config": "zero2",
    }  # fmt: skip
