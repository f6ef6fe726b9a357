"""Two launches into one run folder: one trains, the other is refused and names it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstrain.launch.probe import free_port
from tests.tiny import tiny_recipe
from tests.vocabulary import read_jsonl, write_recipe
from tests.workers import ROOT

pytestmark = pytest.mark.slow

Start = Callable[..., subprocess.Popen[str]]
PORT = "PORT"
WAYS = {
    "dstrain": ["-m", "dstrain.cli"],
    "torchrun": ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", PORT, "-m", "dstrain.cli"],
}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("dstrain", "steps=9")`: a launch of two processes into the same run folder."""
    values = tiny_recipe("rm", tmp_path) | {"save": {"every": 5}, "log": {"every": 1, "tensorboard": False}}
    write_recipe(tmp_path, values)
    started: list[subprocess.Popen[str]] = []

    def begin(way: str, *sets: str) -> subprocess.Popen[str]:
        words = [
            sys.executable,
            *(str(free_port()) if word == PORT else word for word in WAYS[way]),
            "train",
            str(tmp_path / "recipe.yaml"),
            "--run-dir",
            str(tmp_path / "run"),
        ]
        words += ["--num-gpus", "2"] * (way == "dstrain") + [word for text in sets for word in ("--set", text)]
        child = subprocess.Popen(
            words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env={**os.environ, "DSTRAIN_CACHE": str(tmp_path / "cache")},
        )  # fmt: skip
        started.append(child)
        return child

    yield begin
    for child in started:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def steps(run: Path) -> list[int]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [row["step"] for row in rows if row["split"] == "train"]


@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_of_two_starts_one_trains_and_the_other_names_it(first: str, second: str, start: Start, tmp_path: Path) -> None:
    children = [start(first, "steps=30"), start(second, "steps=30")]
    told = [child.communicate(timeout=200)[0] for child in children]
    refused = [text for text in told if "another launch writes into it (process " in text]
    assert len(refused) == 1, "\n".join(told)
    codes = sorted(child.returncode for child in children)
    assert codes == [0, 2] if (first, second) == ("dstrain", "dstrain") else codes[0] == 0 < codes[1]
    assert steps(tmp_path / "run") == list(range(1, 31))


def test_a_launch_that_was_killed_holds_nothing(start: Start, tmp_path: Path) -> None:
    child = start("dstrain", "steps=2000")
    until = time.monotonic() + 120
    while not (tmp_path / "run/checkpoints/step-00000005").exists():
        assert child.poll() is None, child.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.05)
    child.kill()
    child.wait()
    began = time.monotonic()
    again = start("dstrain", "steps=2000", "save.every=1000")
    while not any("resumed" in line for line in (tmp_path / "run/events.jsonl").read_text().splitlines()):
        assert again.poll() is None, again.communicate()[0]
        assert time.monotonic() - began < 60
        time.sleep(0.05)
