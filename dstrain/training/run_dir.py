"""Run folder: configuration files, earlier runs, and checks that all ranks can write."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from dstrain.config import RunConfig, dump_recipe
from dstrain.config.schema import ModelConfig
from dstrain.distributed.world import Ranks, World
from dstrain.errors import RecipeError, RunError, UsageError, fix_for_os_error, mask_secrets
from dstrain.files import atomic_write, find_entry_fault, remove_path, remove_stale_partials
from dstrain.launch.slurm import SCRIPT_FILE
from dstrain.models.folder import resolve_base_model
from dstrain.models.load import read_config
from dstrain.models.weights import find_cached_config
from dstrain.patching import installed_versions
from dstrain.process_setup import log_stdout
from dstrain.report.observe import observing
from dstrain.tasks import Task
from dstrain.training.generation_config import write_generation_config
from dstrain.training.start import ResumeOptions, get_run_dir, is_change_allowed
from dstrain.training.state.manifest import CheckpointInfo

LIBRARIES = ("dstrain", "torch", "deepspeed", "transformers", "peft", "tokenizers", "numpy", "safetensors")
"""Libraries that a result depends on."""


def with_saved_tokenizer(checkpoint: CheckpointInfo, config: RunConfig, allowed_keys: Collection[str]) -> RunConfig:
    """Return the recipe with the tokenizer or processor that the run trained or built at its start.

    Training it again would give every id another meaning if the data or the library has changed.
    """
    model = config.model
    if model.config is None or is_change_allowed("model.tokenizer", allowed_keys):
        return config
    restore_folder(folder := get_run_dir(checkpoint) / "tokenizer")
    if not folder.is_dir():
        return config
    if (folder / "processor_config.json").is_file():
        saved = {} if isinstance(model.processor, str) else {"processor": str(folder), "tokenizer": None}
    else:
        saved = {} if isinstance(model.tokenizer, str) else {"tokenizer": str(folder)}
    return config.model_copy(update={"model": model.model_copy(update=saved)})


def write_run_config(run_dir: Path, config: RunConfig, ds_config: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """Write recipe.yaml, ds_config.json and environment.json. Only rank 0 calls it."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("recipe.yaml", dump_recipe(config)),
        ("ds_config.json", json.dumps(ds_config, indent=2) + "\n"),
        (
            "environment.json",
            json.dumps({**extra, **_find_commit(config.model), **collect_environment()}, indent=2) + "\n",
        ),
    ):
        remove_stale_partials(run_dir / name)
        atomic_write(run_dir / name, text)


def _find_commit(model: ModelConfig) -> dict[str, str]:
    """Return the commit of a model on the Hub; empty for others."""
    base = resolve_base_model(model)
    found = (
        None
        if base.path is None or Path(base.path).expanduser().is_dir()
        else find_cached_config(base.path, base.revision)
    )
    return {} if found is None else {"model_commit": found.parent.name}


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace a folder by what `write` creates; the old one stays until then, or if `write` creates nothing."""
    restore_folder(folder)
    new, old = (folder.with_name(f".{folder.name}.{which}-{secrets.token_hex(4)}") for which in ("new", "old"))
    for which in ("new", "old"):  # of earlier starts: NFS cannot remove a folder while a process has a file of it open
        for path in folder.parent.glob(f".{folder.name}.{which}*"):
            _remove_folder(path)
    write(new)
    if not new.is_dir():
        return
    if os.path.lexists(folder):
        # Two renames, since no file system replaces a folder with content.
        os.rename(folder, old)
    os.rename(new, folder)
    _remove_folder(old)


def restore_folder(folder: Path) -> None:
    """Restore the name of a folder if `replace_folder` was killed between its two renames."""
    old = sorted(folder.parent.glob(f".{folder.name}.old*"))
    if old and not os.path.lexists(folder):
        with contextlib.suppress(OSError):  # another rank has renamed it already
            os.rename(old[-1], folder)


def _remove_folder(path: Path) -> None:
    """Remove a folder, or a link to one without its target."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def archive_previous_run(run_dir: Path, resume: ResumeOptions, world: World) -> None:
    """With `--resume never`, move an earlier run into `previous-N`, a run folder of its own. Collective.

    Raises RunError on every rank if it cannot be moved.
    """
    fault = ""
    try:
        if world.rank == 0:
            _archive_run(run_dir, resume.source == "never")
    except OSError as error:
        fault = f"--resume never: cannot move the earlier run in {run_dir} ({error.strerror}); move it yourself"
    if fault := world.broadcast(fault):
        raise RunError(fault)


def _archive_run(run_dir: Path, is_requested: bool) -> None:
    """Move the files into `.previous`, and rename it to `previous-N` once all are there.

    A move that an interrupted start has begun is completed even if `is_requested` is false.
    """
    archive, checkpoints = run_dir / ".previous", run_dir / "checkpoints"
    begun = archive.is_dir()
    if begun and is_requested and os.path.lexists(checkpoints) and any(archive.iterdir()):
        _rename_to_number(archive)  # of a run before the present one
    elif begun and not is_requested and os.path.lexists(checkpoints):
        return
    if not begun and not (
        is_requested and any(os.path.lexists(run_dir / name) for name in ("checkpoints", "metrics.jsonl"))
    ):
        return
    archive.mkdir(exist_ok=True)
    # Checkpoints first: without them an interrupted move is never resumed as a run.
    names = sorted(os.listdir(run_dir), key=lambda name: name != "checkpoints")
    for name in names:
        if name in _RUN_FILE_NAMES or name.startswith("events.out.tfevents") or ".jsonl.damaged-" in name:
            _move(run_dir / name, archive / name)
    log_stdout(f"--resume never: the earlier run is in {_rename_to_number(archive)} now")


def _rename_to_number(archive: Path) -> Path:
    number = 1
    while (numbered := archive.with_name(f"previous-{number}")).exists():
        number += 1
    os.rename(archive, numbered)
    return numbered


def _move(path: Path, new_path: Path) -> None:
    """Move a file or folder into a sibling folder; a relative link keeps its target."""
    if path.is_symlink() and not os.path.isabs(target := os.readlink(path)):
        new_path.symlink_to(os.path.join(os.pardir, target))
        path.unlink()
    else:
        os.rename(path, new_path)


# fmt: off
_RUN_FILE_NAMES = (
    "recipe.yaml", "ds_config.json", "environment.json", "events.jsonl", "metrics.jsonl", "checkpoints", "report.html",
    "tokenizer", "model", "task.py", "wandb", "mlflow", "profile",
)
# fmt: on
"""Files of a run in its folder. Logs belong to the launch, and any other file to the user."""


def discard_run_dir(run_dir: Path) -> None:
    """Remove what a refused start has written into a new run folder, and the folder if nothing else is in it."""
    for name in (*_RUN_FILE_NAMES, ".workers", "logs", SCRIPT_FILE):
        remove_path(run_dir / name)
    with contextlib.suppress(OSError):  # somebody has put a file there meanwhile
        run_dir.rmdir()


def collect_environment() -> dict[str, Any]:
    """Return machine, versions and command without secrets; no environment variables, which may hold some."""
    import torch

    gpus: list[str] = []
    with observing("torch.cuda.get_device_name"):  # another GPU of the host may be lost
        for index in range(torch.cuda.device_count()):
            gpus.append(torch.cuda.get_device_name(index))
    return {
        "command": [Path(sys.argv[0]).name, *map(mask_secrets, sys.argv[1:])],
        "python": platform.python_version(),
        "platform": platform.platform(),
        "host": platform.node(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpus": gpus,
        "cuda": torch.version.cuda,
        "versions": installed_versions(LIBRARIES),
    }


_FOLDER_NAMES = (
    "logs", "logs/stacks", ".workers", "tokenizer", "model", "profile", "wandb", "mlflow", "exports", "nvme", ".previous",
)  # fmt: skip
"""Folders that a run writes into. `checkpoints` is one too, and may be a link to a folder of another disk."""
_FILE_NAMES = ("slurm.sbatch", "wandb/id", "mlflow/id")
_FILE_PATTERNS = (
    "model/*", "logs/rank-*.log", "logs/host-*.log", "logs/stacks/rank-*.txt", ".workers/*", "profile/*",
)  # fmt: skip
"""Files that a run writes, besides _RUN_FILE_NAMES."""


def check_entries(run_dir: Path) -> None:
    """Raise UsageError for a link, a FIFO or a device at a name that a run writes, also for a file named as a folder."""
    names = [name for name in _RUN_FILE_NAMES if name != "checkpoints" and name not in _FOLDER_NAMES]
    files = [run_dir / name for name in (*names, *_FILE_NAMES)]
    for pattern in _FILE_PATTERNS:
        files += run_dir.glob(pattern)
    folders = [run_dir / name for name in _FOLDER_NAMES]
    for path in (*folders, *files):
        fault = find_entry_fault(path, is_folder=path in folders)
        if fault:
            raise UsageError(f"--run-dir {run_dir}: {path} {fault}")


def check_run_dir_writable(run_dir: Path) -> None:
    """Raise UsageError if the run folder, or a file that a run writes, cannot be created or written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{secrets.token_hex(8)}"  # not the process id: two hosts may use the same one
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        fix = fix_for_os_error(error, "choose another folder")
        raise UsageError(f"--run-dir {run_dir}: cannot be written ({error.strerror}); {fix}") from None
    check_entries(run_dir)
    appended = (run_dir / name for name in ("logs", "checkpoints", "metrics.jsonl", "events.jsonl"))
    for path in (*appended, *run_dir.glob("logs/rank-*.log")):
        if path.exists() and not os.access(path, os.W_OK):  # it belongs to another user of a shared folder
            fix = f"ask its owner for write permission, or continue in another folder with --resume {run_dir}"
            raise UsageError(f"--run-dir {run_dir}: {path} is not writable for this user; {fix}")


def check_run_dir_shared(run_dir: Path, world: Ranks) -> None:
    """Raise UsageError on every rank unless all see the same run folder. Collective."""
    # A new name each time: an NFS client may remember that an earlier one was absent.
    token = run_dir / f".shared-{world.gather(secrets.token_hex(8))[0]}"
    if world.rank == 0:
        token.write_bytes(b"")
    world.gather(None)  # the file exists from here on
    missing = [rank for rank, sees_token in enumerate(world.gather(token.exists())) if not sees_token]
    if world.rank == 0:
        token.unlink()
    if missing:
        raise UsageError(
            f"--run-dir {run_dir}: ranks {', '.join(map(str, missing))} do not see what rank 0 writes there; "
            f"give a folder that all hosts share"
        )


def save_base_config(task: Task, folder: Path) -> None:
    """Write config.json and generation_config.json of `model.path` into a checkpoint that holds all weights.

    With them the checkpoint can be read after `model.path` is gone. The generation config has the ends of an answer
    that `dstrain generate` uses; a model that scores has none. Nothing is written for adapters (their base is needed
    anyway), for models with code of their own, and where a custom task gives `model.path` another meaning.
    """
    from transformers import GenerationConfig

    model = task.recipe.model
    if model.path is None or model.lora is not None or model.trust_remote_code:
        return
    with contextlib.suppress(RecipeError):
        config = read_config(model)
        config.save_pretrained(str(folder))
        source = task.model_source
        if source is None or not source.can_generate:
            return
        try:
            place = str(Path(model.path).expanduser())
            generation = GenerationConfig.from_pretrained(place, revision=model.revision)
        except OSError:  # no generation_config.json: transformers derives it from config.json
            generation = GenerationConfig.from_model_config(config)
        write_generation_config(generation, source.tokenizer, folder)
