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
from dstrain.data.loading.sampler import DataPlan, lengths_of
from dstrain.errors import DataError
from dstrain.launch.command import free_port
from dstrain.launch.kernel_locks import extensions_folder, settle_build_locks
from dstrain.launch.multihost.probe import gloo_interface
from dstrain.launch.threads import cores_here, threads_per_process
from dstrain.launch.topology import Worker, wants_cpu
from dstrain.preset import Device, Preset, read_preset
from dstrain.report.sinks import check_trackers
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.text import TextTask
from dstrain.train.build_model import loaded_in_precision
from dstrain.train.ds_config import check_offload_folders, resolved_ds_config
from dstrain.train.rendezvous import Rendezvous
from dstrain.train.resume.fingerprints import check_fingerprints, fingerprints
from dstrain.train.resume.inputs import check_inputs, files_of, inputs_of
from dstrain.train.run_dir import Resume, batch_to_go_on_with, check_resume, check_writable, with_tokenizer_of

ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's memory on a GPU, read when the first tensor is put there; the second name is known from torch 2.9 on."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All that is known before any process group starts."""

    config: RunConfig
    preset: Preset
    ds_config: dict[str, Any]
    batch: BatchPlan
    task: Task
    train: Sequence[Any]
    test: Sequence[Any] | None
    data: DataPlan
    steps: int
    device: torch.device
    run_dir: Path
    resume: Resume
    began_with: int
    """Processes that the run began with: the learning rate goes by them where it goes by processes."""
    processes_here: int
    """Processes of this host."""
    fingerprints: Mapping[str, Any]
    """Of weights that checkpoints do not hold, and of what the run learns from; found by rank 0, empty on the others."""
    launch: str = ""
    """What the lease of the run folder calls this launch; empty where nobody holds it."""


def set_up_process(worker: Worker, config: RunConfig) -> torch.device:
    """Threads, device and noise of this process, the same under every launcher."""
    os.environ.update(worker.environment)
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # left open only where one process is alone
    if "GLOO_SOCKET_IFNAME" not in os.environ and (
        interface := gloo_interface(worker, os.environ.get("MASTER_ADDR", ""))
    ):
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    torch.set_num_threads(threads_per_process(worker.local_size, cores_here()))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.(distributed|jit)")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if worker.local_rank == 0:
        for line in settle_build_locks(extensions_folder(os.environ)):
            print(line, flush=True)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if wants_cpu(os.environ) or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    index = worker.local_rank % torch.cuda.device_count()  # Slurm may show each task one GPU
    # DeepSpeed computes on the device of the first, and compares the two (runtime/engine.py).
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            os.environ[name] = str(index)
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_plan(
    recipe: Recipe, run_dir: Path, resume: Resume, worker: Worker, together: Rendezvous | None = None
) -> Plan:
    """Check and prepare everything that one process can check alone. Raises UsageError.

    `together`: where the others prepare at the same time; entered once what is cheap was checked. Raises LostError there.
    """
    config = recipe.config
    check_writable(run_dir)
    device = set_up_process(worker, config)
    preset = read_preset(config.ds_config)
    before = check_resume(run_dir, resume, config)
    asked = batch_to_go_on_with(config.batch, before, resume.allowed)
    kept = asked is not config.batch
    batch = resolve_batch(asked, worker.world_size, preset.micro, None if kept else preset.accumulate)
    ds_config = resolved_ds_config(config, preset, batch, (worker.world_size, device_of(device)), run_dir)
    check_offload_folders(ds_config, run_dir)
    task = make_task(with_tokenizer_of(before, loaded_in_precision(config, ds_config), resume.allowed))
    with together or contextlib.nullcontext():
        if worker.rank == 0 and before is not None:  # before the records are looked at: the cause is told first
            check_inputs(before, files_of(task), resume.allowed)
        train, test, weights = _prepared(task, ds_config, worker, together)
        if worker.rank == 0 and before is not None:
            check_fingerprints(before, weights, task, resume.allowed)
    data = data_plan(config, train, batch, worker.world_size)
    steps, total = resolve_steps(config, data.samples_per_epoch, batch.total)
    return Plan(
        config=config, preset=preset, ds_config=ds_config, batch=batch, task=task, train=train, test=test,
        data=replace(data, total_samples=total), steps=steps, device=device, run_dir=run_dir, resume=resume,
        began_with=worker.world_size if before is None else before.record().get("began_with", worker.world_size),
        processes_here=worker.local_size, fingerprints=weights,
    )  # fmt: skip


def _prepared(
    task: Task, ds_config: Mapping[str, Any], worker: Worker, together: Rendezvous | None
) -> tuple[Sequence[Any], Sequence[Any] | None, dict[str, Any]]:
    """Both splits, and on rank 0 the fingerprints: what may take long where a cache is cold. Raises UsageError."""
    task.check()
    if worker.rank == 0:
        check_trackers(task.recipe.log)
    # Of a task whose examples do not come from the cache, each process has to make its own: none need wait.
    with together.first_of_host() if together and isinstance(task, TextTask) else contextlib.nullcontext():
        train, test = task.examples("train"), task.examples("eval")
    if not train:
        raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
    if worker.rank > 0:
        return train, test, {}
    return train, test, {**fingerprints(task, ds_config), "inputs": inputs_of(task, train, test)}


def device_of(device: torch.device) -> Device:
    """What this process computes on, for presets."""
    if device.type == "cpu":
        return Device("cpu", True)
    return Device("cuda", torch.cuda.is_bf16_supported(including_emulation=False))


def data_plan(config: RunConfig, train: Sequence[Any], batch: BatchPlan, world_size: int) -> DataPlan:
    """The order of the samples; a task's examples may say how they are made up of weighted sources, and how long they are."""
    return DataPlan(
        sizes=tuple(getattr(train, "sizes", (len(train),))),
        weights=getattr(train, "weights", None),
        seed=config.seed,
        samples_per_step=batch.total,
        world_size=world_size,
        accumulate=batch.accumulate,
        lengths=lengths_of(train),
    )
