"""Selection of a checkpoint by `best`, `last` or a step number, and the `best` link."""

# `best` is a symbolic link where the file system has them. `cp -rL`, zip and most object stores turn the link
# best -> step-00000200 into a second copy of the folder, or into a file with the text `step-00000200`. All three are
# read here, and the first save turns the other two back into a link.

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

from dstrain.errors import CheckpointError, UsageError
from dstrain.files import MAX_JSON_BYTES, read_limited
from dstrain.train.state.manifest import (
    CHECKPOINT_NAME_PATTERN,
    MANIFEST_FILE,
    CheckpointInfo,
    find_checkpoints,
    find_fault,
    parse_step,
    read_checkpoint_info,
)

BEST_NAME = "best"
MAX_LINK_TEXT_BYTES = 64
"""Largest size of a file in place of the link, in bytes; a name has about 13."""


def select_checkpoint(run_dir: Path, selector: str) -> CheckpointInfo:
    """Return the complete checkpoint `best`, `last` or of a step; `best` is the last if none is marked.

    Raises UsageError if there is none.
    """
    folder = run_dir / "checkpoints"
    complete = [info for info in find_checkpoints(folder) if info.is_complete]
    best = find_best(folder) if selector == "best" else None
    if best is not None and best.name == "best" and find_fault(best, check_hashes=False) is None:
        return read_checkpoint_info(best, None)
    if not complete:
        raise UsageError(f"{run_dir}: has no complete checkpoint; `dstrain checkpoints {run_dir}` lists the faults")
    if selector == "last" or (selector == "best" and best is None):
        return complete[0]
    if best is None and not re.fullmatch(r"[0-9]{1,15}", selector):
        raise UsageError(f"--step {selector}: must be a step number, best or last")
    for info in complete:
        if info.path == best or (best is None and info.step == int(selector)):
            return info
    steps = ", ".join(str(info.step) for info in complete)
    raise UsageError(f"--step {selector}: no complete checkpoint of this step; available: {steps}")


def read_best_name(folder: Path) -> str | None:
    """Return the folder name that `best` refers to; None if there is no `best`, or it is something else."""
    best = folder / BEST_NAME
    try:
        if best.is_symlink():
            name = os.path.basename(os.path.realpath(best))
        elif (best / "run.json").is_file():
            name = f"step-{int(json.loads(read_limited(best / 'run.json', MAX_JSON_BYTES))['step']):08d}"
        elif best.is_file() and best.stat().st_size <= MAX_LINK_TEXT_BYTES:
            name = os.path.basename(best.read_text(encoding="utf-8").strip())
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if CHECKPOINT_NAME_PATTERN.fullmatch(name) else None


def find_best(folder: Path) -> Path | None:
    """Return the folder that `best` refers to; the copy itself if its step's folder no longer exists."""
    name = read_best_name(folder)
    if name is None:
        return None
    if (folder / name).exists():
        return folder / name
    copy = folder / BEST_NAME
    return copy if copy.is_dir() and not copy.is_symlink() else None


def set_best(folder: Path, step: int) -> None:
    """Let `best` link to the checkpoint of this step, or be a file with its name. Raises CheckpointError if damaged."""
    name = f"step-{step:08d}"
    if (folder / BEST_NAME).is_symlink() and os.readlink(folder / BEST_NAME) == name:
        return
    if fault := find_fault(folder / name, check_hashes=False):
        raise CheckpointError(f"{name} cannot be the best: {fault}")
    (folder / "best.new").unlink(missing_ok=True)
    try:
        (folder / "best.new").symlink_to(name)
    except OSError:  # no symbolic links on this file system (exFAT, SMB); the error number differs
        if not (folder / BEST_NAME).is_dir() and read_best_name(folder) == name:
            return
        (folder / "best.new").write_text(f"{name}\n", encoding="utf-8")
    _remove_best_copy(folder / BEST_NAME)
    # A rename, so that `best` exists at every moment.
    os.replace(folder / "best.new", folder / BEST_NAME)


def clear_best(folder: Path) -> None:
    """Remove `best`."""
    _remove_best_copy(folder / BEST_NAME)
    (folder / BEST_NAME).unlink(missing_ok=True)


def restore_best_copy(folder: Path, latest_step: int) -> None:
    """If `best` is a copy of a checkpoint that is missing or damaged, rename the copy to that checkpoint's name.

    A copy of a step after `latest_step`, the newest of the run, is renamed with a timestamp: a later start would
    continue from it.
    """
    best, name = folder / BEST_NAME, read_best_name(folder)
    if best.is_symlink() or not best.is_dir() or name is None:
        return
    if find_fault(best, check_hashes=False) is not None or find_fault(folder / name, check_hashes=False) is None:
        return
    if parse_step(name) > latest_step:
        _rename_with_timestamp(best)
        return
    if (folder / name).exists():
        _rename_with_timestamp(folder / name)
    best.rename(folder / name)


def _remove_best_copy(best: Path) -> None:
    """Remove `best` if it is a second copy of a complete checkpoint; rename any other folder with a timestamp."""
    if best.is_symlink() or not best.is_dir():
        return
    name = read_best_name(best.parent)
    if (
        (best / MANIFEST_FILE).is_file()
        and name is not None
        and find_fault(best.parent / name, check_hashes=False) is None
    ):
        shutil.rmtree(best)
    else:
        _rename_with_timestamp(best)


def _rename_with_timestamp(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-{time.time_ns()}"))


def list_checkpoint_rows(folder: Path, verify: bool = False) -> list[dict[str, Any]]:
    """Return the checkpoints of a folder, newest first, as `dstrain checkpoints --json` prints them."""
    best = read_best_name(folder)
    return [
        {
            "step": info.step, "samples": info.samples, "bytes": info.size, "world_size": info.world_size,
            "zero_stage": info.zero_stage, "metric": info.metric, "state": info.status, "best": info.path.name == best,
        }
        for info in find_checkpoints(folder, verify)
    ]  # fmt: skip
