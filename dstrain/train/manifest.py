"""What a checkpoint folder holds: a manifest that names every file with its size and hash, and what it tells."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.batch import Progress
from dstrain.errors import CheckpointError
from dstrain.report.journal import strict, sync_folder
from dstrain.train.blocks import BLOCK, BlockFile, Entry, write_hashed

MANIFEST = "MANIFEST.json"
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
    """`whole`, or `damaged: ` and the reason."""
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
    return [describe(folder / name, verify(folder / name, read_all)) for name in step_folders(folder)]


def verify(path: Path, read_all: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Why a checkpoint is damaged, None where it is whole.

    Every file must be there with its size; `read_all` compares contents too, of each n-th block of all files from
    the k-th on for `share` (k, n). A file that no manifest names does no harm.
    """
    if not (path / MANIFEST).is_file():  # reading a FIFO would wait for ever
        return f"{MANIFEST} is missing"
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files, step = manifest["files"], {name: manifest[name] for name in ABOUT}["step"]
        if _step(path) not in (step, None):
            return f"{MANIFEST} is of step {step}"
        if wrong := next((name for name in ABOUT if not _fits(name, manifest[name])), None):
            return f"{MANIFEST} names {str(manifest[wrong])[:40]!r} as {wrong}"
        if fault := _sizes(path, files):
            return fault
        if any(json.loads(_small(path, files, "run.json"))[name] != manifest[name] for name in ABOUT):
            return f"{MANIFEST} and run.json differ"
        if read_all:
            _read_share(path, files, share)
    except CheckpointError as error:
        return str(error).removeprefix(f"{path}/").partition(";")[0].replace(": ", " ", 1)
    except OSError as error:
        return f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not readable"
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
        if not (path / name).is_file():
            return f"{name} is missing"
        if (size := (path / name).stat().st_size) != entry["size"]:
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
    if fault is not None:
        return CheckpointInfo(step=_step(path) or 0, path=path, state=f"damaged: {fault}")
    manifest = json.loads((path / MANIFEST).read_bytes())
    size = sum(entry["size"] for entry in manifest["files"].values()) + (path / MANIFEST).stat().st_size
    return CheckpointInfo(path=path, state="whole", size=size, **{name: manifest[name] for name in ABOUT})


def _step(path: Path) -> int | None:
    """The step in a folder's name; None where the user gave it another."""
    return int(path.name[5:].removesuffix(".old")) if NAME.fullmatch(path.name) else None


def step_folders(folder: Path) -> list[str]:
    """Folders that may be checkpoints, newest first; `.old` only where its successor never came."""
    found = {path.name for path in folder.glob("step-*") if NAME.fullmatch(path.name)}
    last = (name for name in found if name.removesuffix(".old") == name or name.removesuffix(".old") not in found)
    return sorted(last, key=lambda name: int(name[5:].removesuffix(".old")), reverse=True)


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
    manifest = {name: record[name] for name in ABOUT} | {"files_per_rank": per_rank}
    for folder in _folders(partial):
        sync_folder(folder)
    write_hashed(partial / MANIFEST, _json(manifest | {"files": dict(sorted(files.items()))}))
    sync_folder(partial)


def _json(value: Any) -> bytes:
    return (json.dumps(strict(value), indent=1, allow_nan=False) + "\n").encode()


def _folders(folder: Path) -> Iterator[Path]:
    yield folder
    yield from (path for path in folder.rglob("*") if path.is_dir())
