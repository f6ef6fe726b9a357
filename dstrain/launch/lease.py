"""The lease of a run folder: one launch at a time writes into it.

    .workers/lease-00000003.json    who holds it: launch, host, process, and a heartbeat that grows; the highest number counts

It takes no file lock, which many network file systems do not carry between hosts. A start that finds number 3 given back,
or its holder gone, makes number 4 as a hard link: of several starts one succeeds, and the file is there with its content
or not at all. The holder counts the heartbeat up, and sees at the same time whether a higher number was made. A process of
this host is looked up; a holder on another host counts as alive while its heartbeat changes. No two clocks are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Self

from dstrain.errors import FolderLostError, ResumeError, one_line
from dstrain.launch.lease_file import (
    MOST_BYTES,
    OVER,
    Holder,
    beat_text,
    launch_of,
    lease_path,
    make,
    newest,
    number_of,
    parse,
)
from dstrain.launch.multihost.probe import machine
from dstrain.launch.processes import alive, start_time
from dstrain.launch.worker import record_folder

BEAT_SECONDS = 3.0
PATIENCE_SECONDS = 15.0
"""A holder on another host whose heartbeat stands still for this long is gone."""
_POLL_SECONDS = 0.25
_TRIES = 20


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
            self._write_beat(OVER)

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
            if not make(temporary, lease_path(self._folder, number + 1)):
                return False
            self._number = number + 1
            if newest(self._folder)[0] != self._number:  # this start was asleep for long, and others came and went
                lease_path(self._folder, self._number).unlink(missing_ok=True)
                return False
        finally:
            temporary.unlink(missing_ok=True)
        for older in (path for path in self._folder.glob("lease-*.json") if number_of(path.name) < self._number):
            older.unlink(missing_ok=True)
        return True

    def _own(self) -> bytes:
        own = Holder(
            launch=self.launch,
            host=socket.gethostname(),
            machine=machine(),
            pid=os.getpid(),
            started=start_time(os.getpid()),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            folder=self.run_dir.stat().st_ino,
            beat=beat_text(0),
        )
        return json.dumps(asdict(own)).encode()

    def _is_free(self, content: bytes, patience: float) -> bool:
        """Whether it was given back or its holder is gone; False where it changed hands meanwhile. Raises ResumeError where it is held."""
        holder = parse(content)
        if holder is not None and (holder.beat == OVER or self._is_gone(holder)):
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
        who = holder or "a launch that cannot be read"
        told = f"{self.run_dir} is held by {who}, which this host cannot look up; waiting up to {patience:g} s for a heartbeat"
        print(told, file=sys.stderr, flush=True)
        until = time.monotonic() + patience
        while time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            _, now = newest(self._folder)
            if now == content:
                continue
            found = parse(now or b"")
            if found is None or found.launch != launch_of(content) or found.beat == OVER:
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
        try:
            number, content = newest(self._folder)
        except FileNotFoundError:
            self._folder.mkdir()  # someone removed it; raises where the run folder is gone too
            number, content = 0, None
        if (holder := parse(content or b"")) is not None and holder.launch != self.launch:
            return taken_over(self.run_dir, holder)
        if number == self._number:
            self._write_beat(beat_text(count))
        elif number == 0:  # someone emptied the folder
            lease_path(self._folder, self._number).write_bytes(self._own())
        return ""

    def _write_beat(self, beat: str) -> None:
        """In place, and only where the file is there: it is removed by who takes the folder."""
        descriptor = os.open(lease_path(self._folder, self._number), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        with os.fdopen(descriptor, "r+b", buffering=0) as file:
            content = file.read(MOST_BYTES)
            if (holder := parse(content)) is not None and holder.launch == self.launch:
                os.pwrite(file.fileno(), content.replace(holder.beat.encode(), beat.encode()), 0)


def check_lease(run_dir: Path, launch: str) -> None:
    """Raise FolderLostError where another launch than this one holds the folder, or it is gone; `launch`: empty where nobody took it."""
    if not launch:
        return
    with contextlib.suppress(OSError):
        found = _found(run_dir)
        if found is not None and found.launch != launch:
            raise FolderLostError(taken_over(run_dir, found))


def _found(run_dir: Path) -> Holder | None:
    """The holder, as the newest lease says it. Raises FolderLostError where the run folder is gone."""
    try:
        return parse(newest(record_folder(run_dir))[1] or b"")
    except FileNotFoundError:
        if os.path.lexists(run_dir):
            return None
    raise FolderLostError(
        f"{run_dir} is not there any more: it was moved or removed while this launch wrote into it; "
        "put it back and start again"
    )


def taken_over(run_dir: Path, holder: Holder | None) -> str:
    """The sentence with which a launch ends that has lost its folder."""
    return f"another launch took {run_dir} over ({holder}); this one ends and writes nothing more into it"
