"""What a checkpoint folder holds: a manifest that names every file with its size and hash, and what it tells."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.batch import Progress
from dstrain.errors import CheckpointError
from dstrain.report.run_log import strict, sync_folder
from dstrain.train.state.hashed_file import BLOCK, BlockFile, Entry, write_hashed

MANIFEST = "MANIFEST.json"
FORMAT = 1
"""Raise it when a checkpoint's files say something else. Manifests of this layout were written without it too."""
ABOUT = ("step", "samples", "metric", "world_size", "zero_stage")
NAME = re.compile(r"step-\d{8,}(\.old)?")
MOST = 1e300
"""More than this no counter or metric is; a number of JSON may be larger than a float."""
_RANK = re.compile(r"(?:^|/)rank-(\d+)")


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint folder says of itself."""

    step: int
    path: Path
    state: str
    """`whole`, `damaged: ` and the reason, or of which other version of dstrain it is."""
    size: int = 0
    """Bytes of all files."""
    samples: int | None = None
    world_size: int | None = None
    zero_stage: int | None = None
    metric: float | None = None

    @property
    def whole(self) -> bool:
        return self.state == "whole"

    @property
    def progress(self) -> Progress:
        """Where the run stood."""
        assert self.samples is not None, f"{self.path} is {self.state}"
        return Progress(self.step, self.samples)

    def record(self) -> dict[str, Any]:
        """run.json: what wrote this checkpoint."""
        return json.loads((self.path / "run.json").read_bytes())


def listed(folder: Path, read_all: bool = False) -> list[CheckpointInfo]:
    """The checkpoints in a folder, newest first, whole and damaged; `read_all` compares hashes too."""
    return list(each(folder, read_all))


def each(folder: Path, read_all: bool = False) -> Iterator[CheckpointInfo]:
    """The same one by one: a folder may hold thousands, and most questions end at the newest."""
    return (inspect(folder / name, read_all) for name in step_folders(folder))


def newest_whole(folder: Path) -> CheckpointInfo | None:
    """The newest whole checkpoint in a folder, by what is cheap to read."""
    return next((info for info in each(folder) if info.whole), None)


def inspect(path: Path, read_all: bool = False) -> CheckpointInfo:
    """What a checkpoint says of itself, and whether it is whole: its manifest is read once."""
    manifest, fault = _examined(path, read_all, (0, 1))
    return _told(path, manifest, fault)


def verify(path: Path, read_all: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Why a checkpoint is damaged, None where it is whole.

    Every file must be there with its size; `read_all` compares contents too, of each n-th block of all files from
    the k-th on for `share` (k, n). A file that no manifest names does no harm.
    """
    return _examined(path, read_all, share)[1]


def _examined(path: Path, read_all: bool, share: tuple[int, int]) -> tuple[dict[str, Any], str | None]:
    """(the manifest, empty where it cannot be read; why the checkpoint is damaged)."""
    manifest: dict[str, Any] = {}
    if not (path / MANIFEST).is_file():  # reading a FIFO would wait for ever
        return {}, f"{MANIFEST} is missing"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        return manifest, other_version(manifest) or _fault_of(path, manifest, read_all, share)
    except FileNotFoundError:
        return {}, f"{MANIFEST} is missing"
    except CheckpointError as error:
        return manifest, str(error).removeprefix(f"{path}/").partition(";")[0].replace(": ", " ", 1)
    except OSError as error:
        return manifest, f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}, f"{MANIFEST} is not readable"


def other_version(manifest: Mapping[str, Any]) -> str | None:
    """Which other version of dstrain wrote it; None where this one reads it."""
    number = manifest.get("format")
    if isinstance(number, int) and number > FORMAT:
        return f"of a later version of dstrain (format {number}), which this one does not read"
    if number is None and any(isinstance(entry["sha256"], str) for entry in manifest["files"].values()):
        return "of an earlier version of dstrain, which this one does not read"
    return None if number in (None, FORMAT) else f"{MANIFEST} has the format {number!r}"


_OF_OTHERS = ("of a later version", "of an earlier version")


def _fault_of(path: Path, manifest: dict[str, Any], read_all: bool, share: tuple[int, int]) -> str | None:
    """Raises what a broken manifest, or a file that differs, makes of it."""
    files, step = manifest["files"], {name: manifest[name] for name in ABOUT}["step"]
    if _step(path) not in (step, None):
        return f"{MANIFEST} is of step {step}"
    if wrong := next((name for name in ABOUT if not _fits(name, manifest[name])), None):
        return f"{MANIFEST} names {str(manifest[wrong])[:40]!r} as {wrong}"
    if fault := _sizes(path, files):
        return fault
    record = json.loads(_small(path, files, "run.json"))
    if any(record[name] != manifest[name] for name in ABOUT):
        return f"{MANIFEST} and run.json differ"
    if read_all:
        _read_share(path, files, share)
    return None


def _fits(name: str, value: Any) -> bool:
    """Whether a value can be what ABOUT names: a file that was handed over may hold anything."""
    if value is None:
        return name in ("metric", "zero_stage")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < MOST if name == "metric" else isinstance(value, int) and 0 <= value < MOST


def _sizes(path: Path, files: Mapping[str, Entry]) -> str | None:
    for name, entry in sorted(files.items()):
        try:
            found = os.stat(f"{path}/{name}")
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        if not stat.S_ISREG(found.st_mode):
            return f"{name} is missing"
        if (size := found.st_size) != entry["size"]:
            return f"{name} has {size} bytes instead of {entry['size']}"
        if len(entry["sha256"]) != max(1, -(-size // BLOCK)):
            return f"{MANIFEST} names {len(entry['sha256'])} hashes of {name}, which has {size} bytes"
    return None


def _small(path: Path, files: Mapping[str, Entry], name: str) -> bytes:
    """A file of one block, as it was written: what is read of it must not wait for a reading of all."""
    return bytes(BlockFile(path / name, files[name]).read(0, files[name]["size"]))


def _read_share(path: Path, files: Mapping[str, Entry], share: tuple[int, int]) -> None:
    """Raises CheckpointError for a block that is not what was written."""
    blocks = [(name, index) for name, entry in sorted(files.items()) for index in range(len(entry["sha256"]))]
    for name, index in blocks[share[0] :: share[1]]:
        BlockFile(path / name, files[name]).block(index)


def describe(path: Path, fault: str | None) -> CheckpointInfo:
    """What the manifest says, with the fault that `verify` found."""
    return _told(path, json.loads((path / MANIFEST).read_bytes()) if fault is None else {}, fault)


def _told(path: Path, manifest: Mapping[str, Any], fault: str | None) -> CheckpointInfo:
    if fault is not None:
        state = fault if fault.startswith(_OF_OTHERS) else f"damaged: {fault}"
        return CheckpointInfo(step=_step(path) or 0, path=path, state=state, size=bytes_in(path))
    size = sum(entry["size"] for entry in manifest["files"].values()) + (path / MANIFEST).stat().st_size
    return CheckpointInfo(path=path, state="whole", size=size, **{name: manifest[name] for name in ABOUT})


def bytes_in(path: Path) -> int:
    """Of the files that are there, whatever the manifest says."""
    total = 0
    for folder, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(f"{folder}/{name}").st_size
    return total


def _step(path: Path) -> int | None:
    """The step in a folder's name; None where the user gave it another."""
    return step_of(path.name) if NAME.fullmatch(path.name) else None


def step_of(name: str) -> int:
    """The step in the name of a folder: `step-00000200`, or what such a name became."""
    return int(name.rpartition("step-")[2].removesuffix(".old"))


def step_folders(folder: Path) -> list[str]:
    """Folders that may be checkpoints, newest first; `.old` only where its successor never came."""
    found = {path.name for path in folder.glob("step-*") if NAME.fullmatch(path.name)}
    last = (name for name in found if name.removesuffix(".old") == name or name.removesuffix(".old") not in found)
    return sorted(last, key=step_of, reverse=True)


def files_of(path: Path) -> dict[str, Entry]:
    """The files that a whole checkpoint's manifest names."""
    return json.loads((path / MANIFEST).read_bytes())["files"]


def seal(partial: Path, files: dict[str, Entry], record: Mapping[str, Any]) -> None:
    """Add progress.json and run.json, then the manifest, last, and have it all on the disk.

    Raises CheckpointError where a file that a rank wrote is not there with its size.
    """
    for name, held in (("progress.json", {name: record[name] for name in ("step", "samples")}), ("run.json", record)):
        files[name] = write_hashed(partial / name, _json(held))
    if fault := _sizes(partial, files):
        raise CheckpointError(f"{partial}: {fault}, though a process wrote it; is the folder shared by all hosts?")
    ranks = [int(found[1]) for found in map(_RANK.search, files) if found]
    per_rank = [ranks.count(rank) for rank in range(record["world_size"])]
    manifest = {"format": FORMAT} | {name: record[name] for name in ABOUT} | {"files_per_rank": per_rank}
    for folder in _folders(partial):
        sync_folder(folder)
    write_hashed(partial / MANIFEST, _json(manifest | {"files": dict(sorted(files.items()))}))
    sync_folder(partial)


def _json(value: Any) -> bytes:
    return (json.dumps(strict(value), indent=1, allow_nan=False) + "\n").encode()


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_dir())
