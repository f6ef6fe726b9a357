"""`dstrain selftest` proves a machine that works, names what does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dstrain.cli import SELFTEST_PRESETS
from dstrain.commands.selftest import CHECKS, TOLERANCE

MAX_SECONDS = 300
PATIENCE_SECONDS = 4 * MAX_SECONDS
"""Time after which a test gives up: other programs may use this machine, too."""


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes it, by default in TMPDIR
    return subprocess.Popen(
        [sys.executable, "-m", "dstrain", "selftest", *words], env=env, cwd=folder / "tmp", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def finish(child: subprocess.Popen[str]) -> tuple[str, str]:
    try:
        return child.communicate(timeout=PATIENCE_SECONDS)
    finally:
        child.terminate()


def processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_every_stage_passes_in_under_five_minutes_and_nothing_is_left(tmp_path: Path) -> None:
    before = processor_seconds()
    child = start(tmp_path, "--json")
    said, errors = finish(child)
    assert child.returncode == 0, said + errors
    report = json.loads(said)
    assert processor_seconds() - before < MAX_SECONDS, "as long as it takes one core without other programs"
    states = {(row["preset"], row["check"]): row["state"] for row in report["results"]}
    assert states == {(preset, check): "ok" for preset in SELFTEST_PRESETS for check in CHECKS}
    assert all(float(row["detail"]) <= TOLERANCE for row in report["results"] if row["check"] == "losses")
    assert report["processes"] == ["2 processes on the CPU", "1 process on the CPU"]
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_a_preset_that_cannot_work_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    child = start(tmp_path, "--preset", str(tmp_path / "wrong.json"), "--preset", "zero1")
    said, errors = finish(child)
    assert child.returncode == 1, said + errors
    assert "overlap_com" in said
    assert "what to do: " in said
    assert "selftest: 1 check failed" in said
    row = next(line for line in said.splitlines() if line.startswith("zero1"))
    assert "FAILED" not in row
    assert "-  " not in row
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.slow
@pytest.mark.timeout(PATIENCE_SECONDS + 60)
def test_control_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    child = start(tmp_path)
    try:
        deadline = time.monotonic() + MAX_SECONDS
        while not [*(tmp_path / "tmp").glob("dstrain-*/zero0-unbroken/metrics.jsonl")]:
            assert child.poll() is None, child.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        family = psutil.Process(child.pid).children(recursive=True)
        assert len(family) >= 3, "a launch and its ranks"
        os.killpg(child.pid, signal.SIGINT)
        child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 1
    assert not [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    assert not [*(tmp_path / "tmp").iterdir()]
