"""A run from Python in this process, and one in others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dstrain
from dstrain.commands.notebook import Run
from dstrain.errors import UsageError


def train(recipe: Mapping[str, Any], folder: Path) -> None:
    """Train into the folder's `here` and `there`, and write all that is printed into said.txt."""
    said = os.open(folder / "said.txt", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(said, 1)
    os.dup2(said, 2)
    os.chdir(folder)
    before = dict(os.environ)
    here = dstrain.train(recipe, run_dir=folder / "here", in_process=True, overrides={"steps": 4})
    assert dict(os.environ) == before, "later commands must not take this process for a rank"
    again = dstrain.train(recipe, run_dir=folder / "here", in_process=True, overrides={"steps": 4})
    assert [row["step"] for row in again.metrics if row["split"] == "train"] == [1, 2, 3, 4]
    there = dstrain.train(recipe, run_dir=folder / "there", overrides={"steps": 4})
    assert there == Run(folder / "there")
    assert [row["step"] for row in there.checkpoints] == [4, 2]
    data = folder / "eval.jsonl"
    scores = there.evaluate(data, "last")
    assert scores["step"] == 4
    assert scores["loss"] == dstrain.evaluate(str(folder / "there"), data, step="last")["loss"]
    exported = there.export(folder / "out", license="mit", max_shard_size="20KB")
    assert exported == folder / "out"
    assert "license: mit" in (exported / "README.md").read_text()
    assert abs(dstrain.evaluate(exported, data)["loss"] - scores["loss"]) < 1e-5
    with pytest.raises(UsageError, match="no such file"):
        dstrain.evaluate(exported, "nowhere.jsonl")
    with pytest.raises(UsageError, match="no such option"):
        dstrain.evaluate(exported, data, gpus=2)
    policy = here.load("last")
    assert policy.step == 4
    (answer,) = policy.generate("How do I mend the pump?", max_new_tokens=4)
    assert policy.generate([[{"role": "user", "content": "How?"}]], max_new_tokens=4) != [answer]
    with pytest.raises(UsageError, match=r"--allow-change optim\.lr"):
        dstrain.train(recipe, run_dir=folder / "there", overrides={"steps": 9, "optim.lr": 0.5})
