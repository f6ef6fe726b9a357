"""MANIFEST.json of a checkpoint: its files with hashes, written and checked by all ranks."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from dstrain.batch import Progress
from dstrain.distributed.world import Ranks
from dstrain.errors import CheckpointError, RunFolderLockedError, UsageError, one_line
from dstrain.files import (
    MAX_JSON_BYTES,
    TRANSIENT_ERRNOS,
    list_folder,
    parse_json,
    read_limited,
    stat_or_none,
    sync_folder,
)
from dstrain.report.run_log import replace_nonfinite

BLOCK_BYTES = 4 << 20
"""Size of a block."""
MAX_CACHED_BYTES = 64 << 20
"""Bytes of blocks that a reader keeps, of all files together."""
PICKLE_SUFFIXES = (".pt", ".pth", ".bin", ".pkl", ".pickle", ".ckpt")

FileEntry = dict[str, Any]
"""{"size": bytes, "sha256": [one hash per block]}; until the index is written also "table", see `write_index`."""


class HashedFileWriter:
    """Writer of a file with hashes; `entry` is set once the file is closed and flushed to the disk."""

    entry: FileEntry

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._hashes: list[str] = []
        self._block_hash = hashlib.sha256()
        self._bytes_in_block = 0

    def write(self, content: bytes | memoryview) -> None:
        """Append the content and hash it."""
        view = memoryview(content).cast("B")
        self._file.write(view)
        while len(view):
            part = view[: BLOCK_BYTES - self._bytes_in_block]
            self._block_hash.update(part)
            self._bytes_in_block += len(part)
            view = view[len(part) :]
            if self._bytes_in_block == BLOCK_BYTES:
                self._finish_block()

    def _finish_block(self) -> None:
        self._hashes.append(self._block_hash.hexdigest())
        self._block_hash, self._bytes_in_block = hashlib.sha256(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # After an error there is no entry, so no manifest can name the file.
            if exc is None:
                self._file.flush()
                # Before the manifest names the file: a complete manifest means complete files, also after a
                # power failure.
                os.fsync(self._file.fileno())
                size = self._file.tell()
                # An empty file has one hash too, that of nothing.
                if self._bytes_in_block or not size:
                    self._finish_block()
                self.entry = {"size": size, "sha256": self._hashes}
        finally:
            self._file.close()


def write_hashed_file(path: Path, content: bytes) -> FileEntry:
    """Write a complete file; return its size and hashes."""
    with HashedFileWriter(path) as file:
        file.write(content)
    return file.entry


class BlockCache:
    """The verified blocks that were read last, of any number of files."""

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes, self._bytes = max_bytes, 0
        self._blocks: OrderedDict[tuple[Path, int], bytes] = OrderedDict()

    def get(self, path: Path, index: int) -> bytes | None:
        """Return a block, and keep it longer; None where it is not cached."""
        if (content := self._blocks.get((path, index))) is not None:
            self._blocks.move_to_end((path, index))
        return content

    def add(self, path: Path, index: int, content: bytes) -> None:
        """Keep a block; drop those that were not read for the longest time."""
        self._blocks[path, index] = content
        self._bytes += len(content)
        while self._bytes > self._max_bytes and len(self._blocks) > 1:
            self._bytes -= len(self._blocks.popitem(last=False)[1])


class HashedFileReader:
    """Reader that compares each block with its hash. Raises CheckpointError if one differs."""

    def __init__(self, path: Path, entry: FileEntry, cache: BlockCache | None = None) -> None:
        self.path, self.size, self._hashes = path, int(entry["size"]), entry["sha256"]
        self._cache = BlockCache() if cache is None else cache

    def read_all(self) -> bytearray:
        """Return the whole file."""
        return self.read(0, self.size)

    def read(self, offset: int, length: int) -> bytearray:
        """Return `length` bytes from `offset` on."""
        if offset < 0 or offset + length > self.size:
            raise CheckpointError(f"{self.path}: names values beyond its end; choose another checkpoint")
        found = bytearray()
        while len(found) < length:
            index, skip = divmod(offset + len(found), BLOCK_BYTES)
            found += memoryview(self.read_block(index))[skip : skip + length - len(found)]
        return found

    def read_block(self, index: int) -> bytes:
        """Return one verified block."""
        # Small tensors share a block; without the cache each of them would hash it again.
        if (cached := self._cache.get(self.path, index)) is not None:
            return cached
        try:
            with self.path.open("rb") as file:
                file.seek(index * BLOCK_BYTES)
                content = file.read(BLOCK_BYTES)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read ({error.strerror}); choose another checkpoint"
            ) from error
        if hashlib.sha256(content).hexdigest() != self._hashes[index]:
            raise CheckpointError(
                f"{self.path}: is not what was written, the sha256 of bytes {index * BLOCK_BYTES} to "
                f"{index * BLOCK_BYTES + len(content)} differs; choose another checkpoint"
            )
        self._cache.add(self.path, index, content)
        return content


def check_no_pickles(folder: Path) -> None:
    """Raise CheckpointError if a folder has pickle files, which run code when read; dstrain writes none."""
    found = sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.suffix.lower() in PICKLE_SUFFIXES
    )
    if found:
        raise CheckpointError(
            f"{folder}: {found[0]} may be a pickle, which runs code when it is read, and dstrain writes none; "
            "nothing of it was read: remove it if you know its origin, or choose another checkpoint"
        )


MANIFEST_FILE = "MANIFEST.json"
MANIFEST_FORMAT = 2
"""Version of the format."""
MANIFEST_FIELDS = ("step", "samples", "metric", "world_size", "zero_stage")
CHECKPOINT_NAME_PATTERN = re.compile(r"step-\d{8,}(\.old)?")
MAX_LISTINGS = 10
"""Listings of a folder whose checkpoints are renamed while they are read."""
MAX_MANIFEST_BYTES = 512 << 20
"""Largest manifest that is read: 72 bytes for each block, so that of a checkpoint of 28 TiB."""
MAX_NUMBER = 1e300
"""Limit of counters and metrics; a number in JSON may be larger than a float."""
_RANK_PATTERN = re.compile(r"(?:^|/)rank-(\d+)")


COMPLETE_STATUS = "whole"
"""What `dstrain checkpoints` prints for a checkpoint without a fault."""
EARLIER_VERSION, LATER_VERSION = "of an earlier version of dstrain", "of a later version of dstrain"
"""Beginnings of the faults of checkpoints that may be complete."""


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """Checkpoint folder, as its manifest describes it."""

    step: int
    path: Path
    fault: str = ""
    """Why it cannot be read; empty if it is complete."""
    size: int = 0
    """Total size of all files in bytes."""
    samples: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    metric: float | None = None
    is_transient: bool = False
    """True if the fault is an error of the file system that may be gone some seconds later."""

    @property
    def is_complete(self) -> bool:
        return not self.fault

    @property
    def is_of_other_version(self) -> bool:
        """True if another version of dstrain wrote it: it is not damaged, and this version never removes it."""
        return self.fault.startswith((EARLIER_VERSION, LATER_VERSION))

    @property
    def status(self) -> str:
        """`whole`, `damaged: REASON`, or the version of dstrain that wrote it, as `dstrain checkpoints` prints it."""
        if self.is_complete:
            return COMPLETE_STATUS
        return self.fault if self.is_of_other_version else f"damaged: {self.fault}"

    @property
    def progress(self) -> Progress:
        """The run's progress when it was saved."""
        assert self.samples is not None, f"{self.path} is {self.status}"
        return Progress(self.step, self.samples)

    @cached_property
    def run_info(self) -> dict[str, Any]:
        """Content of run.json, read once: the recipe, versions and preset of the run that wrote the checkpoint."""
        return parse_json(read_limited(self.path / "run.json", MAX_JSON_BYTES))


def find_checkpoints(folder: Path, check_hashes: bool = False) -> list[CheckpointInfo]:
    """Return the checkpoints in a folder, newest first, complete and damaged.

    A run that is training removes and replaces checkpoints: where a fault is found in a folder that was renamed
    meanwhile, all names are listed again.
    """
    found: dict[str, CheckpointInfo] = {}
    for attempt in range(1, MAX_LISTINGS + 1):
        names = [name for name in list_checkpoint_names(folder) if name not in found]
        for name in names:
            before = stat_or_none(folder / name)
            info = inspect_checkpoint(folder / name, check_hashes)
            after = stat_or_none(folder / name)
            # A rename changes the folder's ctime.
            is_same = before and after and (before.st_ino, before.st_ctime_ns) == (after.st_ino, after.st_ctime_ns)
            if info.is_complete or is_same or (after and attempt == MAX_LISTINGS):
                found[name] = info
        if all(name in found for name in names):
            break
    return [found[name] for name in _sort_names(found)]


def find_latest_complete(folder: Path) -> CheckpointInfo | None:
    """Return the newest complete checkpoint in a folder, checked by sizes, not hashes."""
    # One by one: a folder may have thousands.
    checkpoints = (inspect_checkpoint(folder / name) for name in list_checkpoint_names(folder))
    return next((info for info in checkpoints if info.is_complete), None)


def inspect_checkpoint(path: Path, check_hashes: bool = False, share: tuple[int, int] = (0, 1)) -> CheckpointInfo:
    """Return a checkpoint's info, with its fault if it cannot be read. The manifest is read once.

    Every file must exist with its size; `check_hashes` compares contents too, with `share` = (k, n) of every n-th block
    from block k on. Files that the manifest does not name are ignored.
    """
    is_transient = False
    try:
        manifest = _read_manifest(path)
        fault = _find_version_fault(path, manifest) or _find_content_fault(path, manifest, check_hashes, share)
    except FileNotFoundError:
        fault = f"{MANIFEST_FILE} is missing"
    except CheckpointError as error:
        fault = str(error).removeprefix(f"{path}/").partition(";")[0].replace(": ", " ", 1)
        is_transient = is_transient_error(error)
    except OSError as error:
        fault = f"it cannot be read: {error}"
        is_transient = is_transient_error(error)
    except (ValueError, KeyError, TypeError, AttributeError):
        fault = f"{MANIFEST_FILE} is not readable"
    if fault:
        return make_damaged_info(path, fault, is_transient)
    size = sum(entry["size"] for entry in manifest["files"].values())
    if (file := stat_or_none(path / MANIFEST_FILE)) is not None:  # a run may remove it meanwhile
        size += file.st_size
    return CheckpointInfo(path=path, size=size, **{name: manifest[name] for name in MANIFEST_FIELDS})


def make_damaged_info(path: Path, fault: str, is_transient: bool = False) -> CheckpointInfo:
    """Return the info of a checkpoint that cannot be read."""
    step, size = _step_from_path(path) or 0, get_folder_size(path)
    return CheckpointInfo(step=step, path=path, fault=fault, size=size, is_transient=is_transient)


def _read_manifest(path: Path) -> dict[str, Any]:
    return parse_json(read_limited(path / MANIFEST_FILE, MAX_MANIFEST_BYTES), MAX_MANIFEST_BYTES)


def _find_version_fault(path: Path, manifest: Mapping[str, Any]) -> str:
    number = manifest.get("format")
    if number == MANIFEST_FORMAT:
        return ""
    # The first format had no number.
    is_first = number is None and isinstance(manifest.get("files"), dict) and isinstance(manifest.get("step"), int)
    if not is_first and not isinstance(number, int):
        return f"{MANIFEST_FILE} has the format {number!r}"
    which = LATER_VERSION if isinstance(number, int) and number > MANIFEST_FORMAT else EARLIER_VERSION
    wrote = (read_run_info(path) or {}).get("versions")
    version = wrote.get("dstrain") if isinstance(wrote, dict) else None
    reader = f"dstrain {one_line(version)[:40]}, which wrote it, does" if isinstance(version, str) else "that one does"
    return f"{which} (format {number or 'without a number'}), which this one does not read; {reader}"


def read_run_info(path: Path) -> dict[str, Any] | None:
    """Return run.json without a look at the other files; empty if it is damaged, None if it cannot be read."""
    try:
        info = parse_json(read_limited(path / "run.json", MAX_JSON_BYTES))
    except OSError:
        return None
    except ValueError:
        return {}
    return info if isinstance(info, dict) else {}


def _find_content_fault(path: Path, manifest: dict[str, Any], check_hashes: bool, share: tuple[int, int]) -> str | None:
    """Return a fault; errors of a broken manifest, and CheckpointError for a different block, are raised."""
    files, step = manifest["files"], {name: manifest[name] for name in MANIFEST_FIELDS}["step"]
    if _step_from_path(path) not in (step, None):
        return f"{MANIFEST_FILE} is of step {step}"
    if wrong := next((name for name in MANIFEST_FIELDS if not _is_valid_field(name, manifest[name])), None):
        return f"{MANIFEST_FILE} names {str(manifest[wrong])[:40]!r} as {wrong}"
    per_rank = manifest["files_per_rank"]
    if len(per_rank) != manifest["world_size"] or per_rank != _count_files_per_rank(files, len(per_rank)):
        return f"{MANIFEST_FILE} does not name all files of each rank"
    if fault := _find_size_mismatch(path, files):
        return fault
    if files["run.json"]["size"] > MAX_JSON_BYTES:
        return f"run.json is larger than {MAX_JSON_BYTES >> 20} MiB"
    # The manifest has no hash of its own: run.json, which has one, repeats its fields.
    record = parse_json(HashedFileReader(path / "run.json", files["run.json"]).read_all())
    if any(record[name] != manifest[name] for name in MANIFEST_FIELDS):
        return f"{MANIFEST_FILE} and run.json differ"
    if check_hashes:
        _check_block_hashes(path, files, share)
    return None


def _is_valid_field(name: str, value: Any) -> bool:
    """Return true if a field of the manifest has a valid value: a file from elsewhere may hold anything."""
    if value is None:
        return name in ("metric", "zero_stage")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < MAX_NUMBER if name == "metric" else isinstance(value, int) and 0 <= value < MAX_NUMBER


def _count_files_per_rank(files: Collection[str], world_size: int) -> list[int]:
    counts = Counter(int(found[1]) for found in map(_RANK_PATTERN.search, files) if found)
    return [counts[rank] for rank in range(world_size)]


def _find_size_mismatch(path: Path, files: Mapping[str, FileEntry]) -> str | None:
    for name, entry in sorted(files.items()):
        try:
            found = os.stat(f"{path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is missing"
        if (size := found.st_size) != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        if len(entry["sha256"]) != max(1, -(-size // BLOCK_BYTES)):
            return f"{MANIFEST_FILE} names {len(entry['sha256'])} hashes of {name}, which has {size} bytes"
    return None


def _check_block_hashes(path: Path, files: Mapping[str, FileEntry], share: tuple[int, int]) -> None:
    """Raise CheckpointError for a block with another hash."""
    # Shared out by block: files differ in size, and every rank reads a share.
    blocks = [(name, index) for name, entry in sorted(files.items()) for index in range(len(entry["sha256"]))]
    for name, index in blocks[share[0] :: share[1]]:
        HashedFileReader(path / name, files[name]).read_block(index)


def get_folder_size(path: Path) -> int:
    """Return the total size of the existing files, with or without a manifest."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{folder}/{name}").st_size
    return total


def _step_from_path(path: Path) -> int | None:
    """Return the step in a folder's name; None if a user renamed the folder."""
    return parse_step(path.name) if CHECKPOINT_NAME_PATTERN.fullmatch(path.name) else None


def parse_step(name: str) -> int:
    """Return the step in a folder name such as `step-00000200` or `superseded-TIME-step-00000200`."""
    return int(name.rpartition("step-")[2].removesuffix(".old"))


def list_checkpoint_names(folder: Path) -> list[str]:
    """Return names of possible checkpoints, newest first; `.old` only if its successor does not exist.

    Raises UsageError if the folder exists and cannot be read.
    """
    try:
        return _sort_names({name for name in list_folder(folder) if CHECKPOINT_NAME_PATTERN.fullmatch(name)})
    except OSError as error:
        fix = "check its permissions and that the disk is mounted"
        raise UsageError(f"{folder}: cannot be read ({error.strerror}); {fix}") from None


def _sort_names(names: Collection[str]) -> list[str]:
    last = (name for name in names if name.removesuffix(".old") == name or name.removesuffix(".old") not in names)
    return sorted(last, key=parse_step, reverse=True)


def read_file_entries(path: Path) -> dict[str, FileEntry]:
    """Return name -> size and hashes of the files in a checkpoint's manifest."""
    return _read_manifest(path)["files"]


def finalize_checkpoint(partial: Path, files: dict[str, FileEntry], run_info: Mapping[str, Any]) -> None:
    """Add progress.json, run.json and, last, the manifest; flush all of it to the disk.

    Raises CheckpointError if a file that a rank wrote is missing or has another size.
    """
    for name, held in (
        ("progress.json", {name: run_info[name] for name in ("step", "samples")}),
        ("run.json", run_info),
    ):
        files[name] = write_hashed_file(partial / name, _to_json(held))
    fault = _find_size_mismatch(partial, files)
    if fault:
        # An NFS client may see a file of another host late: a second try finds it.
        raise CheckpointError(
            f"{partial}: {fault}, though a process wrote it; is the folder shared by all hosts?"
        ) from FileNotFoundError(errno.ENOENT, fault)
    per_rank = _count_files_per_rank(files, run_info["world_size"])
    manifest = (
        {"format": MANIFEST_FORMAT} | {name: run_info[name] for name in MANIFEST_FIELDS} | {"files_per_rank": per_rank}
    )
    # All names reach the disk before the manifest does: where it exists, the checkpoint is complete.
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync_folder(folder)
    write_hashed_file(partial / MANIFEST_FILE, _to_json(manifest | {"files": dict(sorted(files.items()))}))
    sync_folder(partial)


def _to_json(value: Any) -> bytes:
    return (json.dumps(replace_nonfinite(value), indent=1, allow_nan=False) + "\n").encode()


class TransientError(CheckpointError):
    """Each rank that failed met an error that may pass (TRANSIENT_ERRNOS)."""


def is_transient_error(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRNOS
        error = error.__cause__ or error.__context__
    return False


T = TypeVar("T")


def gather_or_raise(
    world: Ranks, value: T, error: Exception | None, summarize: Callable[[list[str]], str] = lambda faults: faults[0]
) -> list[T]:
    """Return every rank's value, by rank; or raise on all ranks if one has an error, which they would wait for. Collective.

    Raises RunFolderLockedError if that is the error of any rank, else CheckpointError with `summarize(faults)`, of
    faults such as `rank 3: OSError: ...`: a TransientError if all of them may pass.
    """
    kind = "" if error is None or isinstance(error, CheckpointError) else f"{type(error).__name__}: "
    fault = None if error is None else f"{kind}{error}"
    taken = str(error) if isinstance(error, RunFolderLockedError) else ""
    outcomes = world.gather((value, fault, taken, error is None or is_transient_error(error)))
    conflicts = [outcome[2] for outcome in outcomes if outcome[2]]
    if conflicts:
        raise RunFolderLockedError(conflicts[0]) from error
    faults = [f"rank {rank}: {outcome[1]}" for rank, outcome in enumerate(outcomes) if outcome[1] is not None]
    if faults:
        error_class = TransientError if all(outcome[3] for outcome in outcomes) else CheckpointError
        raise error_class(summarize(faults)) from error
    return [outcome[0] for outcome in outcomes]


@contextmanager
def raise_on_all_ranks(world: Ranks) -> Iterator[None]:
    """Raise CheckpointError on all ranks if the body fails on one. Collective."""
    error = None
    try:
        yield
    except Exception as caught:  # of any kind: the other ranks must learn of it
        error = caught
    gather_or_raise(world, None, error)
