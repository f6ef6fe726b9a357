"""Measure a step of a vision-language model: logits of all tokens, of answers only, and with checkpointing.

    python -m benchmarks.vision [--shape 3m] [--length 512]

A LLaVA with a language model of this shape and a vision tower of the same width. Memory as in benchmarks/checkpointing.py.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.checkpointing import measure_peaks, memory_columns
from benchmarks.common import SHAPES, join_alone, made_batches, made_model, ratio, run, take_turns
from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from dstrain.tasks.common import forward
from dstrain.training.engine.torch import TorchEngine
from tests.vision_recipes import picture

SIDE, PATCH = 112, 14
"""Pixels per side: 64 tokens per image."""


def recipe(folder: Path, shape: str, length: int, checkpointing: bool) -> dict[str, Any]:
    """Return a recipe with questions about images: a long text before short answers."""
    size, lines = SHAPES[shape], []
    for index in range(16):
        picture(index, (SIDE, SIDE)).save(folder / f"{index}.png")
        asked = "<image>\n" + " ".join(f"word{(index * 7 + at) % 50}" for at in range(length // 6))
        lines.append({"image": f"{index}.png", "question": asked, "answer": f"it is number {index}"})
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tower = {
        "model_type": "clip_vision_model", "image_size": SIDE, "patch_size": PATCH, "projection_dim": size["hidden_size"],
        **{name: size[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
    }  # fmt: skip
    return {
        "task": "vlm",
        "model": {
            "config": {"model_type": "llava", "vision_config": tower, "text_config": {"model_type": "llama", **size}},
            "tokenizer": {"train": "bpe", "vocab_size": 319},
            "gradient_checkpointing": checkpointing,
        },
        "data": {"train": str(folder / "train.jsonl"), "max_length": length + SIDE * SIDE // PATCH**2},
        "optim": {"name": "sgd", "lr": 1e-4, "warmup": 0, "schedule": "constant"},
    }


@contextmanager
def all_logits(wanted: bool) -> Iterator[None]:
    """Within the context, the model computes the logits of all tokens if `wanted`."""
    if not wanted:
        yield
        return
    with mock.patch.object(forward, "_parameter_names", return_value=frozenset()):
        yield


def measure(
    *, shape: str = "3m", length: int = 512, micro: int = 4, rounds: int = 5, checked_steps: int = 2
) -> dict[str, Any]:
    """Check that the losses are equal, then measure memory and time."""
    world, kinds = (
        join_alone(),
        {"every token": (True, False), "answers": (False, False), "checkpointing": (False, True)},
    )
    engines, batches = {}, []
    for name, (_, checkpointing) in kinds.items():
        folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
        task = make_task(RunConfig.model_validate(recipe(folder, shape, length, checkpointing)))
        engines[name] = TorchEngine(*made_model(task), task.recipe.optim, world.device)
        batches = batches or made_batches(task, checked_steps, micro)

    def step(name: str, turn: int) -> Any:
        with all_logits(kinds[name][0]):
            return engines[name].step(batches[turn % len(batches)], 1e-4)

    worst = 0.0
    for turn in range(checked_steps):
        told = [step(name, turn) for name in kinds]
        for value in ("loss", "grad_norm"):
            first, *others = (float(getattr(one, value)) for one in told)
            worst = max([worst, *(abs(other - first) / max(abs(first), 1e-3) for other in others)])
    assert worst <= 1e-5, f"a step differs by {worst:.1e}"
    runners = {name: (lambda turn, name=name: step(name, turn)) for name in kinds}
    memory, seconds = measure_peaks(runners, world.device), take_turns(runners, rounds, 1, world.device)
    base = "every token"
    rows = [
        {"logits": name, **ratio(seconds, name, base), **memory_columns(memory, name, base, "step_memory_mib")}
        for name in kinds
    ]
    return {
        "settings": {"shape": shape, "length": length, "micro": micro, "rounds": rounds},
        "checked": f"loss and gradient norm of {checked_steps} steps differ by at most {worst:.1e} (limit 1e-05)",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__ or "")
