"""A rank without memory under the real launcher: one message with the fixes, and no rank hangs."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dstrain.launch.probe import free_port
from dstrain.launch.spawn import RankEnd
from dstrain.launch.supervise import compute_outcome
from dstrain.launch.worker import read_rank_records
from tests.forked import fork
from tests.tiny import tiny_recipe
from tests.vocabulary import find_processes, write_recipe
from tests.workers import ROOT

LIMIT_ADDRESSES = """
import os, resource, sys

def limit(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "seed_step" and frame.f_globals["__name__"] == "dstrain.training.engine.base":
        sys.setprofile(None)
        with open("/proc/self/statm") as file:
            pages = int(file.read().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + 2**23
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

if os.environ.get("RANK") == "1":
    sys.setprofile(limit)
"""


def train(folder: Path, site: str, limit: str = "{}", *sets: str) -> tuple[int, str]:
    """Train with `dstrain train` in two processes; return its exit code and all it printed."""
    (folder / "sitecustomize.py").write_text(site)
    env = {**os.environ, "PYTHONPATH": f"{folder}:{ROOT}", "LIMIT": limit, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "dstrain", "train", str(folder / "recipe.yaml"), "--num-gpus", "2"]
    command += ["--run-dir", str(folder / "run"), *(word for value in sets for word in ("--set", value))]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert not find_processes(folder), "a process is left"
    return done.returncode, done.stdout


def recipe(folder: Path, **changes: Any) -> None:
    values = tiny_recipe("rm", folder)
    values |= {"optim": {"name": "sgd", "lr": 1.0, "clip": 0.05}, "steps": 6, "save": {"every": 2, "keep": 9}}
    write_recipe(folder, values | changes)


def train_as_ranks(folder: Path, limit: str) -> tuple[list[int], str]:
    """Train in two processes that no launcher starts; return their exit codes, and all that they print and it would."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    env |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LIMIT": limit}
    ranks = [
        fork(
            rank,
            "tests.faults.rank_without_memory:train",
            folder,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    records = read_rank_records(folder / "run")
    outcome = compute_outcome({rank: RankEnd(code, records.get(rank)) for rank, code in enumerate(codes)}, range(2))
    assert outcome.code == 1
    return codes, f"{(folder / 'said.txt').read_text()}\n{outcome.message}\n"


def test_ranks_that_stop_print_one_message_with_the_fixes(tmp_path: Path) -> None:
    """It names the rank, the pass and the fixes."""
    recipe(tmp_path)
    codes, said = train_as_ranks(tmp_path, '{"samples": 1, "where": "backward", "from_step": 3, "rank": 1}')
    assert codes == [1, 1], said[-3000:]
    assert said.count("to fit, set in this order:") == 1, said[-3000:]
    headline = next(line for line in said.splitlines() if "out of memory: rank" in line)
    assert "out of memory: rank 1 on " in headline
    assert "step 3, the backward pass of micro-batch 1 of 1 (2 samples, " in headline
    assert headline.endswith("could not allocate 1024.0 TiB of host memory")
    assert re.search(r"1\. .*batch\.micro 2 -> 1 saves ", said), said
    assert "DefaultCPUAllocator: can't allocate memory" in said
    assert "Traceback" not in said
    # In the log: the terminal's copy of it ends 2 s after the rank, however busy the machine is.
    log = (tmp_path / "run/logs/rank-00000.log").read_text()
    assert f"error: step 3: rank 1 on {socket.gethostname()} failed: out of memory; see logs/rank-00001.log" in log


@pytest.mark.slow
def test_a_real_limit_of_addresses_is_explained(tmp_path: Path) -> None:
    recipe(tmp_path)
    code, said = train(
        tmp_path, LIMIT_ADDRESSES, "{}", "model.config.hidden_size=512", "model.config.intermediate_size=2048"
    )
    assert code == 1
    assert said.count("to fit, set in this order:") == 1, said[-3000:]
    assert "out of memory: rank 1 on " in said
    assert "limit of addresses of the process (ulimit -v)" in said
