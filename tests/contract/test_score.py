"""Scores of single answers: those that an evaluation averages, however many processes compute them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands.run_job import JobResult
from dstrain.commands.score import ScoreJob
from dstrain.commands.trained_model import ModelSelector
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
SCORE, EVALUATE = CASES + "score", CASES + "evaluate"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, two: Workers) -> Any:
    """The folder of a run of two processes, with its data beside it."""
    made: dict[str, Path] = {}

    def of(task: str) -> Path:
        if task not in made:
            folder = tmp_path_factory.mktemp("run")
            values = tiny_recipe(task, folder) | {"ds_config": "zero2"}
            write_recipe(folder, values)
            two(RUN, recipe=str(folder / "recipe.yaml"), run_dir=str(folder / "run"))
            made[task] = folder
        return made[task]

    return of


def score(workers: Workers, folder: Path, data: Path, **more: Any) -> list[dict[str, Any]]:
    """Return the rows that a score writes to standard output."""
    return workers(SCORE, folder=str(folder / "run"), data=str(data), out="-", **more)[0]["rows"]


def test_rewards_of_pairs_are_those_of_an_evaluation(trained: Any, one: Workers, two: Workers) -> None:
    folder = trained("rm")
    data = folder / "eval.jsonl"
    rows = score(one, folder, data)
    records = [json.loads(line) for line in data.read_text().splitlines()]
    assert [{name: row[name] for name in record} for row, record in zip(rows, records, strict=True)] == records
    margins = [row["chosen_score"] - row["rejected_score"] for row in rows]
    wanted = one(EVALUATE, folder=str(folder / "run"), data=str(data))[0]
    assert sum(margin > 0 for margin in margins) / len(margins) == pytest.approx(wanted["accuracy"])
    losses = [math.log1p(math.exp(-margin)) for margin in margins]
    assert sum(losses) / len(losses) == pytest.approx(wanted["loss"], rel=1e-4)
    for hold in (None, "zero3"):
        found = score(two, folder, data, ds_config=hold)
        assert [row["chosen_score"] for row in found] == pytest.approx([row["chosen_score"] for row in rows], rel=1e-4)


def test_log_probabilities_of_answers_add_up_to_the_loss(trained: Any, one: Workers, tmp_path: Path) -> None:
    folder, data = trained("sft"), tmp_path / "answers.jsonl"
    answers = [("\n\nHuman: why?\n\nAssistant:", " Take it."), ("\n\nHuman: how?\n\nAssistant:", " No.")]
    rows = [{"prompt": prompt, "completion": answer} for prompt, answer in answers]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    scored = score(one, folder, data)
    wanted = one(EVALUATE, folder=str(folder / "run"), data=str(data))[0]
    tokens = sum(row["num_tokens"] for row in scored)
    assert -sum(row["logp"] for row in scored) / tokens == pytest.approx(wanted["loss"], rel=1e-4)


def test_an_answer_has_the_same_score_in_every_form(trained: Any, one: Workers, tmp_path: Path) -> None:
    """In a pair, in a list and alone; and a record that cannot be read says so in its row."""
    folder = trained("rm")
    prompt, good, bad = "\n\nHuman: How do I mend the kettle?\n\nAssistant:", " Take out the belt.", " No."
    forms = [
        {"prompt": prompt, "chosen": good, "rejected": bad},
        {"prompt": prompt, "completions": [bad, good, "", bad]},
        {"prompt": prompt, "completion": good, "name": "kept"},
        {"prompt": prompt, "completions": 7},
    ]
    data = tmp_path / "forms.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in forms))
    refused = invoke("score", str(folder / "run"), "--data", str(data), "--out", "-")
    assert refused.exit_code == 2
    assert "forms.jsonl:4: 'completions' is not a list of answers" in refused.output
    pair, several, alone, unread = score(one, folder, data, sets=["data.on_error=skip"])
    assert several["scores"][1] == pytest.approx(pair["chosen_score"], rel=1e-5)
    assert several["scores"][0] == several["scores"][3] == pytest.approx(pair["rejected_score"], rel=1e-5)
    assert alone["score"] == pytest.approx(pair["chosen_score"], rel=1e-5)
    assert alone["name"] == "kept"
    assert "'completions' is not a list of answers" in unread["error"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--data", "nowhere.jsonl", "--out", "-"], "there is no such file"),
        (["--data", "in.jsonl", "--out", "nowhere/out.jsonl"], "is not a file in a folder that exists"),
        (["--data", "in.jsonl", "--out", "."], "is not a file in a folder that exists"),
        (["--data", "in.jsonl", "--out", "-", "--task", "protein"], "has no answers to score"),
        (["--data", "in.jsonl", "--out", "-", "--task", "temporal"], "has no answers to score"),
    ],
)
def test_what_cannot_be_scored_is_refused_before_anything_starts(
    words: list[str], wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "in.jsonl").write_text('{"prompt": "hi", "completion": "ho"}\n')
    words = words if "--task" in words else [*words, "--task", "rm"]
    result = invoke("score", str(tmp_path), *words, "--num-gpus", "2")
    assert result.exit_code == 2
    assert wanted in result.output


def test_a_worker_is_told_what_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("dstrain.commands.run_job.run_job", lambda *args: told.append(args) or JobResult(0))
    data, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    words = ["--data", str(data), "--out", str(out), "--step", "last", "--ds-config", "zero3"]
    assert invoke("score", str(tmp_path), *words).exit_code == 0
    first: ScoreJob = told[0][0]
    assert invoke(*first.to_argv()).exit_code == 0
    assert told[1][0] == first
    assert first.selector == ModelSelector(folder=tmp_path, step="last", ds_config="zero3")
