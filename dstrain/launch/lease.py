"""The lease of a run folder: one launch at a time writes into it.

    .workers/lease-00000003.json    who holds it: launch, host, process, and a heartbeat that grows; the highest number counts

It takes no file lock, which many network file systems do not carry between hosts. A start that finds number 3 given back,
or its holder gone, makes number 4 as a hard link: of several starts one succeeds, and the file is there with its content
or not at all. The holder counts the heartbeat up, and sees at the same time whether a higher number was made. A process of
this host is looked up; a holder on another host counts as alive while its heartbeat changes. No two clocks are compared.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from dstrain.errors import ResumeError, RunError, one_line
from dstrain.launch.facts import machine
from dstrain.launch.processes import alive, start_time
from dstrain.launch.worker import record_folder

_NAME = re.compile(r"lease-(\d{8,})\.json")
BEAT_SECONDS = 3.0
PATIENCE_SECONDS = 15.0
"""A holder on another host whose heartbeat stands still for this long is gone."""
_POLL_SECONDS = 0.25
_TRIES = 20
_MOST_BYTES = 64 * 1024


@dataclass(frozen=True)
class Holder:
    """What the file says."""

    launch: str
    host: str
    machine: str
    pid: int
    started: str
    """Of the process, in the kernel's clock ticks after its boot: a pid is given again."""
    since: str
    """Local time, for people."""
    folder: int
    """Inode of the run folder: a copy of it is held by nobody."""
    beat: str

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on {self.host}, since {self.since}")


class Lease:
    """A run folder held by this process for a launch, within `with`, from `take` on."""

    def __init__(self, run_dir: Path, launch: str | None = None) -> None:
        self.launch = launch or secrets.token_hex(8)
        self.run_dir = run_dir
        self.on_lost: Callable[[str], None] | None = None
        """Called, in a thread, with a sentence when another launch has taken the folder."""
        self._folder = record_folder(run_dir)
        self._number = 0
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def take(self, patience: float = PATIENCE_SECONDS) -> None:
        """Hold the folder. Raises ResumeError where another launch does: exit code 2, and nothing is touched."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for _ in range(_TRIES):
                if self._try(patience):
                    break
            else:
                raise ResumeError(f"--run-dir {self.run_dir}: several launches want it at once; start again")
        except OSError as error:
            problem = f"its lease in {self._folder} cannot be written ({error.strerror})"
            raise ResumeError(f"--run-dir {self.run_dir}: {problem}; choose another folder") from error
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Give the folder back, if it is held. Never raises."""
        if self._thread is None:
            return
        self._over.set()
        if self._thread.ident is not None:  # else it never ran: the user may start no more threads
            self._thread.join(timeout=2 * BEAT_SECONDS)
        self._thread = None
        with contextlib.suppress(OSError):
            self._write_beat(_OVER)

    def _try(self, patience: float) -> bool:
        """Whether the folder is held now; False where another start was sooner, and it is to be looked at again."""
        temporary = self._folder / f".lease-{self.launch}"
        temporary.write_bytes(
            self._own()
        )  # before the folder is listed: what a network file system knew of it is forgotten
        try:
            number, content = newest(self._folder)
            if content is not None and not self._is_free(content, patience):
                return False
            if not _make(temporary, self._path(number + 1)):
                return False
            self._number = number + 1
            if newest(self._folder)[0] != self._number:  # this start was asleep for long, and others came and went
                self._path(self._number).unlink(missing_ok=True)
                return False
        finally:
            temporary.unlink(missing_ok=True)
        for older in (path for path in self._folder.glob("lease-*.json") if _number(path.name) < self._number):
            older.unlink(missing_ok=True)
        return True

    def _path(self, number: int) -> Path:
        return self._folder / f"lease-{number:08d}.json"

    def _own(self) -> bytes:
        own = Holder(
            launch=self.launch,
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            folder=self.run_dir.stat().st_ino,
            beat=_beat(0),
        )
        return json.dumps(asdict(own)).encode()

    def _is_free(self, content: bytes, patience: float) -> bool:
        """Whether it was given back or its holder is gone; False where it changed hands meanwhile. Raises ResumeError where it is held."""
        holder = _parse(content)
        if holder is not None and (holder.beat == _OVER or self._is_gone(holder)):
            return True
        return self._stands_still(content, holder, patience)

    def _is_gone(self, holder: Holder) -> bool:
        """Whether its process is known to have ended. Raises ResumeError where it is known to live."""
        if holder.machine != machine() or holder.folder != self.run_dir.stat().st_ino:
            return False
        state = alive(holder.pid, holder.started)
        if state:
            raise self._refusal(holder)
        return state is False

    def _stands_still(self, content: bytes, holder: Holder | None, patience: float) -> bool:
        """Wait whether the heartbeat changes; False where the file did otherwise. Raises ResumeError where it does."""
        who = holder or "an unknown process"
        print(
            f"{self.run_dir} was left by {who}; waiting {patience:g} s for a sign of life", file=sys.stderr, flush=True
        )
        until = time.monotonic() + patience
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            _, now = newest(self._folder)
            if now == content:
                continue
            found = _parse(now or b"")
            if found is None or found.launch != _launch_of(content) or found.beat == _OVER:
                return False
            raise self._refusal(found)
        return True

    def _refusal(self, holder: Holder) -> ResumeError:
        same = holder.machine == machine()
        stop = f"`kill {holder.pid}`" if same else f"`ssh {holder.host} kill {holder.pid}`"
        return ResumeError(
            f"--run-dir {self.run_dir}: another launch writes into it ({holder}); "
            f"wait for its end, stop it with {one_line(stop)}, or choose another folder"
        )

    def _renew(self) -> None:
        count = 0
        while not self._over.wait(BEAT_SECONDS):
            count += 1
            with contextlib.suppress(OSError):
                if (why := self._beat_once(count)) and self.on_lost is not None:
                    self.on_lost(why)
                    return

    def _beat_once(self, count: int) -> str:
        """Count up; a sentence where another launch has taken the folder."""
        number, content = newest(self._folder)
        if number > self._number and (holder := _parse(content or b"")) is not None:
            return taken_over(self.run_dir, holder)
        if number == self._number:
            self._write_beat(_beat(count))
        elif number == 0:  # someone emptied the folder
            self._path(self._number).write_bytes(self._own())
        return ""

    def _write_beat(self, beat: str) -> None:
        """In place, and only where the file is there: it is removed by who takes the folder."""
        descriptor = os.open(self._path(self._number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            content = file.read(_MOST_BYTES)
            if (holder := _parse(content)) is not None and holder.launch == self.launch:
                os.pwrite(file.fileno(), content.replace(holder.beat.encode(), beat.encode()), 0)


def check_lease(run_dir: Path, launch: str) -> None:
    """Raise RunError where another launch than this one holds the folder; `launch`: empty where nobody took it."""
    if not launch:
        return
    with contextlib.suppress(OSError):
        found = _parse(newest(record_folder(run_dir))[1] or b"")
        if found is not None and found.launch != launch:
            raise RunError(taken_over(run_dir, found))


def taken_over(run_dir: Path, holder: Holder | None) -> str:
    """The sentence with which a launch ends that has lost its folder."""
    return f"another launch took {run_dir} over ({holder}); this one ends and writes nothing more into it"


def newest(folder: Path) -> tuple[int, bytes | None]:
    """The highest number and what its file says; 0 and None where there is none. Raises OSError where it cannot be read."""
    while True:
        number = max((_number(name) for name in os.listdir(folder)), default=0)
        if not number:
            return 0, None
        try:
            # Opened anew: a network file system then asks its server.
            flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            with os.fdopen(os.open(folder / f"lease-{number:08d}.json", flags), "rb") as file:
                return number, file.read(_MOST_BYTES)
        except FileNotFoundError:  # a higher one is there now
            continue


def _number(name: str) -> int:
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else 0


def _parse(content: bytes) -> Holder | None:
    try:
        holder = Holder(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    kinds = Holder.__dataclass_fields__.values()
    return holder if all(type(getattr(holder, kind.name)).__name__ == kind.type for kind in kinds) else None


def _launch_of(content: bytes | None) -> str | None:
    holder = _parse(content) if content is not None else None
    return holder.launch if holder else None


def _beat(count: int) -> str:
    """Of one width, so that it can be written in place."""
    return f"beat-{count:012d}"


_OVER = "given-back".ljust(len(_beat(0)), "-")
"""The heartbeat of a lease that its holder gave back."""


def _make(temporary: Path, file: Path) -> bool:
    """Give a file its second name; False where that is taken."""
    try:
        os.link(temporary, file)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        return _copy_exclusively(temporary, file)  # a file system without hard links
    return True


def _copy_exclusively(temporary: Path, file: Path) -> bool:
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(temporary.read_bytes())
    return True
