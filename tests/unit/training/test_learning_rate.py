"""The learning rate of a recipe that names none is its task's own, and a run goes on with the one that it began with."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from dstrain.batch import Progress
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.config import RunConfig, dump_recipe, read_recipe
from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import ResumeError
from dstrain.models.params import build_param_groups
from dstrain.planner.workload import Cluster
from dstrain.tasks import default_learning_rate, find_task, make_task
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.input_digests import dump_training_recipe
from dstrain.training.start import ResumeOptions, decide_start, find_point_by_sizes
from dstrain.training.state.manifest import write_hashed_file
from tests.tiny import tiny_recipe
from tests.workers import ROOT


@pytest.mark.parametrize(
    ("task", "full", "adapters"),
    [("sft", 2e-5, 2e-4), ("vlm", 2e-5, 2e-4), ("rm", 1e-5, 1e-4), ("dpo", 1e-6, 1e-5), ("kto", 1e-6, 1e-5)],
)
def test_each_task_has_its_own_default_rate(task: str, full: float, adapters: float) -> None:
    assert (default_learning_rate(find_task(task), False), default_learning_rate(find_task(task), True)) == (
        full,
        adapters,
    )
    assert make_task(RunConfig.model_validate({"task": task})).recipe.optim.lr == full
    assert make_task(RunConfig.model_validate({"task": task, "optim": {"lr": 3e-4}})).recipe.optim.lr == 3e-4


def test_a_task_of_one_file_has_its_own_or_inherits_one(tmp_path: Path) -> None:
    text = (ROOT / "docs/examples/tiny_task.py").read_text()
    assert default_learning_rate(find_task(str(ROOT / "docs/examples/tiny_task.py")), False) == 1e-2
    silent = tmp_path / "silent.py"
    silent.write_text("".join(line for line in text.splitlines(keepends=True) if "learning_rate" not in line))
    assert default_learning_rate(find_task(str(silent)), False) == 1e-5


def test_what_is_written_down_is_a_number(tmp_path: Path) -> None:
    recipe = started(tmp_path)
    found = resolve_recipe(TrainRequest(recipe=str(recipe), overrides=["model.lora={rank: 2}"]))
    assert found.config.optim.lr == 1e-4
    assert "lr: 0.0001" in dump_recipe(found.config)


def test_a_group_without_a_run_needs_no_rate_and_one_with_its_own_does(tmp_path: Path) -> None:
    import torch

    net = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2), "body": torch.nn.Linear(2, 2)})
    assert {group.lr_scale for group in build_param_groups(net, OptimConfig())} == {1.0}
    with pytest.raises(ValueError, match=r"optim\.lr is not set"):
        build_param_groups(net, OptimConfig.model_validate({"groups": {"head": {"lr": 1e-4}}}))
    task = make_task(RunConfig.model_validate({"task": "dpo", "optim": {"groups": {"head": {"lr": 1e-4}}}}))
    assert sorted({round(group.lr_scale, 6) for group in build_param_groups(net, task.recipe.optim)}) == [1.0, 100.0]


def test_another_default_than_the_run_began_with_is_refused_with_both(tmp_path: Path) -> None:
    recipe, run_dir = started(tmp_path), tmp_path / "run"
    began(run_dir, recipe, lr=3e-05)
    point = find_point_by_sizes(run_dir, ResumeOptions())
    config = resolve_recipe(TrainRequest(recipe=str(recipe), run_dir=run_dir)).config
    with pytest.raises(ResumeError, match=r"optim\.lr: is 1e-05, but the run was started with 3e-05; put it back"):
        decide_start(config, ResumeOptions(), 1, Cluster(kind="cpu"), point)
    same = resolve_recipe(TrainRequest(recipe=str(recipe), run_dir=run_dir, overrides=["optim.lr=3e-05"])).config
    assert decide_start(same, ResumeOptions(), 1, Cluster(kind="cpu"), point).point.step == 1


def started(folder: Path) -> Path:
    """A recipe for a reward model that names no rate."""
    values = tiny_recipe("rm", folder)
    del values["optim"]
    (folder / "recipe.yaml").write_text(yaml.safe_dump(values))
    return folder / "recipe.yaml"


def began(run_dir: Path, recipe: Path, lr: float) -> None:
    """A run folder with a checkpoint, and the recipe as the run wrote it down."""
    config = resolve_recipe(TrainRequest(recipe=str(recipe), overrides=[f"optim.lr={lr}"])).config
    checkpoints = CheckpointStore(folder=run_dir / "checkpoints", world=SingleProcessWorld())
    record = {"recipe": dump_training_recipe(config)}
    checkpoints.save(lambda folder: {"x": write_hashed_file(folder / "x", b"values")}, Progress(1, 1), record)
    (run_dir / "recipe.yaml").write_text(dump_recipe(config))
    assert read_recipe(run_dir / "recipe.yaml").config.optim.lr == lr
