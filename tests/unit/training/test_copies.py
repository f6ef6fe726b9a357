"""A copy is whole or not used; a new disk continues from it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import CheckpointError, UsageError
from dstrain.training.checkpoints import select_checkpoint
from dstrain.training.copies import RunCopy
from dstrain.training.plan import open_copy
from dstrain.training.start import ResumeOptions
from dstrain.training.state.manifest import inspect_checkpoint
from tests.tiny import tiny_recipe
from tests.unit.training.test_checkpoints import OneRank, save, solo, steps
from tests.vocabulary import read_events, wait_until, write_recipe


@pytest.fixture(params=["path", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where copies go."""
    import fsspec

    yield str(tmp_path / "backup") if request.param == "path" else "memory://bucket/runs"
    fsspec.filesystem("memory").store.clear()


def copy_now(copy: RunCopy, name: str) -> tuple[str, dict[str, Any]]:
    """Copy a checkpoint; the event."""
    copy.request(name)
    wait_until(lambda: not copy.in_use)
    (outcome,) = copy.pop_outcomes()
    return outcome


def make_run(run_dir: Path, *saved: int, **options: Any) -> None:
    """A run folder with checkpoints of these steps."""
    run_dir.mkdir(exist_ok=True)
    for name in ("metrics.jsonl", "events.jsonl", "recipe.yaml"):
        (run_dir / name).write_text(f"{name}\n")
    (run_dir / "tokenizer").mkdir(exist_ok=True)
    (run_dir / "tokenizer/vocab.json").write_text("{}")
    for step in saved:
        save(solo(run_dir / "checkpoints", **options), step, metric=float(step))


def test_a_new_disk_gets_the_newest_checkpoint_the_best_and_the_files_of_the_run(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10, 20, 30, keep=9)
    for step in (10, 20, 30):
        event, fields = copy_now(RunCopy(place, run_dir), f"step-{step:08d}")
        assert event == "copied"
        assert fields["checkpoint"] == f"step-{step:08d}"
    before = {file.name: file.read_bytes() for file in (run_dir / "checkpoints/step-00000030").rglob("*.*")}
    shutil.rmtree(run_dir)
    run_dir.mkdir()
    assert "step-00000030 was copied from" in RunCopy(place, run_dir).restore()
    assert steps(run_dir / "checkpoints") == [30, 10]
    assert select_checkpoint(run_dir, "best").step == 10
    assert before == {file.name: file.read_bytes() for file in (run_dir / "checkpoints/step-00000030").rglob("*.*")}
    assert (run_dir / "metrics.jsonl").read_text() == "metrics.jsonl\n"
    assert (run_dir / "tokenizer/vocab.json").is_file()
    assert not (run_dir / "recipe.yaml").exists(), "the start writes it"
    save(solo(run_dir / "checkpoints", keep=9), 40, metric=50.0)
    assert (run_dir / "checkpoints/best").is_symlink()
    assert select_checkpoint(run_dir, "best").step == 10


def test_a_run_folder_with_a_checkpoint_is_left_as_it_is(place: str, tmp_path: Path) -> None:
    make_run(tmp_path / "one", 10, 20)
    copy_now(RunCopy(place, tmp_path / "one"), "step-00000020")
    shutil.rmtree(tmp_path / "one/checkpoints/step-00000020")
    assert RunCopy(place, tmp_path / "one").restore() == ""
    assert steps(tmp_path / "one/checkpoints") == [10]


def test_a_copy_without_its_last_file_is_not_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10, 20)
    copy_now(RunCopy(place, run_dir), "step-00000010")
    copy = RunCopy(place, run_dir)
    put = copy._filesystem.put

    def fail(sources: list[str], targets: list[str]) -> None:
        if targets[0].endswith("MANIFEST.json"):
            raise TimeoutError("no answer")
        put(sources, targets)

    monkeypatch.setattr(copy._filesystem, "put", fail)
    event, fields = copy_now(copy, "step-00000020")
    assert event == "copy_failed"
    assert fields["why"] == "TimeoutError: no answer"
    monkeypatch.undo()
    shutil.rmtree(run_dir / "checkpoints")
    RunCopy(place, run_dir).restore()
    assert steps(run_dir / "checkpoints") == [10]
    shutil.rmtree(run_dir / "checkpoints")
    make_run(run_dir, 20)
    copy_now(RunCopy(place, run_dir), "step-00000020")
    shutil.rmtree(run_dir / "checkpoints")
    RunCopy(place, run_dir).restore()
    assert steps(run_dir / "checkpoints") == [20]


def test_a_copy_with_a_short_file_is_passed_over(tmp_path: Path) -> None:
    run_dir, place = tmp_path / "one", tmp_path / "backup"
    make_run(run_dir, 10, 20)
    for step in (10, 20):
        copy_now(RunCopy(str(place), run_dir), f"step-{step:08d}")
    (place / "one/checkpoints/step-00000020/rank-00000.dat").write_bytes(b"o")
    shutil.rmtree(run_dir)
    RunCopy(str(place), run_dir).restore()
    assert steps(run_dir / "checkpoints") == [10]
    assert [path.name for path in (run_dir / "checkpoints").glob("*.partial")] == []


def test_what_the_run_removed_is_removed_from_the_copies(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    for step in (10, 20, 30):
        make_run(run_dir, step, keep=1)
        copy_now(RunCopy(place, run_dir), f"step-{step:08d}")
    assert steps(run_dir / "checkpoints") == [30, 10], "the last, and the best"
    assert RunCopy(place, run_dir)._list_names() == ["step-00000030", "step-00000010"]


def test_a_checkpoint_is_not_pruned_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "one"
    copy = RunCopy(str(tmp_path / "backup"), run_dir)
    put, seen = copy._filesystem.put, []

    def put_slowly(sources: list[str], targets: list[str]) -> None:
        if not seen:
            seen.append(targets)
            save(solo(run_dir / "checkpoints", keep=1, in_use=lambda: copy.in_use), 30, 40)
        put(sources, targets)

    make_run(run_dir, 10, 20, keep=1)
    monkeypatch.setattr(copy._filesystem, "put", put_slowly)
    assert copy_now(copy, "step-00000020")[0] == "copied"
    assert steps(run_dir / "checkpoints") == [40, 20, 10]
    save(solo(run_dir / "checkpoints", keep=1, in_use=lambda: copy.in_use), 50)
    assert steps(run_dir / "checkpoints") == [50, 10]


def test_a_step_that_was_saved_again_replaces_its_copy(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10)
    copy_now(RunCopy(place, run_dir), "step-00000010")
    shutil.rmtree(run_dir / "checkpoints")
    save(solo(run_dir / "checkpoints"), 10, metric=7.0)
    copy_now(RunCopy(place, run_dir), "step-00000010")
    shutil.rmtree(run_dir / "checkpoints")
    RunCopy(place, run_dir).restore()
    run_info = json.loads((run_dir / "checkpoints/step-00000010/run.json").read_text())
    assert run_info["metric"] == 7.0
    assert inspect_checkpoint(run_dir / "checkpoints/step-00000010", check_hashes=True).is_complete


def test_what_cannot_be_used_is_refused_with_its_cause(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"save\.copy_to: nothing://x cannot be opened \(Protocol not known: nothing"):
        RunCopy("nothing://x", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"save\.copy_to: .*/file/below/one cannot be written \(NotADirectoryError"):
        RunCopy(f"{tmp_path}/file/below", tmp_path / "one").check_writable()
    (tmp_path / "one").mkdir()
    with pytest.raises(UsageError, match="/one is the run folder itself"):
        RunCopy(str(tmp_path), tmp_path / "one").check_writable()
    assert list((tmp_path / "one").iterdir()) == []


def test_copies_that_cannot_be_read_end_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrain.config import RunConfig

    recipe = tiny_recipe("rm", tmp_path) | {"steps": 2, "save": {"copy_to": f"{tmp_path}/backup"}}
    config = RunConfig.model_validate(recipe)
    monkeypatch.setattr(RunCopy, "restore", lambda self: (_ for _ in ()).throw(PermissionError("denied")))
    with pytest.raises(CheckpointError, match=r"backup/one cannot be read \(PermissionError: denied\); fix the cause"):
        open_copy(str(config.save.copy_to), tmp_path / "one", ResumeOptions(), OneRank())  # type: ignore[arg-type]
    assert open_copy(str(config.save.copy_to), tmp_path / "one", ResumeOptions("never"), OneRank()) is not None  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_run_ends_when_its_last_checkpoint_is_copied(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 2, "save": {"every": 1, "copy_to": f"{tmp_path}/backup"}}
    write_recipe(tmp_path, values)
    words = ["train", f"{tmp_path}/recipe.yaml", "--run-dir", f"{tmp_path}/run", "--num-gpus", "2"]
    done = subprocess.run([sys.executable, "-m", "dstrain", *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert inspect_checkpoint(tmp_path / "backup/run/checkpoints/step-00000002", check_hashes=True).is_complete
    assert read_events(tmp_path / "run", "copied")[-1]["checkpoint"] == "step-00000002"
    export = ["export", f"{tmp_path}/backup/run", "--to", f"{tmp_path}/model"]
    read = subprocess.run([sys.executable, "-m", "dstrain", *export], capture_output=True, text=True, timeout=300)
    assert read.returncode == 0, read.stderr
    shutil.rmtree(tmp_path / "run")
    again = subprocess.run([sys.executable, "-m", "dstrain", *words], capture_output=True, text=True, timeout=300)
    assert "this run is already finished" in again.stdout
