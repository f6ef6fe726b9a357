"""The run folder: what is in it before the first step, and whether a run may go on in it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dstrain.config import RunConfig, check_learning_changes, dump_recipe, read_recipe
from dstrain.config.schema import BatchConfig
from dstrain.distributed.world import World
from dstrain.errors import ResumeError, RunError, UsageError
from dstrain.files import atomic_write, remove_stale_partials
from dstrain.models.model_copy import save_base_config
from dstrain.train.resume.inputs import is_change_allowed
from dstrain.train.state.manifest import CheckpointInfo, find_fault, find_latest_complete, read_checkpoint_info

LIBRARIES = ("dstrain", "torch", "deepspeed", "transformers", "peft", "tokenizers", "numpy", "safetensors")


@dataclass(frozen=True)
class ResumeOptions:
    """What --resume and --allow-change ask for."""

    source: str = "auto"
    """auto, never, or the folder of a run or of a checkpoint."""
    allowed_keys: Collection[str] = ()
    """Keys that may differ from the recipe the run was started with."""


def find_compatible_checkpoint(run_dir: Path, resume: ResumeOptions, config: RunConfig) -> CheckpointInfo | None:
    """The checkpoint that the run would go on from, by what is cheap to read. Raises ResumeError where it cannot."""
    start = find_resume_checkpoint(run_dir, resume)
    before = None if start is None else read_recorded_recipe(start)
    if before is not None and (faults := check_learning_changes(before, config, resume.allowed_keys)):
        raise ResumeError(faults)
    return start


def find_resume_checkpoint(run_dir: Path, resume: ResumeOptions) -> CheckpointInfo | None:
    """The newest that is whole by its sizes; None where a new run begins. Raises ResumeError."""
    if resume.source == "never":
        return None
    if resume.source != "auto":
        return find_checkpoint_at(resume.source)
    return find_latest_complete(run_dir / "checkpoints")


def read_recorded_recipe(checkpoint: CheckpointInfo) -> RunConfig | None:
    """The recipe that a checkpoint learned by; None where nothing tells.

    The checkpoint records it. recipe.yaml of its run folder, which may be edited or lost, counts only for a checkpoint
    of a version that did not.
    """
    if (recorded := checkpoint.read_run_info().get("recipe")) is not None:
        try:
            return RunConfig.model_validate(recorded)
        except ValidationError as error:
            at = ".".join(map(str, error.errors()[0]["loc"]))
            raise ResumeError(
                f"{checkpoint.path}/run.json: its recipe does not fit this version of dstrain ({at}); go on with the one that wrote it"
            ) from None
    file = get_run_dir(checkpoint) / "recipe.yaml"
    return read_recipe(file).config if file.is_file() else None


def get_run_dir(checkpoint: CheckpointInfo) -> Path:
    """The run folder of a checkpoint."""
    return checkpoint.path.parent.parent


def dump_training_recipe(config: RunConfig) -> dict[str, Any]:
    """What a checkpoint records of the recipe: all but how it was launched and what it told."""
    return config.model_dump(mode="json", exclude={"launch", "log", "profile"})


def with_saved_tokenizer(
    checkpoint: CheckpointInfo | None, config: RunConfig, allowed_keys: Collection[str]
) -> RunConfig:
    """The recipe with the tokenizer or the processor that a run trained or made at its start, where it goes on.

    To train it again would give every id another meaning wherever the data, or the library that trains it, has changed.
    """
    model = config.model
    if checkpoint is None or model.config is None or is_change_allowed("model.tokenizer", allowed_keys):
        return config
    restore_folder(folder := get_run_dir(checkpoint) / "tokenizer")
    if not folder.is_dir():
        return config
    if (folder / "processor_config.json").is_file():
        own = {} if isinstance(model.processor, str) else {"processor": str(folder), "tokenizer": None}
    else:
        own = {} if isinstance(model.tokenizer, str) else {"tokenizer": str(folder)}
    return config.model_copy(update={"model": model.model_copy(update=own)})


def with_saved_batch_total(
    batch: BatchConfig, checkpoint: CheckpointInfo | None, allowed_keys: Collection[str]
) -> BatchConfig:
    """The recipe's batch with the total that the run began with, whatever the number of processes is now."""
    total = None if checkpoint is None else checkpoint.read_run_info().get("batch_total")
    if total is None or any(key.split(".")[0] == "batch" for key in allowed_keys):
        return batch
    if batch.total is None or (batch.micro is not None and batch.accumulate is not None):
        return batch.model_copy(update={"total": batch.total or total, "accumulate": None})
    return batch


def find_checkpoint_at(folder: str) -> CheckpointInfo:
    """The whole checkpoint that `--resume DIR` names: the folder itself, or the newest of a run folder."""
    path = Path(folder).expanduser().resolve()
    if (path / "MANIFEST.json").is_file():
        fault = find_fault(path, check_hashes=False)
        if fault:
            raise ResumeError(f"--resume {folder}: the checkpoint is damaged ({fault}); choose another one")
        return read_checkpoint_info(path, None)
    whole = find_latest_complete(path / "checkpoints")
    if whole is None:
        raise ResumeError(f"--resume {folder}: holds no whole checkpoint; give a run folder or a checkpoint in it")
    return whole


def write_run_config(run_dir: Path, config: RunConfig, ds_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """recipe.yaml, ds_config.json, environment.json and the model's config: enough to repeat the run. Rank 0 calls it."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("recipe.yaml", dump_recipe(config)),
        ("ds_config.json", json.dumps(ds_config, indent=2) + "\n"),
        ("environment.json", json.dumps({**extra, **collect_environment()}, indent=2) + "\n"),
    ):
        remove_stale_partials(run_dir / name)
        atomic_write(run_dir / name, text)
    save_base_config(config.model, run_dir / "model")


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Have `write` make a folder anew: the old one stays until the new one is whole. `write` may write nothing."""
    restore_folder(folder)
    new, old = (folder.with_name(f".{folder.name}.{which}-{secrets.token_hex(4)}") for which in ("new", "old"))
    for which in ("new", "old"):  # of earlier starts: NFS keeps a folder in which a process has a file open
        for path in folder.parent.glob(f".{folder.name}.{which}*"):
            _remove_folder(path)
    write(new)
    if not new.is_dir():
        return
    if os.path.lexists(folder):
        os.rename(folder, old)
    os.rename(new, folder)
    _remove_folder(old)


def restore_folder(folder: Path) -> None:
    """Give a folder its name back where `replace_folder` was killed between two renames."""
    kept = sorted(folder.parent.glob(f".{folder.name}.old*"))
    if kept and not os.path.lexists(folder):
        with contextlib.suppress(OSError):  # another rank was sooner
            os.rename(kept[-1], folder)


def _remove_folder(path: Path) -> None:
    """A folder, or a link to one, which is not followed."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def archive_previous_run(run_dir: Path, resume: ResumeOptions, world: World) -> None:
    """With `--resume never`, move an earlier run out of the way, into a folder that is a run folder of its own. Collective."""
    fault = ""
    try:
        if world.rank == 0:
            _archive_run(run_dir, resume.source == "never")
    except OSError as error:
        why = f"cannot be moved aside ({error.strerror})"
        fault = f"--resume never: the earlier run in {run_dir} {why}; move it yourself"
    if fault := world.broadcast(fault):
        raise RunError(fault)


def _archive_run(run_dir: Path, is_requested: bool) -> None:
    """Into `.previous`, which gets its number when all is there. What an interrupted start began is finished, asked or not."""
    aside, checkpoints = run_dir / ".previous", run_dir / "checkpoints"
    begun = aside.is_dir()
    if begun and is_requested and os.path.lexists(checkpoints) and any(aside.iterdir()):
        _rename_to_number(aside)  # of an earlier run than the one that is here now
    elif begun and not is_requested and os.path.lexists(checkpoints):
        return
    if not begun and not (
        is_requested and any(os.path.lexists(run_dir / name) for name in ("checkpoints", "metrics.jsonl"))
    ):
        return
    aside.mkdir(exist_ok=True)
    names = sorted(
        os.listdir(run_dir), key=lambda name: name != "checkpoints"
    )  # first: no start goes on with the run then
    for name in names:
        if name in _RUN_FILE_NAMES or name.startswith("events.out.tfevents"):
            _move(run_dir / name, aside / name)
    print(f"--resume never: the run that was here is in {_rename_to_number(aside)} now", flush=True)


def _rename_to_number(archive: Path) -> Path:
    number = 1
    while (numbered := archive.with_name(f"previous-{number}")).exists():
        number += 1
    os.rename(archive, numbered)
    return numbered


def _move(path: Path, new_path: Path) -> None:
    """Into a folder beside the path; a link goes on to lead where it led."""
    if path.is_symlink() and not os.path.isabs(target := os.readlink(path)):
        new_path.symlink_to(os.path.join(os.pardir, target))
        path.unlink()
    else:
        os.rename(path, new_path)


# fmt: off
_RUN_FILE_NAMES = (
    "recipe.yaml", "ds_config.json", "environment.json", "events.jsonl", "metrics.jsonl", "checkpoints", "report.html",
    "tokenizer", "model", "task.py", "wandb", "profile",
)
# fmt: on
"""What a run writes into its folder. Logs belong to the launch, and everything else to the user."""


def get_library_versions() -> dict[str, str]:
    """Versions of the libraries that a result depends on."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def collect_environment() -> dict[str, Any]:
    """Machine, versions and the command, without anything from the environment's variables."""
    import torch

    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "cuda": torch.version.cuda,
        "versions": get_library_versions(),
    }


def check_run_dir_writable(run_dir: Path) -> None:
    """Raise UsageError where the run folder, or what a run adds to in it, cannot be made or written to."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{secrets.token_hex(8)}"  # processes of two hosts may have the same id
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir}: cannot be written ({error.strerror}); choose another folder") from None
    kept = (run_dir / name for name in ("logs", "checkpoints", "metrics.jsonl", "events.jsonl"))
    for path in (*kept, *run_dir.glob("logs/rank-*.log")):
        if path.exists() and not os.access(path, os.W_OK):  # another user's, in a folder of the group
            mend = "have its owner allow it, or go on in another folder with --resume"
            raise UsageError(f"--run-dir {run_dir}: {path} may not be written by this user; {mend} {run_dir}")


def check_run_dir_shared(run_dir: Path, world: World) -> None:
    """Raise UsageError where not every process sees the same run folder. Collective."""
    token = run_dir / f".shared-{world.broadcast(secrets.token_hex(8))}"
    if world.rank == 0:
        token.write_bytes(b"")
    world.barrier()
    blind = [rank for rank, sees in enumerate(world.gather(token.exists())) if not sees]
    if world.rank == 0:
        token.unlink()
    if blind:
        raise UsageError(
            f"--run-dir {run_dir}: ranks {', '.join(map(str, blind))} do not see what rank 0 writes there; "
            f"give a folder that all hosts share"
        )
