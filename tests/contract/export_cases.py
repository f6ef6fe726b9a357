"""What the workers of export and loading tests do."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from dstrain.commands.evaluate import evaluate_model
from dstrain.commands.export import export_model
from dstrain.config.schema import RunConfig
from dstrain.models.sharded import sharded_construction
from dstrain.tasks import make_task
from tests.parity.cases import ds_config, weights, world


def export(run: str, to: str, step: str = "last") -> dict[str, Any]:
    """Export, then score one text as a stranger would: with transformers alone, unpadded."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    proof = export_model(Path(run), step, Path(to))
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(to).eval(), AutoTokenizer.from_pretrained(to)
    ids = tokenizer("\n\nHuman: How do I mend the pump?\n\nAssistant: Gladly: open it.", return_tensors="pt")[
        "input_ids"
    ]
    ids = torch.cat([ids, torch.tensor([[tokenizer.eos_token_id]])], dim=1)
    with torch.no_grad():
        score = float(model(input_ids=ids).logits)
    return {"step": proof.step, "difference": proof.difference, "dtype": proof.dtype, "score": score,
            "model_dtype": str(model.dtype), "files": sorted(path.name for path in Path(to).iterdir())}  # fmt: skip


def evaluate(
    folder: str, data: str, task: str | None = None, sets: list[str] | None = None, step: str = "last"
) -> dict[str, Any]:
    return evaluate_model(Path(folder), data, task, sets or [], step)


def save_base(folder: str, recipe: dict[str, Any]) -> None:
    """A base model without a head, and its tokenizer, as they would come from the hub."""
    from transformers import AutoModel

    task: Any = make_task(RunConfig.model_validate(recipe))
    task.tokenizer.save_pretrained(folder)
    torch.manual_seed(5)
    AutoModel.from_config(task.model_config).save_pretrained(folder, max_shard_size="20MB")


def load(folder: str, recipe: dict[str, Any], preset: str) -> dict[str, Any]:
    """Build the model from its folder; how much memory that took at most, and a few weights. Collective."""
    task = make_task(RunConfig.model_validate(recipe))
    config = ds_config(preset, {"world_size": world().size})
    before, seen, done = psutil.Process().memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(psutil.Process().memory_info().rss - before)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    with sharded_construction(config):
        model = task.build_model()
    done.set()
    thread.join()
    found = weights(model)
    return {
        "peak": max(seen),
        "bytes": sum(4 * value.size for value in found.values()),
        "sums": {name: float(value.sum()) for name, value in found.items()},
        "norm": float(np.sqrt(sum((value**2).sum() for value in found.values()))),
    }
