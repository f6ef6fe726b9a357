"""Training in bf16 is the same whether weights were loaded in 32 bits or in bf16: DeepSpeed casts before it makes masters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cells import SLOW
from tests.workers import Workers

CASES = "tests.parity.precision_cases:"
TIED = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip
LORA = {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.1}}
FOLDER = {"config": None, "path": "BASE"}
STARTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dpo, files in bf16": ("dpo", "bfloat16", {"model": FOLDER}),
    "dpo, files in fp32": ("dpo", "float32", {"model": FOLDER}),
    "dpo, adapters": ("dpo", "bfloat16", {"model": {**FOLDER, **LORA}, "options": {"disable_dropout": False}}),
    "sft, DoRA": ("sft", "bfloat16", {"model": {**FOLDER, "lora": {"rank": 4, "dora": True}}}),
    "sft, drawn, tied": ("sft", "", {"model": {"config": TIED}}),
    "rm, a new head": ("rm", "bfloat16", {"model": FOLDER}),
    "sft, other weights to start from": ("sft", "float32", {"model": {"init": "BASE"}}),
    "vlm": ("vlm", "bfloat16", {"model": FOLDER}),
}
"""Task, type of the files, changes of its tiny recipe."""


QUICK = [
    ("dpo, files in bf16", 0),
    ("dpo, adapters", 2),
    ("rm, a new head", 2),
]
"""Cells that stand for the others; files in fp32 are read for `sft, other weights to start from`; DoRA: adapters; a
vision-language model: files in bf16."""


@pytest.mark.parametrize(
    ("start", "stage"),
    [(start, stage) if (start, stage) in QUICK else SLOW(start, stage) for start in STARTS for stage in (0, 1, 2, 3)],
)
def test_weights_loaded_in_bf16_train_as_those_loaded_in_fp32(
    start: str, stage: int, tmp_path: Path, one: Workers, two: Workers
) -> None:
    task, files, changes = STARTS[start]
    if files:
        one(CASES + "save_base", folder=str(tmp_path / "base"), task=task, dtype=files)
        model = {key: str(tmp_path / "base") if value == "BASE" else value for key, value in changes["model"].items()}
        changes = {**changes, "model": model}
    wanted, found = (
        two(CASES + "trained", task=task, kind=f"zero{stage}", dtype=dtype, changes=changes)
        for dtype in ("float32", "bfloat16")
    )
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["told"] == theirs["told"]
        assert ours["state"] == theirs["state"], "masters and what the optimizer keeps"
        assert ours["tensors"] == theirs["tensors"], "weights and buffers, with their types"
