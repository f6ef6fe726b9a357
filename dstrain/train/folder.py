"""The run folder: what is in it before the first step, and whether a run may go on in it."""

from __future__ import annotations

import json
import os
import platform
import secrets
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dstrain.config import RunConfig, changed_learning_keys, read_recipe, show_recipe
from dstrain.config.schema import BatchConfig
from dstrain.errors import ResumeError, UsageError
from dstrain.train.manifest import CheckpointInfo, describe, newest_whole, verify
from dstrain.world import World

LIBRARIES = ("dstrain", "torch", "deepspeed", "transformers", "peft", "tokenizers", "numpy", "safetensors")


@dataclass(frozen=True)
class Resume:
    """What --resume and --allow-change ask for."""

    wanted: str = "auto"
    """auto, never, or the folder of a run or of a checkpoint."""
    allowed: Collection[str] = ()
    """Keys that may differ from the recipe the run was started with."""


def check_resume(run_dir: Path, resume: Resume, config: RunConfig) -> CheckpointInfo | None:
    """The checkpoint that the run would go on from, by what is cheap to read. Raises ResumeError where it cannot."""
    newest = newest_whole(run_dir / "checkpoints")
    there = [newest] if newest else []
    if resume.wanted == "never":
        if there:
            raise ResumeError(
                f"--resume never: {run_dir} already holds step {there[0].step}; "
                f"choose another --run-dir, or remove the folder if nothing in it is needed"
            )
        return None
    if resume.wanted != "auto":
        there = [chosen_checkpoint(resume.wanted)]
    if not there:
        return None
    before = _recipe_of(there[0])
    if before.is_file():
        faults = changed_learning_keys(read_recipe(before).config, config, resume.allowed)
        if faults:
            raise ResumeError(faults)
    return there[0]


def run_to_go_on_with(run_dir: Path, resume: Resume) -> Path | None:
    """The recipe that the run to go on with was started with; None where a new one begins. Raises ResumeError."""
    if resume.wanted == "never":
        return None
    newest = newest_whole(run_dir / "checkpoints")
    there = [newest] if newest else []
    if resume.wanted != "auto":
        there = [chosen_checkpoint(resume.wanted)]
    before = _recipe_of(there[0]) if there else None
    return before if before is not None and before.is_file() else None


def _recipe_of(checkpoint: CheckpointInfo) -> Path:
    return checkpoint.path.parent.parent / "recipe.yaml"


def batch_to_go_on_with(batch: BatchConfig, start: CheckpointInfo | None, allowed: Collection[str]) -> BatchConfig:
    """The recipe's batch with the total that the run began with, whatever the number of processes is now."""
    total = None if start is None else start.record().get("batch_total")
    if total is None or any(key.split(".")[0] == "batch" for key in allowed):
        return batch
    if batch.total is None or (batch.micro is not None and batch.accumulate is not None):
        return batch.model_copy(update={"total": batch.total or total, "accumulate": None})
    return batch


def chosen_checkpoint(folder: str) -> CheckpointInfo:
    """The whole checkpoint that `--resume DIR` names: the folder itself, or the newest of a run folder."""
    path = Path(folder).expanduser().resolve()
    if (path / "MANIFEST.json").is_file():
        fault = verify(path, read_all=False)
        if fault:
            raise ResumeError(f"--resume {folder}: the checkpoint is damaged ({fault}); choose another one")
        return describe(path, None)
    whole = newest_whole(path / "checkpoints")
    if whole is None:
        raise ResumeError(f"--resume {folder}: holds no whole checkpoint; give a run folder or a checkpoint in it")
    return whole


def write_start(run_dir: Path, config: RunConfig, ds_config: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """recipe.yaml, ds_config.json and environment.json: enough to repeat the run. Rank 0 calls it."""
    (run_dir / "checkpoints").mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("recipe.yaml", show_recipe(config)),
        ("ds_config.json", json.dumps(ds_config, indent=2) + "\n"),
        ("environment.json", json.dumps({**about, **environment()}, indent=2) + "\n"),
    ):
        temporary = run_dir / f".{name}.new"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, run_dir / name)


def versions() -> dict[str, str]:
    """Versions of the libraries that a result depends on."""
    found = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def environment() -> dict[str, Any]:
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
        "versions": versions(),
    }


def check_writable(run_dir: Path) -> None:
    """Raise where the run folder cannot be made or written to."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe = run_dir / f".probe-{secrets.token_hex(8)}"  # processes of two hosts may have the same id
        probe.write_bytes(b"")
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--run-dir {run_dir}: cannot be written ({error.strerror}); choose another folder") from None


def check_shared(run_dir: Path, world: World) -> None:
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
