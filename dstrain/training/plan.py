"""The run plan: all values of a run that are known before a process group starts."""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from dstrain.config import BatchPlan, Recipe, RunConfig, resolve_steps
from dstrain.data.dataset import Dataset
from dstrain.data.loading.loader import Loader, StepSampler
from dstrain.data.loading.micro_batches import make_cost_function, make_limits
from dstrain.distributed.world import Ranks, SingleProcessWorld, World, data_parallel_rank
from dstrain.ds_config import Device, check_offload_folders, resolve_ds_config
from dstrain.errors import CheckpointError, DataError, DstrainError
from dstrain.host_limits import count_available_cores, describe_ignored_threads, threads_per_process
from dstrain.launch.probe import find_gloo_interface
from dstrain.launch.topology import Worker, is_cpu_requested
from dstrain.models.fused_kernels import check_kernels
from dstrain.models.quantization import OPTIMIZERS_8BIT, check_bitsandbytes
from dstrain.planner.workload import ALLOCATOR_ENV_VARS, Cluster
from dstrain.preset import Preset
from dstrain.process_setup import log_if_slow, log_stdout
from dstrain.report.sinks import check_trackers
from dstrain.resources import get_extensions_dir
from dstrain.schedule import Every, LRSchedule, StepSchedule, scale_lr
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.judge import check_generation_data
from dstrain.tasks.common.task import check_sequence_parallel, load_split
from dstrain.training.build_model import check_attention_compiler, get_training_dtype, resolve_model_dtype
from dstrain.training.checkpoints import read_run_id
from dstrain.training.copies import KEY as COPY_KEY
from dstrain.training.copies import RunCopy, describe_error
from dstrain.training.input_digests import (
    check_fingerprints,
    check_inputs_unchanged,
    digest_input_files,
    digest_inputs,
    fingerprint_weights,
)
from dstrain.training.memory import MemoryMonitor
from dstrain.training.rendezvous import Rendezvous
from dstrain.training.run_dir import check_run_dir_shared, check_run_dir_writable, with_saved_tokenizer
from dstrain.training.sink_classes import check_sinks
from dstrain.training.start import ResumeOptions, Start, agree_on_start, is_change_allowed


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All values of a run that are known before a process group starts."""

    config: RunConfig
    preset: Preset
    ds_config: dict[str, Any]
    batch: BatchPlan
    task: Task
    train_dataset: Dataset
    eval_dataset: Dataset | None
    sampler: StepSampler
    steps: int
    device: torch.device
    run_dir: Path
    resume: ResumeOptions
    start: Start
    """What all ranks have agreed to start with; the fields above follow from it."""
    local_world_size: int
    """Processes on this host."""
    fingerprints: Mapping[str, Any]
    """Fingerprints of weights that checkpoints leave out, and of the training inputs; on rank 0 only."""
    launch_id: str = ""
    """Id of this launch in the lease of the run folder; empty without a lease."""
    copy: RunCopy | None = None
    """`save.copy_to`, on rank 0."""

    def with_training_samples(self, dataset: Dataset, world_size: int) -> RunPlan:
        """Return the plan for these training samples: their order, and the number of steps. Raises DataError."""
        if not dataset:
            raise DataError("data.train: no sample is left to train on; give a file with samples that the task keeps")
        sampler = build_sampler(self.task, dataset, self.batch, world_size)
        steps, total_samples = resolve_steps(self.config, sampler.samples_per_epoch, self.batch.total)
        sampler = replace(sampler, total_samples=total_samples)
        return replace(self, train_dataset=dataset, sampler=sampler, steps=steps)


def is_for_user(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's warning of an optimizer that it does not know: ours are tested with it."""
    return "untested optimizer" not in record.getMessage()


def set_up_process(worker: Worker, config: RunConfig) -> torch.device:
    """Set threads and log levels of this process, alike under every launcher; return its device for `use_device`."""
    # Before torch and DeepSpeed read it.
    os.environ.update(worker.environment)
    if worker.world_size == 1:
        os.environ.setdefault("MASTER_PORT", "29500")  # DeepSpeed looks for the name; nobody listens there
    elif "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = find_gloo_interface(worker, os.environ.get("MASTER_ADDR", ""))
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    # Explicitly: launchers set other defaults, and sums depend on the number of threads.
    threads = threads_per_process(worker.local_world_size, count_available_cores())
    torch.set_num_threads(threads)
    ignored = describe_ignored_threads(os.environ, threads)
    if ignored and worker.rank == 0:
        log_stdout(f"warning: {ignored}")
    # Deprecations inside torch and DeepSpeed, which a user cannot act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.(distributed|jit)")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    logging.getLogger("DeepSpeed").addFilter(is_for_user)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if worker.local_rank == 0:  # one process per host: the folder of compiled extensions belongs to the host
        for line in remove_stale_locks(get_extensions_dir(os.environ)):
            log_stdout(line)
    if config.deterministic:
        # cuBLAS is deterministic only with a fixed workspace (NVIDIA cuBLAS documentation, reproducibility).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if is_cpu_requested(os.environ) or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    # Batches of different lengths fragment the fixed segments of the default allocator.
    if not any(name in os.environ for name in ALLOCATOR_ENV_VARS):
        os.environ[ALLOCATOR_ENV_VARS[0]] = "expandable_segments:True"
    index = worker.local_rank % torch.cuda.device_count()  # Slurm may show each task only its own GPU
    # DeepSpeed takes its device from LOCAL_RANK and asserts that the other is equal (runtime/engine.py).
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            os.environ[name] = str(index)
    return torch.device("cuda", index)


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of this process, which takes some memory of it."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def make_plan(
    recipe: Recipe,
    run_dir: Path,
    resume: ResumeOptions,
    worker: Worker,
    rendezvous: Rendezvous | None = None,
    start_handed_on: str = "",
) -> RunPlan:
    """Check the recipe and prepare the data, before a process group starts.

    `rendezvous` lets the ranks agree on the checkpoint and wait for each other; without one, this
    process decides alone. `start_handed_on`: what the launching process has decided (`agree_on_start`).

    Raises UsageError, CheckpointError if no checkpoint of the run folder can
    be used, and PeerFailureError if another rank fails or stops responding.
    """
    check_run_dir_writable(run_dir)
    device = set_up_process(worker, recipe.config)
    with rendezvous or contextlib.nullcontext():
        world: Ranks = rendezvous or SingleProcessWorld()
        if world.size > 1:  # a rank that sees another folder would find every checkpoint damaged
            check_run_dir_shared(run_dir, world)
        copy = None
        if recipe.config.save.copy_to is not None:
            copy = open_copy(recipe.config.save.copy_to, run_dir, resume, world)
        kind = get_preset_device(device)
        cluster = make_cluster(worker.world_size, worker.local_world_size, kind)
        start = agree_on_start(recipe.config, run_dir, resume, worker.world_size, cluster, world, start_handed_on)
        use_device(device)  # only now: `auto` reads the free memory
        if start.auto and worker.rank == 0:
            log_stdout(start.auto)
        config, preset, batch, checkpoint = start.config, start.preset, start.batch, start.point.checkpoint
        ds_config = resolve_ds_config(config, preset, batch, worker.world_size, kind, run_dir)
        check_offload_folders(ds_config, run_dir)
        task_recipe = resolve_model_dtype(config, ds_config)
        if checkpoint is not None:
            task_recipe = with_saved_tokenizer(checkpoint, task_recipe, resume.allowed_keys)
        task = make_task(task_recipe)
        config, task = _with_template_time(config, task, worker, world)
        recorded = checkpoint if worker.rank == 0 else None  # rank 0 alone has digests to compare with it
        if recorded is not None:  # before the records are read, which would fail on what a changed file causes
            check_inputs_unchanged(recorded, digest_input_files(task), resume.allowed_keys)
        train_dataset, eval_dataset, fingerprints = _prepare_datasets(task, ds_config, device, worker, rendezvous)
        if recorded is not None:
            check_fingerprints(recorded, fingerprints, task, resume.allowed_keys)
    sampler = build_sampler(task, train_dataset, batch, worker.world_size)
    steps, total_samples = resolve_steps(config, sampler.samples_per_epoch, batch.total)
    return RunPlan(
        config=config, preset=preset, ds_config=ds_config, batch=batch, task=task, steps=steps, device=device,
        train_dataset=train_dataset, eval_dataset=eval_dataset, run_dir=run_dir, resume=resume, start=start,
        sampler=replace(sampler, total_samples=total_samples), fingerprints=fingerprints,
        local_world_size=worker.local_world_size, copy=copy,
    )  # fmt: skip


def open_copy(place: str, run_dir: Path, resume: ResumeOptions, world: Ranks) -> RunCopy | None:
    """Return the copy of the run on rank 0, None on others; copy its newest checkpoint into an empty run folder.

    Raises UsageError if it is another run's, or cannot be written; CheckpointError if it cannot be read. Collective.
    """
    copy = RunCopy(place, run_dir)
    if world.rank > 0:
        world.gather(None)
        return None
    run_id = read_run_id(run_dir / "checkpoints") if resume.source == "auto" else None
    copy.check_owner(run_id, is_change_allowed(COPY_KEY, resume.allowed_keys))
    copy.check_writable()
    if resume.source == "auto":
        try:
            with log_if_slow(f"looking for a checkpoint in {copy.place}"):
                line = copy.restore()
        except CheckpointError:
            raise
        except Exception as error:  # each file system has errors of its own
            raise CheckpointError(
                f"save.copy_to: {copy.place} cannot be read ({describe_error(error)}); fix the cause, or begin anew with "
                "--resume never"
            ) from error
        if line:
            log_stdout(line)
    world.gather(None)
    return copy


def _with_template_time(config: RunConfig, task: Task, worker: Worker, world: Ranks) -> tuple[RunConfig, Task]:
    """Return recipe and task with the present time of rank 0 where the chat template of a new run asks for it. Collective."""
    time, source = None, task.model_source
    if worker.rank == 0 and config.model.chat_template_time is None:
        with contextlib.suppress(DstrainError):  # of the tokenizer: the checks of the model come first
            time = datetime.now().isoformat(timespec="seconds") if source is not None and source.writes_time else None
    time = world.gather(time)[0]
    if time is None:
        return config, task
    recipes = [
        recipe.model_copy(update={"model": recipe.model.model_copy(update={"chat_template_time": time})})
        for recipe in (config, task.recipe)
    ]
    return recipes[0], make_task(recipes[1])


def _prepare_datasets(
    task: Task, ds_config: Mapping[str, Any], device: torch.device, worker: Worker, rendezvous: Rendezvous | None
) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Return both splits, and on rank 0 the fingerprints. It takes long if the cache is cold.

    Raises UsageError.
    """
    task.checks.run()
    check_sequence_parallel(task)
    task.checks.device()
    check_kernels(task.recipe.model.kernels, device.type)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        check_attention_compiler(task, get_training_dtype(ds_config), capability, os.environ)
    if task.recipe.model.quantize is not None:
        check_bitsandbytes("model.quantize")
    if task.recipe.optim.name in OPTIMIZERS_8BIT:
        check_bitsandbytes("optim.name")
    if worker.rank == 0:  # the other ranks write no metrics, and their hosts may lack the packages
        check_trackers(task.recipe.log)
        if task.recipe.log.sinks:
            check_sinks(task.recipe.log.sinks)
    # Without the cache each process makes its own examples: waiting for another one would gain nothing.
    with (
        rendezvous.local_main_process_first() if rendezvous and task.encodes_records else contextlib.nullcontext(),
        log_if_slow("reading and tokenizing data.train and data.eval, once for these files", worker.rank == 0),
    ):
        train_dataset, eval_dataset = load_split(task, "train"), load_split(task, "eval")
    if not train_dataset:
        raise DataError("data.train: no sample to train on; give a file with records that the task can use")
    check_generation_data(task, eval_dataset)
    # Rank 0's digests go into checkpoints; the same files need not be hashed by all.
    if worker.rank > 0:
        return train_dataset, eval_dataset, {}
    with log_if_slow("hashing the data files and the weights, to compare them when the run is resumed"):
        inputs = digest_inputs(task, train_dataset, eval_dataset)
        return train_dataset, eval_dataset, {**fingerprint_weights(task, ds_config), "inputs": inputs}


def make_cluster(world_size: int, local_world_size: int, device: Device) -> Cluster:
    """Return the processes of a run, `local_world_size` of them on each host."""
    nodes = max(1, world_size // local_world_size)
    return Cluster(gpus_per_node=local_world_size, nodes=nodes, kind=device.kind, bf16=device.bf16)


def get_preset_device(device: torch.device) -> Device:
    """Return the device of this process as presets describe it."""
    if device.type == "cpu":
        return Device("cpu", True)
    return Device("cuda", torch.cuda.is_bf16_supported(including_emulation=False))


def build_sampler(task: Task, train_dataset: Dataset, batch: BatchPlan, world_size: int) -> StepSampler:
    """Return the order of the samples, by sources, weights and lengths of the dataset.

    Raises RecipeError for a limit of tokens where the dataset does not know the lengths.
    """
    costs = make_cost_function(train_dataset, task.loss_inputs.packing())
    return StepSampler(
        sizes=train_dataset.sizes,
        weights=train_dataset.weights,
        seed=task.recipe.seed,
        samples_per_step=batch.total,
        world_size=batch.data_parallel_size(world_size),
        accumulate=batch.accumulate,
        limits=make_limits(batch.to_config(task.recipe.batch), batch.micro, costs),
        costs=costs,
    )


def build_schedule(plan: RunPlan) -> StepSchedule:
    """Return the learning rates, and the steps after which rows, evaluations and checkpoints are due."""
    config, optim = plan.config, plan.config.optim
    return StepSchedule(
        total_steps=plan.steps,
        lr=LRSchedule(scaled_lr(plan, optim.peak_lr), optim.schedule, plan.steps, optim.warmup),
        log_every=Every(config.log.every),
        eval_every=Every(interval_in_steps(plan, config.eval.every)),
        save_every=Every(interval_in_steps(plan, config.save.every)),
    )


def interval_in_steps(plan: RunPlan, every: int | str) -> int | Fraction:
    """Return the steps between two events, at least 1; `every` is a number of steps, or the word epoch."""
    # Not rounded: the steps would move away from the ends of the epochs, more with each epoch.
    if isinstance(every, int):
        return every
    return max(Fraction(1), Fraction(plan.sampler.samples_per_epoch, plan.batch.total))


def scaled_lr(plan: RunPlan, lr: float) -> float:
    """Return a learning rate scaled to the samples of a step."""
    optim = plan.config.optim
    return scale_lr(lr, optim.scale_lr, plan.batch.total, optim.scale_lr_base)


def build_loader(plan: RunPlan, world: World) -> Loader:
    """Build the loader of this rank's batches."""
    data = plan.config.data
    return Loader(
        examples=plan.train_dataset,
        collate=plan.task.collate,
        sampler=plan.sampler,
        rank=data_parallel_rank(world)[0],
        sequence=world.sequence,
        workers=data.workers,
        prefetch=data.prefetch,
        pin_memory=data.pin and world.device.type == "cuda",
    )


def make_memory_monitor(plan: RunPlan, world: World) -> MemoryMonitor:
    """Return the monitor of a run's memory."""
    return MemoryMonitor(
        config=plan.config,
        batch=plan.batch,
        preset=plan.preset,
        cluster=make_cluster(world.size, plan.local_world_size, get_preset_device(plan.device)),
        world=world,
        run_dir=plan.run_dir,
    )


STALE_LOCK_SECONDS = 15 * 60
"""Age from which a lock is removed that another host or container, which shares the folder, may hold."""
LOCAL_FILESYSTEMS = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "apfs", "ntfs"}
"""File systems that only this host writes to."""
INITIAL_PID_NAMESPACE = "pid:[4026531836]"
"""The host's own (PROC_PID_INIT_INO of Linux): /proc shows every process there, in a container only its own."""


def remove_stale_locks(folder: Path) -> Iterator[str]:
    """Remove the locks that killed builds have left; yield a message for each lock that nobody here holds.

    torch creates the file `lock` next to a build, has it open while it compiles, and waits without
    end while it exists (torch/utils/file_baton.py).
    """
    with contextlib.suppress(OSError, RuntimeError):
        locks = {path: _identity(path) for pattern in ("*/lock", "*/*/lock") for path in folder.glob(pattern)}
        for lock in locks and sorted(locks.keys() - _find_open_locks([*locks])):
            if _identity(lock) != locks[lock]:  # a build that began during the search
                continue
            sees_all = _is_on_local_disk(lock) and os.readlink("/proc/self/ns/pid") == INITIAL_PID_NAMESPACE
            if sees_all or lock.stat().st_mtime + STALE_LOCK_SECONDS <= time.time():
                lock.unlink()
                yield f"removed {lock}: a compilation that was killed had left it, and later ones would wait for it"
            else:
                yield (
                    f"{lock}: no process here holds it. Another host or container may be compiling; if not, remove it: "
                    f"this run waits for it. A start removes it once it is {STALE_LOCK_SECONDS // 60} minutes old"
                )


def _identity(lock: Path) -> tuple[int, int]:
    """Return what tells a file from one that takes its place."""
    stat = lock.stat()
    return stat.st_ino, stat.st_ctime_ns


def _is_on_local_disk(path: Path) -> bool:
    """Return True if the path is on a file system that only this host writes to."""
    import psutil

    mounts = {Path(found.mountpoint): found.fstype for found in psutil.disk_partitions(all=True)}
    return next((mounts[place] in LOCAL_FILESYSTEMS for place in path.resolve().parents if place in mounts), False)


def _find_open_locks(locks: list[Path]) -> set[Path]:
    """Return the locks that a process of this host has open."""
    wanted = {str(lock.resolve()): lock for lock in locks}
    held = set()
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if found := wanted.get(os.readlink(link)):
                held.add(found)
    return held
