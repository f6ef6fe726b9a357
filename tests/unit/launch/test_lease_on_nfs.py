"""Lease of a run folder on a network file system, and in a folder that is removed."""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dstrain.errors import ResumeError, RunError
from dstrain.files import atomic_write
from dstrain.launch import lease as lease_file
from dstrain.launch import lease as module
from dstrain.launch.lease import Lease, check_lease, read_latest_lease


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_SECONDS", 0.05)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)


def launch_of(run: Path) -> str:
    return str(json.loads(read_latest_lease(run / ".workers")[1] or b"{}")["launch"])


def assert_only_first_acquires(run: Path) -> None:
    with Lease(run) as first, Lease(run) as second:
        first.acquire()
        with pytest.raises(ResumeError, match="another launch writes into it"):
            second.acquire()
        assert launch_of(run) == first.launch_id


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("code", [errno.EEXIST, errno.EIO])
def test_a_link_that_was_made_and_reported_as_a_fault_is_its_own(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def answered_twice(source: Path, target: Path) -> None:
        link(source, target)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", answered_twice)
    assert_only_first_acquires(tmp_path)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EACCES, errno.EXDEV])
def test_a_link_that_is_refused_in_whatever_way_is_replaced_by_an_exclusive_open(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "link", refuse)
    assert_only_first_acquires(tmp_path)


def test_a_file_that_another_host_removes_while_it_is_read_is_looked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Lease(tmp_path) as lease:
        lease.acquire()
    opened, stale = os.open, iter([OSError(errno.ESTALE, "Stale file handle")])

    def once(path: Path, flags: int, mode: int = 0o777) -> int:
        if "lease-" in str(path) and flags & os.O_ACCMODE == os.O_RDONLY:
            for fault in stale:
                raise fault
        return opened(path, flags, mode)

    monkeypatch.setattr(os, "open", once)
    with Lease(tmp_path) as lease:
        lease.acquire()
        assert next(stale, None) is None


def test_a_listing_that_names_a_removed_file_without_end_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_file, "STALE_LISTING_SECONDS", 0.2)
    monkeypatch.setattr(os, "listdir", lambda _: ["lease-00000007.json"])
    with pytest.raises(OSError, match="Stale file handle"):
        read_latest_lease(tmp_path)


def test_a_number_with_more_zeros_than_it_is_written_with_is_no_lease(tmp_path: Path) -> None:
    (tmp_path / "lease-000000003.json").write_bytes(b"{}")
    assert read_latest_lease(tmp_path) == (0, None)
    (tmp_path / "lease-100000000.json").write_bytes(b"{}")
    assert read_latest_lease(tmp_path) == (100_000_000, b"{}")


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Lease]:
    """A launch that is the third in its folder."""
    for _ in range(2):
        with Lease(tmp_path / "run") as earlier:
            (tmp_path / "run").mkdir(exist_ok=True)
            earlier.acquire()
    with Lease(tmp_path / "run") as lease:
        lease.acquire()
        yield lease


def test_a_holder_whose_records_were_removed_writes_its_lease_again(running: Lease) -> None:
    shutil.rmtree(running.run_dir / ".workers")
    wait_until(
        lambda: (running.run_dir / ".workers").is_dir() and read_latest_lease(running.run_dir / ".workers")[0] == 3
    )
    with Lease(running.run_dir) as second, pytest.raises(ResumeError, match="another launch writes into it"):
        second.acquire()


def test_a_holder_hears_of_a_launch_that_began_with_a_lower_number(running: Lease) -> None:
    heard: list[str] = []
    running.on_lost = heard.append
    (running.run_dir / ".workers").rename(running.run_dir / "old")
    (running.run_dir / ".workers").mkdir(exist_ok=True)
    holder = json.loads((running.run_dir / "old/lease-00000003.json").read_bytes())
    other = holder | {"launch": "other", "host": "node9"}
    for number in (1, 2):
        atomic_write(running.run_dir / f".workers/lease-{number:08d}.json", json.dumps(other))

    def hears() -> bool:
        # Its own may come back: in the moment before the others were written it found the folder empty.
        (running.run_dir / ".workers/lease-00000003.json").unlink(missing_ok=True)
        return bool(heard)

    wait_until(hears)
    assert "on node9" in heard[0]


def test_a_run_folder_that_was_moved_away_is_not_made_anew(running: Lease, tmp_path: Path) -> None:
    (tmp_path / "run").rename(tmp_path / "moved")
    time.sleep(0.3)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match="moved or removed"):
        check_lease(running.run_dir, running.launch_id)
