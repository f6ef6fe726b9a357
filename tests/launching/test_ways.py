"""Four ways to start the same run: same losses, same files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dstrain.launch.probe import free_port
from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, read_jsonl, write_recipe
from tests.workers import ROOT, Workers


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recipe")
    return write_recipe(folder, tiny_recipe("dpo", folder) | {"ds_config": "zero3", "steps": 5})


def start(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{ROOT / 'launchers'}:{os.environ['PATH']}"
    return subprocess.run(command, env={**os.environ, "PATH": path, **env}, capture_output=True, text=True, timeout=400)


def losses(run_dir: Path) -> list[Any]:
    rows = read_jsonl(run_dir / "metrics.jsonl")
    return [(row["step"], row["split"], row["loss"], row.get("grad_norm")) for row in rows]


def files(run_dir: Path) -> set[str]:
    names = {path.relative_to(run_dir).as_posix() for path in run_dir.rglob("*") if path.is_file()}
    return {name for name in names if not name.startswith((".workers", "events.out"))}


def ways(recipe: Path) -> dict[str, list[str]]:
    train, port = ["train", str(recipe)], str(free_port())
    deepspeed = ["deepspeed", "--master_port", port, "--num_gpus", "2"]
    return {
        "dstrain": ["dstrain", *train, "--num-gpus", "2"],
        "deepspeed": [*deepspeed, "--module", "dstrain.cli", *train],
        "deepspeed -m": [*deepspeed, "-m", "dstrain.cli", *train],
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--master-port", port, "-m", "dstrain.cli", *train],
    }


@pytest.fixture(scope="module")
def by_workers(recipe: Path, two: Workers) -> Path:
    """The run folder of two processes of a process group that stands."""
    run_dir = recipe.with_name("workers")
    two(RUN, recipe=str(recipe), run_dir=str(run_dir))
    assert len(losses(run_dir)) == 6
    return run_dir


# torchrun: hosts/test_elastic; dstrain: test_terminal
@pytest.mark.parametrize("way", [SLOW("dstrain"), SLOW("deepspeed"), "deepspeed -m", SLOW("torchrun")])
def test_all_ways_in_give_the_same_run(way: str, recipe: Path, by_workers: Path, tmp_path: Path) -> None:
    """Each way starts new processes: DeepSpeed's own communication must stand before a sharded model is built."""
    done = start([*ways(recipe)[way], "--run-dir", str(tmp_path)])
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert "shm_comm" not in done.stdout + done.stderr, "nothing is compiled on a CPU"
    assert losses(tmp_path) == losses(by_workers)
    assert files(tmp_path) == files(by_workers) | {"logs/rank-00000.log", "logs/rank-00001.log"}
    assert (tmp_path / "checkpoints/step-00000005/MANIFEST.json").is_file()


@pytest.mark.slow  # unit/launch/test_supervise, unit/training/test_rendezvous (the ranks)
def test_bad_usage_found_by_a_worker_exits_with_2(recipe: Path, tmp_path: Path) -> None:
    """Only a worker reads the model's config."""
    command = ["dstrain", "train", str(recipe), "--num-gpus", "2", "--run-dir", str(tmp_path / "run")]
    done = start([*command, "--set", "model.config.hidden_sizes=3"])
    assert done.returncode == 2, done.stderr[-3000:]
    assert "did you mean 'hidden_size'?" in done.stdout + done.stderr
    assert not (tmp_path / "run" / "checkpoints").exists()
