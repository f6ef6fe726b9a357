"""Recorded facts of a checkpoint that a resumed run has to follow, read without torch."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dstrain.config import RunConfig, check_learning_changes
from dstrain.config.schema import BatchConfig
from dstrain.errors import ResumeError
from dstrain.train.state.manifest import (
    MANIFEST_FILE,
    CheckpointInfo,
    find_fault,
    find_latest_complete,
    read_checkpoint_info,
)


@dataclass(frozen=True)
class ResumeOptions:
    """The options --resume and --allow-change."""

    source: str = "auto"
    """auto, never, or the folder of a run or of a checkpoint."""
    allowed_keys: Collection[str] = ()
    """Keys that may differ from the recipe the run was started with."""

    @property
    def names_folder(self) -> bool:
        """True if --resume is a folder, not auto or never."""
        return self.source not in ("auto", "never")


def is_change_allowed(key: str, allowed_keys: Collection[str]) -> bool:
    """Return True if --allow-change names the key or a block that contains it."""
    return any(key == name or key.startswith(f"{name}.") for name in allowed_keys)


def find_resume_candidate(run_dir: Path, options: ResumeOptions) -> CheckpointInfo | None:
    """Return the newest checkpoint that is complete by its file sizes; None if a new run begins.

    Hashes are not compared, so this is a guess for messages before the launch. The ranks decide
    with `decide_start`. Raises ResumeError if --resume names a folder without a usable checkpoint.
    """
    if options.source == "never":
        return None
    if options.names_folder:
        return find_checkpoint_at(options.source)
    return find_latest_complete(run_dir / "checkpoints")


def find_compatible_candidate(run_dir: Path, options: ResumeOptions, config: RunConfig) -> CheckpointInfo | None:
    """Return the candidate after `check_recipe_unchanged`. Raises ResumeError."""
    candidate = find_resume_candidate(run_dir, options)
    check_recipe_unchanged(candidate, config, options.allowed_keys)
    return candidate


def find_checkpoint_at(folder: str) -> CheckpointInfo:
    """Return the checkpoint that `--resume DIR` names: the folder itself, or the newest of a run folder.

    Only sizes are compared. Raises ResumeError.
    """
    path = Path(folder).expanduser().resolve()
    if (path / MANIFEST_FILE).is_file():
        fault = find_fault(path, check_hashes=False)
        if fault:
            raise ResumeError(f"--resume {folder}: the checkpoint is damaged ({fault}); choose another one")
        return read_checkpoint_info(path, None)
    newest = find_latest_complete(path / "checkpoints")
    if newest is None:
        raise ResumeError(f"--resume {folder}: holds no complete checkpoint; give a run folder or a checkpoint in it")
    return newest


def check_recipe_unchanged(checkpoint: CheckpointInfo | None, config: RunConfig, allowed_keys: Collection[str]) -> None:
    """Raise ResumeError for keys that change learning and differ from the checkpoint's recipe."""
    if checkpoint is None:
        return
    recorded = read_recorded_recipe(checkpoint)
    if recorded.batch.total is None and config.batch.total == checkpoint.read_run_info().get("batch_total"):
        # The product of micro, accumulate and processes, which a smaller micro-batch keeps.
        total = config.batch.total
        recorded = recorded.model_copy(update={"batch": recorded.batch.model_copy(update={"total": total})})
    info = checkpoint.read_run_info()
    digests = {*info, *(key for key, what in info.get("inputs", {}).items() if "digest" in what)}
    if faults := check_learning_changes(recorded, config, allowed_keys, digests):
        raise ResumeError(faults)


def read_recorded_recipe(checkpoint: CheckpointInfo) -> RunConfig:
    """Return the recipe that a checkpoint was trained with, from run.json: recipe.yaml may have been edited.

    Raises ResumeError.
    """
    try:
        return RunConfig.model_validate(checkpoint.read_run_info().get("recipe"))
    except ValidationError as error:
        at = ".".join(map(str, error.errors()[0]["loc"])) or "recipe"
        raise ResumeError(
            f"{checkpoint.path}/run.json: its recipe does not fit this version of dstrain ({at}); "
            f"resume with the version that wrote it"
        ) from None


def get_run_dir(checkpoint: CheckpointInfo) -> Path:
    """Return the run folder of a checkpoint."""
    return checkpoint.path.parent.parent


def dump_training_recipe(config: RunConfig) -> dict[str, Any]:
    """Return the recipe as a checkpoint records it: without keys about launching and logging."""
    return config.model_dump(mode="json", exclude={"launch", "log", "profile"})


def with_saved_batch_total(
    batch: BatchConfig, checkpoint: CheckpointInfo | None, allowed_keys: Collection[str]
) -> BatchConfig:
    """Return the recipe's batch with the total the run began with, whatever the world size is now."""
    total = None if checkpoint is None else checkpoint.read_run_info().get("batch_total")
    if total is None or any(key.split(".")[0] == "batch" for key in allowed_keys):
        return batch
    if batch.total is None or (batch.micro is not None and batch.accumulate is not None):
        return batch.model_copy(update={"total": batch.total or total, "accumulate": None})
    return batch
