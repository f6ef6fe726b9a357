"""Temporary folders of killed commands: the next command removes them, and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dstrain.commands import run_job
from dstrain.commands.run_job import OWNER_FILE, keep_scratch, make_scratch, remove_stale_scratch
from dstrain.files import get_host_id
from tests.workers import ROOT

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
