"""Paths that the command line takes and the file system does not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.commands.trained_model import find_saved_model
from dstrain.config.read import read_recipe
from dstrain.errors import RecipeError, UsageError
from dstrain.tasks import TaskOptions

LONG = "ä" * 128
"""256 bytes, and half as many letters."""


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.parametrize(
    "words",
    [
        ("init", "rm", "--to", LONG),
        ("train", "demo-rm", "--dry-run", "--run-dir", LONG),
        ("train", "demo-rm", "--dry-run", "--set", "model.config=null", "--set", f"model.path=./{LONG}"),
    ],
    ids=["init", "run folder", "model"],
)
def test_a_name_that_is_too_long_is_said_in_a_sentence(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = run(*words)
    assert told.exit_code == 2
    assert f"{LONG}" in told.output
    assert "is too long for the file system; choose a shorter one" in told.output


@pytest.mark.parametrize("kind", ["link", "file"])
def test_checkpoints_that_are_no_folder_are_refused_before_the_launch(kind: str, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    if kind == "link":
        (place / "checkpoints").symlink_to(tmp_path / "disk")
    else:
        (place / "checkpoints").write_text("")
    told = run("train", "demo-rm", "--dry-run", "--run-dir", place)
    assert told.exit_code == 2
    said = "is a link to a folder that does not exist" if kind == "link" else "is not a folder"
    assert f"error: {place}/checkpoints: {said}" in told.output


def test_checkpoints_may_be_a_link_to_another_disk(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoints").symlink_to("../disk")
    told = run("train", "demo-rm", "--dry-run", "--run-dir", tmp_path / "run")
    assert told.exit_code == 0, told.output


@pytest.mark.parametrize("name", ["metrics.jsonl", "events.jsonl", "logs/rank-00000.log", "logs", ".workers"])
@pytest.mark.parametrize("kind", ["link", "FIFO"])
def test_a_run_folder_that_leads_elsewhere_is_refused_at_once(name: str, kind: str, tmp_path: Path) -> None:
    """Somebody else has made the folder: the run would empty the user's file, append to it, or wait for a reader."""
    notes = tmp_path / "notes.txt"
    notes.write_text("precious\n")
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    if kind == "link":
        path.symlink_to(notes)
    else:
        os.mkfifo(path)
    (tmp_path / "run/environment.json").write_text("{}")
    told = run("train", "demo-rm", "--run-dir", tmp_path / "run")
    assert told.exit_code == 2, told.output
    assert f"{path} is " in told.output
    assert notes.read_text() == "precious\n"
    assert {entry.name for entry in (tmp_path / "run").iterdir()} == {
        path.relative_to(tmp_path / "run").parts[0],
        "environment.json",
    }


LATIN = os.fsdecode(b"f\xfcr")
"""The name of a file from an old disk or archive, in Latin-1."""
LETTER = "\\uDCFC"
"""The same letter as YAML writes it."""
RECORDS = '{"prompt": "a", "chosen": "b", "rejected": "c"}\n' * 8


def test_a_pattern_that_fits_a_name_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    for name in ("ok", LATIN):
        (tmp_path / f"{name}.jsonl").write_text(RECORDS)
    for words in (
        ("data", "check", tmp_path / "*.jsonl", "--task", "rm"),
        ("train", "demo-rm", "--dry-run", "--set", f"data.train={tmp_path}/*.jsonl"),
    ):
        told = run(*words)
        assert told.exit_code == 2
        assert f"error: {tmp_path}/f\\xfcr.jsonl: is not valid UTF-8" in told.output


def test_a_working_folder_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / LATIN).mkdir()
    (tmp_path / LATIN / "t.jsonl").write_text(RECORDS)
    monkeypatch.chdir(tmp_path / LATIN)
    told = run("train", "demo-rm", "--dry-run", "--set", "data.train=t.jsonl", "--run-dir", tmp_path / "run")
    assert told.exit_code == 2
    assert f"{tmp_path}/f\\xfcr/t.jsonl: is not valid UTF-8" in told.output


def test_a_cache_that_is_not_utf8_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / LATIN))
    (tmp_path / "t.jsonl").write_text(RECORDS)
    told = run("data", "check", tmp_path / "t.jsonl", "--task", "rm")
    assert told.exit_code == 2
    assert f"error: {tmp_path}/f\\xfcr: is not valid UTF-8" in told.output


def test_folders_and_values_of_the_api_that_are_not_utf8_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"f\\xfcr: is not valid UTF-8"):
        find_saved_model(tmp_path / LATIN, "last")
    with pytest.raises(
        RecipeError, match=r"data\.train: is 'f\\udcfcr\.jsonl', but it is not valid UTF-8; rename the file"
    ) as told:
        read_recipe(None, [f'data.train="f{LETTER}r.jsonl"', "steps=1"], "rm", None, TaskOptions())
    str(told.value).encode()
    with pytest.raises(RecipeError, match=r"--set data\.train=f\\udcfcr\.jsonl: is not valid UTF-8; rename the file"):
        read_recipe(None, [f"data.train={LATIN}.jsonl"], "rm", None, TaskOptions())
