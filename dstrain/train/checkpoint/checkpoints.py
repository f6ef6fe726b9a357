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
from dstrain.distributed.connection_errors import find_connection_error, unknown_peer_message
from dstrain.distributed.world import Ranks
from dstrain.errors import CheckpointError, PeerFailureError, RunFolderTakenError
from dstrain.files import sync_folder
from dstrain.report.run_log import format_current_time
from dstrain.train.checkpoint.nfs import clear_path, remove_folder, rename_folder
from dstrain.train.checkpoint.select import clear_best, read_best_name, restore_best_copy, set_best
from dstrain.train.state.hashed_file import FileEntry
from dstrain.train.state.manifest import (
    MANIFEST_FIELDS,
    CheckpointInfo,
    finalize_checkpoint,
    find_checkpoints,
    find_fault,
    inspect_checkpoint,
    iter_checkpoints,
    list_checkpoint_names,
    parse_step,
    read_checkpoint_info,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CheckpointStore:
    """The checkpoints of a run."""

    folder: Path
    """`checkpoints` in the run folder; shared by all hosts."""
    world: Ranks
    keep: int | None = 3
    """Newest checkpoints to keep; null for all."""
    keep_every: int | None = None
    """Also keep each whose step is a multiple of this."""
    best_mode: Literal["min", "max"] = "min"
    """Whether a lower or a higher metric is better; `best` is kept too."""
    check_usable: Callable[[Path], None] | None = None
    """Raises CheckpointError for a sealed checkpoint that nobody could use; asked on rank 0 before it gets its name."""
    check_owner: Callable[[], None] | None = None
    """Raises where another launch has taken the run folder; asked on rank 0 before a checkpoint is begun and before it gets its name."""
    _is_best_checked: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)
    """Not empty once all metrics were compared: `best` is then by the rule of this run."""

    def save(
        self,
        write: Callable[[Path], Mapping[str, FileEntry]],
        progress: Progress,
        run_info: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint and commit it, or raise on every rank and leave the older ones alone.

        Every rank calls `write` with the folder to put its files into, and gets their sizes and hashes. Collective.
        """
        final = self.folder / f"step-{progress.step:08d}"
        partial = final.with_suffix(".partial")
        about = (progress.step, progress.samples, metric, self.world.size, run_info.get("zero_stage"))
        run_info = {"time": format_current_time(), **run_info, **dict(zip(MANIFEST_FIELDS, about, strict=True))}
        try:
            self.run_on_rank_zero(f"making {partial}", lambda: self._create_partial(partial))
            written = self._run_on_all_ranks(f"writing {final.name}", lambda: write(partial))
            files = {name: entry for share in written for name, entry in share.items()}
            self.run_on_rank_zero(f"sealing {partial}", lambda: self._finalize(partial, files, run_info))
            self.run_on_rank_zero(f"committing {final.name}", lambda: _commit(partial, final))
        except RunFolderTakenError:
            raise
        except CheckpointError:
            if self.world.rank == 0:  # all ranks came back: nobody writes any more
                shutil.rmtree(partial, ignore_errors=True)
            raise
        self.run_on_rank_zero("choosing the best", lambda: self._update_best(final))
        self.run_on_rank_zero("pruning", lambda: self._prune(progress.step))
        return final

    def _create_partial(self, partial: Path) -> None:
        if self.check_owner is not None:
            self.check_owner()
        _create_empty_folder(partial)

    def _finalize(self, partial: Path, files: dict[str, FileEntry], run_info: Mapping[str, Any]) -> None:
        finalize_checkpoint(partial, files, run_info)
        if self.check_owner is not None:
            self.check_owner()
        if self.check_usable is not None:
            self.check_usable(partial)

    def find_latest_valid(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """The newest that verifies, all ranks reading a share, and the damaged ones passed over. Collective."""
        names = self.run_on_rank_zero("listing checkpoints", lambda: list_checkpoint_names(self.folder))
        passed_over: list[CheckpointInfo] = []
        for name in names:
            path = self.folder / name
            fault = self.find_fault(path)
            if fault is None:
                return read_checkpoint_info(path, None), passed_over
            passed_over.append(read_checkpoint_info(path, fault))
        return None, passed_over

    def find_fault(self, path: Path) -> str | None:
        """Why a checkpoint is damaged, every byte of it read, by each rank a share; None where it is whole. Collective."""
        faults = self._gather(f"verifying {path}", find_fault(path, share=(self.world.rank, self.world.size)))
        return next((f"{fault} (rank {rank})" for rank, fault in enumerate(faults) if fault), None)

    def list_all(self, check_hashes: bool = False) -> list[CheckpointInfo]:
        """`listed` of this folder."""
        return find_checkpoints(self.folder, check_hashes)

    def remove_incomplete(self) -> list[str]:
        """Remove what a run that died left half done; returns the names. Call before the first save. Collective."""
        return self.run_on_rank_zero("cleaning up", lambda: _remove_incomplete(self.folder))

    def supersede_newer(self, checkpoint: CheckpointInfo) -> list[str]:
        """Take the newer checkpoints of this folder out of the count, where the run goes on from an older one. Collective."""
        aside = self.run_on_rank_zero(
            "setting newer checkpoints aside", lambda: _supersede_newer(self.folder, checkpoint)
        )
        if aside:
            self.run_on_rank_zero("choosing the best", self._choose_best)
        return aside

    def _update_best(self, saved: Path) -> None:
        """Have `best` point to what was just saved where that is better; all are compared where that does not suffice."""
        now, best = inspect_checkpoint(saved), read_best_name(self.folder)
        if self._is_best_checked and now.metric is None and best is None:
            return
        held = (
            inspect_checkpoint(self.folder / best) if self._is_best_checked and best not in (None, saved.name) else None
        )
        if held is None or not held.is_complete or held.metric is None or not now.is_complete:
            self._choose_best()
        elif (
            now.metric is not None and math.isfinite(now.metric) and self._sign * now.metric < self._sign * held.metric
        ):
            set_best(self.folder, now.step)

    @property
    def _sign(self) -> int:
        return 1 if self.best_mode == "min" else -1

    def _choose_best(self) -> None:
        """Point to the whole checkpoint with the best metric, of equals the older; to none where none has one."""
        sign = self._sign
        self._is_best_checked.append(True)
        restore_best_copy(self.folder, max(map(parse_step, list_checkpoint_names(self.folder)), default=0))
        metrics = [(info.metric, info.step) for info in find_checkpoints(self.folder) if info.is_complete]
        found = [(sign * value, step) for value, step in metrics if value is not None and math.isfinite(value)]
        if found:
            set_best(self.folder, min(found)[1])
        else:
            clear_best(self.folder)

    def _prune(self, current_step: int) -> None:
        """Remove what is older than the newest `keep` whole ones, but for multiples, the best and the current."""
        if self.keep is None:
            return
        whole = (info.step for info in iter_checkpoints(self.folder) if info.is_complete)
        oldest = min(itertools.islice(whole, self.keep), default=0)
        best = read_best_name(self.folder)
        for name in list_checkpoint_names(self.folder):
            step = parse_step(name)
            multiple = self.keep_every is not None and step % self.keep_every == 0
            if step < oldest and not multiple and name != best and step != current_step:
                remove_checkpoint(self.folder / name)
        for path in list_superseded(self.folder):
            if parse_step(path.name) <= current_step:  # the run has come as far again
                remove_checkpoint(path)

    def run_on_rank_zero(self, action: str, function: Callable[[], T]) -> T:
        """Act on rank 0 and have its result; or raise on all ranks where it failed. Collective."""
        return cast(T, self._run_on_all_ranks(action, lambda: function() if self.world.rank == 0 else None)[0])

    def _run_on_all_ranks(self, action: str, function: Callable[[], T]) -> list[T]:
        """Act on every rank and have all results, by rank; or raise on all where one failed. Collective."""
        cause, value = None, None
        try:
            value = function()
        except Exception as error:  # whatever it is, the other ranks must hear of it, not wait
            cause = error
        taken = str(cause) if isinstance(cause, RunFolderTakenError) else ""
        outcomes = self._gather(action, (value, cause and f"{type(cause).__name__}: {cause}", taken))
        if taken := next((told for _, _, told in outcomes if told), ""):
            raise RunFolderTakenError(taken) from cause
        failed = [f"rank {rank}: {why}" for rank, (_, why, _) in enumerate(outcomes) if why]
        if failed:
            raise CheckpointError(
                f"{action} failed on {len(failed)} of {self.world.size} ranks ({failed[0]}); "
                f"the older checkpoints in {self.folder} are as they were: fix the cause and start again"
            ) from cause
        return [value for value, _, _ in outcomes]

    def _gather(self, action: str, value: Any) -> list[Any]:
        """Every rank's value; LostError where one is gone, which leaves the folder to the next start. Collective."""
        try:
            return self.world.gather(value)
        except RuntimeError as error:
            if (why := find_connection_error(error)) is None:
                raise
            after = f"the older checkpoints in {self.folder} are as they were: fix the cause and start again"
            raise PeerFailureError(action, unknown_peer_message(why), after) from error


def list_superseded(folder: Path) -> list[Path]:
    """Checkpoints that were set aside where a run went on from an older one."""
    return [path for path in sorted(folder.glob("superseded-*")) if REMOVABLE_NAME_PATTERN.fullmatch(path.name)]


REMOVABLE_NAME_PATTERN = re.compile(r"(superseded-\d+-)?step-\d{8,}(\.old)?")
"""Names of folders that a run may remove."""


def _create_empty_folder(folder: Path) -> None:
    clear_path(folder)
    folder.mkdir(parents=True)


def _commit(partial: Path, final: Path) -> None:
    """Give the checkpoint its name. The one it replaces stands aside, findable, until that is done."""
    old = final.with_suffix(".old")
    if final.exists():
        clear_path(old)
        rename_folder(final, old)
    rename_folder(partial, final)
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Take the name away first: a checkpoint half removed must not look like one."""
    aside = path.with_suffix(".partial")
    clear_path(aside)
    rename_folder(path, aside)
    shutil.rmtree(aside, ignore_errors=True)  # what a reader holds open on NFS goes with the next clean()


def _remove_incomplete(folder: Path) -> list[str]:
    removed = []
    for path in sorted(folder.glob("*")):
        successor = path.with_suffix("")
        if path.suffix not in (".partial", ".old") or not REMOVABLE_NAME_PATTERN.fullmatch(successor.name):
            continue  # the user's
        if path.suffix == ".old" and not successor.exists():
            rename_folder(path, successor)
        elif remove_folder(path):
            removed.append(path.name)
    (folder / "best.new").unlink(missing_ok=True)
    return removed


def _supersede_newer(folder: Path, checkpoint: CheckpointInfo) -> list[str]:
    if checkpoint.path.parent.resolve() != folder.resolve():
        return []
    restore_best_copy(folder, checkpoint.step)
    newer = [folder / name for name in list_checkpoint_names(folder) if parse_step(name) > checkpoint.step]
    for path in newer:
        rename_folder(path, folder / f"superseded-{time.time_ns()}-{path.name}")
    return [path.name for path in newer]
