"""`model.init` from outside: what cannot be is refused with exit 2, and what can is where the run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save_file

from dstrain.cli import main
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import RecipeError
from dstrain.tasks import Task, make_task
from dstrain.training.build_model import build_model
from dstrain.training.engine.module import TrainModule
from tests.cells import SLOW
from tests.contract.test_bad_input import RECIPE, plan
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, metric_rows, read_events
from tests.workers import ROOT, Workers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a good recipe in it, to stand in."""
    values = tiny_recipe("rm", tmp_path)
    (tmp_path / RECIPE).write_text(yaml.safe_dump(values, sort_keys=False))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path


def task_of(*sets: str) -> Task:
    return make_task(resolve_recipe(TrainRequest(recipe=RECIPE, overrides=sets)).config)


def garbage(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text("garbage")


class Planted:
    """Unpickled by Python's own pickle, it makes a file."""

    def __reduce__(self) -> Any:
        return os.system, ("touch trap",)


SEEN_AT_ONCE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "nothing there": ("nowhere.pt", lambda folder: None, r"model.init: 'nowhere.pt' is neither a file nor a folder"),
    "a hub id": ("org/name", lambda folder: None, r"'org/name' is neither a file nor a folder"),
    "another kind of file": ("train.jsonl", lambda folder: None, r"ends in '.jsonl'; give a .safetensors file"),
    "a folder without weights": (".", lambda folder: None, r"holds no weights; give a .safetensors file"),
    "garbage": ("w.safetensors", garbage("w.safetensors"), r"w.safetensors is damaged"),
}


@pytest.mark.parametrize("wrong", SEEN_AT_ONCE)
def test_files_that_cannot_be_are_refused_before_anything_is_launched(
    wrong: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init, write, wanted = SEEN_AT_ONCE[wrong]
    write(folder)
    monkeypatch.setattr("dstrain.commands.train.supervise", None)
    result = CliRunner().invoke(
        main, ["train", RECIPE, "--set", f"model.init={init}", "--set", "data.train=none.jsonl"]
    )
    assert result.exit_code == 2
    assert wanted in result.stderr, result.stderr
    assert "none.jsonl" in result.stderr, "all faults at once"
    assert not (folder / "runs").exists()


SEEN_BY_A_WORKER: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "garbage": ("w.pt", garbage("w.pt"), r"model\.init: .*w\.pt cannot be read \(UnpicklingError"),
    "a trap": (
        "w.pt",
        lambda folder: torch.save({"model": Planted()}, "w.pt"),
        r"reading it would run 'posix\.system'",
    ),
    "another size": (
        "w.safetensors",
        lambda folder: save_file({"model.norm.weight": torch.zeros(33)}, "w.safetensors"),
        r"'model\.norm\.weight' is \(33,\) in .*w\.safetensors and \(32,\) in the model; set the model's hidden_size to 33 instead of 32",
    ),
    "another model": (
        "w.safetensors",
        lambda folder: save_file({"a": torch.zeros(1)}, "w.safetensors"),
        r"no key in .*w\.safetensors matches the model \(keys of the file: a; keys of the model: model\.embed_tokens\.weight",
    ),
}


@pytest.mark.parametrize("wrong", SEEN_BY_A_WORKER)
def test_contents_that_cannot_be_are_refused_before_any_process_group(wrong: str, folder: Path) -> None:
    init, write, wanted = SEEN_BY_A_WORKER[wrong]
    write(folder)
    with pytest.raises(RecipeError, match=f"(?s){wanted}"):
        plan(folder, [f"model.init={init}"])
    assert not (folder / "trap").exists()


@pytest.mark.slow
def test_garbage_ends_in_exit_2_and_a_sentence(folder: Path) -> None:
    garbage("w.pt")(folder)
    command = [sys.executable, "-m", "dstrain", "train", RECIPE, "--set", "model.init=w.pt", "--num-gpus", "2"]
    done = subprocess.run(
        [*command, "--run-dir", "run"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    assert f"error: --set model.init: {folder / 'w.pt'} cannot be read" in done.stdout + done.stderr
    assert not (folder / "run/checkpoints").exists()


def test_a_path_is_looked_up_beside_the_recipe_and_kept_whole(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.zeros(1)}, folder / "w.safetensors")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    found = resolve_recipe(TrainRequest(recipe=str(folder / RECIPE), overrides=["model.init=w.safetensors"]))
    assert found.config.model.init == str(folder / "w.safetensors")


@pytest.mark.parametrize("preset", [SLOW("zero1"), "zero3"])  # every stage: parity/test_init
def test_a_run_starts_where_the_old_one_ended(preset: str, folder: Path, two: Workers) -> None:
    old = task_of("seed=7").build_model()
    old.score.weight.data.mul_(30)  # so that the first loss is far from log 2
    torch.save({"model": {f"module.{name}": value for name, value in old.state_dict().items()}, "step": 9}, "old.pt")
    sets = [f"ds_config={preset}", "steps=1"]
    found = {}
    for name, more in (("fresh", []), ("old", ["model.init=old.pt"])):
        seen = two(RUN, recipe=str(folder / RECIPE), run_dir=str(folder / name), sets=[*sets, *more])
        found[name] = metric_rows(folder / name)[0]["loss"]

    task = task_of()
    examples: Any = task.examples("train")
    ids = [sample for of_rank in seen for step in of_rank["samples"] for sample in step]
    with torch.no_grad():
        total, _ = TrainModule(task, old.eval())(make_batch(examples, task.collate, ids, ids[0]))
    assert found["old"] == pytest.approx(float(total) / len(ids), rel=1e-5)
    assert abs(found["fresh"] - found["old"]) > 0.01
    assert not read_events(folder / "fresh", "init")
    event = read_events(folder / "old", "init")[0]
    assert (event["file"], event["removed"]) == (str(folder / "old.pt"), "module.")
    assert event["matched"] == event["total"] == len(old.state_dict())
    assert event["missing"] == event["unexpected"] == 0
    assert yaml.safe_load((folder / "old/recipe.yaml").read_text())["model"]["init"] == str(folder / "old.pt")


def test_a_policy_and_its_reference_start_from_the_same_weights(folder: Path) -> None:
    recipe = tiny_recipe("dpo", folder)
    old = make_task(RunConfig.model_validate(recipe | {"seed": 7})).build_model().state_dict()
    save_file(old, folder / "old.safetensors")
    recipe["model"]["init"] = str(folder / "old.safetensors")
    task = make_task(RunConfig.model_validate(recipe))
    task.checks.run()
    for model in (build_model(task), task.reference.build()):
        assert all(torch.equal(value, old[name]) for name, value in model.state_dict().items())
