"""Atomic files and folders: readers find all or nothing, two writers do not tear, leftovers of the dead go."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dstrain import files
from dstrain.errors import UsageError
from dstrain.files import (
    MAX_JSON_DEPTH,
    NOT_REGULAR,
    WatchedFile,
    atomic_folder,
    atomic_write,
    display_path,
    get_host_id,
    not_file_reason,
    open_for_writing,
    open_regular_file,
    parse_json,
    partial_path,
    remove_stale_partials,
    stat_or_none,
    sync_folder,
)


@pytest.mark.parametrize("content", [b"new", "new", lambda file: file.write(b"new")])
@pytest.mark.parametrize("sync", [False, True])
def test_a_file_is_replaced_and_nothing_is_left(tmp_path: Path, content: files.Content, sync: bool) -> None:
    (tmp_path / "a.json").write_text("old")
    atomic_write(tmp_path / "a.json", content, sync)
    assert (tmp_path / "a.json").read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    def fail(file: object) -> None:
        raise OSError("full")

    (tmp_path / "a.json").write_text("old")
    with pytest.raises(OSError, match="full"):
        atomic_write(tmp_path / "a.json", fail)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_a_synced_file_is_on_the_disk_before_its_name_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("replace"), replace(a, b)))
    atomic_write(tmp_path / "a.json", b"x", sync=True)
    assert len(calls) == 3
    assert calls[0].endswith(".partial")
    assert calls[1:] == ["replace", str(tmp_path)]


def test_two_writers_at_once_do_not_tear(tmp_path: Path) -> None:
    texts = [letter * 100_000 for letter in "abcd"]
    threads = [
        threading.Thread(target=lambda text=text: [atomic_write(tmp_path / "x", text) for _ in range(20)])
        for text in texts
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert not (tmp_path / "x").exists() or (tmp_path / "x").read_text() in texts
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def write(fails: bool = False) -> None:
        with atomic_folder(tmp_path / "out") as partial:
            partial.mkdir()
            (partial / "file").touch()
            assert partial.parent == tmp_path
            if fails:
                raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        write(fails=True)
    assert not list(tmp_path.iterdir())
    write()
    with pytest.raises(OSError, match="not empty"):
        write()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_partials_of_dead_processes_are_removed_and_other_files_left(tmp_path: Path) -> None:
    place, dead = tmp_path / "out[1]", subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = partial_path(place)
    gone = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    foreign, fresh = (place.with_name(f"out[1].{letter * 12}-1-01234567.partial") for letter in "01")
    other, old, users = tmp_path / "out[1]b.partial", tmp_path / "out[1].partial", tmp_path / "out[1].v2.partial"
    for path in (mine, gone, foreign, fresh, other, old, users):
        path.write_bytes(b"")
    for path in (foreign, other, old, users):
        os.utime(path, (0, time.time() - 25 * 3600))
    remove_stale_partials(place)
    assert {*tmp_path.iterdir()} == {mine, fresh, other, old, users}


def raising(error: OSError) -> object:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


def test_a_host_without_proc_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "readlink", raising(OSError()))
    monkeypatch.setattr(files.socket, "gethostname", lambda: "box")
    assert get_host_id.__wrapped__().startswith("box ")


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EBADF, errno.ENOTSUP])
def test_a_file_system_that_flushes_no_folder_is_accepted(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[int] = []
    open_folder = os.open
    monkeypatch.setattr(files.os, "open", lambda *args: opened.append(open_folder(*args)) or opened[-1])
    monkeypatch.setattr(files.os, "fsync", raising(OSError(code, "")))
    sync_folder(tmp_path)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(*opened)


def test_a_disk_that_fails_to_flush_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.os, "fsync", raising(OSError(errno.EIO, "broken")))
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="broken"):
        sync_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_partial_folder_is_removed_with_its_content(tmp_path: Path) -> None:
    place = tmp_path / "out"
    foreign = place.with_name(f"out.{'0' * 12}-1-01234567.partial")
    foreign.mkdir()
    (foreign / "a").write_text("x")
    for path in (foreign / "a", foreign):
        os.utime(path, (0, time.time() - 25 * 3600))
    remove_stale_partials(place)
    assert not foreign.exists()


def test_a_partial_that_is_gone_by_now_is_young(tmp_path: Path) -> None:
    assert files._last_modified(tmp_path / "gone") == pytest.approx(time.time(), abs=60)


def test_paths_are_displayed_from_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert display_path(tmp_path / "a" / "b") == "a/b"
    assert display_path(Path("/elsewhere")) == "/elsewhere"
    assert display_path(Path("a\0b")) == "a\0b"


def test_only_a_regular_file_is_opened(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    os.mkfifo(tmp_path / "fifo")
    with open_regular_file(tmp_path / "a") as opened:
        assert opened.read() == b"x"
    with pytest.raises(IsADirectoryError, match="is a folder"):
        open_regular_file(tmp_path)
    with pytest.raises(OSError, match=NOT_REGULAR):
        open_regular_file(tmp_path / "fifo")


@pytest.mark.parametrize("append", [True, False])
def test_a_file_that_a_run_writes_is_created_with_its_folder(append: bool, tmp_path: Path) -> None:
    for _ in range(2):
        with open_for_writing(tmp_path / "logs/a.log", append) as file:
            file.write(b"line\n")
    assert (tmp_path / "logs/a.log").read_bytes() == b"line\n" * (2 if append else 1)


@pytest.mark.parametrize("append", [True, False])
@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda path: path.symlink_to("notes.txt"), "is a link to notes.txt"),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere"),
        (os.mkfifo, NOT_REGULAR),
        (lambda path: os.mknod(path, stat.S_IFSOCK), NOT_REGULAR),
    ],
    ids=["link", "broken link", "FIFO", "socket"],
)
def test_a_run_writes_only_regular_files(
    make: Callable[[Path], object], problem: str, append: bool, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("precious")
    path = tmp_path / "a.log"
    make(path)
    with pytest.raises(UsageError, match=rf"a\.log: {problem}.*; remove it, or choose another run folder"):
        open_for_writing(path, append)
    assert (tmp_path / "notes.txt").read_text() == "precious"
    assert not (tmp_path / "nowhere").exists()


def test_a_fifo_that_somebody_reads_is_not_written(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.log")
    reader = os.open(tmp_path / "a.log", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(UsageError, match="is not a regular file"):
        open_for_writing(tmp_path / "a.log")
    os.close(reader)


def test_a_run_writes_into_no_folder_that_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "logs").symlink_to("elsewhere")
    with pytest.raises(UsageError, match=r"logs: is a link to elsewhere, and a run follows no link inside its folder"):
        open_for_writing(tmp_path / "logs/a.log")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_file_that_is_replaced_before_it_is_opened_is_closed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x")
    closed: list[int] = []
    close = os.close
    monkeypatch.setattr(files.os, "fstat", lambda descriptor: os.stat_result((stat.S_IFIFO, *[0] * 9)))
    monkeypatch.setattr(files.os, "close", lambda descriptor: closed.append(descriptor) or close(descriptor))
    with pytest.raises(OSError, match=NOT_REGULAR):
        open_regular_file(tmp_path / "a")
    assert len(closed) == 1


def test_why_a_path_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    reasons = {name: not_file_reason(tmp_path / name) for name in ("a", "", "b", "a\0b", "loop", "dangling", "fifo")}
    assert reasons == {
        "a": "", "": "", "b": "", "a\0b": "", "loop": "is a link that points to itself",
        "dangling": "is a link to nowhere, which does not exist", "fifo": NOT_REGULAR,
    }  # fmt: skip


def test_a_watched_file_tells_that_it_has_changed(tmp_path: Path) -> None:
    watched = WatchedFile.from_path(tmp_path / "a")
    assert watched.find_change() is None
    assert stat_or_none(tmp_path / "a\0b") is None
    (tmp_path / "a").write_text("x")
    assert watched.find_change() == f"{tmp_path / 'a'} has changed"


@pytest.mark.parametrize("encode", [str, str.encode, lambda text: bytearray(text.encode())])
def test_json_from_elsewhere_has_a_limit_of_depth(encode: Callable[[str], str | bytes | bytearray]) -> None:
    for depth in (1, MAX_JSON_DEPTH):
        assert parse_json(encode("[" * depth + "]" * depth)) is not None
        assert parse_json(encode('{"a":' * (depth - 1) + "{}" + "}" * (depth - 1))) is not None
    for depth in (MAX_JSON_DEPTH + 1, 900, 100_000):
        with pytest.raises(ValueError, match="more than 100 levels"):
            parse_json(encode("[" * depth + "]" * depth))
    wide = [[1]] * 1000
    assert parse_json(encode(json.dumps(wide))) == wide
    assert parse_json(encode(json.dumps("[{" * 1000))) == "[{" * 1000


def test_json_from_elsewhere_has_a_limit_of_size() -> None:
    assert parse_json(b"[1, 2]", 6) == [1, 2]
    with pytest.raises(ValueError, match="larger than"):
        parse_json(b"[1, 23]", 6)
    with pytest.raises(ValueError, match="utf-8"):
        parse_json(b'"\xff"')


def test_an_error_of_an_open_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_text("x")

    class Failing(io.FileIO):
        def read(self, *_: object) -> bytes:
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(files, "open_regular_file", Failing)
    with pytest.raises(OSError, match=r"broken: '.*x'"):
        files.read_limited(tmp_path / "x", 9)
