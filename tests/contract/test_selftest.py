"""`dstrain selftest` proves a machine that works, names what does not, and leaves nothing behind."""

from __future__ import annotations

import json
import os
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


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    (folder / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": str(folder / "tmp"), "CUDA_VISIBLE_DEVICES": ""}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes it, by default in TMPDIR
    return subprocess.Popen(
        [sys.executable, "-m", "dstrain", "selftest", *words], env=env, cwd=folder / "tmp", text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
def test_every_stage_passes_in_under_five_minutes_and_nothing_is_left(tmp_path: Path) -> None:
    said, errors = (child := start(tmp_path, "--json")).communicate(timeout=MAX_SECONDS)
    assert child.returncode == 0, said + errors
    report = json.loads(said)
    assert report["seconds"] < MAX_SECONDS
    checks = [check for names in CHECKS.values() for check in names]
    states = {(row["preset"], row["check"]): row["state"] for row in report["results"]}
    assert states == {(preset, check): "ok" for preset in SELFTEST_PRESETS for check in checks}
    assert all(float(row["detail"]) <= TOLERANCE for row in report["results"] if row["check"] == "losses")
    assert report["processes"] == ["2 processes on the CPU", "1 process on the CPU"]
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.slow
def test_a_preset_that_cannot_work_fails_alone(tmp_path: Path) -> None:
    (tmp_path / "wrong.json").write_text('{"zero_optimization": {"stage": 2, "overlap_com": true}}')
    said, errors = (
        child := start(tmp_path, "--preset", str(tmp_path / "wrong.json"), "--preset", "zero1")
    ).communicate(timeout=MAX_SECONDS)
    assert child.returncode == 1, said + errors
    assert "overlap_com" in said
    assert "what to do: " in said
    assert "selftest: 1 check failed" in said
    row = next(line for line in said.splitlines() if line.startswith("zero1"))
    assert "FAILED" not in row
    assert "-  " not in row
    assert not [*(tmp_path / "tmp").iterdir()]


@pytest.mark.slow
def test_control_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    child = start(tmp_path)
    try:
        deadline = time.monotonic() + 200
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
