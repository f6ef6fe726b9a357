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

from dstrain.batch import Progress
from dstrain.errors import CheckpointError, UsageError
from dstrain.training.checkpoints import read_run_id, select_checkpoint
from dstrain.training.copies import RunCopy
from dstrain.training.plan import open_copy
from dstrain.training.start import ResumeOptions
from dstrain.training.state.manifest import inspect_checkpoint
from tests.tiny import tiny_recipe
from tests.unit.training.test_checkpoints import OneRank, save, solo, steps, write
from tests.vocabulary import read_events, wait_until, write_recipe


@pytest.fixture(params=["path", "object store"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where copies go."""
    import fsspec

    yield str(tmp_path / "backup") if request.param == "path" else "memory://bucket/runs"
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def claim(place: str, run_dir: Path, run_id: str = "first", may_take_over: bool = False) -> RunCopy:
    """The copies of a run that starts in this folder, with this id from its checkpoints."""
    copy = RunCopy(place, run_dir)
    copy.check_owner(read_run_id(run_dir / "checkpoints"), may_take_over)
    copy.claim(run_id)
    return copy


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
        event, fields = copy_now(claim(place, run_dir), f"step-{step:08d}")
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
    copy_now(claim(place, tmp_path / "one"), "step-00000020")
    shutil.rmtree(tmp_path / "one/checkpoints/step-00000020")
    assert RunCopy(place, tmp_path / "one").restore() == ""
    assert steps(tmp_path / "one/checkpoints") == [10]


def test_a_copy_without_its_last_file_is_not_used(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10, 20)
    copy_now(claim(place, run_dir), "step-00000010")
    copy = claim(place, run_dir)
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
    copy_now(claim(place, run_dir), "step-00000020")
    shutil.rmtree(run_dir / "checkpoints")
    RunCopy(place, run_dir).restore()
    assert steps(run_dir / "checkpoints") == [20]


def test_a_copy_with_a_short_file_is_passed_over(tmp_path: Path) -> None:
    run_dir, place = tmp_path / "one", tmp_path / "backup"
    make_run(run_dir, 10, 20)
    for step in (10, 20):
        copy_now(claim(str(place), run_dir), f"step-{step:08d}")
    (place / "one/checkpoints/step-00000020/rank-00000.dat").write_bytes(b"o")
    shutil.rmtree(run_dir)
    RunCopy(str(place), run_dir).restore()
    assert steps(run_dir / "checkpoints") == [10]
    assert [path.name for path in (run_dir / "checkpoints").glob("*.partial")] == []


def test_a_copy_with_a_flipped_bit_is_passed_over(tmp_path: Path) -> None:
    run_dir, place = tmp_path / "one", tmp_path / "backup"
    make_run(run_dir, 10, 20)
    for step in (10, 20):
        copy_now(claim(str(place), run_dir), f"step-{step:08d}")
    damaged = place / "one/checkpoints/step-00000020/rank-00000.dat"
    damaged.write_bytes(b"p" + damaged.read_bytes()[1:])
    shutil.rmtree(run_dir)
    line = RunCopy(str(place), run_dir).restore()
    assert "step-00000010 was copied from" in line
    assert "step-00000020 is damaged: rank-00000.dat is not what was written" in line
    assert steps(run_dir / "checkpoints") == [10]


def test_copies_that_are_all_damaged_end_the_start(tmp_path: Path) -> None:
    """A run that began anew would replace them."""
    run_dir, place = tmp_path / "one", tmp_path / "backup"
    make_run(run_dir, 10)
    copy_now(claim(str(place), run_dir), "step-00000010")
    (place / "one/checkpoints/step-00000010/run.json").write_text("{}")
    shutil.rmtree(run_dir)
    with pytest.raises(
        CheckpointError, match=r"none of the 1 copies in .*/backup/one can be used \(step-00000010 is dam"
    ):
        open_copy(str(place), run_dir, ResumeOptions(), OneRank())  # type: ignore[arg-type]
    assert open_copy(str(place), run_dir, ResumeOptions("never"), OneRank()) is not None  # type: ignore[arg-type]


def test_a_place_that_does_not_answer_is_not_an_empty_one(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10)
    copy_now(claim(place, run_dir), "step-00000010")
    shutil.rmtree(run_dir)
    copy = RunCopy(place, run_dir)

    def fail(*_: Any, **__: Any) -> None:
        raise TimeoutError("no answer")

    for name in ("info", "ls", "cat_file"):
        monkeypatch.setattr(copy._filesystem, name, fail)
    with pytest.raises(TimeoutError):
        copy.restore()
    with pytest.raises(UsageError, match=r"cannot be read \(TimeoutError: no answer\)"):
        copy.check_owner(None, False)


# Copies belong to one run.


def save_with_id(run_dir: Path, step: int, run_id: str) -> None:
    checkpoints = solo(run_dir / "checkpoints")
    checkpoints.save(write, Progress(step, step), {"zero_stage": 2, "run_id": run_id})


def names_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


def copies_of(run_dir: Path, place: str, run_id: str = "first", step: int = 8) -> None:
    """A run with one checkpoint, and the copy of it."""
    run_dir.mkdir(parents=True)
    save_with_id(run_dir, step, run_id)
    assert copy_now(claim(place, run_dir, run_id), f"step-{step:08d}")[0] == "copied"


def test_another_runs_copies_are_not_touched(tmp_path: Path) -> None:
    """Also with --resume never, and where the other run has checkpoints of its own."""
    place = tmp_path / "copies"
    copies_of(tmp_path / "alice/rm", str(place))
    before = names_in(place)
    other = tmp_path / "bob/rm"
    other.mkdir(parents=True)
    for resume in (ResumeOptions(), ResumeOptions("never")):
        with pytest.raises(
            UsageError, match=r"are those of the run \S+/alice/rm on .*, and this run is \S+/bob/rm; give"
        ):
            open_copy(str(place), other, resume, OneRank())  # type: ignore[arg-type]
    save_with_id(other, 2, "second")
    with pytest.raises(UsageError, match=r"--allow-change save\.copy_to"):
        open_copy(str(place), other, ResumeOptions(), OneRank())  # type: ignore[arg-type]
    assert names_in(place) == before


def test_a_lost_run_folder_is_restored_and_goes_on_copying(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "alice/rm"
    copies_of(run_dir, place)
    shutil.rmtree(run_dir)
    copy = open_copy(place, run_dir, ResumeOptions(), OneRank())  # type: ignore[arg-type]
    assert copy is not None
    assert steps(run_dir / "checkpoints") == [8]
    assert not copy.is_taken_over
    run_id = read_run_id(run_dir / "checkpoints")
    assert run_id == "first"
    copy.claim(run_id)
    save_with_id(run_dir, 9, "first")
    assert copy_now(copy, "step-00000009")[0] == "copied"
    assert copy._list_names() == ["step-00000009", "step-00000008"]


def test_a_run_that_begins_anew_in_its_folder_replaces_its_own_copies(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "alice/rm"
    copies_of(run_dir, place)
    shutil.rmtree(run_dir / "checkpoints")  # as --resume never moves it away
    copy = open_copy(place, run_dir, ResumeOptions("never"), OneRank())  # type: ignore[arg-type]
    assert copy is not None
    copy.claim("second")
    save_with_id(run_dir, 2, "second")
    copy_now(copy, "step-00000002")
    assert copy._list_names() == ["step-00000002"]


def test_another_run_may_take_copies_over_and_the_first_one_stops_copying(place: str, tmp_path: Path) -> None:
    alice, bob = tmp_path / "alice/rm", tmp_path / "bob/rm"
    copies_of(alice, place)
    first = claim(place, alice)
    bob.mkdir(parents=True)
    second = open_copy(place, bob, ResumeOptions(allowed_keys=["save.copy_to"]), OneRank())  # type: ignore[arg-type]
    assert second is not None
    assert second.is_taken_over
    assert steps(bob / "checkpoints") == [8]
    second.claim("second")
    save_with_id(alice, 10, "first")
    event, fields = copy_now(first, "step-00000010")
    assert event == "copy_failed"
    assert f"are those of the run {bob} on" in fields["why"]
    assert second._list_names() == ["step-00000008"]
    with pytest.raises(UsageError, match="are those of the run"):
        open_copy(place, alice, ResumeOptions(), OneRank())  # type: ignore[arg-type]


def test_of_two_runs_that_start_at_once_one_is_refused(place: str, tmp_path: Path) -> None:
    copies = []
    for name in ("alice", "bob"):
        (tmp_path / name / "rm").mkdir(parents=True)
        copies.append(RunCopy(place, tmp_path / name / "rm"))
        copies[-1].check_owner(None, False)
    copies[0].claim("first")
    with pytest.raises(UsageError, match=r"are those of the run \S+/alice/rm"):
        copies[1].claim("second")
    copies[0].claim("first")


def test_a_moved_run_folder_keeps_its_copies_and_a_copied_one_does_not_get_them(place: str, tmp_path: Path) -> None:
    copies_of(tmp_path / "alice/rm", place)
    shutil.copytree(tmp_path / "alice/rm", tmp_path / "bob/rm", symlinks=True)
    with pytest.raises(UsageError, match=r"are those of the run \S+/alice/rm"):
        open_copy(place, tmp_path / "bob/rm", ResumeOptions(), OneRank())  # type: ignore[arg-type]
    (tmp_path / "alice/rm").rename(tmp_path / "alice/old")
    copy = open_copy(place, tmp_path / "bob/rm", ResumeOptions(), OneRank())  # type: ignore[arg-type]
    assert copy is not None
    assert not copy.is_taken_over


def test_a_folder_with_other_files_is_not_copied_into(tmp_path: Path) -> None:
    (tmp_path / "runs/rm").mkdir(parents=True)
    (tmp_path / "runs/rm/notes.txt").write_text("mine")
    (tmp_path / "alice/rm").mkdir(parents=True)
    for allowed in ((), ("save",)):
        with pytest.raises(UsageError, match=r"has files that are no copies of a run \(notes\.txt\)"):
            open_copy(f"{tmp_path}/runs", tmp_path / "alice/rm", ResumeOptions("auto", allowed), OneRank())  # type: ignore[arg-type]
    assert names_in(tmp_path / "runs") == ["rm", "rm/notes.txt"]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{}", b'{"run_id": 1}', b"[" * 60000])
def test_an_owner_that_cannot_be_read_is_another_one(content: bytes, tmp_path: Path) -> None:
    copies_of(tmp_path / "alice/rm", f"{tmp_path}/copies")
    (tmp_path / "copies/rm/owner.json").write_bytes(content)
    with pytest.raises(UsageError, match=r"have an owner\.json that cannot be read"):
        open_copy(f"{tmp_path}/copies", tmp_path / "alice/rm", ResumeOptions(), OneRank())  # type: ignore[arg-type]
    claim(f"{tmp_path}/copies", tmp_path / "alice/rm", may_take_over=True)


def test_nothing_is_removed_where_the_run_folder_does_not_answer(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "one"
    make_run(run_dir, 10, 20)
    copy_now(claim(place, run_dir), "step-00000010")
    monkeypatch.setattr("dstrain.training.copies.list_checkpoint_names", lambda folder: [])
    copy_now(claim(place, run_dir), "step-00000020")
    assert claim(place, run_dir)._list_names() == ["step-00000020", "step-00000010"]


def test_what_the_run_removed_is_removed_from_the_copies(place: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "one"
    for step in (10, 20, 30):
        make_run(run_dir, step, keep=1)
        copy_now(claim(place, run_dir), f"step-{step:08d}")
    assert steps(run_dir / "checkpoints") == [30, 10], "the last, and the best"
    assert RunCopy(place, run_dir)._list_names() == ["step-00000030", "step-00000010"]


def test_a_checkpoint_is_not_pruned_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "one"
    copy = claim(str(tmp_path / "backup"), run_dir)
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
    copy_now(claim(place, run_dir), "step-00000010")
    shutil.rmtree(run_dir / "checkpoints")
    save(solo(run_dir / "checkpoints"), 10, metric=7.0)
    copy_now(claim(place, run_dir), "step-00000010")
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
        RunCopy(str(tmp_path), tmp_path / "one").check_owner(None, True)
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
    other = [*words[:3], f"{tmp_path}/other/run", *words[4:], "--resume", "never"]
    refused = subprocess.run([sys.executable, "-m", "dstrain", *other], capture_output=True, text=True, timeout=300)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert f"are those of the run {tmp_path}/run on" in refused.stdout + refused.stderr
    assert not (tmp_path / "other/run").exists()
    export = ["export", f"{tmp_path}/backup/run", "--to", f"{tmp_path}/model"]
    read = subprocess.run([sys.executable, "-m", "dstrain", *export], capture_output=True, text=True, timeout=300)
    assert read.returncode == 0, read.stderr
    shutil.rmtree(tmp_path / "run")
    again = subprocess.run([sys.executable, "-m", "dstrain", *words], capture_output=True, text=True, timeout=300)
    assert "this run is already finished" in again.stdout
