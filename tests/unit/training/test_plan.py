"""What a run is before any process group starts."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands.train import TrainRequest, resolve_recipe
from dstrain.launch.topology import Worker
from dstrain.resources import get_extensions_dir
from dstrain.training.plan import (
    STALE_LOCK_SECONDS,
    RunPlan,
    build_schedule,
    is_for_user,
    make_plan,
    remove_stale_locks,
)
from dstrain.training.start import ResumeOptions
from tests.tiny import tiny_recipe


def planned(folder: Path, **changes: Any) -> RunPlan:
    recipe = tiny_recipe("dpo", folder)
    recipe["model"] |= changes.pop("model", {})
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | changes))
    wish = resolve_recipe(TrainRequest(recipe=str(folder / "recipe.yaml")))
    return make_plan(wish, folder / "run", ResumeOptions(), Worker(0, 0, 1, "tests", 1))


@pytest.mark.parametrize(
    ("precision", "asked", "loaded"),
    [
        ("bf16", None, "bfloat16"),
        ("fp32", None, None),
        ("bf16", "float32", "float32"),
        ("bf16", "bfloat16", "bfloat16"),
    ],
)
def test_weights_are_loaded_in_the_runs_precision_unless_the_recipe_says_otherwise(
    precision: str, asked: str | None, loaded: str | None, tmp_path: Path
) -> None:
    plan = planned(tmp_path, precision=precision, model={"dtype": asked})
    assert plan.task.recipe.model.dtype == loaded
    assert plan.task.loss_inputs.reference.config.dtype == loaded
    assert plan.config.model.dtype == asked, "the recipe that is written down stays as it was given"


def test_each_epoch_has_its_evaluation(tmp_path: Path) -> None:
    """Steps between two were rounded up: seven evaluations of ten epochs, at 1.6, 3.2, 4.8 and so on."""
    plan = planned(tmp_path, batch={"total": 8}, eval={"every": "epoch"}, save={"every": "epoch"})
    plan = replace(plan, sampler=replace(plan.sampler, sizes=[10]), steps=13)
    schedule = build_schedule(plan)
    due = [schedule.due_after(step, stop=False) for step in range(1, 14)]
    assert [(one.eval, one.save) for one in due].count((True, True)) == 10


# Locks of killed compilations do not block later runs.


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # The tests may run in a container.
    monkeypatch.setattr("dstrain.training.plan.INITIAL_PID_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    path = tmp_path / "py311_cpu/cpu_adam/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.training.plan.LOCAL_FILESYSTEMS", set())


def test_the_lock_of_a_dead_build_is_removed_at_once(lock: Path, tmp_path: Path) -> None:
    (said,) = remove_stale_locks(tmp_path)
    assert said.startswith(f"removed {lock}")
    assert not lock.exists()


def test_a_lock_that_someone_holds_stays_however_old(lock: Path, tmp_path: Path) -> None:
    age(lock, STALE_LOCK_SECONDS + 1)
    with lock.open():
        assert not list(remove_stale_locks(tmp_path))
    assert lock.exists()


def test_the_lock_of_a_build_that_began_during_the_search_stays(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(locks: list[Path]) -> set[Path]:
        lock.unlink()
        lock.touch()
        return set()

    monkeypatch.setattr("dstrain.training.plan._find_open_locks", search)
    assert not list(remove_stale_locks(tmp_path))
    assert lock.exists()


def test_in_a_container_a_young_lock_may_be_of_another_one(
    lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dstrain.training.plan.INITIAL_PID_NAMESPACE", "another")
    (said,) = remove_stale_locks(tmp_path)
    assert "Another host or container may be compiling" in said
    assert lock.exists()


def test_on_a_shared_folder_a_young_lock_is_named_and_an_old_one_removed(
    lock: Path, tmp_path: Path, shared: None
) -> None:
    age(lock, STALE_LOCK_SECONDS - 60)
    (said,) = remove_stale_locks(tmp_path)
    assert "Another host or container may be compiling; if not, remove it" in said
    assert lock.exists()
    age(lock, STALE_LOCK_SECONDS + 1)
    (said,) = remove_stale_locks(tmp_path)
    assert said.startswith(f"removed {lock}")
    assert not lock.exists()


def test_no_folder_is_no_lock(tmp_path: Path) -> None:
    assert not list(remove_stale_locks(tmp_path / "none"))


def test_the_folder_is_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.cpp_extension import get_default_build_root

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert str(get_extensions_dir(os.environ)) == get_default_build_root()
    assert get_extensions_dir({"TORCH_EXTENSIONS_DIR": "/x"}) == Path("/x")


def test_a_user_without_a_home_folder_has_torchs_folder_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert get_extensions_dir({}) == Path("~/.cache/torch_extensions")


def test_a_warning_of_deepspeed_about_our_own_optimizers_is_not_shown() -> None:
    texts = ("**** You are using ZeRO with an untested optimizer, proceed with caution *****", "another %s")
    records = [logging.LogRecord("DeepSpeed", logging.WARNING, "engine.py", 1, text, (), None) for text in texts]
    assert [is_for_user(record) for record in records] == [False, True]
