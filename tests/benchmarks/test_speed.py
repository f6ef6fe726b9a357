"""The speed benchmark compares losses before it times, counts each token once, and draws a setting from its seed alone."""

from __future__ import annotations

import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.common import tell
from benchmarks.speed.matmuls import Work, count_work
from benchmarks.speed.settings import SETTINGS, drawn_setting
from tests.workers import Workers

NAMES = ["dstrain zero2", *(["TRL"] if find_spec("trl") else []), "plain DeepSpeed zero2", "matrix products alone"]
needs_hh = pytest.mark.skipif("DSTRAIN_DATA" not in os.environ, reason="DSTRAIN_DATA has hh-rlhf")


@needs_hh
@pytest.mark.parametrize(
    "task", ["rm", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dpo", "sft", "vlm"))]
)
def test_losses_are_compared_and_each_variant_has_a_row(task: str, one: Workers, tmp_path: Path) -> None:
    tiny = {"settings": "tiny", "tasks": task, "rounds": 2, "checked_steps": 2, "memory": 0}
    result = one("benchmarks.speed.__main__:measure", **tiny)[0]
    assert [row["variant"] for row in result["rows"]] == NAMES
    assert "fp32 losses within" in result["checked"]
    assert "bf16 losses within" in result["checked"]
    tell(result, tmp_path / "told.json")
    assert json.loads((tmp_path / "told.json").read_text())["rows"] == result["rows"]


@needs_hh
def test_another_loss_is_never_timed(one: Workers) -> None:
    with pytest.raises(AssertionError, match="losses in fp32 differ"):
        one("tests.benchmarks.test_speed:measure_unequal")


def measure_unequal() -> None:
    """In a worker: a plain loop with another loss."""
    from unittest import mock

    from benchmarks.speed.__main__ import measure
    from benchmarks.speed.plain_deepspeed import PlainDeepSpeed

    exact = PlainDeepSpeed._reward_loss
    with mock.patch.object(PlainDeepSpeed, "_reward_loss", lambda self, examples: 1.01 * exact(self, examples)):
        measure(settings="tiny", tasks="rm", rounds=1, checked_steps=1, memory=0)


@needs_hh
@pytest.mark.slow
def test_memory_is_that_of_a_process_of_its_own() -> None:
    from benchmarks.speed.memory import step_memory_mib

    assert 1 < step_memory_mib(SETTINGS["tiny"], "rm", NAMES[0], "bf16", ()) < 2000


@needs_hh
@pytest.mark.slow
def test_scaling_compares_losses_of_one_process_and_two(one: Workers) -> None:
    result = one("benchmarks.speed.scaling:measure", setting="tiny", steps=1, rounds=1)[0]
    assert [row["processes"] for row in result["rows"]] == [1, 2]


@pytest.mark.slow
def test_the_gpu_script_runs_on_a_cpu_and_says_what_it_could_not_run(one: Workers) -> None:
    result = one("benchmarks.gpu:measure", tasks="rm", tiny=1)[0]
    found = {row["variant"]: row for row in result["rows"]}
    for name in ("as it is", "attention sdpa", "gradient checkpointing", "all logits at once"):
        assert found[name]["tokens_per_second"] > 0, found[name]
    assert all(row["tokens_per_second"] or row["note"] for row in result["rows"])


def test_a_token_that_both_answers_share_counts_once() -> None:
    pair: dict[str, Any] = {"chosen": np.array([1, 2, 3, 4]), "rejected": np.array([1, 2, 5]), "prompt_length": 2}
    assert count_work("rm", [pair, pair]) == Work(tokens=10, targets=0)
    assert count_work("dpo", [pair]) == Work(tokens=5, targets=3)
    text = {"input_ids": np.array([1, 2, 3]), "loss_mask": np.array([0, 1, 1])}
    assert count_work("sft", [text]) == Work(tokens=3, targets=2)


def test_a_drawn_setting_is_a_function_of_its_seed() -> None:
    assert drawn_setting(7) == drawn_setting(7) != drawn_setting(8)
    assert all(drawn_setting(seed).hidden % 64 == 0 for seed in range(20))
