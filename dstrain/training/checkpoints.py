"""Checkpoints of a run: written by rename, kept, selected, deleted."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from dstrain.batch import Progress
from dstrain.distributed.store import find_connection_error, unknown_peer_message
from dstrain.distributed.world import Ranks
from dstrain.errors import CheckpointError, PeerFailureError, RunFolderLockedError, UsageError, lookup
from dstrain.files import RETRY_SECONDS, list_folder, sync_folder
from dstrain.report.run_log import format_current_time
from dstrain.training.state.manifest import (
    MANIFEST_FIELDS,
    CheckpointInfo,
    FileEntry,
    TransientError,
    finalize_checkpoint,
    find_checkpoints,
    find_latest_complete,
    gather_or_raise,
    inspect_checkpoint,
    is_transient_error,
    list_checkpoint_names,
    make_damaged_info,
    parse_step,
    read_run_info,
)

BEST_NAME = "best"
"""Link to the best checkpoint, for people. Nothing reads it: `find_best` compares the metrics of all checkpoints."""


def select_checkpoint(run_dir: Path, selector: str) -> CheckpointInfo:
    """Return the complete checkpoint `best`, `last` or of a step; `best` is the last if none is marked.

    Raises UsageError if there is none, CheckpointError if one cannot be read that might be it.
    """
    folder = run_dir / "checkpoints"
    checkpoints = find_checkpoints(folder)
    complete = [info for info in checkpoints if info.is_complete]
    unread = [info for info in checkpoints if info.is_transient]
    if selector == "last" and complete:
        unread = [info for info in unread if info.step > complete[0].step]
    elif selector not in ("last", "best"):
        unread = [info for info in unread if str(info.step) == selector]
    if unread:
        raise _unread_error(selector, unread[0].path)
    if not complete:
        raise UsageError(f"{run_dir}: has no complete checkpoint; `dstrain checkpoints {run_dir}` lists the faults")
    if selector == "last":
        return complete[0]
    if selector == "best":
        ranking = _rank_by_metric(folder, list_checkpoint_names(folder))
        if ranking.unread:
            raise _unread_error(selector, folder / min(ranking.unread))
        best = inspect_checkpoint(folder / ranking.ranked[0]) if ranking.ranked else complete[0]
        if best.fault:  # the second best is not what was asked for
            raise UsageError(f"--step best: {best.path} is {best.status}; give another step, or last")
        return best
    if not re.fullmatch(r"[0-9]{1,15}", selector):
        raise UsageError(f"--step {selector}: must be a step number, best or last")
    for info in complete:
        if info.step == int(selector):
            return info
    steps = ", ".join(str(info.step) for info in complete)
    raise UsageError(f"--step {selector}: no complete checkpoint of this step; available: {steps}")


def _unread_error(selector: str, checkpoint: Path) -> CheckpointError:
    return CheckpointError(
        f"--step {selector}: {checkpoint} cannot be read now, and it may be the one; try again, or give the step of another"
    )


def find_best(folder: Path) -> CheckpointInfo | None:
    """Return the complete checkpoint with the best metric; None where none has a metric."""
    for name in _rank_by_metric(folder, list_checkpoint_names(folder)).ranked:
        checkpoint = inspect_checkpoint(folder / name)
        if checkpoint.is_complete:
            return checkpoint
    return None


def read_run_id(folder: Path) -> str | None:
    """Return the id of the run that wrote the newest complete checkpoint in a folder; None if there is none."""
    newest = find_latest_complete(folder)
    run_id = None if newest is None else newest.run_info.get("run_id")
    return run_id if isinstance(run_id, str) else None


class _Ranking(NamedTuple):
    """Names of checkpoints by their metrics."""

    ranked: list[str]
    """Those with a metric, the best first, the older of equals first."""
    unread: set[str]
    """Those whose metric cannot be read now."""


def _rank_by_metric(folder: Path, names: Sequence[str]) -> _Ranking:
    """Compare the metrics of checkpoints; `names`: the newest first.

    `eval.metric` and `eval.best` are those of the newest complete checkpoint: a run may have gone on with another
    metric, and checkpoints with the old one are not compared.
    """
    checkpoints = (inspect_checkpoint(folder / name) for name in names)
    newest = next((info for info in checkpoints if info.is_complete), None)
    if newest is None:
        return _Ranking([], set(names))
    metric_name, mode = (lookup(newest.run_info, ("recipe", "eval", key)) for key in ("metric", "best"))
    sign = -1 if mode == "max" else 1
    ranking, unread = [], set()
    for name in names:
        info = read_run_info(folder / name)
        if info is None:
            unread.add(name)
            continue
        metric, recorded_name = info.get("metric"), lookup(info, ("recipe", "eval", "metric"))
        if not isinstance(metric, int | float) or not math.isfinite(metric):
            continue
        if metric_name is None or recorded_name in (None, metric_name):
            ranking.append((sign * metric, parse_step(name), name))
    return _Ranking([name for _, _, name in sorted(ranking)], unread)


def link_best(folder: Path, best: str | None) -> None:
    """Let the link `best` point to the best checkpoint, where there is one, and the file system has links.

    A file or folder of this name is the user's, such as the copy that `cp -rL` makes of a link.
    """
    link, new_link = folder / BEST_NAME, folder / "best.new"
    if not link.is_symlink() and link.exists():
        return
    if best is None:
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == best:
        return
    new_link.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # exFAT and SMB have no links; the error number differs
        new_link.symlink_to(best)
        os.replace(new_link, link)  # so that it exists at every moment


def list_checkpoint_rows(folder: Path, verify: bool = False) -> list[dict[str, Any]]:
    """Return the checkpoints of a folder, newest first, as `dstrain checkpoints --json` prints them."""
    best = find_best(folder)
    return [
        {
            "step": info.step, "samples": info.samples, "bytes": info.size, "world_size": info.world_size,
            "zero_stage": info.zero_stage, "metric": info.metric, "state": info.status,
            "best": best is not None and info.path == best.path,
        }
        for info in find_checkpoints(folder, verify)
    ]  # fmt: skip


# In the folder `checkpoints` of a run:
#
#     step-00000200.partial/   being written, or left by a killed run; never read; .retry.partial by a second try
#     step-00000100/           complete: MANIFEST.json was written last
#     step-00000100.old/       replaced by step-00000100; exists between two renames
#     superseded-TIME-step-00000200/   newer than the checkpoint that the run continued from; removed once step 200
#                              is saved again
#     best -> step-00000100
#
# Nothing is pickled.


T = TypeVar("T")
PARTIAL_SUFFIXES = (".partial", ".retry.partial")
"""Of the first and the second try of a save: a network file system may not remove what the first one has left."""


@dataclass(kw_only=True)
class CheckpointStore:
    """Checkpoints of a run: saved and verified by all ranks together, and pruned."""

    folder: Path
    """The folder `checkpoints` in the run folder, shared by all hosts."""
    world: Ranks
    keep: int | None = 3
    """Number of newest checkpoints to keep; None for all."""
    keep_every: int | None = None
    """Also keep every checkpoint whose step is a multiple of this."""
    check_usable: Callable[[Path], None] = lambda _: None
    """Raises CheckpointError for a written checkpoint that cannot be loaded; called on rank 0 before the last rename."""
    find_index_fault: Callable[[Path], str] = lambda _: ""
    """Returns why the state in a checkpoint whose hashes are right cannot be read; called on rank 0 before a resume."""
    check_owner: Callable[[], None] = lambda: None
    """Raises if another launch has taken the run folder; called on rank 0 before a save and before the last rename."""
    in_use: Callable[[], Collection[str]] = tuple
    """Names of checkpoints that are not pruned yet, since they are being copied."""
    _events: list[tuple[str, dict[str, Any]]] = field(default_factory=list, init=False)

    def save(
        self,
        write: Callable[[Path], Mapping[str, FileEntry]],
        progress: Progress,
        run_info: Mapping[str, Any],
        metric: float | None = None,
    ) -> Path:
        """Write a checkpoint and rename it to its final name; return that folder. Collective.

        Every rank calls `write(folder)`, which writes the rank's files and returns their sizes and hashes; it is called
        again, with another folder, after an error that may pass. On failure every rank raises CheckpointError, and older
        checkpoints are unchanged. Once the checkpoint has its name, nothing raises: see `pop_events`.
        """
        final = self.folder / f"step-{progress.step:08d}"
        fields = (progress.step, progress.samples, metric, self.world.size, run_info.get("zero_stage"))
        run_info = {"time": format_current_time(), **run_info, **dict(zip(MANIFEST_FIELDS, fields, strict=True))}
        self.try_twice(
            lambda attempt: self._write_and_rename(final, final.with_suffix(PARTIAL_SUFFIXES[attempt]), write, run_info)
        )
        fault = self.run_on_rank_zero("pruning", lambda: self._clean_up(final.name))
        if fault:
            self._add_event("cleanup_failed", checkpoint=final.name, why=fault)
        return final

    def try_twice(self, action: Callable[[int], T]) -> T:
        """Return `action(0)`; after an error that may pass, and a pause, `action(1)`. Collective.

        `action` raises TransientError on all ranks or on none: all try again. Raises CheckpointError after the second.
        """
        try:
            return action(0)
        except TransientError as error:
            self._add_event("save_retried", why=str(error).rpartition("; ")[0])  # without the hint
        time.sleep(RETRY_SECONDS)
        try:
            return action(1)
        except TransientError as error:
            raise CheckpointError(f"in two tries: {error}") from error

    def _add_event(self, name: str, **fields: Any) -> None:
        if self.world.rank == 0:
            self._events.append((name, fields))

    def pop_events(self) -> list[tuple[str, dict[str, Any]]]:
        """Return what saves since the last call have met on rank 0: events, which are warnings, and their fields."""
        events, self._events = self._events, []
        return events

    def _write_and_rename(
        self,
        final: Path,
        partial: Path,
        write: Callable[[Path], Mapping[str, FileEntry]],
        run_info: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint under the partial name, and rename it. Collective."""
        try:
            self.run_on_rank_zero(f"making {partial}", lambda: self._create_partial(partial))
            written = self._run_on_all_ranks(f"writing {final.name}", lambda: write(partial))
            files = {name: entry for share in written for name, entry in share.items()}
            # After all ranks have written: the manifest names every file, with the hashes of its writer.
            self.run_on_rank_zero(f"sealing {partial}", lambda: self._finalize(partial, files, run_info))
            self.run_on_rank_zero(f"committing {final.name}", lambda: _commit(partial, final))
        except RunFolderLockedError:
            raise
        except CheckpointError:
            if self.world.rank == 0:  # all ranks have returned, so none writes any more
                shutil.rmtree(partial, ignore_errors=True)
            raise

    def _create_partial(self, partial: Path) -> None:
        self.check_owner()
        clear_path(partial)
        partial.mkdir(parents=True)

    def _finalize(self, partial: Path, files: dict[str, FileEntry], run_info: Mapping[str, Any]) -> None:
        from dstrain.training.state.files import write_index

        write_index(partial, files)
        finalize_checkpoint(partial, files, run_info)
        self.check_owner()
        self.check_usable(partial)

    def find_latest_valid(self) -> tuple[CheckpointInfo | None, list[CheckpointInfo]]:
        """Return the newest complete checkpoint, or None, and the newer damaged ones. Collective."""
        # One list for all ranks: another host may have an older listing in its NFS cache.
        names = self.run_on_rank_zero("listing checkpoints", lambda: list_checkpoint_names(self.folder))
        passed_over: list[CheckpointInfo] = []
        for name in names:
            info = self.verify(self.folder / name)
            if info.is_transient:  # or the run would go back to an older one
                time.sleep(RETRY_SECONDS)
                info = self.verify(self.folder / name)
            if info.is_complete:
                return info, passed_over
            passed_over.append(info)
        return None, passed_over

    def verify(self, path: Path) -> CheckpointInfo:
        """Return a checkpoint's info, with the fault that the lowest rank has found. Collective.

        Every byte is read and hashed, a share by each rank.
        """
        info = inspect_checkpoint(path, check_hashes=True, share=(self.world.rank, self.world.size))
        fault, is_transient = info.fault, info.is_transient
        if not fault and self.world.rank == 0:
            try:
                fault = self.find_index_fault(path)
            except OSError as error:  # the other ranks wait for this one
                fault, is_transient = f"it cannot be read: {error}", is_transient_error(error)
        with self._peer_errors(f"verifying {path}"):
            faults = self.world.gather((fault, is_transient))
        for rank, (fault, is_transient) in enumerate(faults):
            if fault:
                return make_damaged_info(path, f"{fault} (rank {rank})", is_transient)
        return info

    def remove_incomplete(self) -> list[str]:
        """Remove incomplete checkpoints of a killed run; return their names. Call before the first save. Collective."""
        return self.run_on_rank_zero("cleaning up", lambda: _remove_incomplete(self.folder))

    def supersede_newer(self, checkpoint: CheckpointInfo) -> list[str]:
        """Rename the checkpoints newer than the one that the run continues from; return their names. Collective.

        All of them where that one is in another folder: they are of a run that does not go on here.
        """
        superseded = self.run_on_rank_zero(
            "superseding newer checkpoints", lambda: _replace_newer(self.folder, checkpoint)
        )
        if superseded:
            self.run_on_rank_zero("choosing the best", self._link_best)
        return superseded

    def _link_best(self) -> None:
        best = find_best(self.folder)
        link_best(self.folder, None if best is None else best.path.name)

    def _clean_up(self, current: str) -> str:
        """Link the best checkpoint and remove what is not kept, also what earlier saves could not remove.

        Returns why that failed: the checkpoint that was just written is whole, whatever happens here.
        """
        try:
            # Before anything is removed: the new name must outlive a power failure.
            sync_folder(self.folder)
            _remove_incomplete(self.folder)
            names = list_checkpoint_names(self.folder)
            if current not in names:
                return f"the listing of {self.folder} does not have it yet"
            ranking = _rank_by_metric(self.folder, names)
            # One that cannot be read now may be the best.
            kept = {current, *self.in_use(), *ranking.unread}
            best = None
            for name in ranking.ranked:
                kept.add(name)
                if inspect_checkpoint(self.folder / name).is_complete:
                    best = name
                    break
            link_best(self.folder, best)
            if self.keep is not None:
                self._prune(names, self.keep, kept, parse_step(current))
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def _prune(self, names: Sequence[str], keep: int, kept: Collection[str], current_step: int) -> None:
        """Remove checkpoints older than the newest `keep` complete ones, except multiples and those in `kept`."""
        complete = (parse_step(name) for name in names if inspect_checkpoint(self.folder / name).is_complete)
        # Damaged ones do not count, or they would push out checkpoints that can be loaded.
        newest = [*itertools.islice(complete, keep)]
        # With fewer there is nothing to remove: one that could not be read for a moment is not older than the kept ones.
        oldest = newest[-1] if len(newest) == keep else 0
        for name in names:
            step = parse_step(name)
            is_multiple = self.keep_every is not None and step % self.keep_every == 0
            if step < oldest and not is_multiple and name not in kept:
                remove_checkpoint(self.folder / name)
        for path in list_old_versions(self.folder):
            if parse_step(path.name) <= current_step:  # the run has reached this step again
                remove_checkpoint(path)

    def run_on_rank_zero(self, action: str, function: Callable[[], T], hint: str = "") -> T:
        """Call the function on rank 0 and return its result; raise on all ranks if it failed. Collective.

        `hint`: what is left of the checkpoints then, where the older ones are not unchanged.
        """
        return cast(T, self._run_on_all_ranks(action, lambda: function() if self.world.rank == 0 else None, hint)[0])

    def _run_on_all_ranks(self, action: str, function: Callable[[], T], hint: str = "") -> list[T]:
        """Call the function on every rank and return all results, by rank; raise on all if one failed. Collective."""
        error, value = None, None
        try:
            value = function()
        except Exception as caught:  # of any kind: the other ranks must learn of it, not wait
            error = caught

        def summarize(faults: list[str]) -> str:
            left = hint or self._unchanged_hint()
            return f"{action} failed on {len(faults)} of {self.world.size} ranks ({faults[0]}); {left}"

        with self._peer_errors(action):
            return cast("list[T]", gather_or_raise(self.world, value, error, summarize))

    def _unchanged_hint(self) -> str:
        return f"the older checkpoints in {self.folder} are unchanged: fix the cause and start again"

    @contextmanager
    def _peer_errors(self, action: str) -> Iterator[None]:
        """Raise PeerFailureError if a rank is gone inside; the partial folder is left to the next start."""
        try:
            yield
        except RuntimeError as error:
            if (reason := find_connection_error(error)) is None:
                raise
            raise PeerFailureError(action, unknown_peer_message(reason), self._unchanged_hint()) from error


def list_old_versions(folder: Path) -> list[Path]:
    """Return the checkpoints that were renamed because the run continued from an older one."""
    names = (name for name in sorted(list_folder(folder)) if name.startswith("superseded-"))
    return [folder / name for name in names if REMOVABLE_NAME_PATTERN.fullmatch(name)]


REMOVABLE_NAME_PATTERN = re.compile(r"(superseded-\d+-)?step-\d{8,}(\.old|\.retry)?")
"""Folder names that a run may remove; all others are the user's."""


def _commit(partial: Path, final: Path) -> None:
    """Rename a written checkpoint to its final name. The one that it replaces is `.old` until the cleanup."""
    old = final.with_suffix(".old")
    replaces = final.exists()
    if replaces:
        # Two renames, as no file system replaces a folder with content; `.old` is found between them.
        clear_path(old)
        rename_folder(final, old)
    try:
        rename_folder(partial, final)
    except OSError:
        if replaces:
            with contextlib.suppress(OSError):  # the next start finds `.old`
                rename_folder(old, final)
        raise


def remove_checkpoint(path: Path) -> bool:
    """Remove a checkpoint if it is complete; return False for any other folder, which stays.

    The manifest and the hash of run.json prove that it is one, and of this version of dstrain. It is renamed first: one
    that is half removed must not look like a checkpoint.
    """
    if not inspect_checkpoint(path).is_complete:
        return False
    partial = path.with_suffix(".partial")
    clear_path(partial)
    rename_folder(path, partial)
    shutil.rmtree(partial, ignore_errors=True)  # the next cleanup removes files that a reader holds open on NFS
    return True


def _remove_incomplete(folder: Path) -> list[str]:
    removed = []
    for name in sorted(list_folder(folder)):
        path = folder / name
        successor = path.with_suffix("")
        if path.suffix not in (".partial", ".old") or not REMOVABLE_NAME_PATTERN.fullmatch(successor.name):
            continue  # a folder of the user
        # Killed between the two renames of a commit.
        if path.suffix == ".old" and not successor.exists():
            rename_folder(path, successor)
        elif remove_folder(path):
            removed.append(path.name)
    (folder / "best.new").unlink(missing_ok=True)
    return removed


def _replace_newer(folder: Path, checkpoint: CheckpointInfo) -> list[str]:
    last_kept = checkpoint.step if checkpoint.path.parent.resolve() == folder.resolve() else -1
    newer = [folder / name for name in list_checkpoint_names(folder) if parse_step(name) > last_kept]
    for path in newer:
        rename_folder(path, folder / f"superseded-{time.time_ns()}-{path.name}")
    return [path.name for path in newer]


def clear_path(path: Path) -> None:
    """Remove a checkpoint folder; if NFS keeps files that a reader has open, rename it for a later cleanup."""
    if not remove_folder(path):
        name = path.name[path.name.index("step-") :].removesuffix(".partial")
        rename_folder(path, path.with_name(f"superseded-{time.time_ns()}-{name}.partial"))


def remove_folder(path: Path) -> bool:
    """Remove a folder; return False if NFS keeps a file (.nfs*) that a process has open. Raises OSError."""
    # Twice: the first pass goes on after an error, the second one tells what is left.
    shutil.rmtree(path, ignore_errors=True)
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise
        return False
    return True


def rename_folder(path: Path, target: Path) -> None:
    """Rename a folder to a free name. A network file system may report an error of a rename that it has done."""
    try:
        os.rename(path, target)
    except OSError:
        # Both the other way round: the first request did the rename, and its answer was lost.
        if os.path.lexists(path) or not target.exists():
            raise
