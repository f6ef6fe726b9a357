"""What a run starts with: checkpoint, preset, micro-batch and total batch, decided once."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from dstrain.config import BatchPlan, RunConfig, check_learning_changes, resolve_batch
from dstrain.config.schema import BatchConfig
from dstrain.distributed.world import Ranks
from dstrain.errors import CheckpointError, Fault, PresetError, ResumeError
from dstrain.files import parse_json
from dstrain.planner.choose import AUTO, Budget, choose_preset
from dstrain.planner.workload import GPU_MEMORY_ENV, Cluster, detect_gpu_bytes, host_bytes
from dstrain.preset import Preset, read_preset
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.state.manifest import (
    MANIFEST_FILE,
    CheckpointInfo,
    find_latest_complete,
    inspect_checkpoint,
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


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """The checkpoint to continue from, and the newer ones that are damaged."""

    checkpoint: CheckpointInfo | None = None
    """None if a new run begins."""
    skipped: tuple[CheckpointInfo, ...] = ()
    """Damaged checkpoints that are newer, newest first."""

    @property
    def folder(self) -> str:
        """Folder of the checkpoint; empty if a new run begins."""
        return "" if self.checkpoint is None else str(self.checkpoint.path)

    @property
    def step(self) -> int:
        """Optimizer steps that were taken before this start."""
        return 0 if self.checkpoint is None else self.checkpoint.step


@dataclass(frozen=True, kw_only=True)
class Start:
    """What a run starts with."""

    point: ResumePoint
    config: RunConfig
    """The recipe with the preset of `ds_config: auto`."""
    preset: Preset
    batch: BatchPlan
    auto: str = ""
    """The line on the choice of `ds_config: auto`; empty where the recipe names a preset."""

    def to_json(self, run_dir: Path) -> str:
        """Return the decision for the ranks of a run, which have the recipe and the preset themselves."""
        return json.dumps(
            {
                "run_dir": str(run_dir),
                "checkpoint": self.point.folder,
                "ds_config": self.config.ds_config,
                "batch": self.config.batch.model_dump(mode="json"),
                "chat_template_time": self.config.model.chat_template_time,
                "plan": asdict(self.batch),
                "auto": self.auto,
            }
        )


START_ENV = "DSTRAIN_START"
"""Environment variable with the decision of the launching process, as `Start.to_json` writes it."""


def decide_start(
    config: RunConfig,
    options: ResumeOptions,
    world_size: int,
    cluster: Cluster,
    point: ResumePoint,
    devices: Sequence[str] = (),
) -> Start:
    """Return what a run starts with at a point: preset, then micro-batch, then total; refuse what changes learning.

    `dstrain train` decides before it starts processes, and hands the decision to its ranks. They decide themselves in the
    cases that `agree_on_start` names. `devices`: the GPUs of the launch as CUDA_VISIBLE_DEVICES names them; empty: all.

    Raises ResumeError if the recipe would change what was learnt; PresetError where no preset fits, or the memory of the
    GPUs is not known; RecipeError.
    """
    checkpoint, recorded, auto = point.checkpoint, None, ""
    if checkpoint is not None:
        recorded = read_recorded_recipe(checkpoint)
        if config.model.chat_template_time is None:  # the chat template goes on writing the time of the first start
            time = recorded.model.chat_template_time
            config = config.model_copy(update={"model": config.model.model_copy(update={"chat_template_time": time})})
    if config.ds_config == AUTO:
        config, auto = _with_preset(config, cluster, point, recorded, devices)
    batch = config.batch
    if checkpoint is not None and recorded is not None:
        check_recipe_unchanged(checkpoint, recorded, config, options.allowed_keys)
        batch = with_saved_batch_total(batch, checkpoint, options.allowed_keys)
    preset = read_preset(config.ds_config)
    # The preset's accumulation would contradict the total that was taken from the checkpoint.
    accumulate = preset.accumulate if batch is config.batch else None
    plan = resolve_batch(batch, world_size, preset.micro, accumulate, config.parallel.sequence)
    return Start(point=point, config=config, preset=preset, batch=plan, auto=auto)


def agree_on_start(
    config: RunConfig,
    run_dir: Path,
    options: ResumeOptions,
    world_size: int,
    cluster: Cluster,
    world: Ranks,
    handed_on: str = "",
) -> Start:
    """Return what the run starts with, the same on every rank: each verifies a share of the checkpoint. Collective.

    `handed_on`: the decision of the launching process. Rank 0 decides again where there is none, as under torchrun and
    other launchers, or where the verified checkpoint is another one: the newest was damaged, or came from
    `save.copy_to`. Other ranks may see old files on a network file system, or other free memory. Nothing on disk is
    changed. Raises as `decide_start` does, and CheckpointError if the checkpoint is damaged.
    """
    from dstrain.training.state.files import find_index_fault  # not at the top: it needs torch

    checkpoints = CheckpointStore(folder=run_dir / "checkpoints", world=world, find_index_fault=find_index_fault)
    point = find_resume_point(checkpoints, options)
    if world.rank == 0:
        decided = parse_json(handed_on or "{}")
        if (decided.get("run_dir"), decided.get("checkpoint")) != (str(run_dir), point.folder):
            handed_on = decide_start(config, options, world_size, cluster, point).to_json(run_dir)
    decided = parse_json(world.gather(handed_on)[0])
    model = config.model.model_copy(update={"chat_template_time": decided["chat_template_time"]})
    batch = BatchConfig.model_validate(decided["batch"])
    config = config.model_copy(update={"ds_config": decided["ds_config"], "batch": batch, "model": model})
    return Start(
        point=point, config=config, preset=read_preset(config.ds_config), batch=BatchPlan(**decided["plan"]),
        auto=decided["auto"],
    )  # fmt: skip


def _with_preset(
    config: RunConfig, cluster: Cluster, point: ResumePoint, recorded: RunConfig | None, devices: Sequence[str]
) -> tuple[RunConfig, str]:
    """Return the recipe with the preset and micro-batch of `ds_config: auto`, and the line that says why.

    A resumed run takes those that it was trained with.
    """
    batch = config.batch
    if recorded is not None and recorded.ds_config != AUTO:
        is_open = batch.micro is None and batch.accumulate is None and batch.tokens_per_micro is None
        name, micro = recorded.ds_config, recorded.batch.micro if is_open else None
        passes = "" if micro is None else f", batch.micro {micro}"
        reason = f"{name}{passes}, as {Path(point.folder).name} was trained"
    else:
        choice = choose_preset(config, cluster, find_budget(cluster, devices))
        name, micro, reason = choice.preset, choice.micro, choice.reason
    if micro is not None:
        batch = batch.model_copy(update={"micro": micro})
    return config.model_copy(update={"ds_config": name, "batch": batch}), f"ds_config auto: {reason}"


def find_budget(cluster: Cluster, devices: Sequence[str] = ()) -> Budget:
    """Return the free memory of the smallest GPU and of this host. Raises PresetError where it is not known."""
    env = {} if cluster.kind == "cpu" and GPU_MEMORY_ENV not in os.environ else dict(os.environ)
    if devices and env:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
    found, _ = detect_gpu_bytes(env)
    if cluster.kind == "cpu":
        own = found[0] if GPU_MEMORY_ENV in os.environ else host_bytes() // cluster.gpus_per_node
        return Budget(gpu_bytes=own)
    if not found:
        problem = "the memory of the GPUs cannot be read on this machine: there is neither pynvml nor nvidia-smi"
        raise PresetError(Fault("ds_config auto", problem, f"name a preset, or set {GPU_MEMORY_ENV}=24GiB"))
    return Budget(gpu_bytes=min(found), host_bytes=host_bytes())


def find_point_by_sizes(run_dir: Path, options: ResumeOptions) -> ResumePoint:
    """Return the newest checkpoint whose files have the sizes that were written; the ranks compare hashes too.

    Raises ResumeError if --resume names a folder without such a checkpoint.
    """
    if options.source == "never":
        return ResumePoint()
    if options.names_folder:
        return ResumePoint(checkpoint=find_checkpoint_at(options.source))
    return ResumePoint(checkpoint=find_latest_complete(run_dir / "checkpoints"))


def find_resume_point(checkpoints: CheckpointStore, options: ResumeOptions) -> ResumePoint:
    """Return the checkpoint to continue from, every byte of it verified, and newer ones that are damaged. Collective.

    Rank 0 lists the folder, since another host may see an old listing over NFS, each rank reads a share, and the faults
    of all ranks are exchanged: every rank returns the same.

    Raises ResumeError if --resume names a folder without a checkpoint, CheckpointError if the named
    checkpoint, or each one of the run folder, is damaged.
    """
    if options.source == "never":
        return ResumePoint()
    if options.names_folder:
        info = checkpoints.verify(_find_requested(checkpoints, options.source))
        if info.fault:
            raise CheckpointError(f"--resume {options.source}: {info.path} is {info.status}; choose another")
        return ResumePoint(checkpoint=info)
    newest, skipped = checkpoints.find_latest_valid()
    other = next((info for info in skipped if info.is_of_other_version), None)
    if newest is None and other is not None:
        raise CheckpointError(
            f"{checkpoints.folder}: {other.path.name} is {other.status}: install that version, or give a new --run-dir to "
            "start a new run"
        )
    if newest is None and skipped:
        raise CheckpointError(
            f"{checkpoints.folder}: all of its {len(skipped)} checkpoints are damaged, {skipped[0].path.name} is "
            f"{skipped[0].status}; restore an undamaged copy there, or give a new --run-dir to start a new run"
        )
    return ResumePoint(checkpoint=newest, skipped=tuple(skipped))


def find_checkpoint_at(folder: str) -> CheckpointInfo:
    """Return the checkpoint that `--resume DIR` names: the folder itself, or the newest of a run folder.

    Only sizes are compared. Raises ResumeError.
    """
    path = Path(folder).expanduser().resolve()
    if (path / MANIFEST_FILE).is_file():
        info = inspect_checkpoint(path)
        if info.fault:
            raise ResumeError(f"--resume {folder}: the checkpoint is {info.status}; choose another one")
        return info
    newest = find_latest_complete(path / "checkpoints")
    if newest is None:
        raise ResumeError(f"--resume {folder}: holds no complete checkpoint; give a run folder or a checkpoint in it")
    return newest


def _find_requested(checkpoints: CheckpointStore, source: str) -> Path:
    """Return the checkpoint that rank 0 finds at `--resume DIR`. Raises its ResumeError on every rank. Collective."""
    path = fault = ""
    if checkpoints.world.rank == 0:
        try:
            path = str(_check_not_replaced(find_checkpoint_at(source).path, checkpoints, source))
        except ResumeError as error:  # raised below, where the other ranks raise it too
            fault = str(error)
    # Only rank 0's answer counts; the others take part so that all raise alike.
    path, fault = checkpoints.world.gather((path, fault))[0]
    if fault:
        raise ResumeError(fault)
    return Path(path)


def _check_not_replaced(path: Path, checkpoints: CheckpointStore, source: str) -> Path:
    """Return the path. Raises ResumeError for `step-N.old` beside its successor: the cleanup removes it."""
    successor = path.with_suffix("")
    if path.suffix == ".old" and successor.exists() and path.parent == checkpoints.folder.resolve():
        raise ResumeError(f"--resume {source}: was replaced by {successor.name}; choose that one")
    return path


def check_recipe_unchanged(
    checkpoint: CheckpointInfo, recorded: RunConfig, config: RunConfig, allowed_keys: Collection[str]
) -> None:
    """Raise ResumeError for keys that change learning and differ from the recipe that the checkpoint records."""
    if recorded.batch.total is None and config.batch.total == checkpoint.run_info.get("batch_total"):
        # The product of micro, accumulate and processes, which a smaller micro-batch keeps.
        total = config.batch.total
        recorded = recorded.model_copy(update={"batch": recorded.batch.model_copy(update={"total": total})})
    info = checkpoint.run_info
    digests = {*info, *(key for key, what in info.get("inputs", {}).items() if "digest" in what)}
    if faults := check_learning_changes(recorded, config, allowed_keys, digests):
        raise ResumeError(faults)


def read_recorded_recipe(checkpoint: CheckpointInfo) -> RunConfig:
    """Return the recipe that a checkpoint was trained with, from run.json: recipe.yaml may have been edited.

    Raises ResumeError.
    """
    try:
        return RunConfig.model_validate(checkpoint.run_info.get("recipe"))
    except ValidationError as error:
        at = ".".join(map(str, error.errors()[0]["loc"])) or "recipe"
        raise ResumeError(
            f"{checkpoint.path}/run.json: its recipe does not fit this version of dstrain ({at}); "
            f"resume with the version that wrote it"
        ) from None


def get_run_dir(checkpoint: CheckpointInfo) -> Path:
    """Return the run folder of a checkpoint."""
    return checkpoint.path.parent.parent


def with_saved_batch_total(
    batch: BatchConfig, checkpoint: CheckpointInfo, allowed_keys: Collection[str]
) -> BatchConfig:
    """Return the recipe's batch with the total the run began with, whatever the world size is now."""
    total = checkpoint.run_info.get("batch_total")
    if total is None or any(key.split(".")[0] == "batch" for key in allowed_keys):
        return batch
    if batch.total is None or (batch.micro is not None and batch.accumulate is not None):
        return batch.model_copy(update={"total": batch.total or total, "accumulate": None})
    return batch
