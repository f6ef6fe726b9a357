"""Which checkpoint `best`, `last` or a number means.

`best` is a link where dstrain made it and the file system has links. `cp -rL`, zip and most object stores turn best -> step-00000200 into a second copy of
the folder, or into a file that holds the text `step-00000200`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

from dstrain.errors import CheckpointError, UsageError
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
"""Bytes of a file that a link became; a name has some 13."""


def select_checkpoint(run_dir: Path, selector: str) -> CheckpointInfo:
    """The whole checkpoint `best`, `last` or of a number; `best` is the last where none was marked."""
    folder = run_dir / "checkpoints"
    there = [info for info in find_checkpoints(folder) if info.is_complete]
    best = find_best(folder) if selector == "best" else None
    if best is not None and best.name == "best" and find_fault(best, check_hashes=False) is None:
        return read_checkpoint_info(best, None)
    if not there:
        raise UsageError(f"{run_dir}: holds no whole checkpoint; `dstrain checkpoints {run_dir}` says why")
    if selector == "last" or (selector == "best" and best is None):
        return there[0]
    if best is None and not selector.isdecimal():
        raise UsageError(f"--step {selector}: is neither a number nor best nor last")
    for info in there:
        if info.path == best or (best is None and info.step == int(selector)):
            return info
    steps = ", ".join(str(info.step) for info in there)
    raise UsageError(f"--step {selector}: there is no whole checkpoint of it; there are {steps}")


def read_best_name(folder: Path) -> str | None:
    """The checkpoint's name in `checkpoints`, as `best` says it; None where nothing was marked, or something else is there."""
    best = folder / BEST_NAME
    try:
        if best.is_symlink():
            name = os.path.basename(os.path.realpath(best))
        elif (best / "run.json").is_file():
            name = f"step-{int(json.loads((best / 'run.json').read_bytes())['step']):08d}"
        elif best.is_file() and best.stat().st_size <= MAX_LINK_TEXT_BYTES:
            name = os.path.basename(best.read_text(encoding="utf-8").strip())
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if CHECKPOINT_NAME_PATTERN.fullmatch(name) else None


def find_best(folder: Path) -> Path | None:
    """The folder that `best` means; of a copy whose step is not beside it any more, the copy itself."""
    name = read_best_name(folder)
    if name is None:
        return None
    if (folder / name).exists():
        return folder / name
    copy = folder / BEST_NAME
    return copy if copy.is_dir() and not copy.is_symlink() else None


def set_best(folder: Path, step: int) -> None:
    """Have `best` be a link to the checkpoint of this step, or a file that names it. Raises CheckpointError where that one is not whole."""
    name = f"step-{step:08d}"
    if (folder / BEST_NAME).is_symlink() and os.readlink(folder / BEST_NAME) == name:
        return
    if fault := find_fault(folder / name, check_hashes=False):
        raise CheckpointError(f"{name} cannot be the best: {fault}")
    (folder / "best.new").unlink(missing_ok=True)
    try:
        (folder / "best.new").symlink_to(name)
    except OSError:  # a file system without symbolic links (exFAT, SMB), each of which says so in its own way
        if not (folder / BEST_NAME).is_dir() and read_best_name(folder) == name:
            return
        (folder / "best.new").write_text(f"{name}\n", encoding="utf-8")
    _remove_best_copy(folder / BEST_NAME)
    os.replace(folder / "best.new", folder / BEST_NAME)


def clear_best(folder: Path) -> None:
    """Have `best` mean nothing."""
    _remove_best_copy(folder / BEST_NAME)
    (folder / BEST_NAME).unlink(missing_ok=True)


def restore_best_copy(folder: Path, latest_step: int) -> None:
    """Where `best` is a copy of a checkpoint that is not whole beside it: give the copy that checkpoint's name.

    A copy of a step after `newest`, the newest of the run, is set aside: a later start would go on from it.
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
    """Remove `best` where it is a folder, the second copy of a whole checkpoint; another folder is set aside."""
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
