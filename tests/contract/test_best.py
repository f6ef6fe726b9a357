"""Which checkpoints are kept, and that `best` is the best: whoever asks for a checkpoint by name gets that one's weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from dstrain.commands.trained_model import find_saved_model
from dstrain.errors import UsageError
from tests.contract.best_cases import sums
from tests.contract.export_cases import make_run, stored
from tests.tiny import tiny_recipe
from tests.vocabulary import read_events, write_recipe
from tests.workers import Workers

CASES = "tests.contract.best_cases:"
TOLD = {1: 0.9, 2: 0.5, 3: 0.2, 4: 0.6, 5: 0.7, 6: 0.8}
"""Step -> loss on held-out data, as it were: the best is in the middle."""


def trained(tmp_path: Path, preset: str, workers: Workers, **changes: Any) -> Path:
    """A run of six steps that keeps the newest, each fourth and the best."""
    values = tiny_recipe("rm", tmp_path) | {"ds_config": preset, "steps": 6, "batch": {"total": 6, "micro": 2}}
    values |= {"eval": {"every": 1}, "save": {"every": 1, "keep": 1, "keep_every": 4}} | changes
    write_recipe(tmp_path, values)
    workers(CASES + "run_told", recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"), told=TOLD)
    return tmp_path / "run"


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero0", "zero1", "zero2", "zero3"])
def test_best_is_the_best_for_whoever_asks(preset: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    run = trained(tmp_path, preset, two)
    assert kept(run) == ["best", "step-00000003", "step-00000004", "step-00000006"]
    assert (run / "checkpoints/best").readlink() == Path("step-00000003"), "of its own folder, wherever that is moved"
    by_step = {step: stored(str(run / f"checkpoints/step-0000000{step}")) for step in (3, 4, 6)}
    assert len({tuple(sums(found).items()) for found in by_step.values()}) == 3

    for step, wanted in (("best", 3), ("4", 4), ("last", 6)):
        assert find_saved_model(run, step).step == wanted
        to = tmp_path / f"out-{step}"
        one("tests.contract.export_cases:export_only", run=str(run), to=str(to), step=step)
        assert sums(load_file(to / "model.safetensors")) == sums(by_step[wanted])
        for workers, hold in ((one, None), (two, "zero3"), (two, "zero2")):
            for told in workers(CASES + "held", folder=str(run), step=step, ds_config=hold):
                assert told == sums(by_step[wanted]), (step, hold)
    data = str(tmp_path / "eval.jsonl")
    row = one("tests.contract.export_cases:evaluate", folder=str(run), data=data, step="best")[0]
    assert row["step"] == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "other"),
    [
        ("zero3", "zero3"),
        ("zero0", "zero0"),
        ("zero1", "zero1"),
        ("zero2", "zero2"),
        ("zero3", "zero1"),
        ("zero0", "zero3"),
    ],
)
def test_going_on_from_the_best_begins_with_its_weights(
    preset: str, other: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    run = trained(tmp_path, preset, two)
    best = sums(stored(str(run / "checkpoints/step-00000003")))
    asked = {"recipe": str(tmp_path / "recipe.yaml"), "run_dir": str(run), "sets": [f"ds_config={other}"]}
    for told in two(CASES + "resumed", **asked, resume=str(run / "checkpoints/best")):
        assert told == {"step": 3, "weights": best}
    (event,) = [event for event in read_events(run, "resumed") if event["step"] == 3]
    assert event["checkpoint"] == str((run / "checkpoints/step-00000003").resolve()), "not the link, which may move"
    aside = [name.rpartition("-step-")[2] for name in kept(run) if name.startswith("superseded-")]
    assert sorted(aside) == ["00000004", "00000006"]
    assert (run / "checkpoints/best").resolve().name == "step-00000003"
    for told in one(CASES + "resumed", **asked, resume="auto"):
        assert told == {"step": 3, "weights": best}, "newer ones are out of the count"


def test_a_run_elsewhere_begins_with_the_best_of_another(tmp_path: Path, one: Workers) -> None:
    run = trained(tmp_path, "zero2", one)
    asked = {"recipe": str(tmp_path / "recipe.yaml"), "run_dir": str(tmp_path / "other"), "sets": []}
    (told,) = one(CASES + "resumed", **asked, resume=str(run / "checkpoints/best"))
    assert told == {"step": 3, "weights": sums(stored(str(run / "checkpoints/step-00000003")))}
    assert kept(run) == ["best", "step-00000003", "step-00000004", "step-00000006"], "that one is left alone"


def test_a_higher_metric_is_the_best_where_the_recipe_says_so(tmp_path: Path, one: Workers) -> None:
    run = trained(tmp_path, "zero2", one, eval={"every": 1, "metric": "accuracy", "best": "max"})
    assert find_saved_model(run, "best").step == 1
    assert kept(run) == ["best", "step-00000001", "step-00000004", "step-00000006"]


def test_without_a_metric_best_is_the_last(tmp_path: Path, one: Workers) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 2, "save": {"every": 1}}
    values["data"] = {"train": values["data"]["train"], "max_length": 48}
    write_recipe(tmp_path, values)
    one("tests.resume.cases:run", recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    assert kept(tmp_path / "run") == ["step-00000001", "step-00000002"]
    assert find_saved_model(tmp_path / "run", "best").step == 2


def test_a_best_that_is_damaged_is_never_passed_over_for_another(tmp_path: Path) -> None:
    run = make_run(tmp_path, "rm")
    better = run / "checkpoints/step-00000007"
    shutil.copytree(run / "checkpoints/step-00000001", better)
    for name in ("MANIFEST.json", "run.json"):
        values = json.loads((better / name).read_text())
        (better / name).write_text(json.dumps(values | {"step": 7, "metric": 0.1}))
    with pytest.raises(UsageError, match=r"--step best: .*step-00000007 is damaged: run.json"):
        find_saved_model(run, "best")
    assert find_saved_model(run, "last").step == 1


@pytest.mark.slow
def test_a_damaged_checkpoint_stops_all_who_would_read_it(tmp_path: Path, two: Workers) -> None:
    """In shards rank 0 alone reads: the other one must not wait for it."""
    run = trained(tmp_path, "zero3", two)
    shard = next((run / "checkpoints/step-00000003/state").glob("rank-00001*"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 4] ^= 1
    shard.write_bytes(content)
    for told in two(CASES + "refusal", folder=str(run), step="best", ds_config="zero3"):
        assert "is not what was written, the sha256" in told
