"""The DeepSpeed configuration of a run, also `ds_config: auto`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dstrain.config import BatchPlan, RunConfig
from dstrain.distributed.world import Ranks
from dstrain.errors import Fault, PresetError
from dstrain.launch.topology import Worker
from dstrain.planner.choose import AUTO, Budget, choose_preset
from dstrain.planner.workload import GPU_MEMORY_ENV, Cluster, detect_gpu_bytes, host_bytes, make_run_settings
from dstrain.preset import Device, Preset, complete_preset
from dstrain.process_setup import log_stdout
from dstrain.train.resume import ResumeOptions, find_resume_candidate, read_recorded_recipe


def resolve_ds_config(
    config: RunConfig, preset: Preset, batch: BatchPlan, world_size: int, device: Device, run_dir: Path
) -> dict[str, Any]:
    """Return the complete DeepSpeed JSON of a run. Imports no torch.

    Raises PresetError, or RecipeError if the recipe contradicts the preset or its precision.
    """
    settings = make_run_settings(config, preset, batch, world_size, device, str(run_dir / "nvme"))
    return complete_preset(preset, settings=settings)


def check_offload_folders(ds_config: Mapping[str, Any], run_dir: Path) -> None:
    """Raise PresetError if an NVMe offload folder of the preset is missing or not writable.

    DeepSpeed would create it on whatever disk is there. The default folder in the run folder is created.
    """
    zero, faults = ds_config["zero_optimization"], []
    for name in ("offload_optimizer", "offload_param"):
        path = zero.get(name, {}).get("nvme_path") if zero.get(name, {}).get("device") == "nvme" else None
        if path is None or Path(path) == run_dir / "nvme":
            continue
        if not Path(path).is_dir():
            problem, fix = "this folder does not exist on this machine", "create it on a local disk of every host"
        elif not os.access(path, os.W_OK | os.X_OK):
            problem, fix = "the folder is not writable", "change its permissions, or name another"
        else:
            continue
        faults.append(Fault(f"zero_optimization.{name}.nvme_path {path}", problem, fix))
    if faults:
        raise PresetError(faults)


def ds_config_warnings(ds_config: Mapping[str, Any]) -> list[str]:
    """Return warnings about this JSON for the start of a run."""
    several, stage = ds_config["gradient_accumulation_steps"] > 1, ds_config["zero_optimization"]["stage"]
    if not (several and ds_config["bf16"]["enabled"] and stage == 0):
        return []
    return [
        "at stage 0 DeepSpeed sums the gradients of several micro-batches in bf16, which loses precision; zero1 sums in fp32"
    ]


def batch_warnings(batch: BatchPlan, world_size: int) -> list[str]:
    """Return warnings about a batch that `world_size` processes share."""
    largest = batch.largest_micro(world_size)
    if batch.accumulate is None or batch.accumulate > 1 or largest >= batch.micro:
        return []
    return [
        f"batch.micro is {batch.micro}, but a step of {batch.total} samples on {world_size} processes takes at most {largest} "
        "in one forward pass; raise batch.total, or lower batch.micro"
    ]


AutoChoice = tuple[str, int | None]
"""Name of a preset, and `batch.micro`, None where the recipe decides it."""


def resolve_auto(
    config: RunConfig, run_dir: Path, resume: ResumeOptions, cluster: Cluster, devices: Sequence[str] = ()
) -> tuple[AutoChoice, str]:
    """Return the preset and micro-batch of a recipe with `ds_config: auto`, and the line that says why.

    A resumed run takes those that it was trained with. `devices`: the GPUs of the launch as CUDA_VISIBLE_DEVICES names
    them; empty: all. Raises PresetError where nothing fits, or the memory of the GPUs is not known.
    """
    candidate = find_resume_candidate(run_dir, resume)
    recorded = None if candidate is None else read_recorded_recipe(candidate)
    if candidate is not None and recorded is not None and recorded.ds_config != AUTO:
        is_open = (
            config.batch.micro is None and config.batch.accumulate is None and config.batch.tokens_per_micro is None
        )
        micro = recorded.batch.micro if is_open else None
        passes = "" if micro is None else f", batch.micro {micro}"
        return (
            recorded.ds_config,
            micro,
        ), f"ds_config auto: {recorded.ds_config}{passes}, as {candidate.path.name} was trained"
    choice = choose_preset(config, cluster, find_budget(cluster, devices))
    return (choice.preset, choice.micro), f"ds_config auto: {choice.reason}"


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


def apply_choice(config: RunConfig, chosen: AutoChoice) -> RunConfig:
    """Return the recipe with the preset and micro-batch."""
    name, micro = chosen
    values: dict[str, Any] = {"ds_config": name}
    if micro is not None:
        values["batch"] = config.batch.model_copy(update={"micro": micro})
    return config.model_copy(update=values)


def resolve_auto_on_rank_0(
    config: RunConfig, run_dir: Path, resume: ResumeOptions, worker: Worker, device: Device, world: Ranks
) -> RunConfig:
    """Return the recipe of a process that a launcher started, with what rank 0 decided. Collective for `auto`.

    Ranks would read different amounts of free memory while others already take some.
    """
    if config.ds_config != AUTO:
        return config
    cluster = Cluster(
        gpus_per_node=worker.local_world_size,
        nodes=max(1, worker.world_size // worker.local_world_size),
        kind=device.kind,
        bf16=device.bf16,
    )
    chosen: AutoChoice | None = None
    if world.rank == 0:
        chosen, line = resolve_auto(config, run_dir, resume, cluster)
        if worker.rank == 0:
            log_stdout(line)
    chosen = world.gather(chosen)[0]
    assert chosen is not None, "rank 0 decided, or raised on all"
    return apply_choice(config, (str(chosen[0]), chosen[1]))
