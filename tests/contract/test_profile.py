"""`profile`: files about a few steps, and the same run."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.report import flops
from dstrain.training import profiler
from dstrain.training.profiler import MAX_ALLOCATIONS, MemoryHistory
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, read_events, read_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.profile_cases"


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    """The tiny reward model with dropout on, six steps of two micro-batches on each of two ranks."""
    values = tiny_recipe("rm", tmp_path) | {
        "options": {"disable_dropout": False},
        "steps": 6,
        "batch": {"total": 8, "micro": 2},
        "profile": {"steps": [2, 4], "memory": True},
    }
    values["model"]["config"]["attention_dropout"] = 0.1
    write_recipe(tmp_path, values)
    return str(tmp_path / "recipe.yaml")


def losses(run_dir: Path) -> list[tuple[Any, ...]]:
    told = read_jsonl(run_dir / "metrics.jsonl")
    return [(row["step"], row["split"], row["loss"], row.get("grad_norm")) for row in told]


def trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path) as file:
        return json.load(file)["traceEvents"]


def steps_in(path: Path) -> list[str]:
    return sorted({event["name"] for event in trace(path) if str(event.get("name")).startswith("step ")})


def module_row(table: str, name: str) -> list[str]:
    """Class, parameters, FLOPs and seconds of the first module of this name."""
    found = re.search(rf"^ *{re.escape(name)}  +(\S.*\S)\s*$", table, flags=re.M)
    assert found, table[:2000]
    return re.split(r"  +", found[1])


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=pytest.mark.slow) for name in ("zero0", "zero1", "zero2", "zero3")]
)
def test_profiling_changes_no_loss(preset: str, recipe: str, tmp_path: Path, two: Workers) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    assert two(RUN, recipe=recipe, run_dir=str(with_it), sets=[f"ds_config={preset}"])[0]["code"] == 0
    two(RUN, recipe=recipe, run_dir=str(without), sets=[f"ds_config={preset}", "profile=null"])
    assert losses(with_it) == losses(without), "bit for bit"
    assert not (without / "profile").exists()
    traces = [f"trace-rank-0000{rank}-steps-2-4.json.gz" for rank in (0, 1)]
    (told,) = read_events(with_it, "profiled")
    assert (told["steps"], told["files"]) == ([2, 4], ["flops.txt", *traces])
    assert sorted(path.name for path in (with_it / "profile").iterdir()) == told["files"]
    for name in traces:
        assert steps_in(with_it / "profile" / name) == ["step 2", "step 3", "step 4"]
    seen = trace(with_it / "profile" / traces[0])
    assert any(event.get("args", {}).get("Input Dims") for event in seen)
    assert any(event.get("name") == "[memory]" for event in seen)
    table = (with_it / "profile" / "flops.txt").read_text()
    assert "at step 2" in table
    kind, parameters, flops, seconds = module_row(table, "(all)")
    assert (kind, parameters) == ("TrainModule", "25.8 k"), "of the whole model, in shards or not"
    assert flops != "0"
    assert float(seconds) > 0
    assert module_row(table, "q_proj")[0] == "Linear"


@pytest.mark.slow  # a stop: resume/test_resume
def test_a_run_may_stop_and_go_on_within_the_steps(recipe: str, tmp_path: Path, two: Workers) -> None:
    stopped = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), stop_at=3)
    assert [result["code"] for result in stopped] == [75, 75]
    again = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"))
    assert [result["code"] for result in again] == [0, 0]
    assert [event["steps"] for event in read_events(tmp_path / "run", "profiled")] == [[2, 3], [4, 4]]
    folder = tmp_path / "run" / "profile"
    assert steps_in(folder / "trace-rank-00001-steps-2-3.json.gz") == ["step 2", "step 3"]
    assert steps_in(folder / "trace-rank-00001-steps-4-4.json.gz") == ["step 4"]


def test_steps_after_the_end_of_the_run_are_said_to_be_missing(recipe: str, tmp_path: Path, two: Workers) -> None:
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=["profile.steps=[6, 9]", "profile.memory=false"])
    (warning,) = read_events(tmp_path / "run", "warning")
    assert warning["what"] == "profile.steps is [6, 9], but the run ends with step 6"
    (told,) = read_events(tmp_path / "run", "profiled")
    assert told["steps"] == [6, 6]
    seen = trace(tmp_path / "run" / "profile" / "trace-rank-00000-steps-6-6.json.gz")
    assert not any(event.get("name") == "[memory]" for event in seen), "it was not asked for"


@pytest.mark.slow  # its parts: below
def test_a_profiler_that_fails_never_stops_the_run(recipe: str, tmp_path: Path, two: Workers) -> None:
    sets = ["steps=5", "profile.memory=false"]
    done = two(f"{CASES}:run_with_broken_profilers", recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets)
    assert [result["code"] for result in done] == [0, 0]
    failed = [(event["rank"], event["why"]) for event in read_events(tmp_path / "run", "profile_failed")]
    assert failed == [(0, "flops.txt: no room"), (1, "trace-rank-00001-steps-2-4.json.gz: no room")]
    (told,) = read_events(tmp_path / "run", "profiled")
    assert told["files"] == ["trace-rank-00000-steps-2-4.json.gz"]


def test_the_table_counts_one_forward_pass_and_changes_no_output(tmp_path: Path, one: Workers) -> None:
    ((same, table),) = one(f"{CASES}:table_of_one_pass", path=str(tmp_path / "flops.txt"))
    assert same
    assert "at step 7" in table
    assert module_row(table, "layer")[:3] == ["Linear", "16", "192"], "2 x 2 x 3 positions, 4 x 4 weights"
    assert module_row(table, "(all)")[0] == "ByName"


def test_a_call_that_torch_cannot_count_is_left_out_of_the_table(tmp_path: Path) -> None:
    """Its formulas would raise in the middle of the forward pass."""

    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x

    def broken(*_: Any, **__: Any) -> int:
        raise AssertionError("heads differ")

    assert flops.or_zero(broken)((2, 2), (2, 2)) == 0
    table = profiler.FlopsTable(model := Product(), 1)
    model(torch.eye(2))
    table.write(tmp_path / "flops.txt")
    assert module_row((tmp_path / "flops.txt").read_text(), "(all)")[2] == "16"


def test_a_forward_pass_that_fails_ends_the_count(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    table = profiler.FlopsTable(model, 1)
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3))
    assert table._counter.mode is None
    assert torch.equal(model(torch.zeros(1, 2))[0], model.bias)
    table.write(tmp_path / "flops.txt")


def test_a_memory_history_is_ended_even_if_it_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def full(path: str) -> None:
        raise OSError("no room")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **options: asked.append(options))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", full)
    history = MemoryHistory()
    with pytest.raises(OSError, match="no room"):
        history.write(tmp_path / "memory.pickle")
    assert asked == [{"max_entries": MAX_ALLOCATIONS}, {"enabled": None}]
