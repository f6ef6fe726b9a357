"""Judged answers of a run: the same on one and two processes, at stages 0 and 3, and as generate and score give them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.contract.test_generate import GENERATE
from tests.reward_models import export_reward_model
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, message, read_jsonl, write_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
NAMES = ("reward", "win_rate", "anls")


@pytest.mark.slow
def test_a_run_is_judged_alike_on_any_processes_at_any_stage(tmp_path: Path, one: Workers, two: Workers) -> None:
    judge = str(export_reward_model(tmp_path))
    generate = {"samples": 7, "max_new_tokens": 6, "metrics": ["anls"], "reward_model": judge}
    values = tiny_recipe("sft", tmp_path) | {"ds_config": "zero3", "steps": 2, "batch": {"total": 4, "micro": 2}}
    values["eval"] = {"every": 1, "generate": generate, "metric": "win_rate", "best": "max"}
    values["data"] |= {"max_length": 120}  # no prompt is cut, which `generate` does not do
    write_recipe(tmp_path, values)
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    first, last = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if row["split"] == "eval"]
    assert all(name in row for row in (first, last) for name in NAMES)
    assert not any(name in row for row in read_jsonl(tmp_path / "run/metrics.jsonl")[:1] for name in NAMES)

    asked: dict[str, Any] = {"folder": str(tmp_path / "run"), "data": str(tmp_path / "eval.jsonl")}
    wanted = {name: pytest.approx(last[name], rel=1e-5) for name in NAMES}
    for workers, hold in ((one, None), (two, "zero0"), (two, "zero3")):
        for found in workers(CASES + "evaluate", ds_config=hold, **asked):
            assert {name: found[name] for name in NAMES} == wanted

    sampling = {"max_new_tokens": 6, "batch": 2}
    answers = one(GENERATE, sampling=sampling, sets=["data.max_samples=7"], **asked)[0]
    records = read_jsonl(tmp_path / "eval.jsonl")[:7]
    answered = [
        {"messages": [*record["messages"][:-1], message("assistant", answer["answer"])]}
        for record, answer in zip(records, answers, strict=True)
    ]
    scores = []
    for name, rows in (("answered", answered), ("right", records)):
        data = str(write_jsonl(tmp_path / f"{name}.jsonl", rows))
        scored = one(CASES + "score", folder=judge, data=data, out="-", sets=["data.on_error=skip"])[0]["rows"]
        scores.append([row.get("score") for row in scored])
    given = [score for score in scores[0] if score is not None]
    assert last["reward"] == pytest.approx(sum(given) / len(given), rel=1e-5)
    pairs = zip(*scores, strict=True)
    assert last["win_rate"] == sum(answer is not None and answer > right for answer, right in pairs) / 7
