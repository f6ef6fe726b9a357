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
from dstrain.train.state.manifest import MANIFEST, NAME, CheckpointInfo, describe, listed, step_of, verify

BEST = "best"
LONGEST_NAME = 64
"""Bytes of a file that a link became; a name has some 13."""


def find_checkpoint(run: Path, step: str) -> CheckpointInfo:
    """The whole checkpoint `best`, `last` or of a number; `best` is the last where none was marked."""
    folder = run / "checkpoints"
    there = [info for info in listed(folder) if info.whole]
    best = best_checkpoint(folder) if step == "best" else None
    if best is not None and best.name == "best" and verify(best, read_all=False) is None:
        return describe(best, None)
    if not there:
        raise UsageError(f"{run}: holds no whole checkpoint; `dstrain checkpoints {run}` says why")
    if step == "last" or (step == "best" and best is None):
        return there[0]
    if best is None and not step.isdecimal():
        raise UsageError(f"--step {step}: is neither a number nor best nor last")
    for info in there:
        if info.path == best or (best is None and info.step == int(step)):
            return info
    steps = ", ".join(str(info.step) for info in there)
    raise UsageError(f"--step {step}: there is no whole checkpoint of it; there are {steps}")


def best_name(folder: Path) -> str | None:
    """The checkpoint's name in `checkpoints`, as `best` says it; None where nothing was marked, or something else is there."""
    best = folder / BEST
    try:
        if best.is_symlink():
            name = os.path.basename(os.path.realpath(best))
        elif (best / "run.json").is_file():
            name = f"step-{int(json.loads((best / 'run.json').read_bytes())['step']):08d}"
        elif best.is_file() and best.stat().st_size <= LONGEST_NAME:
            name = os.path.basename(best.read_text(encoding="utf-8").strip())
        else:
            return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return name if NAME.fullmatch(name) else None


def best_checkpoint(folder: Path) -> Path | None:
    """The folder that `best` means; of a copy whose step is not beside it any more, the copy itself."""
    name = best_name(folder)
    if name is None:
        return None
    if (folder / name).exists():
        return folder / name
    copy = folder / BEST
    return copy if copy.is_dir() and not copy.is_symlink() else None


def point_best(folder: Path, step: int) -> None:
    """Have `best` be a link to the checkpoint of this step, or a file that names it. Raises CheckpointError where that one is not whole."""
    name = f"step-{step:08d}"
    if (folder / BEST).is_symlink() and os.readlink(folder / BEST) == name:
        return
    if fault := verify(folder / name, read_all=False):
        raise CheckpointError(f"{name} cannot be the best: {fault}")
    (folder / "best.new").unlink(missing_ok=True)
    try:
        (folder / "best.new").symlink_to(name)
    except OSError:  # a file system without symbolic links (exFAT, SMB), each of which says so in its own way
        if not (folder / BEST).is_dir() and best_name(folder) == name:
            return
        (folder / "best.new").write_text(f"{name}\n", encoding="utf-8")
    _clear_folder(folder / BEST)
    os.replace(folder / "best.new", folder / BEST)


def forget_best(folder: Path) -> None:
    """Have `best` mean nothing."""
    _clear_folder(folder / BEST)
    (folder / BEST).unlink(missing_ok=True)


def restore_best(folder: Path, newest: int) -> None:
    """Where `best` is a copy of a checkpoint that is not whole beside it: give the copy that checkpoint's name.

    A copy of a step after `newest`, the newest of the run, is set aside: a later start would go on from it.
    """
    best, name = folder / BEST, best_name(folder)
    if best.is_symlink() or not best.is_dir() or name is None:
        return
    if verify(best, read_all=False) is not None or verify(folder / name, read_all=False) is None:
        return
    if step_of(name) > newest:
        _set_aside(best)
        return
    if (folder / name).exists():
        _set_aside(folder / name)
    best.rename(folder / name)


def _clear_folder(best: Path) -> None:
    """Remove `best` where it is a folder, the second copy of a whole checkpoint; another folder is set aside."""
    if best.is_symlink() or not best.is_dir():
        return
    name = best_name(best.parent)
    if (best / MANIFEST).is_file() and name is not None and verify(best.parent / name, read_all=False) is None:
        shutil.rmtree(best)
    else:
        _set_aside(best)


def _set_aside(folder: Path) -> None:
    folder.rename(folder.with_name(f"{folder.name}-{time.time_ns()}"))
