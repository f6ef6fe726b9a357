"""Real runs leave a report page, have one while they go on, and answer `dstrain status` from another process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.tiny import tiny_recipe
from tests.vocabulary import read_events, run_dstrain, write_recipe


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The tiny reward model with enough steps to be caught running."""
    values = tiny_recipe("rm", tmp_path) | {"steps": 100_000, "save": {"every": 1000}, "eval": {"every": 5}}
    values["log"] = {"every": 1, "tensorboard": False}
    return write_recipe(tmp_path, values)


def start(recipe: Path, *words: str) -> subprocess.Popen[str]:
    run_dir = str(recipe.parent / "run")
    command = [sys.executable, "-m", "dstrain", "train", str(recipe), "--run-dir", run_dir, *words]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def wait(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not condition():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            raise AssertionError(process.communicate()[0][-3000:])
        time.sleep(0.05)


def read_status(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_dstrain("status", run_dir, "--json"))
    return found


@pytest.mark.slow
def test_a_killed_rank_is_on_the_page_although_it_could_not_write_it(recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    process = start(recipe)
    wait(process, lambda: (run_dir / "report.html").exists())
    (rank,) = read_status(run_dir)["launch"]["ranks"]
    psutil.Process(rank["pid"]).kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output[-3000:]
    text = (run_dir / "report.html").read_text()
    assert 'badge killed"' in text or 'badge failed"' in text
    assert 'http-equiv="refresh"' not in text
    assert read_status(run_dir)["state"] in ("killed", "failed")


@pytest.mark.slow
def test_the_error_that_ends_a_run_is_an_event_and_on_the_page(recipe: Path) -> None:
    run_dir = recipe.parent / "run"
    process = start(recipe, "--set", "optim.lr=1e30", "--set", "optim.clip=1e30", "--set", "optim.warmup=0")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 1, output[-3000:]
    (failed,) = read_events(run_dir, "failed")
    assert "not finite" in failed["what"]
    text = (run_dir / "report.html").read_text()
    assert 'badge failed"' in text
    assert "not finite" in text
    assert "not finite" in read_status(run_dir)["reason"]
