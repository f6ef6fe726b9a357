"""Checkpoints that are whole or absent: written aside, verified by a manifest, committed by a rename.

    step-00000200.partial/   being written, or left by a run that died; never read
    step-00000100/           whole: MANIFEST.json was written last
    step-00000100.old/       what step-00000100 replaces, for the moment between two renames
    best -> step-00000100

Nothing here is pickled; what the ranks write is theirs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from dstrain.batch import Progress
from dstrain.errors import CheckpointError
from dstrain.report.journal import now, sync_folder, write_json
from dstrain.world import World

T = TypeVar("T")
MANIFEST = "MANIFEST.json"
_ABOUT = ("step", "samples", "metric", "world_size", "zero_stage")
_NAME = re.compile(r"step-\d{8,}(\.old)?")
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


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run."""

    folder: Path
    """`checkpoints` in the run folder; shared by all hosts."""
    world: World
    keep: int | None = 3
    """Newest checkpoints to keep; null for all."""
    keep_every: int | None = None
    """Also keep each whose step is a multiple of this."""
    best: Literal["min", "max"] = "min"
    """Whether a lower or a higher metric is better; `best` is kept too."""

    def save(
        self,
        write: Callable[[Path], object],
        progress: Progress,
        record: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint and commit it, or raise on every rank and leave the older ones alone.

        Every rank calls `write` with the folder to put its files into. Collective.
        """
        final = self.folder / f"step-{progress.step:08d}"
        partial = final.with_suffix(".partial")
        about = (progress.step, progress.samples, metric, self.world.size, record.get("zero_stage"))
        record = {"time": now(), **record, **dict(zip(_ABOUT, about, strict=True))}
        try:
            self._on_first(f"making {partial}", lambda: _make_empty(partial))
            self._together(f"writing {final.name}", lambda: bool(write(partial)))
            seen = self._together(f"listing {partial}", lambda: _files_in(partial))
            mine = sorted(set().union(*seen))[self.world.rank :: self.world.size]
            hashes = self._together(f"reading {partial} back", lambda: _describe(partial, mine, sync=True))
            files = {name: entry for share in hashes for name, entry in share.items()}
            self._on_first(f"sealing {partial}", lambda: _seal(partial, files, record))
            self._on_first(f"committing {final.name}", lambda: _commit(partial, final))
        except CheckpointError:
            if self.world.rank == 0:  # all ranks came back: nobody writes any more
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self._on_first("choosing the best", lambda: self._choose_best(metric))
        self._on_first("pruning", lambda: self._prune(progress.step))
        return final

    def newest(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """The newest that verifies, all ranks reading a share, and the damaged ones passed over. Collective."""
        names = self._on_first("listing checkpoints", lambda: _names(self.folder))
        passed_over: list[CheckpointInfo] = []
        for name in names:
            path, share = self.folder / name, (self.world.rank, self.world.size)
            faults = self.world.gather(verify(path, share=share))
            fault = next((f"{fault} (rank {rank})" for rank, fault in enumerate(faults) if fault), None)
            if fault is None:
                return describe(path, None), passed_over
            passed_over.append(describe(path, fault))
        return None, passed_over

    def whole(self, read_all: bool = False) -> list[CheckpointInfo]:
        """`listed` of this folder."""
        return listed(self.folder, read_all)

    def mark_best(self, step: int) -> None:
        """Point `best` at the checkpoint of this step. Collective."""
        self._on_first("marking the best", lambda: _point_best(self.folder, step))

    def clean(self) -> list[str]:
        """Remove what a run that died left half done; returns the names. Call before the first save. Collective."""
        return self._on_first("cleaning up", lambda: _clean(self.folder))

    def _choose_best(self, metric: float | None) -> None:
        if metric is None or not math.isfinite(metric):
            return
        sign = 1 if self.best == "min" else -1
        metrics = [(info.metric, info.step) for info in listed(self.folder) if info.whole]
        _point_best(self.folder, min((sign * value, step) for value, step in metrics if value is not None)[1])

    def _prune(self, current: int) -> None:
        """Remove what is older than the newest `keep` whole ones, but for multiples, the best and the current."""
        checkpoints = listed(self.folder)
        newest = [info.step for info in checkpoints if info.whole][: self.keep]
        best = (self.folder / "best").resolve().name
        for info in checkpoints:
            multiple = self.keep_every is not None and info.step % self.keep_every == 0
            if info.step < min(newest, default=0) and not multiple and info.path.name != best and info.step != current:
                _discard(info.path)

    def _on_first(self, doing: str, act: Callable[[], T]) -> T:
        """Act on rank 0 and have its result; or raise on all ranks where it failed. Collective."""
        return cast(T, self._together(doing, lambda: act() if self.world.rank == 0 else None)[0])

    def _together(self, doing: str, act: Callable[[], T]) -> list[T]:
        """Act on every rank and have all results, by rank; or raise on all where one failed. Collective."""
        cause, value = None, None
        try:
            value = act()
        except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
            cause = error
        outcomes = self.world.gather((value, cause and f"{type(cause).__name__}: {cause}"))
        failed = [f"rank {rank}: {why}" for rank, (_, why) in enumerate(outcomes) if why]
        if failed:
            raise CheckpointError(
                f"{doing} failed on {len(failed)} of {self.world.size} ranks ({failed[0]}); "
                f"the older checkpoints in {self.folder} are as they were: mend the cause and start again"
            ) from cause
        return [value for value, _ in outcomes]


def listed(folder: Path, read_all: bool = False) -> list[CheckpointInfo]:
    """The checkpoints in a folder, newest first, whole and damaged; `read_all` compares hashes too."""
    return [describe(folder / name, verify(folder / name, read_all)) for name in _names(folder)]


def verify(path: Path, read_all: bool = True, share: tuple[int, int] = (0, 1)) -> str | None:
    """Why a checkpoint is damaged, None where it is whole.

    Every file must be there with its size; `read_all` compares contents too, of each n-th file from
    the k-th on for `share` (k, n). A file that no manifest names does no harm.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
        files, step = manifest["files"], {name: manifest[name] for name in _ABOUT}["step"]
        if _step(path) not in (step, None):
            return f"{MANIFEST} is of step {step}"
        for name, entry in sorted(files.items()):
            if not (path / name).is_file():
                return f"{name} is missing"
            if (size := (path / name).stat().st_size) != entry["size"]:
                return f"{name} has {size} bytes instead of {entry['size']}"
        for name in sorted(files)[share[0] :: share[1]] if read_all else ():
            if _describe(path, [name])[name] != files[name]:
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
    return CheckpointInfo(path=path, state="whole", size=size, **{name: manifest[name] for name in _ABOUT})


def _step(path: Path) -> int | None:
    """The step in a folder's name; None where the user gave it another."""
    return int(path.name[5:].removesuffix(".old")) if _NAME.fullmatch(path.name) else None


def _names(folder: Path) -> list[str]:
    """Folders that may be checkpoints, newest first; `.old` only where its successor never came."""
    found = {path.name for path in folder.glob("step-*") if _NAME.fullmatch(path.name)}
    last = (name for name in found if name.removesuffix(".old") == name or name.removesuffix(".old") not in found)
    return sorted(last, key=lambda name: int(name[5:].removesuffix(".old")), reverse=True)


def _files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _describe(folder: Path, names: Iterable[str], sync: bool = False) -> dict[str, dict[str, Any]]:
    """Size and hash of files, after their bytes have reached the disk."""
    entries = {}
    for name in names:
        with (folder / name).open("rb") as file:
            if sync:
                os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            entries[name] = {"size": file.tell(), "sha256": digest}
    return entries


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)  # raises where something of an older one could not be removed


def _seal(partial: Path, files: dict[str, Any], record: Mapping[str, Any]) -> None:
    """Add progress.json and run.json, then the manifest, last, and have it all on the disk."""
    write_json(partial / "progress.json", {name: record[name] for name in ("step", "samples")})
    write_json(partial / "run.json", record)
    files |= _describe(partial, ["progress.json", "run.json"])
    ranks = [int(found[1]) for found in map(_RANK.search, files) if found]
    per_rank = [ranks.count(rank) for rank in range(record["world_size"])]
    manifest = {name: record[name] for name in _ABOUT} | {"files_per_rank": per_rank}
    write_json(partial / MANIFEST, manifest | {"files": dict(sorted(files.items()))})
    for folder in (partial, *(path for path in partial.rglob("*") if path.is_dir())):
        sync_folder(folder)


def _commit(partial: Path, final: Path) -> None:
    """Give the checkpoint its name. The one it replaces stands aside, findable, until that is done."""
    old = final.with_suffix(".old")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        os.rename(final, old)
    os.rename(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _discard(path: Path) -> None:
    """Take the name away first: a checkpoint half removed must not look like one."""
    aside = path.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    os.rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)  # what a reader holds open on NFS goes with the next clean()


def _clean(folder: Path) -> list[str]:
    removed = []
    for path in sorted(folder.glob("*")):
        successor = path.with_suffix("")
        if path.suffix == ".old" and not successor.exists():
            os.rename(path, successor)
        elif path.suffix in (".partial", ".old") and _NAME.fullmatch(successor.name):
            shutil.rmtree(path)
            removed.append(path.name)
    (folder / "best.new").unlink(missing_ok=True)
    return removed


def _point_best(folder: Path, step: int) -> None:
    name = f"step-{step:08d}"
    if fault := verify(folder / name, read_all=False):
        raise CheckpointError(f"{name} cannot be the best: {fault}")
    (folder / "best.new").unlink(missing_ok=True)
    (folder / "best.new").symlink_to(name)
    os.replace(folder / "best.new", folder / "best")
