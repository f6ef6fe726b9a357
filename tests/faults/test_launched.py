"""A rank that fails in the middle of a save, under the real launcher: all end with code 1 and a sentence, none is left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import yaml

from dstrain.tasks import find_task
from dstrain.train.manifest import listed
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
GONE = "error: writing step-00000003: another process has ended or does not answer"
FULL = "error: writing step-00000003 failed on 1 of 2 ranks (rank 1: OSError: [Errno 27] File too large)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "rank", "says", "sentence"),
    [("SIGKILL", 1, [0], GONE), ("SIGKILL", 0, [1], GONE), ("SIGSTOP", 1, [0], GONE), ("full", 1, [0, 1], FULL)],
)
def test_all_ranks_end_with_code_1_and_a_sentence_that_says_what_to_do(
    fault: str, rank: int, says: list[int], sentence: str, tmp_path: Path
) -> None:
    values = find_task("rm").tiny(tmp_path) | {"steps": 6, "save": {"every": 1}, "timeout_minutes": 0.1}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(values))
    (tmp_path / "sitecustomize.py").write_text(AT_THE_SHARD_OF_STEP_3)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "FAULT": fault, "FAULTY_RANK": str(rank)}
    command = [sys.executable, "-m", "dstrain", "train", str(tmp_path / "recipe.yaml"), "--num-gpus", "2"]
    done = subprocess.run([*command, "--run-dir", str(tmp_path / "run")], env=env, capture_output=True, timeout=180)
    assert done.returncode == 1, done.stdout.decode()[-2000:]
    for other in says:
        log = (tmp_path / f"run/logs/rank-{other:05d}.log").read_text()
        assert sentence in log
        assert "mend the cause and start again" in log
        assert "Traceback" not in log
    assert [info.step for info in listed(tmp_path / "run/checkpoints", read_all=True) if info.whole] == [2, 1]
    assert not [process for process in psutil.process_iter() if str(tmp_path) in _words(process)], "a process is left"


def _words(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
