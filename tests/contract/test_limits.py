"""Users without a home folder, a working folder that is gone, limits on threads, streams that do not wait."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import termios
import threading
import time
from array import array
from datetime import timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dstrain.cli import main
from dstrain.distributed.store import rendezvous_errors
from dstrain.errors import RunError, UsageError, explain_system_error
from dstrain.launch import tee_log
from dstrain.launch.lease import Lease
from dstrain.training.run_dir import check_run_dir_writable
from tests.tiny import tiny_recipe
from tests.vocabulary import write_recipe
from tests.workers import ROOT


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    write_recipe(tmp_path, tiny_recipe("rm", tmp_path))
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("more", [[], ["--hostfile", "hosts", "--launcher", "ssh"]], ids=["one host", "hosts"])
def test_a_user_without_a_home_folder_trains_where_nothing_needs_one(
    more: list[str], recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container with an arbitrary user ID has no HOME and no line in /etc/passwd."""
    monkeypatch.chdir(recipe.parent)
    Path("hosts").write_text("localhost slots=1\n")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    result = call("train", str(recipe), "--run-dir", "run", "--dry-run", *more)
    assert result.exit_code == 0, result.output


def test_a_working_folder_that_is_gone_is_said(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = recipe.parent / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for words in (["train", str(recipe), "--run-dir", str(recipe.parent / "run")], ["train", "nowhere.yaml"]):
        result = call(*words, "--dry-run")
        assert (result.exit_code, "the working folder was removed" in result.output) == (2, True), result.output
    assert call("--help").exit_code == 0


def test_no_more_threads_are_said_and_the_run_folder_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as limited, Lease(tmp_path) as lease:
        limited.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread") as told:
            lease.acquire()
    with Lease(tmp_path) as lease:
        lease.acquire()
    assert "raise `ulimit -u`" in str(explain_system_error(told.value))
    assert "raise `ulimit -u`" in str(explain_system_error(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))))
    assert explain_system_error(BlockingIOError(errno.EAGAIN, "write could not complete without blocking")) is None


@pytest.mark.parametrize(
    ("gloo", "mend"),
    [
        ("[enforce fail at /x/gloo/device.cc:212] ifa != nullptr. Unable to find interface for: [127.0.0.1]", "ip link set lo up"),
        ("[/x/gloo/transport/tcp/device.cc:83] File name too long", "up to 63 characters"),
        ("Resource temporarily unavailable", "raise `ulimit -u`"),
    ],
)  # fmt: skip
def test_what_this_host_lacks_for_a_process_group_is_no_other_processs_fault(gloo: str, mend: str) -> None:
    with pytest.raises(RunError, match="cannot start on") as told, rendezvous_errors(timedelta(seconds=9)):
        raise RuntimeError(gloo)
    assert mend in str(told.value)
    assert "logs of the others" not in str(told.value)


def test_output_goes_on_over_a_pipe_that_does_not_wait(tmp_path: Path) -> None:
    """ssh, node and others set O_NONBLOCK on what they share with us; a full pipe then refuses what is written."""
    log = tmp_path / "log"
    log.write_bytes(b"x" * 300_000)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETFL, fcntl.fcntl(write, fcntl.F_GETFL) | os.O_NONBLOCK)
    command = [sys.executable, "-E", "-S", tee_log.__file__, str(log), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=write) as copier:
        os.close(write)
        waiting, capacity = array("i", [0]), fcntl.fcntl(read, fcntl.F_GETPIPE_SZ)  # less for a user with many pipes
        while copier.poll() is None and waiting[0] < capacity:
            fcntl.ioctl(read, termios.FIONREAD, waiting)
        time.sleep(0.2)  # it finds the pipe full
        received, part = 0, b"x"
        while part:
            part = os.read(read, 4096)
            received += len(part)
            if received == 300_000 and copier.stdin is not None and not copier.stdin.closed:
                copier.stdin.close()
    os.close(read)
    assert received == 300_000


@pytest.mark.parametrize("name", ["logs/rank-00001.log", "metrics.jsonl", "checkpoints"])
def test_a_run_folder_of_the_group_with_files_of_another_user_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.touch()
    access = os.access
    monkeypatch.setattr(os, "access", lambda at, mode: Path(at) != path and access(at, mode))
    with pytest.raises(UsageError, match=f"{name} is not writable for this user; .*--resume {tmp_path}"):
        check_run_dir_writable(tmp_path)
    path.unlink()
    check_run_dir_writable(tmp_path)


def test_several_processes_without_loopback_are_refused(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network namespace of its own has loopback, and has it down."""

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", refuse)
    words = ["train", str(recipe), "--run-dir", str(recipe.parent / "run"), "--dry-run"]
    result = call(*words, "--num-gpus", "2")
    assert (result.exit_code, "ip link set lo up" in result.output) == (2, True), result.output
    assert call(*words, "--num-gpus", "1").exit_code == 0


LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.mark.parametrize(
    ("environment", "words", "code", "wanted"),
    [
        ({"PYTHONIOENCODING": "latin-1"}, ["init", "rm", "--to", "€.yaml"], 0, "\\u20ac.yaml: fill in"),
        (LOCALE, ["init", "rm"], 0, "task: rm"),
        (LOCALE, ["train", "recipe.yaml", "--run-dir", "ü", "--dry-run"], 2, "Python reads paths as ascii here; set PYTHONUTF8=1"),
        ({"PYTHONOPTIMIZE": "2"}, ["train", "recipe.yaml", "--dry-run"], 2, "unset PYTHONOPTIMIZE, or set it to 1"),
    ],
)  # fmt: skip
def test_what_pythons_variables_forbid_is_said(
    environment: dict[str, str], words: list[str], code: int, wanted: str, recipe: Path
) -> None:
    found = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-m", "dstrain.cli", *words]
    told = subprocess.run(command, cwd=recipe.parent, env=found, capture_output=True, timeout=120, check=False)
    output = (told.stdout + told.stderr).decode()
    assert (told.returncode, wanted in output) == (code, True), output
    assert "Traceback" not in output
