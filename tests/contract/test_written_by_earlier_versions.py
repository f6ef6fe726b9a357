"""What an earlier version wrote is read by this one: its checkpoints, its tokenizers, its exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.vocabulary import invoke, read_events
from tests.workers import ROOT, Workers

EARLIER = ROOT / "tests" / "fixtures" / "8f49f80"
MARK = "@FOLDER@"
"""Stands in the fixtures for the folder that they were made in."""
CLOSE = {"rel": 1e-5, "abs": 1e-6}
"""Losses are the same in all but the last bits of a float32: a sum is added up in another order since then."""
LEARNT = ("loss", "accuracy", "margin", "exact_match", "token_accuracy", "grad_norm")
COUNTED = ("step", "split", "samples", "epoch", "lr")
CUT_AT = {"rm": 4, "vlm": 3}
"""Task -> the step of its checkpoint."""

Resumed = Callable[[str], list[int]]


def put(fixture: Path, folder: Path) -> Path:
    """Copies a fixture into a folder, and does what its user would do who moves it: the paths in it name the new place."""
    shutil.copytree(fixture, folder, symlinks=True, dirs_exist_ok=True)
    for path in [path for path in folder.rglob("*") if path.suffix in (".yaml", ".json")]:
        text = path.read_text(encoding="utf-8")
        if MARK in text:
            path.write_text(text.replace(MARK, str(folder)), encoding="utf-8")
    return folder


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def learnt(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in LEARNT if name in row}


def counted(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in COUNTED if name in row}


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def moved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The earlier version's folder in another place. Its runs go on in it where a test asks for it."""
    return put(EARLIER, tmp_path_factory.mktemp("moved"))


@pytest.fixture(scope="module")
def resumed(moved: Path, two: Workers) -> Resumed:
    """Has the run of a task go on, once; the exit code of each of the two processes."""
    done: dict[str, list[int]] = {}

    def go_on(task: str) -> list[int]:
        if task not in done:
            told = two("tests.contract.earlier_cases:go_on", folder=str(moved), task=task)
            done[task] = [result["code"] for result in told]
        return done[task]

    return go_on


@pytest.fixture
def untouched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The earlier version's folder in another place, for one test alone; commands in this process use its cache."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return put(EARLIER, tmp_path)


def test_the_fixtures_name_no_place_of_the_machine_they_were_made_on() -> None:
    for name, found in content(EARLIER).items():
        for word in (b"/home/", b"/root", b"/tmp", b"/work", b"/Users/"):
            assert word not in found, f"{name} holds {word!r}"


@pytest.mark.parametrize("task", CUT_AT)
def test_a_run_goes_on_from_an_old_checkpoint(task: str, moved: Path, resumed: Resumed) -> None:
    """The steps that follow give the losses that the earlier version gave when nothing broke it off."""
    assert resumed(task) == [0, 0]
    assert [event["step"] for event in read_events(moved / task / "run", "resumed")][-1] == CUT_AT[task]
    found, wanted = rows(moved / task / "run/metrics.jsonl"), rows(moved / task / "unbroken.jsonl")
    assert len(found) > len(rows(EARLIER / task / "run/metrics.jsonl"))
    assert [counted(row) for row in found] == [pytest.approx(counted(row), nan_ok=True) for row in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert learnt(one) == pytest.approx(learnt(other), **CLOSE), one["step"]
    assert (moved / task / f"run/checkpoints/step-{wanted[-1]['step']:08d}/MANIFEST.json").is_file()


def test_old_checkpoints_are_whole(untouched: Path) -> None:
    for task, step in CUT_AT.items():
        result = invoke("checkpoints", str(untouched / task / "run"), "--verify", "--json")
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.stdout)
        assert (found["step"], found["state"], found["world_size"]) == (step, "whole", 2)


@pytest.mark.parametrize("which", ["rm/run", "rm/export", "vlm/run"])
def test_an_old_model_is_judged_as_it_was(which: str, untouched: Path) -> None:
    task, _, kind = which.partition("/")
    data = str(untouched / task / "eval.jsonl")
    result = invoke("evaluate", str(untouched / which), "--data", data, "--json")
    assert result.exit_code == 0, result.output
    found, wanted = json.loads(result.stdout), read(EARLIER / task / f"evaluated-{kind}.json")
    assert learnt(found) == pytest.approx(learnt(wanted), **CLOSE)
    assert (found["step"], found["examples"]) == (wanted["step"], wanted["examples"])


def test_an_old_policy_answers_as_it_did(untouched: Path) -> None:
    data = str(untouched / "vlm/eval.jsonl")
    result = invoke("generate", str(untouched / "vlm/run"), "--data", data, "--max-new-tokens", "8", "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    for one, other in zip(found, rows(EARLIER / "vlm/generated.jsonl"), strict=True):
        assert {name: one[name] for name in other} == other


def test_an_old_run_is_exported_as_it_was(untouched: Path) -> None:
    """Tensor by tensor, bit by bit, and with the same tokenizer."""
    from safetensors.torch import load_file

    again = untouched / "again"
    result = invoke("export", str(untouched / "rm/run"), "--to", str(again))
    assert result.exit_code == 0, result.output
    found, wanted = (load_file(folder / "model.safetensors") for folder in (again, untouched / "rm/export"))
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == wanted[name].dtype and found[name].equal(wanted[name]) for name in wanted)
    assert read(again / "tokenizer.json") == read(untouched / "rm/export/tokenizer.json")
    assert read(again / "config.json")["architectures"] == read(untouched / "rm/export/config.json")["architectures"]
