"""Jobs in several processes: their result, and when their folder is kept."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from dstrain.commands import run_job
from dstrain.commands.run_job import (
    OWNER_FILE,
    JobResult,
    _launch_workers,
    explain_failure,
    keep_scratch,
    make_scratch,
    remove_stale_scratch,
)
from dstrain.errors import DeviceError, OutOfMemoryError
from dstrain.files import get_host_id
from dstrain.launch.plan import Launch
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


def launch(work: str, place: Path) -> Launch:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-c", WORKER.format(work), str(place)]
    return Launch(argv=argv, environment=env, world_size=1, ranks=range(1))


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


@pytest.mark.slow
def test_a_signal_ends_it_at_once(tmp_path: Path) -> None:
    work = f"Path({str(tmp_path / 'pid')!r}).write_text(str(__import__('os').getpid())); time.sleep(60)"
    main = f"""
        import sys
        from pathlib import Path
        from dstrain.commands.run_job import _launch_workers
        from tests.unit.commands.test_run_job import launch
        place = Path({str(tmp_path / "place")!r})
        sys.exit(_launch_workers(launch({work!r}, place), place).exit_code)
    """
    started = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(main)], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert started.poll() is None
        time.sleep(0.02)
    started.send_signal(signal.SIGTERM)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 1
    assert "ended at once, as asked\n" in said
    assert {path.name for path in tmp_path.iterdir()} == {"pid"}
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# Temporary folders of killed commands: the next command removes them, and nothing else.


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="start times of processes are Linux's here")
KILLED = "import os, sys\nfrom pathlib import Path\nfrom dstrain.commands.run_job import make_scratch\nmake_scratch(Path(sys.argv[1]))\nos.kill(os.getpid(), 9)"


def killed(place):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", KILLED, str(place)], env=env).returncode == -9
    assert (place / OWNER_FILE).exists()
    assert place.stat().st_mode & 0o777 == 0o700


def test_the_next_command_removes_what_a_killed_one_left(tmp_path):
    first, second = tmp_path / f"dstrain-{'0' * 16}", tmp_path / f"dstrain-{'1' * 16}"
    killed(first)
    make_scratch(second)
    assert [path.name for path in tmp_path.iterdir()] == [second.name]


def test_a_folder_that_was_kept_or_is_somebody_elses_stays(tmp_path, monkeypatch):
    names = {name: tmp_path / f"dstrain-{index:016x}" for index, name in enumerate(
        ("kept", "alive", "other machine", "other user", "no owner", "not JSON", "link", "fifo"))}  # fmt: skip
    for name, place in names.items():
        if name != "link":
            place.mkdir()
        owner = {"machine": get_host_id(), "pid": 2**22 + 1, "started": "1"}
        if name == "kept":
            (place / OWNER_FILE).write_text(json.dumps(owner))
            keep_scratch(place)
        elif name == "alive":
            owner |= {"pid": os.getpid(), "started": run_job.start_time(os.getpid())}
        elif name == "other machine":
            owner["machine"] = "elsewhere"
        if name == "link":
            (tmp_path / "mine").mkdir()
            (tmp_path / "mine" / OWNER_FILE).write_text(json.dumps(owner))
            place.symlink_to(tmp_path / "mine")
        elif name == "fifo":
            os.mkfifo(place / OWNER_FILE)
        elif name not in ("kept", "no owner"):
            (place / OWNER_FILE).write_text("{" if name == "not JSON" else json.dumps(owner))
    if os.geteuid() == 0:
        os.chown(names["other user"], 65534, 65534)
    else:
        (names["other user"] / OWNER_FILE).unlink()
    remove_stale_scratch(tmp_path)
    assert [name for name, place in names.items() if not place.exists()] == []


def test_only_so_many_are_removed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(run_job, "_MAX_REMOVED", 2)
    for index in range(3):
        place = tmp_path / f"dstrain-{index:016x}"
        place.mkdir()
        (place / OWNER_FILE).write_text(json.dumps({"machine": get_host_id(), "pid": 2**22 + 1, "started": "1"}))
    (tmp_path / "dstrain-notes").mkdir()
    remove_stale_scratch(tmp_path)
    assert len(list(tmp_path.glob("dstrain-0*"))) == 1
    assert (tmp_path / "dstrain-notes").exists()


# A command that runs out of memory says so in one line, with what to change on its command line.


GPU = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 8.00 GiB"
HOST = "[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 4294967296 bytes."


@pytest.mark.parametrize(
    ("command", "error", "fix"),
    [
        ("generate", torch.OutOfMemoryError(GPU), r"2\.5 GiB on the GPU .*; ask for fewer prompts .*--batch 1.*zero3"),
        ("evaluate", torch.OutOfMemoryError(GPU), r"2\.5 GiB on the GPU .*--set batch\.micro=1.*--ds-config zero3"),
        ("prepare", RuntimeError(HOST), r"4\.0 GiB of host memory .*; .*fewer processes on this host"),
        ("bench", MemoryError(), r"an allocation of host memory could not be allocated; "),
    ],
)
def test_a_failed_allocation_names_the_fix(command: str, error: Exception, fix: str) -> None:
    with (
        pytest.raises(OutOfMemoryError, match=rf"^dstrain {command}: {fix}"),
        explain_failure(command, torch.device("cpu")),
    ):
        raise error


def test_a_card_that_failed_is_named() -> None:
    error = RuntimeError("CUDA error: uncorrectable ECC error encountered")
    with (
        pytest.raises(DeviceError, match=r"^dstrain score: the card failed"),
        explain_failure("score", torch.device("cuda", 0)),
    ):
        raise error


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match=r"^out of luck$"), explain_failure("evaluate", torch.device("cpu")):
        raise RuntimeError("out of luck")
