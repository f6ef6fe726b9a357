"""A rank that fails in the middle of a save, under the real launcher: all end with code 1 and a sentence, none is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dstrain.training.state.manifest import find_checkpoints
from tests.tiny import tiny_recipe
from tests.vocabulary import find_processes, read_jsonl, wait_until, write_recipe
from tests.workers import ROOT

AT_THE_SHARD_OF_STEP_3 = """
import os, resource, signal, sys

def act(event, arguments):
    if event == "open" and "step-00000003.partial/state/rank" in str(arguments[0]):
        if os.environ["FAULT"] == "full":
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
        else:
            os.kill(os.getpid(), getattr(signal, os.environ["FAULT"]))

if os.environ.get("RANK") == os.environ["FAULTY_RANK"]:
    sys.addaudithook(act)
"""
"""As sitecustomize, so that it is there before anything else."""
SILENT = f"step-00000003: rank 1 on {socket.gethostname()} went silent: "
FULL = "writing step-00000003 failed on 1 of 2 ranks (rank 1: OSError: [Errno 27] File too large)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "sentence"),
    [
        ("SIGKILL", 1, "dstrain: rank 1 was killed by SIGKILL (is the host's memory full? see dmesg)"),
        ("SIGKILL", 0, "dstrain: rank 0 was killed by SIGKILL (is the host's memory full? see dmesg)"),
        ("SIGSTOP", 1, f"dstrain: rank 0 failed with code 1: writing {SILENT}"),
        ("full", 1, f"dstrain: rank 0 failed with code 1, and so did rank 1: {FULL}"),
    ],
)
def test_all_ranks_end_with_code_1_and_one_sentence_that_names_the_rank(
    fault: str, rank: int, sentence: str, tmp_path: Path
) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 6, "save": {"every": 1}, "timeout_minutes": 0.1}
    write_recipe(tmp_path, values)
    (tmp_path / "sitecustomize.py").write_text(AT_THE_SHARD_OF_STEP_3)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "FAULT": fault, "FAULTY_RANK": str(rank)}
    command = [sys.executable, "-m", "dstrain", "train", str(tmp_path / "recipe.yaml"), "--num-gpus", "2"]
    command += ["--run-dir", str(tmp_path / "run")]
    train = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180, check=False
    )
    assert train.returncode == 1, train.stdout[-2000:]
    (cause,) = [line for line in train.stdout.splitlines() if "dstrain: " in line or "error" in line.lower()]
    assert cause.startswith(sentence)
    if fault != "SIGKILL":
        assert "fix the cause and start again" in cause
    if fault == "SIGSTOP":
        assert cause.endswith("; stopped by SIGSTOP or a debugger: rank 1")
    assert "Traceback" not in train.stdout
    assert [
        info.step for info in find_checkpoints(tmp_path / "run/checkpoints", check_hashes=True) if info.is_complete
    ] == [2, 1]
    assert not find_processes(tmp_path), "a process is left"


HANG_IN_STEP_3 = """
import os, sys, time

def hang_here():
    time.sleep(600)

def trace(frame, event, argument):
    if frame.f_code.co_name == "seed_step" and frame.f_globals["__name__"] == "dstrain.training.engine.base":
        if frame.f_locals["step"] == 2:
            hang_here()

if os.environ.get("RANK") == "1":
    sys.setprofile(trace)
"""


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_step_is_named_and_shows_where(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 6, "timeout_minutes": 0.1}
    write_recipe(tmp_path, values)
    (tmp_path / "sitecustomize.py").write_text(HANG_IN_STEP_3)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "dstrain", "train", str(tmp_path / "recipe.yaml"), "--num-gpus", "2"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], env=env, capture_output=True, timeout=180)
    assert done.returncode == 1
    log = (tmp_path / "run/logs/rank-00000.log").read_text()
    who = f"rank 1 on {socket.gethostname()} did not enter"
    assert f"stalled: step 3: {who}" in log
    assert log.splitlines()[-1].startswith(f"error: step 3: {who}")
    assert "hang_here" in (tmp_path / "run/logs/stacks/rank-00001.txt").read_text()
    events = read_jsonl(tmp_path / "run/events.jsonl")
    assert [(event["step"], event["ranks"]) for event in events if event["event"] == "stalled"] == [(3, [1])]
    assert not find_processes(tmp_path), "a process is left"


@pytest.mark.slow
def test_a_signal_writes_the_checkpoint_although_nobody_reads_the_output_any_more(tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"steps": 100_000, "save": {"every": 50_000}, "log": {"every": 1}}
    write_recipe(tmp_path, values)
    run = tmp_path / "run"
    command = [sys.executable, "-m", "dstrain", "train", str(tmp_path / "recipe.yaml"), "--num-gpus", "2"]
    train = subprocess.Popen(
        [*command, "--run-dir", str(run)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert train.stdout is not None
    wait_until(lambda: (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_bytes(), 120)
    train.stdout.close()
    train.send_signal(signal.SIGHUP)
    assert train.wait(timeout=60) == 75
    (step,) = [info.step for info in find_checkpoints(run / "checkpoints", check_hashes=True) if info.is_complete]
    events = read_jsonl(run / "events.jsonl")
    told = [(event["event"], event["step"], event["signal"]) for event in events if event["event"].startswith("stop")]
    assert told == [("stopping", step, "SIGHUP"), ("stopped", step, "SIGHUP")]
