"""The lease on a run folder: one launch at a time writes it; its file, its heartbeat."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from dstrain.errors import ResumeError, RunFolderLockedError, fix_for_os_error, one_line
from dstrain.files import MAX_JSON_BYTES, atomic_write, get_host_id, parse_json, read_limited
from dstrain.launch.processes import is_process_alive, start_time
from dstrain.launch.worker import get_workers_dir
from dstrain.process_setup import log_stderr

# `.workers/lease.json` names the holder's launch, host and process, and has a heartbeat that the holder changes.
#
# No file lock: many network file systems do not carry locks between hosts. The first launch creates the file with an
# exclusive open. Later ones replace a released or stale file while they hold `lease.guard`, which is also created with
# an exclusive open and exists for milliseconds. A holder on this host is checked by its process; one on another host is
# alive while its heartbeat changes. Clocks are never compared.
HEARTBEAT_SECONDS = 3.0
LEASE_TIMEOUT_SECONDS = 15.0
"""A holder on another host whose heartbeat does not change for this long is dead."""
RELEASED_HEARTBEAT = "released----"
"""Heartbeat of a released lease."""
_POLL_SECONDS = 0.25
_MAX_ATTEMPTS = 20
_MAX_STALE_READS = 4


@dataclass(frozen=True)
class LeaseHolder:
    """Content of a lease file; the fields are its keys."""

    launch: str
    host: str
    machine: str
    pid: int
    started: str
    """Start time of the process in clock ticks after boot: pids are reused."""
    since: str
    """Local time, for display only."""
    folder: int
    """Inode of the run folder: a copy of the folder is not held."""
    beat: str

    def __str__(self) -> str:
        return one_line(f"process {self.pid} on {self.host}, since {self.since}")


def lease_path(run_dir: Path) -> Path:
    return get_workers_dir(run_dir) / "lease.json"


def read_lease(run_dir: Path) -> bytes | None:
    """Return the content of the lease file; None if there is none. Raises OSError."""
    for attempt in range(_MAX_STALE_READS):
        try:
            # Opened on each call: NFS then asks its server for the current content (close-to-open consistency).
            return read_limited(lease_path(run_dir), MAX_JSON_BYTES)
        except FileNotFoundError:
            break
        except OSError as fault:
            # ESTALE: another NFS client replaced the file while it was read.
            if fault.errno != errno.ESTALE or attempt == _MAX_STALE_READS - 1:
                raise
            time.sleep(_POLL_SECONDS)
    return None


def parse_holder(content: bytes | None) -> LeaseHolder | None:
    """Return the holder in a lease file; None if the content is not a lease, as while its launch writes it."""
    try:
        holder = LeaseHolder(**parse_json(content or b""))
    except (ValueError, TypeError):
        return None
    kinds = LeaseHolder.__dataclass_fields__.values()
    return holder if all(type(getattr(holder, kind.name)).__name__ == kind.type for kind in kinds) else None


def find_live_holder(
    run_dir: Path, content: bytes | None, timeout: float, on_wait: Callable[[], None] = lambda: None
) -> LeaseHolder | None:
    """Return who holds a run folder whose lease has this content; None if it is released, or its holder dead.

    A holder that this host cannot look up is dead if its heartbeat stays the same for `timeout` seconds; `on_wait` is
    called before. Raises OSError.
    """
    holder = parse_holder(content)
    if holder is not None and holder.beat == RELEASED_HEARTBEAT:
        return None
    if holder is not None and holder.machine == get_host_id() and holder.folder == run_dir.stat().st_ino:
        is_alive = is_process_alive(holder.pid, holder.started)
        if is_alive is not None:
            return holder if is_alive else None
    on_wait()
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        current = read_lease(run_dir)
        # It goes on, or another launch was faster. One that cannot be read is being written.
        holder = parse_holder(current)
        if current != content and holder is not None:
            return holder if holder.beat != RELEASED_HEARTBEAT else None
    return None


class Lease:
    """Context manager that holds a run folder for a launch, from `acquire` to its end."""

    def __init__(self, run_dir: Path, launch_id: str | None = None) -> None:
        self.launch_id = launch_id or secrets.token_hex(8)
        self.run_dir = run_dir
        self.on_lost: Callable[[str], None] | None = None
        """Called in a thread, with the error message, when another launch has taken the folder."""
        self._path = lease_path(run_dir)
        self._holder: LeaseHolder | None = None
        self._num_beats = 0
        self._stop_event = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, timeout: float = LEASE_TIMEOUT_SECONDS) -> None:
        """Acquire the folder. Raises ResumeError (exit code 2) if another launch holds it; nothing is changed then."""
        self._stop_event.clear()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._holder = LeaseHolder(
                launch=self.launch_id,
                host=socket.gethostname(),
                machine=get_host_id(),
                pid=os.getpid(),
                started=start_time(os.getpid()),
                since=time.strftime("%Y-%m-%d %H:%M:%S"),
                folder=self.run_dir.stat().st_ino,
                beat="",
            )
            for _ in range(_MAX_ATTEMPTS):
                if self._try_acquire(timeout):
                    break
            else:
                raise ResumeError(f"--run-dir {self.run_dir}: several launches start in it at once; start again")
        except OSError as error:
            problem = f"its lease in {self._path.parent} cannot be written ({error.strerror or error})"
            fix = fix_for_os_error(error, "choose another folder")
            raise ResumeError(f"--run-dir {self.run_dir}: {problem}; {fix}") from error
        self._thread = threading.Thread(target=self._run_heartbeat, name="lease", daemon=True)
        self._thread.start()

    def release(self) -> None:
        """Release the folder if it is held. Never raises."""
        if self._thread is None:
            return
        self._stop_event.set()
        if self._thread.ident is not None:  # None if the thread could not start (ulimit -u)
            self._thread.join(timeout=2 * HEARTBEAT_SECONDS)
        self._thread = None
        with contextlib.suppress(OSError):
            # After the thread has ended, which would overwrite it.
            self._write_heartbeat()

    def _try_acquire(self, timeout: float) -> bool:
        """Return True if the folder is held now; False if another launch was faster: try again.

        Raises ResumeError if another launch holds it.
        """
        content = read_lease(self.run_dir)
        if content is None:
            return self._create()
        holder = find_live_holder(self.run_dir, content, timeout, lambda: self._log_wait(content, timeout))
        if holder is not None:
            raise self._conflict_error(holder)
        return self._replace(content, timeout)

    def _create(self) -> bool:
        """Create the lease file; return False if another launch was faster."""
        try:
            file = self._path.open("xb", buffering=0)
        except FileExistsError:
            return False
        with file:
            try:
                file.write(self._encode_holder())
            except OSError:  # such as a full disk: an empty lease would be waited for
                self._path.unlink(missing_ok=True)
                raise
        return True

    def _replace(self, stale: bytes, timeout: float) -> bool:
        """Replace a lease that nobody holds; return False if another launch was faster.

        Only one launch at a time replaces the file, and only the content that it has judged.
        """
        guard = self._path.with_suffix(".guard")
        try:
            guard.open("xb").close()
        except FileExistsError:
            _wait_for_guard(guard, timeout)
            return False
        try:
            if read_lease(self.run_dir) != stale:
                return False
            atomic_write(self._path, self._encode_holder())
        finally:
            guard.unlink(missing_ok=True)
        return True

    def _encode_holder(self) -> bytes:
        assert self._holder is not None
        # Always of the same length: it is overwritten in place.
        self._num_beats += 1
        beat = RELEASED_HEARTBEAT if self._stop_event.is_set() else f"{self._num_beats:012d}"
        return json.dumps(asdict(self._holder) | {"beat": beat}).encode()

    def _log_wait(self, content: bytes, timeout: float) -> None:
        holder = parse_holder(content) or "a launch that cannot be read"
        log_stderr(
            f"{self.run_dir} is held by {holder}, which this host cannot look up; waiting up to {timeout:g} s for a heartbeat"
        )

    def _conflict_error(self, holder: LeaseHolder) -> ResumeError:
        same = holder.machine == get_host_id()
        stop = f"`kill {holder.pid}`" if same else f"`ssh {holder.host} kill {holder.pid}`"
        return ResumeError(
            f"--run-dir {self.run_dir}: another launch writes into it ({holder}); "
            f"wait for its end, stop it with {one_line(stop)}, or choose another folder"
        )

    def _run_heartbeat(self) -> None:
        while not self._stop_event.wait(HEARTBEAT_SECONDS):
            # Suppressed: a file system that fails for a while; the next heartbeat tries again.
            with contextlib.suppress(OSError):
                conflict = self._write_heartbeat()
                if conflict and self.on_lost is not None:
                    self.on_lost(conflict)
                    return

    def _write_heartbeat(self) -> str:
        """Overwrite the heartbeat in place; return a message if another launch has taken the folder, else ''."""
        try:
            # Checked and written through one descriptor: if another launch replaces the file in between, this
            # heartbeat goes into the old one.
            file = self._path.open("r+b", buffering=0)
        except FileNotFoundError:  # the user removed it
            self._path.parent.mkdir(exist_ok=True)  # raises if the run folder is gone too
            self._create()
            return ""
        with file:
            holder = parse_holder(file.read(MAX_JSON_BYTES))
            if holder is not None and holder.launch != self.launch_id:
                return format_lease_conflict(self.run_dir, holder)
            file.seek(0)
            file.write(self._encode_holder())
        return ""


def _wait_for_guard(guard: Path, timeout: float) -> None:
    """Wait until the guard of another launch is gone; remove it after `timeout` seconds: that launch was killed."""
    deadline = time.monotonic() + timeout
    with contextlib.suppress(FileNotFoundError):
        first = guard.stat()
        while time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            current = guard.stat()
            if (current.st_ino, current.st_mtime_ns) != (first.st_ino, first.st_mtime_ns):
                return
        guard.unlink()


def check_lease(run_dir: Path, launch_id: str) -> None:
    """Raise RunFolderLockedError if another launch holds the folder, or the folder is gone.

    An empty `launch_id` means that no lease was acquired: nothing is checked.
    """
    if not launch_id:
        return
    holder = None
    with contextlib.suppress(OSError):  # a file system that fails for a while is not a conflict
        try:
            os.lstat(run_dir)
        except FileNotFoundError as error:
            raise RunFolderLockedError(
                f"{run_dir} does not exist any more: it was moved or removed while this launch wrote into it; "
                "put it back and start again"
            ) from error
        holder = parse_holder(read_lease(run_dir))
    if holder is not None and holder.launch != launch_id:
        raise RunFolderLockedError(format_lease_conflict(run_dir, holder))


def format_lease_conflict(run_dir: Path, holder: LeaseHolder | None) -> str:
    """Return the error message of a launch that has lost its folder."""
    return f"another launch took {run_dir} over ({holder}); this one ends and writes nothing more into it"
