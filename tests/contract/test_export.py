"""An export says what the run said, at every stage; models load in shards where they are trained in shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.tasks import find_task
from tests.resume.test_resume import RUN, rows
from tests.workers import WorkerError, Workers

CASES = "tests.contract.export_cases:"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    values = find_task("rm").tiny(tmp_path) | {
        "eval": {"every": 2, "metric": "accuracy", "best": "max"},
        "save": {"every": 2},
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    return str(tmp_path / "recipe.yaml")


@pytest.mark.parametrize(
    ("preset", "precision"), [("zero0", "fp32"), ("zero2", "bf16"), ("zero3", "fp32"), ("zero3", "bf16")]
)
def test_an_export_scores_as_the_run_does(
    preset: str, precision: str, recipe: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[f"ds_config={preset}", f"precision={precision}"])
    told = one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"))[0]
    assert told["step"] == 4
    assert told["dtype"] == ("float32" if precision == "fp32" else "bfloat16")
    assert told["difference"] <= (1e-5 if precision == "fp32" else 1e-2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(told["files"])

    in_run = [row for row in rows(tmp_path / "run") if row["split"] == "eval"][-1]
    data = str(tmp_path / "eval.jsonl")
    of_run = one(CASES + "evaluate", folder=str(tmp_path / "run"), data=data)[0]
    of_export = one(CASES + "evaluate", folder=str(tmp_path / "out"), data=data)[0]
    tolerance = 1e-5 if precision == "fp32" else 1e-2
    for name in ("loss", "accuracy", "margin"):
        assert of_run[name] == pytest.approx(in_run[name], abs=tolerance), name
        assert of_export[name] == pytest.approx(of_run[name], abs=tolerance), name


def test_best_exports_the_best(recipe: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"))
    best = (tmp_path / "run/checkpoints/best").resolve().name
    told = one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"), step="best")[0]
    assert best == f"step-{told['step']:08d}"


def test_an_export_never_overwrites(recipe: str, tmp_path: Path, one: Workers, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["steps=2"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine.txt").write_text("mine")
    with pytest.raises(WorkerError, match="exists and is not empty"):
        one(CASES + "export", run=str(tmp_path / "run"), to=str(tmp_path / "out"))
    assert (tmp_path / "out/mine.txt").read_text() == "mine"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, one: Workers) -> tuple[str, dict[str, Any]]:
    """A base model of 60 MB in several files, without a head."""
    folder = tmp_path_factory.mktemp("base")
    recipe = find_task("rm").tiny(folder)
    big = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    recipe["model"]["config"] |= big
    one(CASES + "save_base", folder=str(folder / "model"), recipe=recipe)
    return str(folder / "model"), recipe | {"model": {"path": str(folder / "model")}}


def test_weights_and_a_new_head_are_equal_at_every_stage(
    base: tuple[str, dict[str, Any]], one: Workers, two: Workers
) -> None:
    folder, recipe = base
    plain = one(CASES + "load", folder=folder, recipe=recipe, preset="zero2")[0]
    assert "score.weight" in plain["sums"]
    for told in two(CASES + "load", folder=folder, recipe=recipe, preset="zero3"):
        assert told["sums"] == pytest.approx(plain["sums"], abs=1e-9)
        assert told["norm"] == pytest.approx(plain["norm"], abs=1e-9)


def test_at_stage_3_no_rank_holds_a_full_copy(base: tuple[str, dict[str, Any]], two: Workers) -> None:
    folder, recipe = base
    whole = two(CASES + "load", folder=folder, recipe=recipe, preset="zero2")
    sharded = two(CASES + "load", folder=folder, recipe=recipe, preset="zero3")
    size = whole[0]["bytes"]
    assert size > 50e6
    assert sharded[1]["peak"] < 0.8 * size, json.dumps([told["peak"] / size for told in (*whole, *sharded)])
