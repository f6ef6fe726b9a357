"""One decision about the checkpoint to continue from, the same for the plan, the run and every rank."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.batch import Progress
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import CheckpointError, ResumeError, UsageError
from dstrain.launch.topology import Worker
from dstrain.report.run_log import RunLog
from dstrain.train import checkpoints as checkpoints_module
from dstrain.train.checkpoints import CheckpointStore
from dstrain.train.resume import ResumeOptions, StartDecision, decide_start, dump_training_recipe
from dstrain.train.setup.build_run import prepare_start
from dstrain.train.setup.plan import RunPlan, make_plan
from dstrain.train.state.manifest import write_hashed_file
from tests.unit.distributed.thread_world import on_ranks
from tests.vision_recipes import named_recipe


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))


def save(folder: Path, step: int, **record: Any) -> Path:
    manager = CheckpointStore(folder=folder / "checkpoints", world=SingleProcessWorld(), keep=None)
    return manager.save(
        lambda place: {"state": write_hashed_file(place / "state", b"values")}, Progress(step, step), record
    )


def flip_byte(checkpoint: Path) -> None:
    (checkpoint / "state").write_bytes(b"Values")


def plan_run(folder: Path, resume: str = "auto", rendezvous: Any = None) -> RunPlan:
    request = TrainRequest(recipe=str(folder / "recipe.yaml"), overrides=["batch={micro: 2}"])
    worker = Worker(0, 0, 1, "tests", 1)
    return make_plan(resolve_recipe(request), folder / "run", ResumeOptions(resume), worker, rendezvous)


def decide(folder: Path, resume: str = "auto", world: Any = None) -> StartDecision:
    checkpoints = CheckpointStore(folder=folder / "checkpoints", world=world or SingleProcessWorld())
    return decide_start(checkpoints, ResumeOptions(resume))


def test_plan_and_run_continue_from_the_same_checkpoint_if_the_newest_is_damaged(tmp_path: Path) -> None:
    """Sizes do not show a flipped byte: the total of the newest used to go with the weights of the older one."""
    _, values = named_recipe("rm", tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    recipe = dump_training_recipe(plan_run(tmp_path).config)
    save(tmp_path / "run", 1, recipe=recipe, inputs={}, batch_total=4)
    flip_byte(save(tmp_path / "run", 2, recipe=recipe, inputs={}, batch_total=8))
    plan = plan_run(tmp_path)
    assert (plan.batch.total, plan.start.step) == (4, 1)
    checkpoints = CheckpointStore(folder=tmp_path / "run" / "checkpoints", world=SingleProcessWorld())
    start = prepare_start(plan.start, checkpoints, RunLog(tmp_path / "run"), prune_when_full=False)
    assert start is not None
    assert start.step == 1
    assert [path.name.split("-", 2)[2] for path in checkpoints.folder.glob("superseded-*")] == ["step-00000002"]


def test_every_rank_gets_the_decision_of_all(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flip_byte(save(tmp_path, 2))
    decisions = on_ranks(3, lambda world: decide(tmp_path, world=world))
    assert [decision.step for decision in decisions] == [1, 1, 1]
    assert len({decision.skipped[0].status for decision in decisions}) == 1
    assert "state is not what was written" in decisions[0].skipped[0].status


def test_a_decision_changes_nothing_and_survives_the_cleanup(tmp_path: Path) -> None:
    """A commit that was killed between its two renames leaves step-N.old alone."""
    path = save(tmp_path, 1)
    path.rename(path.with_suffix(".old"))
    decision = decide(tmp_path)
    assert decision.checkpoint is not None
    assert decision.checkpoint.path.is_dir()
    checkpoints = CheckpointStore(folder=tmp_path / "checkpoints", world=SingleProcessWorld())
    checkpoints.remove_incomplete()
    assert decision.after_cleanup(checkpoints) == replace(decision, checkpoint=replace(decision.checkpoint, path=path))


def test_never_begins_a_new_run(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert decide(tmp_path, "never") == StartDecision()


def test_a_named_checkpoint_that_is_damaged_is_refused_on_every_rank(tmp_path: Path) -> None:
    flip_byte(path := save(tmp_path, 1))
    for error in on_ranks(2, lambda world: decide(tmp_path, str(path), world)):
        assert isinstance(error, CheckpointError)
        assert f"--resume {path}: {path} is damaged (state is not what was written" in str(error)


def test_a_named_folder_without_a_checkpoint_is_refused_on_every_rank(tmp_path: Path) -> None:
    for error in on_ranks(2, lambda world: decide(tmp_path, str(tmp_path), world)):
        assert type(error) is ResumeError
        assert str(error).startswith(f"--resume {tmp_path}: holds no complete checkpoint")


def test_a_named_checkpoint_that_one_rank_does_not_see_is_refused_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path, 1)

    def find_fault(path: Path, share: tuple[int, int]) -> str | None:
        return "MANIFEST.json is missing" if share[0] == 1 else None

    monkeypatch.setattr(checkpoints_module, "find_fault", find_fault)
    for error in on_ranks(2, lambda world: decide(tmp_path, str(path), world)):
        assert isinstance(error, CheckpointError)
        assert "is damaged (MANIFEST.json is missing (rank 1))" in str(error)


def test_a_named_checkpoint_that_was_replaced_is_refused(tmp_path: Path) -> None:
    """The cleanup removes it, and the run went on from its successor, which nobody had verified."""
    path = save(tmp_path, 1)
    shutil.copytree(path, old := path.with_suffix(".old"))
    with pytest.raises(ResumeError, match="was replaced by step-00000001; choose that one"):
        decide(tmp_path, str(old))


class BlindRank:
    """Rendezvous of rank 0 with a rank that sees none of its files."""

    rank, size = 0, 2

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value, False if value is True else "MANIFEST.json is missing" if value is None else value]


def test_a_run_folder_that_is_not_shared_is_named_before_its_checkpoints_are_judged(tmp_path: Path) -> None:
    """They were called damaged, with the advice to restore them."""
    _, values = named_recipe("rm", tmp_path)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    save(tmp_path / "run", 1)
    with pytest.raises(UsageError, match="ranks 1 do not see what rank 0 writes there"):
        plan_run(tmp_path, rendezvous=BlindRank())
