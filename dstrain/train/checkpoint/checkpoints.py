"""Checkpoints that are whole or absent: written aside, verified by a manifest, committed by a rename.

    step-00000200.partial/   being written, or left by a run that died; never read
    step-00000100/           whole: MANIFEST.json was written last
    step-00000100.old/       what step-00000100 replaces, for the moment between two renames
    superseded-TIME-step-00000200/   of a run that went on from an older one; gone once step 200 is saved again
    best -> step-00000100

Nothing here is pickled; what the ranks write is theirs."""

from __future__ import annotations

import itertools
import math
import re
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from dstrain.batch import Progress
from dstrain.distributed.collective_log import lost
from dstrain.distributed.world import World
from dstrain.errors import CheckpointError, FolderLostError, LostError
from dstrain.report.run_log import now, sync_folder
from dstrain.train.checkpoint.nfs import free_name, remove_folder, rename
from dstrain.train.checkpoint.select import best_name, forget_best, point_best, restore_best
from dstrain.train.health.rank_status import unnamed
from dstrain.train.state.hashed_file import Entry
from dstrain.train.state.manifest import (
    ABOUT,
    CheckpointInfo,
    describe,
    each,
    inspect,
    listed,
    seal,
    step_folders,
    step_of,
    verify,
)

T = TypeVar("T")


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
    check: Callable[[Path], None] | None = None
    """Raises CheckpointError for a sealed checkpoint that nobody could use; asked on rank 0 before it gets its name."""
    owned: Callable[[], None] | None = None
    """Raises where another launch has taken the run folder; asked on rank 0 before a checkpoint is begun and before it gets its name."""
    _compared: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    """Not empty once all metrics were compared: `best` is then by the rule of this run."""

    def save(
        self,
        write: Callable[[Path], Mapping[str, Entry]],
        progress: Progress,
        record: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint and commit it, or raise on every rank and leave the older ones alone.

        Every rank calls `write` with the folder to put its files into, and gets their sizes and hashes. Collective.
        """
        final = self.folder / f"step-{progress.step:08d}"
        partial = final.with_suffix(".partial")
        about = (progress.step, progress.samples, metric, self.world.size, record.get("zero_stage"))
        record = {"time": now(), **record, **dict(zip(ABOUT, about, strict=True))}
        try:
            self.on_first(f"making {partial}", lambda: self._begin(partial))
            written = self._together(f"writing {final.name}", lambda: write(partial))
            files = {name: entry for share in written for name, entry in share.items()}
            self.on_first(f"sealing {partial}", lambda: self._seal(partial, files, record))
            self.on_first(f"committing {final.name}", lambda: _commit(partial, final))
        except FolderLostError:
            raise
        except CheckpointError:
            if self.world.rank == 0:  # all ranks came back: nobody writes any more
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.on_first("choosing the best", lambda: self._update_best(final))
        self.on_first("pruning", lambda: self._prune(progress.step))
        return final

    def _begin(self, partial: Path) -> None:
        if self.owned is not None:
            self.owned()
        _make_empty(partial)

    def _seal(self, partial: Path, files: dict[str, Entry], record: Mapping[str, Any]) -> None:
        seal(partial, files, record)
        if self.owned is not None:
            self.owned()
        if self.check is not None:
            self.check(partial)

    def newest(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """The newest that verifies, all ranks reading a share, and the damaged ones passed over. Collective."""
        names = self.on_first("listing checkpoints", lambda: step_folders(self.folder))
        passed_over: list[CheckpointInfo] = []
        for name in names:
            path = self.folder / name
            fault = self.fault(path)
            if fault is None:
                return describe(path, None), passed_over
            passed_over.append(describe(path, fault))
        return None, passed_over

    def fault(self, path: Path) -> str | None:
        """Why a checkpoint is damaged, every byte of it read, by each rank a share; None where it is whole. Collective."""
        faults = self._gather(f"verifying {path}", verify(path, share=(self.world.rank, self.world.size)))
        return next((f"{fault} (rank {rank})" for rank, fault in enumerate(faults) if fault), None)

    def whole(self, read_all: bool = False) -> list[CheckpointInfo]:
        """`listed` of this folder."""
        return listed(self.folder, read_all)

    def clean(self) -> list[str]:
        """Remove what a run that died left half done; returns the names. Call before the first save. Collective."""
        return self.on_first("cleaning up", lambda: _clean(self.folder))

    def set_aside_after(self, start: CheckpointInfo) -> list[str]:
        """Take the newer checkpoints of this folder out of the count, where the run goes on from an older one. Collective."""
        aside = self.on_first("setting newer checkpoints aside", lambda: _set_aside(self.folder, start))
        if aside:
            self.on_first("choosing the best", self._choose_best)
        return aside

    def _update_best(self, saved: Path) -> None:
        """Have `best` point to what was just saved where that is better; all are compared where that does not suffice."""
        now, best = inspect(saved), best_name(self.folder)
        if self._compared and now.metric is None and best is None:
            return
        held = inspect(self.folder / best) if self._compared and best not in (None, saved.name) else None
        if held is None or not held.whole or held.metric is None or not now.whole:
            self._choose_best()
        elif (
            now.metric is not None and math.isfinite(now.metric) and self._sign * now.metric < self._sign * held.metric
        ):
            point_best(self.folder, now.step)

    @property
    def _sign(self) -> int:
        return 1 if self.best == "min" else -1

    def _choose_best(self) -> None:
        """Point to the whole checkpoint with the best metric, of equals the older; to none where none has one."""
        sign = self._sign
        self._compared.append(True)
        restore_best(self.folder, max(map(step_of, step_folders(self.folder)), default=0))
        metrics = [(info.metric, info.step) for info in listed(self.folder) if info.whole]
        found = [(sign * value, step) for value, step in metrics if value is not None and math.isfinite(value)]
        if found:
            point_best(self.folder, min(found)[1])
        else:
            forget_best(self.folder)

    def _prune(self, current: int) -> None:
        """Remove what is older than the newest `keep` whole ones, but for multiples, the best and the current."""
        if self.keep is None:
            return
        whole = (info.step for info in each(self.folder) if info.whole)
        oldest = min(itertools.islice(whole, self.keep), default=0)
        best = best_name(self.folder)
        for name in step_folders(self.folder):
            step = step_of(name)
            multiple = self.keep_every is not None and step % self.keep_every == 0
            if step < oldest and not multiple and name != best and step != current:
                discard(self.folder / name)
        for path in superseded(self.folder):
            if step_of(path.name) <= current:  # the run has come as far again
                discard(path)

    def on_first(self, doing: str, act: Callable[[], T]) -> T:
        """Act on rank 0 and have its result; or raise on all ranks where it failed. Collective."""
        return cast(T, self._together(doing, lambda: act() if self.world.rank == 0 else None)[0])

    def _together(self, doing: str, act: Callable[[], T]) -> list[T]:
        """Act on every rank and have all results, by rank; or raise on all where one failed. Collective."""
        cause, value = None, None
        try:
            value = act()
        except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
            cause = error
        taken = str(cause) if isinstance(cause, FolderLostError) else ""
        outcomes = self._gather(doing, (value, cause and f"{type(cause).__name__}: {cause}", taken))
        if taken := next((told for _, _, told in outcomes if told), ""):
            raise FolderLostError(taken) from cause
        failed = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(outcomes) if why]
        if failed:
            raise CheckpointError(
                f"{doing} failed on {len(failed)} of {self.world.size} ranks ({failed[0]}); "
                f"the older checkpoints in {self.folder} are as they were: fix the cause and start again"
            ) from cause
        return [value for value, _, _ in outcomes]

    def _gather(self, doing: str, value: Any) -> list[Any]:
        """Every rank's value; LostError where one is gone, which leaves the folder to the next start. Collective."""
        try:
            return self.world.gather(value)
        except RuntimeError as error:
            if (why := lost(error)) is None:
                raise
            after = f"the older checkpoints in {self.folder} are as they were: fix the cause and start again"
            raise LostError(doing, unnamed(why), after) from error


def superseded(folder: Path) -> list[Path]:
    """Checkpoints that were set aside where a run went on from an older one."""
    return [path for path in sorted(folder.glob("superseded-*")) if OURS.fullmatch(path.name)]


OURS = re.compile(r"(superseded-\d+-)?step-\d{8,}(\.old)?")
"""Names of folders that a run may remove."""


def _make_empty(folder: Path) -> None:
    free_name(folder)
    folder.mkdir(parents=True)


def _commit(partial: Path, final: Path) -> None:
    """Give the checkpoint its name. The one it replaces stands aside, findable, until that is done."""
    old = final.with_suffix(".old")
    if final.exists():
        free_name(old)
        rename(final, old)
    rename(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def discard(path: Path) -> None:
    """Take the name away first: a checkpoint half removed must not look like one."""
    aside = path.with_suffix(".partial")
    free_name(aside)
    rename(path, aside)
    shutil.rmtree(aside, ignore_errors=True)  # what a reader holds open on NFS goes with the next clean()


def _clean(folder: Path) -> list[str]:
    removed = []
    for path in sorted(folder.glob("*")):
        successor = path.with_suffix("")
        if path.suffix not in (".partial", ".old") or not OURS.fullmatch(successor.name):
            continue  # the user's
        if path.suffix == ".old" and not successor.exists():
            rename(path, successor)
        elif remove_folder(path):
            removed.append(path.name)
    (folder / "best.new").unlink(missing_ok=True)
    return removed


def _set_aside(folder: Path, start: CheckpointInfo) -> list[str]:
    if start.path.parent.resolve() != folder.resolve():
        return []
    restore_best(folder, start.step)
    newer = [folder / name for name in step_folders(folder) if step_of(name) > start.step]
    for path in newer:
        rename(path, folder / f"superseded-{time.time_ns()}-{path.name}")
    return [path.name for path in newer]
