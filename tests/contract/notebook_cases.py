"""A run from Python in this process, and one in others."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import dstrain
from dstrain.commands.notebook import Run
from dstrain.errors import UsageError
from tests.vocabulary import wait_until


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


def train_until_signal(recipe: Mapping[str, Any], folder: Path) -> None:
    """Train in this process, which gets a SIGTERM after the first row: it is raised or returned, and continued."""

    def send_signal() -> None:
        metrics = folder / "run/metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > size)
        os.kill(os.getpid(), signal.SIGTERM)

    def train(**options: Any) -> Run:
        threading.Thread(target=send_signal).start()
        return dstrain.train(recipe, run_dir=folder / "run", in_process=True, **options)

    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with pytest.raises(dstrain.RunStopped) as stop:
        train()
    assert stop.value.code == 75
    (stopped_at,) = [row["step"] for row in stop.value.run.checkpoints]
    run = train(raise_if_stopped=False)
    assert run.is_stopped
    assert run.checkpoints[0]["step"] > stopped_at
    assert signal.signal(signal.SIGTERM, before) is signal.SIG_IGN, "the handler of the script"
