"""At most one launch writes into a run folder."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dstrain.cli import main
from dstrain.errors import ResumeError, RunError
from dstrain.files import atomic_write
from dstrain.launch.lease import Lease, LeaseHolder, check_lease, lease_path, read_lease
from dstrain.launch.processes import start_time
from tests.vocabulary import wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dstrain.launch.lease.HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr("dstrain.launch.lease._POLL_SECONDS", 0.02)


def write(run: Path, content: LeaseHolder | bytes) -> None:
    """As another launch's lease."""
    (run / ".workers").mkdir(parents=True, exist_ok=True)
    atomic_write(lease_path(run), content if isinstance(content, bytes) else json.dumps(asdict(content)).encode())


def holder_of(run: Path) -> LeaseHolder:
    return LeaseHolder(**json.loads(read_lease(run) or b""))


def gone(run: Path) -> LeaseHolder:
    """A holder as it is, whose process has ended."""
    with Lease(run) as lease:
        lease.acquire()
        found = holder_of(run)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    return replace(found, launch="earlier", pid=ended.pid)


def test_a_second_launch_is_refused_with_host_and_process_of_the_first(tmp_path: Path) -> None:
    with Lease(tmp_path) as first, Lease(tmp_path) as second:
        first.acquire()
        with pytest.raises(
            ResumeError, match=rf"process {os.getpid()} on {socket.gethostname()}.*`kill {os.getpid()}`"
        ):
            second.acquire()
        assert holder_of(tmp_path).launch == first.launch_id
    with Lease(tmp_path) as third:
        third.acquire(timeout=60)
    assert [path.name for path in (tmp_path / ".workers").iterdir()] == ["lease.json"]


def test_the_folder_of_a_process_that_ended_is_taken_at_once(tmp_path: Path) -> None:
    write(tmp_path, gone(tmp_path))
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=60)
        assert holder_of(tmp_path).launch == lease.launch_id


def test_a_pipe_in_the_place_of_a_lease_does_not_block(tmp_path: Path) -> None:
    (tmp_path / ".workers").mkdir()
    os.mkfifo(lease_path(tmp_path))
    with pytest.raises(ResumeError, match="is not a regular file"):
        Lease(tmp_path).acquire()


def test_a_lease_that_could_not_be_written_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Path.open

    class FullDisk(io.BytesIO):
        def write(self, _: object) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def full(path: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(path, mode, **options)
        if path.name != "lease.json":
            return file
        file.close()
        return FullDisk()

    with monkeypatch.context() as limited:
        limited.setattr(Path, "open", full)
        with Lease(tmp_path) as lease, pytest.raises(ResumeError, match="No space left on device"):
            lease.acquire()
    assert list((tmp_path / ".workers").iterdir()) == []


def test_a_process_id_given_again_holds_nothing(tmp_path: Path) -> None:
    found = replace(gone(tmp_path), pid=os.getpid())
    started = str(int(found.started) - 1)
    assert start_time(os.getpid()) != started
    write(tmp_path, replace(found, started=started))
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=0.1)


def test_a_heartbeat_on_another_host_keeps_the_folder(tmp_path: Path) -> None:
    elsewhere, over = replace(gone(tmp_path), machine="another", host="node7", pid=os.getpid()), threading.Event()

    write(tmp_path, elsewhere)

    def beat() -> None:
        count = 0
        while not over.wait(0.02):
            count += 1
            write(tmp_path, replace(elsewhere, beat=f"{count:012d}"))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with Lease(tmp_path) as lease, pytest.raises(ResumeError, match=r"on node7, since .*`ssh node7 kill"):
            lease.acquire(timeout=20)
    finally:
        over.set()
        thread.join()
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=0.2)  # it stands still now
        assert holder_of(tmp_path).launch == lease.launch_id


def test_a_copy_of_a_folder_in_use_is_not_in_use(tmp_path: Path) -> None:
    with Lease(tmp_path / "run") as first:
        (tmp_path / "run").mkdir()
        first.acquire()
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        with Lease(tmp_path / "copy") as second:
            second.acquire(timeout=0.2)
        check_lease(tmp_path / "run", first.launch_id)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b'{"launch": 1}', b"\x00" * 100, b"[" * 100_000],
    ids=["empty", "torn", "list", "types", "zeros", "deep"],
)
def test_a_file_that_says_nothing_is_waited_for_and_replaced(content: bytes, tmp_path: Path) -> None:
    write(tmp_path, content)
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=0.1)
        assert holder_of(tmp_path).launch == lease.launch_id


def test_a_lease_with_a_value_of_another_type_is_waited_for_and_replaced(tmp_path: Path) -> None:
    write(tmp_path, replace(gone(tmp_path), pid="12"))  # type: ignore[arg-type]
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=0.1)
        assert holder_of(tmp_path).launch == lease.launch_id


def test_a_launch_whose_folder_was_taken_hears_of_it_and_leaves_the_file(tmp_path: Path) -> None:
    heard: list[str] = []
    with Lease(tmp_path) as lease:
        lease.acquire()
        lease.on_lost = heard.append
        write(tmp_path, replace(holder_of(tmp_path), launch="another", host="node8", pid=4711))
        wait_until(lambda: heard)
        assert "another launch took" in heard[0]
        assert "process 4711 on node8" in heard[0]
        with pytest.raises(RunError, match="process 4711 on node8"):
            check_lease(tmp_path, lease.launch_id)
    assert holder_of(tmp_path).launch == "another"
    check_lease(tmp_path, "")  # of a run that nobody launched


def test_the_heartbeat_grows(tmp_path: Path) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
        before = holder_of(tmp_path)
        wait_until(lambda: holder_of(tmp_path).beat > before.beat)
        assert holder_of(tmp_path).launch == before.launch


def test_what_a_launch_left_that_was_killed_while_it_took_the_folder_is_removed(tmp_path: Path) -> None:
    write(tmp_path, gone(tmp_path))
    (tmp_path / ".workers/lease.guard").touch()
    with Lease(tmp_path) as lease:
        lease.acquire(timeout=0.2)
        assert [path.name for path in (tmp_path / ".workers").iterdir()] == ["lease.json"]


@pytest.mark.parametrize("left", [False, True], ids=["free", "left by a launch that ended"])
def test_of_many_starts_at_once_one_holds_the_folder(left: bool, tmp_path: Path) -> None:
    for _ in range(10):
        if left:
            write(tmp_path, gone(tmp_path))
        leases, took, barrier = [Lease(tmp_path) for _ in range(8)], [], threading.Barrier(8)

        def start(lease: Lease, barrier: threading.Barrier = barrier, took: list[Lease] = took) -> None:
            barrier.wait()
            try:
                lease.acquire(timeout=0.2)
                took.append(lease)
            except ResumeError:
                pass

        threads = [threading.Thread(target=start, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        held = [lease for lease in took if holder_of(tmp_path).launch == lease.launch_id]
        assert len(held) == 1
        for lease in took:
            lease.release()
        assert len(took) == 1, "more than one believed to hold it"


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".workers").write_text("a file")
    with Lease(tmp_path) as lease, pytest.raises(ResumeError, match=r"its lease in .* cannot be written"):
        lease.acquire()


@pytest.mark.parametrize("more", [[], ["--resume", "never"]], ids=["resume", "never"])
def test_a_second_start_of_a_command_ends_before_anything_is_touched(more: list[str], tmp_path: Path) -> None:
    with Lease(tmp_path / "run") as lease:
        (tmp_path / "run").mkdir()
        lease.acquire()
        told = CliRunner().invoke(
            main, ["train", "demo-rm", "--num-gpus", "2", "--run-dir", str(tmp_path / "run"), *more]
        )
        assert told.exit_code == 2
        assert f"another launch writes into it (process {os.getpid()} on " in told.output
        assert [path.name for path in (tmp_path / "run").iterdir()] == [".workers"]


# Lease of a run folder on a network file system, and in a folder that is removed.


def test_a_file_that_another_host_replaces_while_it_is_read_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
    opened, stale = os.open, iter([OSError(errno.ESTALE, "Stale file handle")])

    def once(path: Path, flags: int, mode: int = 0o777) -> int:
        if str(path).endswith("lease.json") and flags & os.O_ACCMODE == os.O_RDONLY:
            for fault in stale:
                raise fault
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", once)
    with Lease(tmp_path) as lease:
        lease.acquire()
        assert next(stale, None) is None


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Lease]:
    with Lease(tmp_path / "run") as lease:
        (tmp_path / "run").mkdir()
        lease.acquire()
        yield lease


def test_a_holder_whose_records_were_removed_writes_its_lease_again(running: Lease) -> None:
    shutil.rmtree(running.run_dir / ".workers")
    wait_until(lambda: read_lease(running.run_dir))
    with Lease(running.run_dir) as second, pytest.raises(ResumeError, match="another launch writes into it"):
        second.acquire()


def test_a_run_folder_that_was_moved_away_is_not_made_anew(running: Lease, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    time.sleep(0.3)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="moved or removed"):
        check_lease(running.run_dir, running.launch_id)


def test_a_run_folder_that_does_not_answer_is_not_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One ESTALE would end the run."""

    def fail(path: Path) -> os.stat_result:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, "lstat", fail)
    check_lease(tmp_path, "first")
    monkeypatch.undo()
    with pytest.raises(RunError, match="does not exist any more"):
        check_lease(tmp_path / "gone", "first")
