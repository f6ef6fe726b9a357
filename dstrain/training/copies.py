"""`save.copy_to`: whole checkpoints are copied elsewhere while the run trains, and a new disk starts from there."""

from __future__ import annotations

import secrets
import shutil
import threading
import time
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

from dstrain.errors import UsageError, mask_secrets, one_line
from dstrain.training.checkpoints import BEST_NAME, clear_path, find_best
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
        self._lock = threading.Lock()
        self._wanted: str | None = None
        self._copying: str | None = None
        self._outcomes: list[tuple[str, dict[str, Any]]] = []

    def check_writable(self) -> None:
        """Raise UsageError if the folder of the copies cannot be written, or is the run folder itself."""
        name = f".probe-{secrets.token_hex(8)}"
        try:
            self._filesystem.makedirs(self._root, exist_ok=True)
            self._filesystem.pipe_file(f"{self._root}/{name}", b"")
            is_run_dir = (self._run_dir / name).exists()
            self._filesystem.rm_file(f"{self._root}/{name}")
        except Exception as error:  # each file system has errors of its own
            raise UsageError(
                f"{KEY}: {self.place} cannot be written ({describe_error(error)}); check the address, the permissions and "
                "the credentials of its file system, or remove the key"
            ) from error
        if is_run_dir:
            raise UsageError(f"{KEY}: {self.place} is the run folder itself; give another place for the copies")

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
            found, self._outcomes = self._outcomes, []
        return found

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
        source, target = self._checkpoints / name, f"{self._root}/checkpoints/{name}"
        entries = read_file_entries(source)
        if not self._is_same(source / MANIFEST_FILE, f"{target}/{MANIFEST_FILE}"):
            self._remove(target)
            self._put({source / file: f"{target}/{file}" for file in entries})
            self._put(
                {path: f"{self._root}/{path.relative_to(self._run_dir).as_posix()}" for path in self._run_files()}
            )
            self._put({source / MANIFEST_FILE: f"{target}/{MANIFEST_FILE}"})
        kept = list_checkpoint_names(self._checkpoints)
        best = find_best(self._checkpoints)
        if best is not None:
            self._filesystem.pipe_file(f"{self._root}/checkpoints/{BEST_NAME}", best.path.name.encode())
        for other in self._list_names():
            if other not in kept and other != name:
                self._remove(f"{self._root}/checkpoints/{other}")
        return sum(entry["size"] for entry in entries.values())

    def _run_files(self) -> list[Path]:
        found = []
        for path in (self._run_dir / name for name in COPIED_NAMES):
            found += sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
            found += [path] if path.is_file() else []
        return found

    def _put(self, files: dict[Path, str]) -> None:
        """Copy files, several at once where the file system can."""
        for folder in sorted({str(PurePosixPath(target).parent) for target in files.values()}):
            self._filesystem.makedirs(folder, exist_ok=True)
        self._filesystem.put([str(path) for path in files], list(files.values()))

    def _is_same(self, manifest: Path, copy: str) -> bool:
        return self._filesystem.exists(copy) and self._filesystem.cat_file(copy) == manifest.read_bytes()

    def _remove(self, folder: str) -> None:
        self._filesystem.invalidate_cache()
        if self._filesystem.exists(f"{folder}/{MANIFEST_FILE}"):
            self._filesystem.rm_file(f"{folder}/{MANIFEST_FILE}")
        if self._filesystem.exists(folder):
            self._filesystem.rm(folder, recursive=True)

    def _list_names(self) -> list[str]:
        """Return the names of the copied checkpoints, newest first, whole or not."""
        self._filesystem.invalidate_cache()
        folder = f"{self._root}/checkpoints"
        paths = self._filesystem.ls(folder, detail=False) if self._filesystem.exists(folder) else []
        names = {PurePosixPath(path).name for path in paths}
        return sorted(filter(CHECKPOINT_NAME_PATTERN.fullmatch, names), key=parse_step, reverse=True)

    def restore(self) -> str:
        """Copy the newest whole checkpoint, the best one and what a start reads into a run folder without checkpoints.

        Returns a line about it; empty if there is nothing to copy. Raises OSError, and errors of the file system.
        """
        if list_checkpoint_names(self._checkpoints):
            return ""
        names = [
            n for n in self._list_names() if self._filesystem.exists(f"{self._root}/checkpoints/{n}/{MANIFEST_FILE}")
        ]
        newest = next((name for name in names if self._fetch_checkpoint(name)), None)
        if newest is None:
            return ""
        for name in RESTORED_NAMES:
            self._fetch(name, self._run_dir / name)
        # The newest one first: where it exists, nothing is copied at the next start.
        self._partial(newest).rename(self._checkpoints / newest)
        best = self._read_best_name()
        if best in names and best != newest and self._fetch_checkpoint(best):
            self._partial(best).rename(self._checkpoints / best)
        return f"{self._run_dir} has no checkpoint; {newest} was copied from {self.place}"

    def _read_best_name(self) -> str:
        path = f"{self._root}/checkpoints/{BEST_NAME}"
        if not self._filesystem.exists(path):
            return ""
        name: bytes = self._filesystem.cat_file(path)
        return name.decode(errors="replace").strip()

    def _fetch_checkpoint(self, name: str) -> bool:
        """Copy a checkpoint to its partial folder; return False if files are missing or have other sizes."""
        partial = self._partial(name)
        clear_path(partial)
        self._fetch(f"checkpoints/{name}", partial)
        if inspect_checkpoint(partial).is_complete:
            return True
        shutil.rmtree(partial, ignore_errors=True)
        return False

    def _partial(self, name: str) -> Path:
        return (self._checkpoints / name).with_suffix(".partial")

    def _fetch(self, name: str, target: Path) -> None:
        """Copy a file, or the files of a folder, from the copies; nothing where it does not exist."""
        source = f"{self._root}/{name}"
        if not self._filesystem.exists(source):
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


def describe_error(error: Exception) -> str:
    """Return an error of a file system in one line, without secrets."""
    return one_line(mask_secrets(f"{type(error).__name__}: {error}"))[:400]
