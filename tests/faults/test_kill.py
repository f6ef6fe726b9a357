"""kill -9 of everything at any moment: the same command again gives the same run."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import yaml

from dstrain.training.state.manifest import find_checkpoints
from tests.tiny import tiny_recipe
from tests.vocabulary import read_jsonl


def start(recipe: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "dstrain", "train", str(recipe), "--num-gpus", "2", "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def kill_tree(process: subprocess.Popen[bytes]) -> None:
    parent = psutil.Process(process.pid)
    for victim in [*parent.children(recursive=True), parent]:
        victim.send_signal(signal.SIGKILL)
    process.wait()


def wait_for_step(run_dir: Path, step: int) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        path = run_dir / "metrics.jsonl"
        if path.is_file() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(f"{run_dir} never came to step {step}")


def told(run_dir: Path) -> list[tuple[object, ...]]:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [(row["split"], row["step"], row["samples"], row["loss"], row.get("lr")) for row in rows]


@pytest.mark.slow
def test_killing_the_whole_tree_in_mid_run_changes_nothing(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 30, "save": {"every": 5}, "eval": {"every": 10}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    unbroken = start(recipe, tmp_path / "unbroken")
    output, _ = unbroken.communicate(timeout=180)
    assert unbroken.returncode == 0, output.decode()[-3000:]

    killed = start(recipe, tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 13)
    kill_tree(killed)
    before = told(tmp_path / "killed")
    assert 13 <= before[-1][1] < 30, "killed in the middle"

    again = start(recipe, tmp_path / "killed")
    output, _ = again.communicate(timeout=180)
    assert again.returncode == 0, output.decode()[-3000:]
    assert b"continuing from step" in output
    assert told(tmp_path / "killed") == told(tmp_path / "unbroken")


@pytest.mark.slow
def test_sigterm_saves_exits_with_75_and_leaves_nobody(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 5000, "save": {"every": 4000}}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(values))
    run = start(recipe, tmp_path / "run")
    wait_for_step(tmp_path / "run", 5)
    family = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGTERM)
    output, _ = run.communicate(timeout=60)
    assert run.returncode == 75, output.decode()[-3000:]
    assert not [child for child in family if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
    last = told(tmp_path / "run")[-1][1]
    assert (tmp_path / f"run/checkpoints/step-{last:08d}/MANIFEST.json").is_file()
    assert b"stopped at step" in output


@pytest.mark.slow
def test_a_save_killed_twenty_times_at_random_moments_is_resumed_twenty_times(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 260, "save": {"every": 1, "keep": 2}, "eval": {"every": 100}}
    recipe, run_dir, draw = tmp_path / "recipe.yaml", tmp_path / "killed", random.Random(0)
    recipe.write_text(yaml.safe_dump(values))
    resumed = []
    for _ in range(20):
        run = start(recipe, run_dir)
        known = newest(run_dir)
        wait_for_step(run_dir, known + 2)
        while not list((run_dir / "checkpoints").glob("*.partial")):
            time.sleep(0.0005)
        time.sleep(draw.random() * 0.02)
        kill_tree(run)
        whole = newest(run_dir)
        assert whole >= known + 1, "a step that was saved is lost"
        resumed.append(whole)
    last = start(recipe, run_dir)
    output, _ = last.communicate(timeout=180)
    assert last.returncode == 0, output.decode()[-3000:]
    events = read_jsonl(run_dir / "events.jsonl")
    assert [event["step"] for event in events if event["event"] == "resumed"] == resumed
    assert not [event for event in events if event["event"] == "checkpoint_skipped"]
    unbroken = start(recipe, tmp_path / "unbroken")
    unbroken.communicate(timeout=180)
    assert told(run_dir) == told(tmp_path / "unbroken")


def newest(run_dir: Path) -> int:
    """The step of the newest whole checkpoint; 0 without one."""
    return next(
        (info.step for info in find_checkpoints(run_dir / "checkpoints", check_hashes=True) if info.is_complete), 0
    )
