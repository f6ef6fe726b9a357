"""Task docqa: an evaluation generates answers on every rank, and training does not notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import EXIT_STOPPED
from dstrain.tasks.common.answers import ANSWER_METRICS
from tests.cells import SLOW
from tests.contract.test_generate import GENERATE
from tests.resume.test_tasks import rows
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, read_jsonl, write_jsonl, write_recipe
from tests.workers import Workers

WITHOUT = "tests.contract.docqa_cases:run_without_generation"
STOPPED = "tests.contract.docqa_cases:run_stopped_while_generating"
EVALUATE = "tests.contract.export_cases:evaluate"
DROPOUT = {"lora": {"rank": 4, "dropout": 0.2}}


def recipe(folder: Path, preset: str, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    values = tiny_recipe("docqa", folder) | {"ds_config": preset, "batch": {"total": 6, "micro": 2}}
    values |= {"steps": 6, "eval": {"every": 2, "metric": "exact_match", "best": "max"}, "save": {"every": 6}}
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value} if isinstance(value, dict) else value
    return str(write_recipe(folder, values))


def eval_rows(run_dir: Path) -> list[dict[str, Any]]:
    return [row for row in rows(run_dir) if row["split"] == "eval"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "changes"),
    [
        ("zero2", {"model": DROPOUT}),
        SLOW("zero3", {}),  # zero2; in shards: contract/test_generate
        SLOW("zero3", {"model": DROPOUT, "precision": "bf16"}),
        SLOW("zero0", {"precision": "bf16"}),
        SLOW("zero1", {"model": DROPOUT}),
    ],
)
def test_generation_in_evaluations_leaves_training_as_it_is(
    preset: str, changes: dict[str, Any], tmp_path: Path, two: Workers
) -> None:
    """To the bit, with dropout and gradient checkpointing: random states, modes and the cache do not leak."""
    file = recipe(tmp_path, preset, steps=4, **changes)
    two(RUN, recipe=file, run_dir=str(tmp_path / "with"))
    two(WITHOUT, recipe=file, run_dir=str(tmp_path / "without"), sets=["eval.metric=loss", "eval.best=min"])
    found, wanted = rows(tmp_path / "with"), rows(tmp_path / "without")
    assert all({*ANSWER_METRICS} <= row.keys() for row in found if row["split"] == "eval")
    plain = [{name: row[name] for name in row if name not in ANSWER_METRICS} for row in found]
    assert plain == wanted
    assert len(eval_rows(tmp_path / "with")) == 2


@pytest.mark.slow  # a signal: resume/test_resume
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
def test_a_signal_during_generation_ends_the_run_with_a_checkpoint(preset: str, tmp_path: Path, two: Workers) -> None:
    """An evaluation may take longer than the grace period. As after any signal, there is no row of an evaluation."""
    file = recipe(tmp_path, preset, steps=4, save={"every": 6}, log={"every": 3})
    two(RUN, recipe=file, run_dir=str(tmp_path / "whole"))
    for found in two(STOPPED, recipe=file, run_dir=str(tmp_path / "run")):
        assert (found["code"], found["batches"]) == (EXIT_STOPPED, 1)
    assert [path.name for path in (tmp_path / "run/checkpoints").glob("step-*")] == ["step-00000002"]
    assert [(row["step"], row["split"]) for row in rows(tmp_path / "run")] == [(2, "train")]
    again = two(RUN, recipe=file, run_dir=str(tmp_path / "run"))[0]
    assert again["code"] == 0
    assert eval_rows(tmp_path / "run") == eval_rows(tmp_path / "whole")[1:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, one: Workers, two: Workers) -> Path:
    """The folder of a run that has learnt to answer; it learns in one process, and ends with two at stage 3."""
    folder = tmp_path_factory.mktemp("docqa")
    file = recipe(folder, "zero3", steps=80, optim={"lr": 1e-2}, eval={"every": 40}, save={"every": 40})
    run = {"recipe": file, "run_dir": str(folder / "run")}
    assert one(RUN, **run, sets=["ds_config=zero1", "batch.micro=6"], stop_at=78)[0]["code"] == EXIT_STOPPED
    two(RUN, **run)
    return folder


@pytest.mark.slow  # the run it needs takes half a minute
def test_metrics_are_those_of_the_answers(trained: Path, one: Workers) -> None:
    """Of `dstrain generate`, scored here; alike from a training engine in two processes and from one process."""
    data = str(trained / "eval.jsonl")
    written = one(GENERATE, folder=str(trained / "run"), data=data, sampling={"max_new_tokens": 8, "batch": 2})[0]
    accepted = [record["answers"] for record in read_jsonl(trained / "eval.jsonl")]
    answers = [row["answer"].strip() for row in written]
    assert all(row["prompt"].endswith("?") or "Page" in row["prompt"] for row in written)
    wanted = {
        name: sum(score(*pair) for pair in zip(answers, accepted, strict=True)) / len(accepted)
        for name, score in ANSWER_METRICS.items()
    }
    assert wanted["exact_match"] > 0.4, "it has learnt to answer: a guess among three colours has 0.33"
    assert {name: eval_rows(trained / "run")[-1][name] for name in wanted} == pytest.approx(wanted)
    alone = one(EVALUATE, folder=str(trained / "run"), data=data)[0]
    assert {name: alone[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.slow  # the run it needs takes half a minute
def test_each_sample_counts_once_where_ranks_have_unequal_shares(trained: Path, one: Workers, two: Workers) -> None:
    records = read_jsonl(trained / "eval.jsonl")[:3]
    data = str(write_jsonl(trained / "three.jsonl", records))
    alone = one(EVALUATE, folder=str(trained / "run"), data=data)[0]
    for preset in ("zero2", "zero3"):
        for found in two(EVALUATE, folder=str(trained / "run"), data=data, ds_config=preset):
            assert {name: found[name] for name in ANSWER_METRICS} == {name: alone[name] for name in ANSWER_METRICS}
    first = one(EVALUATE, folder=str(trained / "run"), data=data, sets=["eval.generate.samples=1"])[0]
    assert first["exact_match"] in (0, 1)
    assert first["loss"] == alone["loss"], "the losses are those of all samples"


@pytest.mark.slow  # the run it needs takes half a minute
def test_the_best_checkpoint_is_that_of_the_best_answers(trained: Path) -> None:
    by_step = {row["step"]: row["exact_match"] for row in eval_rows(trained / "run")}
    best = int((trained / "run/checkpoints/best").readlink().name.removeprefix("step-"))
    assert by_step[best] == max(by_step.values())
