"""`save.copy_to`: whole checkpoints are copied elsewhere while the run trains, and a new disk starts from there."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from dstrain.errors import CheckpointError, UsageError, first_names, mask_secrets, one_line
from dstrain.files import NOT_REGULAR, parse_json
from dstrain.report.run_log import format_current_time
from dstrain.training.checkpoints import BEST_NAME, clear_path, find_best, read_run_id
from dstrain.training.state.manifest import (
    CHECKPOINT_NAME_PATTERN,
    MANIFEST_FILE,
    inspect_checkpoint,
    list_checkpoint_names,
    parse_step,
    read_file_entries,
)

KEY = "save.copy_to"
COPIED_NAMES = (
    *("recipe.yaml", "ds_config.json", "environment.json", "events.jsonl", "metrics.jsonl"),
    *("task.py", "tokenizer", "model"),
)
"""Files and folders of a run that are copied with each checkpoint: a copy is a run folder that commands can read."""
RESTORED_NAMES = ("events.jsonl", "metrics.jsonl", "tokenizer")
"""Those that a start reads; it writes the others itself."""
OWNER_FILE = "owner.json"
PROBE_PREFIX = ".probe-"


@dataclass(frozen=True)
class CopyOwner:
    """Content of owner.json in the folder of the copies: the run that writes and removes there."""

    run_id: str
    folder: str
    """The run folder."""
    host: str
    since: str

    def __str__(self) -> str:
        return one_line(f"{self.folder} on {self.host}, since {self.since}")

    def is_of(self, run_dir: Path) -> bool:
        """Return True if this is the run folder, by its path or by a link to it."""
        if os.path.abspath(self.folder) == os.path.abspath(run_dir):
            return True
        return os.path.realpath(self.folder) == os.path.realpath(run_dir)


def open_filesystem(url: str) -> tuple[Any, str]:
    """Return fsspec's file system for a URL or a path, and the path in it. Raises UsageError."""
    import fsspec

    try:
        filesystem, path = fsspec.url_to_fs(url)
    except (ImportError, ValueError) as error:  # a package that is not installed; an unknown protocol
        raise UsageError(f"{KEY}: {mask_secrets(url)} cannot be opened ({one_line(str(error))})") from None
    return filesystem, path.rstrip("/")


class RunCopy:
    """Copies of a run's checkpoints in the folder `URL/NAME`, where NAME is that of the run folder.

    It is a run folder, except that `checkpoints/best` is a file with a name. A checkpoint's manifest is copied last and
    removed first: a checkpoint with a manifest is whole, on object stores too, which cannot rename a folder.
    Only rank 0 has one. Its thread copies the newest checkpoint that was asked for.

    `owner.json` names the run that the copies are of. It is written before anything else, and read before each copy:
    nothing is written or removed in a folder of another run.
    """

    def __init__(self, url: str, run_dir: Path) -> None:
        """Raises UsageError if the URL cannot be opened; nothing is read or written yet."""
        self._run_dir, self._checkpoints = run_dir, run_dir / "checkpoints"
        self._filesystem, path = open_filesystem(url)
        self._root = f"{path}/{run_dir.name}"
        self.place = mask_secrets(f"{url.rstrip('/')}/{run_dir.name}")
        """The folder of the copies, for messages."""
        self.seconds = 0.0
        """Duration of the last copy."""
        self.is_taken_over = False
        """True if the copies are those of another run, which --allow-change hands over to this one."""
        self._record: bytes | None = None
        """Content of owner.json that `check_owner` has read, or `claim` has written."""
        self._lock = threading.Lock()
        self._wanted: str | None = None
        self._copying: str | None = None
        self._outcomes: list[tuple[str, dict[str, Any]]] = []

    def check_owner(self, run_id: str | None, may_take_over: bool) -> None:
        """Raise UsageError if the folder of the copies is not this run's. Nothing is written.

        `run_id`: of the checkpoints in the run folder; None if there is none. The copies are those of this run if they
        record its id, and no other folder has the run now; or if this run folder, which they record, has lost its
        checkpoints. `may_take_over`: --allow-change save.copy_to.
        """
        from fsspec.implementations.local import LocalFileSystem

        is_local = isinstance(self._filesystem, LocalFileSystem)
        if is_local and os.path.realpath(self._root) == os.path.realpath(self._run_dir):
            raise UsageError(f"{KEY}: {self.place} is the run folder itself; give another place for the copies")
        with self._accessing("read"):
            self._record, names = self._read(OWNER_FILE), self._list(self._root)
        if self._record is not None:
            owner = parse_owner(self._record)
            self.is_taken_over = owner is None or not self._is_own(owner, run_id)
            if self.is_taken_over and not may_take_over:
                raise self._owner_error()
            return
        names = [name for name in names if not name.startswith(PROBE_PREFIX)]  # left by a start that was killed
        if names:
            raise UsageError(
                f"{KEY}: {self.place} has files that are no copies of a run ({first_names(names)}), and {self._run_dir} "
                "would be copied over them; give another place"
            )

    def _is_own(self, owner: CopyOwner, run_id: str | None) -> bool:
        if run_id is None:
            return owner.is_of(self._run_dir)
        if owner.run_id != run_id:
            return False
        if owner.is_of(self._run_dir):
            return True
        # A run folder that was moved is the same run. One that was copied with `cp -a` is not: the recorded one is.
        try:
            return read_run_id(Path(owner.folder) / "checkpoints") != run_id
        except UsageError:  # it exists, and this user may not read it
            return False

    def check_writable(self) -> None:
        """Raise UsageError if the folder of the copies cannot be written."""
        path = f"{self._root}/{PROBE_PREFIX}{secrets.token_hex(8)}"
        with self._accessing("written"):
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._filesystem.pipe_file(path, b"")
            self._filesystem.rm_file(path)

    def claim(self, run_id: str) -> None:
        """Record that the copies are this run's, from here on. Call it once the start is not refused any more.

        Raises UsageError if another run has done so since `check_owner`.
        """
        owner = CopyOwner(run_id, os.path.abspath(self._run_dir), socket.gethostname(), format_current_time())
        with self._accessing("written"):
            if self._read(OWNER_FILE) == self._record:
                self._record = json.dumps(asdict(owner), indent=1).encode()
                self._filesystem.makedirs(self._root, exist_ok=True)
                self._filesystem.pipe_file(f"{self._root}/{OWNER_FILE}", self._record)
            self._check_claim()  # another run may have written it at the same time

    def _check_claim(self) -> None:
        """Raise UsageError if owner.json is no longer what this start has read or written."""
        if self._read(OWNER_FILE) != self._record:
            raise self._owner_error()

    def _owner_error(self) -> UsageError:
        record = self._read(OWNER_FILE)
        owner = None if record is None else parse_owner(record)
        whose = f"are those of the run {owner}" if owner else f"have an {OWNER_FILE} that cannot be read"
        return UsageError(
            f"{KEY}: the copies in {self.place} {whose}, and this run is {self._run_dir}; give this run another place, or "
            f"let it go on from these copies and replace them with --allow-change {KEY}"
        )

    @contextlib.contextmanager
    def _accessing(self, action: str) -> Iterator[None]:
        """Context that raises UsageError for an error of the file system; each one has errors of its own."""
        try:
            yield
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(
                f"{KEY}: {self.place} cannot be {action} ({describe_error(error)}); check the address, the permissions and "
                "the credentials of its file system, or remove the key"
            ) from error

    def request(self, name: str) -> None:
        """Copy this checkpoint in the background, after the one that is being copied; an older request is dropped."""
        with self._lock:
            self._wanted = name
            if self._copying is None:
                self._copying = name  # so that it is in use from here on
                threading.Thread(target=self._run, name="copying", daemon=True).start()

    @property
    def in_use(self) -> Collection[str]:
        """Names of checkpoints that must not be removed yet."""
        with self._lock:
            return {name for name in (self._wanted, self._copying) if name is not None}

    def pop_outcomes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of copies that have ended since the last call: their names and fields."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _run(self) -> None:
        while True:
            with self._lock:
                self._copying, self._wanted = self._wanted, None
                name = self._copying
            if name is None:
                return
            start = time.monotonic()
            try:
                size = self._copy(name)
                self.seconds = time.monotonic() - start
                fields = {"to": self.place, "bytes": size, "seconds": round(self.seconds, 3)}
                outcome = ("copied", {"checkpoint": name, **fields})
            except Exception as error:  # training goes on: the next checkpoint is another chance
                outcome = ("copy_failed", {"checkpoint": name, "to": self.place, "why": describe_error(error)})
            with self._lock:
                self._outcomes.append(outcome)

    def _copy(self, name: str) -> int:
        """Copy a checkpoint and the files of the run, then remove the copies of checkpoints that were removed here.

        Returns the bytes of the checkpoint.
        """
        self._check_claim()
        source, target = self._checkpoints / name, f"{self._root}/checkpoints/{name}"
        entries = read_file_entries(source)
        if self._read(f"checkpoints/{name}/{MANIFEST_FILE}") != (source / MANIFEST_FILE).read_bytes():
            self._remove(target)
            self._put({source / file: f"{target}/{file}" for file in entries})
            self._put(
                {path: f"{self._root}/{path.relative_to(self._run_dir).as_posix()}" for path in self._run_files()}
            )
            self._put({source / MANIFEST_FILE: f"{target}/{MANIFEST_FILE}"})
        best = find_best(self._checkpoints)
        if best is not None:
            self._filesystem.pipe_file(f"{self._root}/checkpoints/{BEST_NAME}", best.path.name.encode())
        kept = list_checkpoint_names(self._checkpoints)
        self._check_claim()  # a copy may take hours
        for other in self._list_names():
            if name in kept and other not in kept:  # the run folder is there, and has removed it
                self._remove(f"{self._root}/checkpoints/{other}")
        return sum(entry["size"] for entry in entries.values())

    def _run_files(self) -> list[Path]:
        files = []
        for path in (self._run_dir / name for name in COPIED_NAMES):
            files += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
            files += [path] if path.is_file() else []
        return files

    def _put(self, files: dict[Path, str]) -> None:
        """Copy files, several at once where the file system can."""
        for folder in sorted({str(PurePosixPath(target).parent) for target in files.values()}):
            self._filesystem.makedirs(folder, exist_ok=True)
        self._filesystem.put([str(path) for path in files], list(files.values()))

    def _remove(self, folder: str) -> None:
        self._filesystem.invalidate_cache()
        if self._exists(f"{folder}/{MANIFEST_FILE}"):
            self._filesystem.rm_file(f"{folder}/{MANIFEST_FILE}")
        if self._exists(folder):
            self._filesystem.rm(folder, recursive=True)

    def _list_names(self) -> list[str]:
        """Return the names of the copied checkpoints, newest first, whole or not."""
        names = self._list(f"{self._root}/checkpoints")
        return sorted(filter(CHECKPOINT_NAME_PATTERN.fullmatch, names), key=parse_step, reverse=True)

    # fsspec's `exists` answers False for any error: a place that does not answer would look empty.

    def _list(self, folder: str) -> list[str]:
        """Return the names in a folder; none if it does not exist."""
        self._filesystem.invalidate_cache()
        try:
            return sorted(PurePosixPath(path).name for path in self._filesystem.ls(folder, detail=False))
        except FileNotFoundError:
            return []

    def _exists(self, path: str) -> bool:
        try:
            self._filesystem.info(path)
        except FileNotFoundError:
            return False
        return True

    def _read(self, name: str) -> bytes | None:
        """Return the content of a file in the copies; None if it does not exist."""
        self._filesystem.invalidate_cache()
        path = f"{self._root}/{name}"
        try:
            if self._filesystem.info(path)["type"] != "file":
                raise OSError(errno.EINVAL, NOT_REGULAR, path)  # a FIFO would never end
            content: bytes = self._filesystem.cat_file(path)
        except FileNotFoundError:
            return None
        return content

    def restore(self) -> str:
        """Copy the newest whole checkpoint, the best one and what a start reads into a run folder without checkpoints.

        Returns a line about it; empty if there is nothing to copy. Raises CheckpointError if there are copies and none is
        whole; OSError, and errors of the file system.
        """
        if list_checkpoint_names(self._checkpoints):
            return ""
        names = [
            name for name in self._list_names() if self._exists(f"{self._root}/checkpoints/{name}/{MANIFEST_FILE}")
        ]
        newest, faults = None, list[str]()
        for name in names:
            fault = self._fetch_checkpoint(name)
            if not fault:
                newest = name
                break
            faults.append(f"{name} is {fault}")
        if newest is None and faults:
            raise CheckpointError(
                f"{KEY}: none of the {len(faults)} copies in {self.place} can be used ({faults[0]}); put a whole one there, "
                "or begin anew with --resume never"
            )
        if newest is None:
            return ""
        for name in RESTORED_NAMES:
            self._fetch(name, self._run_dir / name)
        # The newest one first: where it exists, nothing is copied at the next start.
        self._partial(newest).rename(self._checkpoints / newest)
        best = (self._read(f"checkpoints/{BEST_NAME}") or b"").decode(errors="replace").strip()
        if best in names and best != newest and not self._fetch_checkpoint(best):
            self._partial(best).rename(self._checkpoints / best)
        newer = "".join(f"; {fault}" for fault in faults)
        return f"{self._run_dir} has no checkpoint; {newest} was copied from {self.place}{newer}"

    def _fetch_checkpoint(self, name: str) -> str:
        """Copy a checkpoint to its partial folder, and compare every byte with its hashes; return why it is not whole."""
        partial = self._partial(name)
        clear_path(partial)
        self._fetch(f"checkpoints/{name}", partial)
        info = inspect_checkpoint(partial, check_hashes=True)
        if info.is_complete:
            return ""
        shutil.rmtree(partial, ignore_errors=True)
        return info.status

    def _partial(self, name: str) -> Path:
        return (self._checkpoints / name).with_suffix(".partial")

    def _fetch(self, name: str, target: Path) -> None:
        """Copy a file, or the files of a folder, from the copies; nothing where it does not exist."""
        source = f"{self._root}/{name}"
        if not self._exists(source):
            return
        if self._filesystem.isfile(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            self._filesystem.get_file(source, str(target))
            return
        files = {}
        for path in self._filesystem.find(source):
            relative = PurePosixPath(path).relative_to(source)
            if ".." in relative.parts:  # a name in an object store may be anything
                raise OSError(f"{path} is outside of {source}")
            files[path] = target / relative
        for folder in {path.parent for path in files.values()}:
            folder.mkdir(parents=True, exist_ok=True)
        self._filesystem.get(list(files), [str(path) for path in files.values()])


def parse_owner(record: bytes) -> CopyOwner | None:
    """Return the owner in an owner.json; None if it cannot be read."""
    try:
        owner = CopyOwner(**parse_json(record))
    except (ValueError, TypeError):
        return None
    return owner if all(isinstance(value, str) for value in asdict(owner).values()) else None


def describe_error(error: Exception) -> str:
    """Return an error of a file system in one line, without secrets."""
    return one_line(mask_secrets(f"{type(error).__name__}: {error}"))[:400]
