"""Jobs in several processes: their result, and when their folder is kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dstrain.commands.run_job import JobResult, _launch_workers
from dstrain.launch.command import LocalLaunch
from tests.workers import ROOT

WORKER = """
import json, sys, time
from pathlib import Path
from dstrain.launch.worker import run_worker
place = Path(sys.argv[1])
def work():
    {}
    (place / "result.json").write_text(json.dumps({{"loss": 0.5}}))
    return 0
sys.exit(run_worker(place, 0, work))
"""


def launch(work: str, place: Path) -> LocalLaunch:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return LocalLaunch([sys.executable, "-c", WORKER.format(work), str(place)], env, 1)


def test_an_answer_is_brought_back_and_the_folder_removed(tmp_path: Path) -> None:
    assert _launch_workers(launch("pass", tmp_path / "place"), tmp_path / "place") == JobResult(0, {"loss": 0.5})
    assert not list(tmp_path.iterdir())


def test_bad_usage_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    work = "from dstrain.errors import DataError; raise DataError('eval.jsonl: holds nothing')"
    assert _launch_workers(launch(work, tmp_path / "place"), tmp_path / "place") == JobResult(2)
    assert not list(tmp_path.iterdir())
    assert "eval.jsonl: holds nothing" in capfd.readouterr().err


@pytest.mark.parametrize("work", ["raise RuntimeError('out of luck')", "import os; os.kill(os.getpid(), 9)"])
def test_the_logs_of_a_failure_are_kept_and_named(work: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert _launch_workers(launch(work, tmp_path / "place"), tmp_path / "place") == JobResult(1)
    assert f"are kept in {tmp_path / 'place' / 'logs'}" in capfd.readouterr().err
    assert (tmp_path / "place/logs/rank-00000.log").is_file()


def test_a_signal_ends_it_at_once(tmp_path: Path) -> None:
    work = f"Path({str(tmp_path / 'pid')!r}).write_text(str(__import__('os').getpid())); time.sleep(60)"
    main = f"""
        import sys
        from pathlib import Path
        from dstrain.commands.run_job import _launch_workers
        from tests.unit.commands.job.test_run_job import launch
        place = Path({str(tmp_path / "place")!r})
        sys.exit(_launch_workers(launch({work!r}, place), place).exit_code)
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(main)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert started.poll() is None
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=30)
    assert started.returncode == 1
    assert "ended at once, as asked\n" in said
    assert {path.name for path in tmp_path.iterdir()} == {"pid"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
