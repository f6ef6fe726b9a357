"""Everything that one process can decide alone, before any process group starts."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dstrain.config import BatchPlan, Recipe, RunConfig, resolve_batch, resolve_steps
from dstrain.data.loading.sampler import StepSampler, get_length_function
from dstrain.distributed.world import SingleProcessWorld
from dstrain.errors import DataError
from dstrain.launch.command import free_port
from dstrain.launch.kernel_locks import get_extensions_dir, remove_stale_locks
from dstrain.launch.multihost.probe import find_gloo_interface
from dstrain.launch.threads import count_available_cores, threads_per_process
from dstrain.launch.topology import Worker, is_cpu_requested
from dstrain.preset import Device, Preset, read_preset
from dstrain.report.sinks import check_trackers
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.text import TextTask
from dstrain.train.build_model import resolve_model_dtype
from dstrain.train.checkpoint.checkpoints import CheckpointManager
from dstrain.train.ds_config import check_offload_folders, resolve_ds_config
from dstrain.train.rendezvous import Rendezvous
from dstrain.train.resume.decision import StartDecision, decide_start
from dstrain.train.resume.fingerprints import check_fingerprints, fingerprint_weights
from dstrain.train.resume.inputs import check_inputs_unchanged, digest_input_files, digest_inputs
from dstrain.train.resume.recorded import ResumeOptions, check_recipe_unchanged, with_saved_batch_total
from dstrain.train.run_dir import check_run_dir_writable, with_saved_tokenizer

ALLOCATOR_ENV_VARS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's memory on a GPU, read when the first tensor is put there; the second name is known from torch 2.9 on."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """All that is known before any process group starts."""

    config: RunConfig
    preset: Preset
    ds_config: dict[str, Any]
    batch: BatchPlan
    task: Task
    train_dataset: Sequence[Any]
    eval_dataset: Sequence[Any] | None
    sample_plan: StepSampler
    steps: int
    device: torch.device
    run_dir: Path
    resume: ResumeOptions
    start: StartDecision
    """The checkpoint to continue from; all ranks have agreed on it."""
    initial_world_size: int
    """Processes that the run began with: the learning rate goes by them where it goes by processes."""
    local_world_size: int
    """Processes of this host."""
    fingerprints: Mapping[str, Any]
    """Of weights that checkpoints do not hold, and of what the run learns from; found by rank 0, empty on the others."""
    launch_id: str = ""
    """What the lease of the run folder calls this launch; empty where nobody holds it."""


def set_up_process(worker: Worker, config: RunConfig) -> torch.device:
    """Threads, device and noise of this process, the same under every launcher."""
    os.environ.update(worker.environment)
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # left open only where one process is alone
    if "GLOO_SOCKET_IFNAME" not in os.environ and (
        interface := find_gloo_interface(worker, os.environ.get("MASTER_ADDR", ""))
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(threads_per_process(worker.local_world_size, count_available_cores()))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.(distributed|jit)")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if worker.local_rank == 0:
        for line in remove_stale_locks(get_extensions_dir(os.environ)):
            print(line, flush=True)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if is_cpu_requested(os.environ) or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    if not any(name in os.environ for name in ALLOCATOR_ENV_VARS):
        os.environ[ALLOCATOR_ENV_VARS[0]] = "expandable_segments:True"
    index = worker.local_rank % torch.cuda.device_count()  # Slurm may show each task one GPU
    # DeepSpeed computes on the device of the first, and compares the two (runtime/engine.py).
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            os.environ[name] = str(index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_plan(
    recipe: Recipe, run_dir: Path, resume: ResumeOptions, worker: Worker, rendezvous: Rendezvous | None = None
) -> RunPlan:
    """Check and prepare everything that one process can check alone. Raises UsageError.

    `together`: where the others prepare at the same time; entered once what is cheap was checked. Raises LostError there.
    """
    config = recipe.config
    check_run_dir_writable(run_dir)
    device = set_up_process(worker, config)
    preset = read_preset(config.ds_config)
    with rendezvous or contextlib.nullcontext():
        checkpoints = CheckpointManager(folder=run_dir / "checkpoints", world=rendezvous or SingleProcessWorld())
        start = decide_start(checkpoints, resume)
        before = start.checkpoint
        check_recipe_unchanged(before, config, resume.allowed_keys)
        asked = with_saved_batch_total(config.batch, before, resume.allowed_keys)
        kept = asked is not config.batch
        batch = resolve_batch(asked, worker.world_size, preset.micro, None if kept else preset.accumulate)
        ds_config = resolve_ds_config(config, preset, batch, (worker.world_size, get_preset_device(device)), run_dir)
        check_offload_folders(ds_config, run_dir)
        task = make_task(with_saved_tokenizer(before, resolve_model_dtype(config, ds_config), resume.allowed_keys))
        if worker.rank == 0 and before is not None:  # before the records are read: a changed file is the cause
            check_inputs_unchanged(before, digest_input_files(task), resume.allowed_keys)
        train, test, weights = _prepare_datasets(task, ds_config, worker, rendezvous)
        if worker.rank == 0 and before is not None:
            check_fingerprints(before, weights, task, resume.allowed_keys)
    data = build_sample_plan(config, train, batch, worker.world_size)
    steps, total = resolve_steps(config, data.samples_per_epoch, batch.total)
    return RunPlan(
        config=config, preset=preset, ds_config=ds_config, batch=batch, task=task, train_dataset=train, eval_dataset=test,
        sample_plan=replace(data, total_samples=total), steps=steps, device=device, run_dir=run_dir, resume=resume, start=start,
        initial_world_size=worker.world_size if before is None else before.read_run_info().get("began_with", worker.world_size),
        local_world_size=worker.local_world_size, fingerprints=weights,
    )  # fmt: skip


def _prepare_datasets(
    task: Task, ds_config: Mapping[str, Any], worker: Worker, rendezvous: Rendezvous | None
) -> tuple[Sequence[Any], Sequence[Any] | None, dict[str, Any]]:
    """Both splits, and on rank 0 the fingerprints: what may take long where a cache is cold. Raises UsageError."""
    task.check()
    if worker.rank == 0:
        check_trackers(task.recipe.log)
    # Of a task whose examples do not come from the cache, each process has to make its own: none need wait.
    with (
        rendezvous.local_main_process_first() if rendezvous and isinstance(task, TextTask) else contextlib.nullcontext()
    ):
        train, test = task.examples("train"), task.examples("eval")
    if not train:
        raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
    if worker.rank > 0:
        return train, test, {}
    return train, test, {**fingerprint_weights(task, ds_config), "inputs": digest_inputs(task, train, test)}


def get_preset_device(device: torch.device) -> Device:
    """What this process computes on, for presets."""
    if device.type == "cpu":
        return Device("cpu", True)
    return Device("cuda", torch.cuda.is_bf16_supported(including_emulation=False))


def build_sample_plan(
    config: RunConfig, train_dataset: Sequence[Any], batch: BatchPlan, world_size: int
) -> StepSampler:
    """The order of the samples; a task's examples may say how they are made up of weighted sources, and how long they are."""
    return StepSampler(
        sizes=tuple(getattr(train_dataset, "sizes", (len(train_dataset),))),
        weights=getattr(train_dataset, "weights", None),
        seed=config.seed,
        samples_per_step=batch.total,
        world_size=world_size,
        accumulate=batch.accumulate,
        lengths=get_length_function(train_dataset),
    )
