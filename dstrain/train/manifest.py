"""What a checkpoint folder holds: a manifest that names every file with its size and hash, and what it tells."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.batch import Progress
from dstrain.report.journal import sync_folder, write_json

MANIFEST = "MANIFEST.json"
ABOUT = ("step", "samples", "metric", "world_size", "zero_stage")
NAME = re.compile(r"step-\d{8,}(\.old)?")
_RANK = re.compile(r"(?:^|/|pp_|dp_|[-.])rank[-_](\d+)")


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

    Every file must be there with its size; `read_all` compares contents too, of each n-th file from
    the k-th on for `share` (k, n). A file that no manifest names does no harm.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files, step = manifest["files"], {name: manifest[name] for name in ABOUT}["step"]
        if _step(path) not in (step, None):
            return f"{MANIFEST} is of step {step}"
        for name, entry in sorted(files.items()):
            if not (path / name).is_file():
                return f"{name} is missing"
            if (size := (path / name).stat().st_size) != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
        for name in sorted(files)[share[0] :: share[1]] if read_all else ():
            if hashes_of(path, [name])[name] != files[name]:
                return f"{name} is not what was written: its sha256 differs"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except OSError as error:
        return f"it cannot be read: {error}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is not readable"
    return None


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


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def hashes_of(folder: Path, wanted: Iterable[str], sync: bool = False) -> dict[str, dict[str, Any]]:
    """Size and hash of files, after their bytes have reached the disk."""
    entries = {}
    for name in wanted:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = {"size": file.tell(), "sha256": digest}
    return entries


def seal(partial: Path, files: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Add progress.json and run.json, then the manifest, last, and have it all on the disk."""
    write_json(partial / "progress.json", {name: record[name] for name in ("step", "samples")})
    write_json(partial / "run.json", record)
    files |= hashes_of(partial, ["progress.json", "run.json"])
    ranks = [int(found[1]) for found in map(_RANK.search, files) if found]
    per_rank = [ranks.count(rank) for rank in range(record["world_size"])]
    manifest = {name: record[name] for name in ABOUT} | {"files_per_rank": per_rank}
    write_json(partial / MANIFEST, manifest | {"files": dict(sorted(files.items()))})
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync_folder(folder)
