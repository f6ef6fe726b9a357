"""launchers/torchrun.sh: several machines, a rank that dies, a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from dstrain.launch.probe import free_port
from tests.launching.test_ways import losses
from tests.tiny import tiny_recipe
from tests.unit.launch.test_launchers import container_of
from tests.vocabulary import read_events, write_recipe
from tests.workers import ROOT

pytestmark = pytest.mark.slow

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """`start("run", sets, NODES="2")`: the script over the tiny reward model, into a run folder of this name."""
    values = tiny_recipe("rm", tmp_path) | {"steps": 6, "save": {"every": 50}}
    write_recipe(tmp_path, values)
    started: list[subprocess.Popen[str]] = []

    def begin(run: str, *sets: str, cores: Sequence[int] = (), **env: str) -> subprocess.Popen[str]:
        pin = ["taskset", "-c", ",".join(map(str, cores))] if cores else []
        words = [
            *pin,
            str(ROOT / "launchers/torchrun.sh"),
            str(tmp_path / "recipe.yaml"),
            "--run-dir",
            str(tmp_path / run),
        ]
        words += [word for setting in sets for word in ("--set", setting)]
        # The variables are what the script reads, whatever the shell that runs the tests has.
        ours = ("NODES", "NODE_RANK", "RESTARTS", "GRACE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_ADDR")
        rest = {name: value for name, value in os.environ.items() if name not in ours}
        with (tmp_path / f"{run}-{len(started)}.log").open("w") as log:
            child = subprocess.Popen(
                words, env={**rest, "PYTHON": sys.executable, **env}, stdout=log, stderr=log, text=True
            )
        started.append(child)
        return child

    yield begin
    for child in started:
        if child.poll() is None:
            child.kill()  # its ranks end with it
            child.wait()


def wait_for(path: Path, child: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert child.poll() is None, "it ended before"
        assert time.monotonic() < until, f"no {path.name} after 2 minutes"
        time.sleep(0.05)


@pytest.mark.parametrize("restarts", ["0", "1"])
def test_two_machines_are_one_run(restarts: str, start: Start, tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]  # one for each process: the order of a sum depends on the threads
    assert start("one", GPUS="2", cores=cores).wait(200) == 0
    place = {"NODES": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RESTARTS": restarts}
    both = [
        start("two", GPUS="1", NODE_RANK=str(node), LOCAL_ADDR="127.0.0.1", cores=cores[node : node + 1], **place)
        for node in (0, 1)
    ]
    assert [child.wait(200) for child in both] == [0, 0]
    assert len(losses(tmp_path / "one")) == 7
    assert losses(tmp_path / "two") == losses(tmp_path / "one")


def test_ranks_start_again_where_one_was_killed(start: Start, tmp_path: Path) -> None:
    child = start("run", "steps=400", GPUS="2", RESTARTS="2")
    wait_for(tmp_path / "run/checkpoints/step-00000050", child)
    os.kill(json.loads((tmp_path / "run/.workers/rank-00001.json").read_text())["pid"], signal.SIGKILL)
    assert child.wait(200) == 0
    (resumed,) = read_events(tmp_path / "run", "resumed")
    assert resumed["step"] >= 50
    assert [event["step"] for event in read_events(tmp_path / "run", "finished")] == [400]


@pytest.mark.parametrize("name", ["trainjob.yaml", "jobset.yaml"])
def test_a_node_of_an_operator_trains(name: str, start: Start, tmp_path: Path) -> None:
    """The command of the example, as a run of one node with the variables of the operator."""
    container, _ = container_of(name)
    script = container["args"][0].replace("/shared/recipe.yaml", f"{tmp_path}/recipe.yaml")
    script = script.replace("/shared/runs/one", f"{tmp_path}/run")
    given = {entry["name"]: entry["value"] for entry in container["env"]}
    of_operator = {"PET_NNODES": "1", "PET_NODE_RANK": "0", "PET_MASTER_ADDR": "127.0.0.1"}
    of_operator |= {"PET_MASTER_PORT": str(free_port()), "JOB_COMPLETION_INDEX": "0"}
    place = {"NODES": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "GPUS": "2"}
    env = {**os.environ, **given, **of_operator, **place}
    done = subprocess.run([*container["command"], script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 7


RAY = """
import os, sys, types
for name in ("ray", "ray.train", "ray.train.torch"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["ray.train"].ScalingConfig = sys.modules["ray.train.torch"].TorchTrainer = None
import runpy
runpy.run_path(sys.argv[1])["train_rank"]({"arguments": sys.argv[2:]})
"""
"""What a worker of Ray runs, without Ray."""


def test_ranks_that_ray_starts_are_one_run(start: Start, tmp_path: Path) -> None:
    words = [str(ROOT / "docs/examples/ray_train.py"), f"{tmp_path}/recipe.yaml", "--run-dir", f"{tmp_path}/run"]
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    place["MASTER_PORT"] = str(free_port() - 1)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RAY, *words], env={**os.environ, **place, "RANK": rank, "LOCAL_RANK": rank}
        )
        for rank in "01"
    ]
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    assert len(losses(tmp_path / "run")) == 7


@pytest.mark.parametrize("setting", ["data.max_length=nothing", "data.train=nowhere.jsonl"])
def test_what_is_refused_is_not_tried_again(setting: str, start: Start, tmp_path: Path) -> None:
    child = start("run", setting, GPUS="2", RESTARTS="3")
    assert child.wait(100) == 1, "torchrun's own"
    said = (tmp_path / "run-0.log").read_text()
    assert "error: " in said
    assert "attempts left" not in said
    assert said.count(f"{setting.split('=')[0]}: ") <= 2, "each rank says it once"


def test_a_stop_leaves_a_checkpoint(start: Start, tmp_path: Path) -> None:
    child = start("run", "steps=20000", GPUS="2", GRACE="60")
    wait_for(tmp_path / "run/checkpoints/step-00000050", child)
    child.send_signal(signal.SIGTERM)
    assert child.wait(100) == 1, "torchrun's own"
    (stopped,) = read_events(tmp_path / "run", "stopped")
    assert (tmp_path / f"run/checkpoints/step-{stopped['step']:08d}/MANIFEST.json").is_file()
    for rank in range(2):
        assert json.loads((tmp_path / f"run/.workers/rank-{rank:05d}.json").read_text())["exit"] == 75
