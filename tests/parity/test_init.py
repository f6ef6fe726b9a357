"""A model that starts from old weights is the same model at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.workers import Workers

CASES = "tests.parity.init_cases:"
TIED = {"model": {"config": {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True,
}}}  # fmt: skip
HALF = {"model": {**TIED["model"], "dtype": "bfloat16"}}
OLD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a run of DDP": ({"task": "rm", "path": "old.pt", "changes": {}, "prefix": "module."}, {}),
    "a model with another head": ({"task": "dpo", "path": "old.pt", "changes": {}}, {}),
    "tied weights": ({"task": "dpo", "path": "old.safetensors", "changes": TIED}, TIED),
    "weights of another type": ({"task": "dpo", "path": "old.pt", "changes": TIED}, HALF),
}  # fmt: skip


def equal(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(value, wanted[name]) for name, value in found.items())


@pytest.mark.parametrize("old", OLD)
def test_starting_from_old_weights_is_the_same_at_every_stage(
    old: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    how, changes = OLD[old]
    task = "rm" if old == "a model with another head" else how["task"]
    path = str(tmp_path / how["path"])
    one(CASES + "save_old", **how | {"path": path})
    wanted = one(CASES + "started", task=task, kind="zero0", path=path, changes=changes)[0]
    for stage in (0, 3):
        for found in two(CASES + "started", task=task, kind=f"zero{stage}", path=path, changes=changes):
            assert found["sharded"] == (stage == 3)
            assert equal(found["weights"], wanted["weights"])
            assert found["report"] == wanted["report"]
    assert ("missing keys: score.weight" in wanted["report"]) == (old == "a model with another head")


def test_where_weights_lie_in_shards_rank_0_alone_reads(tmp_path: Path, one: Workers, two: Workers) -> None:
    for rank, task in enumerate(("rm", "dpo")):  # other names in rank 1's file: nothing hangs either
        one(CASES + "save_old", path=str(tmp_path / f"{rank}.pt"), task=task, changes={"seed": 7 + rank})
    path = str(tmp_path / "RANK.pt")
    wanted = one(CASES + "started", task="rm", kind="zero0", path=path, changes={})[0]
    for found in two(CASES + "started", task="rm", kind="zero3", path=path, changes={}):
        assert equal(found["weights"], wanted["weights"])
