"""dstrain bench: speed and memory of a recipe's training steps."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.commands.run_job import SINGLE_WORKER, Job
from dstrain.commands.trained_model import hash_weights
from dstrain.config import Recipe, RunConfig
from dstrain.ds_config import Device
from dstrain.launch.topology import worker_from_env
from dstrain.preset import read_preset
from dstrain.tasks import make_task
from dstrain.training.start import ResumeOptions
from dstrain.units import format_count

if TYPE_CHECKING:
    import torch

    from dstrain.batch import Batch
    from dstrain.data.loading.loader import Loader
    from dstrain.distributed.world import World
    from dstrain.planner.lines import PlanInputs
    from dstrain.training.engine.deepspeed import DeepSpeedEngine
    from dstrain.training.memory import MemoryForecast
    from dstrain.training.plan import RunPlan

WARMUP_STEPS = 3
"""Steps before the measured ones: the first ones allocate memory and load kernels. Their operations are counted."""
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, kw_only=True)
class BenchJob(Job):
    """A job that takes training steps of a recipe and measures them: no evaluation, checkpoint or tracker."""

    request: TrainRequest
    steps: int
    """Measured steps, after WARMUP_STEPS others."""
    run_dir: Path
    trains = True

    def to_argv(self) -> list[str]:
        return ["bench", *self.request.recipe_argv(), "--steps", str(self.steps)]

    def check_recipe(self) -> RunConfig:
        config = self._recipe().config
        make_task(config).checks.required_keys()
        read_preset(config.ds_config)
        return config

    def _recipe(self) -> Recipe:
        """Return the recipe with as many steps as are taken, and without what is not measured."""
        changes = (
            f"steps={WARMUP_STEPS + self.steps}", "optim.warmup=0", "data.eval=null", "data.eval_fraction=0",
            "eval.generate=null", "log.tensorboard=false", "log.wandb=null", "profile=null",
        )  # fmt: skip
        recipe = resolve_recipe(self.request)  # first as it is, so that its own faults are the ones reported
        changed = resolve_recipe(replace(self.request, overrides=(*self.request.overrides, *changes), resume="never"))
        return replace(changed, name=recipe.name)

    def prepare(self, world_size: int, device: Device) -> RunPlan:
        import os

        from dstrain.training.plan import make_plan

        worker = worker_from_env(os.environ) or SINGLE_WORKER
        return make_plan(self._recipe(), self.run_dir, ResumeOptions("never"), worker)

    def cache_weight_hashes(self, prepared: RunPlan) -> None:
        hash_weights(prepared.task, include_base=False)

    def run(self, prepared: RunPlan, world: World) -> dict[str, Any]:
        from dstrain.training.list_parameters import list_base_parameters
        from dstrain.training.plan import make_memory_monitor

        memory = make_memory_monitor(prepared, world)
        with memory.explain():
            row = self._run(prepared, world)
        forecast = memory.make_forecast(list_base_parameters)
        if forecast is None:
            return row | {"plan": None, "roofline": None}
        roofline = compare_with_bound(forecast.inputs, row)
        return row | {"plan": compare_with_plan(forecast, row), "roofline": roofline}

    def _run(self, plan: RunPlan, world: World) -> dict[str, Any]:
        from dstrain.report.run_log import RunLog
        from dstrain.training.build_model import count_parameters
        from dstrain.training.build_run import build_engine, with_frozen_outputs

        plan = with_frozen_outputs(plan, world)
        with contextlib.closing(RunLog(plan.run_dir, world.rank)) as run_log:
            engine = build_engine(plan, world, run_log)
        total, trained = count_parameters(engine.train_module.model)
        return {
            "task": plan.config.task,
            "preset": plan.preset.name,
            "device": _device_name(world.device),
            "precision": _precision(plan.ds_config),
            "processes": world.size,
            "batch": {"total": plan.batch.total, "micro": plan.batch.micro, "accumulate": plan.batch.accumulate},
            "parameters": total,
            "trained_parameters": trained,
            "warmup_steps": WARMUP_STEPS,
            **_measure(engine, plan, self.steps),
        }


def compare_with_plan(forecast: MemoryForecast, row: Mapping[str, Any]) -> dict[str, float | None]:
    """Return predicted and measured GiB of one kind each: tensors, and on a GPU all of its memory too."""
    total = max(row["process_memory_gib"], default=None)
    if row["peak_memory_gib"] is None:  # on a CPU, where the process's host memory is measured
        return {"predicted_gib": forecast.device_bytes / 2**30, "measured_gib": total}
    return {
        "predicted_gib": forecast.tensor_bytes / 2**30,
        "measured_gib": max(row["peak_memory_gib"]),
        "predicted_total_gib": forecast.device_bytes / 2**30,
        "measured_total_gib": total,
    }


def compare_with_bound(inputs: PlanInputs | None, row: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return computed operations, bytes and bound of the mean measured pass, and the share of the bound that is reached.

    Computed are all places of the input ids: more than the tokens with padding, and fewer where answers share a prompt,
    whose tokens count for each. `inputs`: of the run's plan. None for models whose layers the planner does not know.
    """
    from dstrain.planner.roofline import compute_roofline

    mean_pass = row["mean_pass"]
    if inputs is None or not mean_pass["tokens"]:
        return None
    planned = inputs.workload
    rows = mean_pass["samples"] * inputs.shape.task.rows_per_sample
    share = rows / planned.rows  # of the plan's largest pass
    places = max(1, round(mean_pass["positions"] or mean_pass["tokens"]))
    per_token = places / mean_pass["tokens"]
    workload = replace(
        planned, rows=max(1, round(rows)), tokens=places, targets=min(places, round(mean_pass["targets"]) or places),
        images=round(planned.images * share), image_tokens=round(planned.image_tokens * share),
    )  # fmt: skip
    values = compute_roofline(replace(inputs, workload=workload), [row["device"]])
    if values is None:
        return None
    kernels, reached = values["kernels"], None
    bound = values["bounds"].get(row["device"], {}).get(kernels)
    if bound is not None:
        bound["tokens_per_second"] /= per_token
        reached = row["tokens_per_second"] / row["processes"] / bound["tokens_per_second"]
    return {
        "kernels": kernels,
        "flops_per_token": values["flops_per_token"] * per_token,
        "recomputed_flops_per_token": values["recomputed_flops_per_token"] * per_token,
        "bytes_per_token": values["bytes_per_token"][kernels] * per_token,
        "bound": bound,
        "share_of_bound": reached,
    }


@dataclass(frozen=True)
class _StepRecord:
    """One step of this rank."""

    seconds: float
    samples: int
    tokens: int
    positions: int
    """Places of the input ids; 0 for batches without any."""
    padding: int
    """Places among them that hold no token."""
    targets: int = 0
    """Tokens in the loss; 0 for batches without a mask of them."""
    passes: int = 1


def _measure(engine: DeepSpeedEngine, plan: RunPlan, steps: int) -> dict[str, Any]:
    """Take the warm-up steps and `steps` others; return their figures, over all ranks. Collective."""
    from dstrain.planner.gpu_peaks import find_peak_flops
    from dstrain.report.flops import StepFlops
    from dstrain.report.memory import host_memory_gib, measure_peak, peak_memory_gib
    from dstrain.training.plan import build_loader

    world, loader = engine.world, build_loader(plan, engine.world)
    module = engine.train_module
    records = _iter_steps(engine, plan, loader)
    with StepFlops(module, module.model) as flops:
        warmup = [next(records) for _ in range(WARMUP_STEPS)]
    loader.pop_wait_seconds()
    measured = [next(records) for _ in range(steps)]
    peak = measure_peak(world.device).total
    ranks = world.gather(
        {
            "steps": measured,
            "wait": loader.pop_wait_seconds(),
            "flops": flops.total,
            "counted_tokens": sum(record.tokens for record in warmup),
            "peak_memory_gib": peak_memory_gib(world.device),
            "host_memory_gib": host_memory_gib(),
            "process_memory_gib": None if peak is None else peak / 2**30,
        }
    )
    has_peak = world.device.type == "cuda" and _precision(plan.ds_config) != "fp32"
    return summarize(ranks, find_peak_flops(_device_name(world.device)) if has_peak else None)


def _iter_steps(engine: DeepSpeedEngine, plan: RunPlan, loader: Loader) -> Iterator[_StepRecord]:
    """Yield each step after it was taken, in the order of the run. Collective."""
    import torch

    from dstrain.training.engine.base import seed_step
    from dstrain.training.plan import build_schedule

    device, schedule = engine.world.device, build_schedule(plan)
    steps = loader.iter_steps(0)
    for index in range(plan.steps):
        start = time.perf_counter()
        batches = next(steps).batches
        seed_step(plan.config.seed, index, engine.world.rank)
        result = engine.step(batches, schedule.lr(index))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - start
        yield _StepRecord(seconds, result.samples, result.tokens, *_count_places(batches), len(batches))


def _count_places(batches: Sequence[Batch]) -> tuple[int, int, int]:
    """Return (places of the input ids, those without a token, targets); without an attention mask none is padding."""
    places = padding = targets = 0
    for batch in batches:
        tensors = batch.tensors
        if "input_ids" not in tensors:
            continue
        shared = 1 if batch.sequence is None else batch.sequence.size
        places += tensors["input_ids"].numel() // shared
        if "attention_mask" in tensors:
            padding += int((tensors["attention_mask"] == 0).sum())
        if "loss_mask" in tensors:
            targets += int(tensors["loss_mask"].sum())
    return places, padding, targets


def summarize(ranks: Sequence[Mapping[str, Any]], peak_flops: float | None) -> dict[str, Any]:
    """Return the figures of all ranks' records; the time of a step is that of the slowest rank."""
    seconds = np.array([[record.seconds for record in rank["steps"]] for rank in ranks]).max(0)  # (steps,)
    records = [record for rank in ranks for record in rank["steps"]]
    total, tokens = float(seconds.sum()), sum(record.tokens for record in records)
    places = sum(record.positions for record in records)
    counted = sum(rank["counted_tokens"] for rank in ranks)
    # Operations were counted in the warm-up steps, whose samples have other lengths.
    flops = sum(rank["flops"] for rank in ranks) / counted * tokens if counted else None
    passes = sum(record.passes for record in records)
    memory = [rank["peak_memory_gib"] for rank in ranks]
    process_memory = [rank["process_memory_gib"] for rank in ranks]
    return {
        "steps": len(seconds),
        "tokens_per_second": tokens / total,
        "samples_per_second": sum(record.samples for record in records) / total,
        "step_seconds": {"mean": total / len(seconds)}
        | {f"p{rank}": float(np.percentile(seconds, rank)) for rank in PERCENTILES},
        "mean_pass": {
            "tokens": tokens / passes,
            "positions": places / passes,
            "targets": sum(record.targets for record in records) / passes,
            "samples": sum(record.samples for record in records) / passes,
        },
        "data_wait_share": sum(rank["wait"] for rank in ranks) / len(ranks) / total,
        "padding_share": sum(record.padding for record in records) / places if places else None,
        "flops_per_step": flops / len(seconds) if flops else None,
        "peak_flops": peak_flops,
        "mfu": flops / total / peak_flops / len(ranks) if flops and peak_flops else None,
        "peak_memory_gib": None if None in memory else memory,
        "host_memory_gib": [rank["host_memory_gib"] for rank in ranks],
        "process_memory_gib": [size for size in process_memory if size is not None],
    }


def _device_name(device: torch.device) -> str:
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _precision(ds_config: Mapping[str, Any]) -> str:
    return next((name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")), "fp32")


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{100 * value:.3g} %"


def _gib(values: Sequence[float] | None) -> str:
    return "unknown" if values is None else ", ".join(f"{value:.3g} GiB" for value in values)


def _most(values: Sequence[float | None]) -> list[float] | None:
    """Return the largest of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return [max(known)] if known else None


def _describe_pair(plan: Mapping[str, float | None], predicted: str, measured: str) -> str:
    return f"predicted {_gib(_most([plan[predicted]]))}, measured {_gib(_most([plan[measured]]))}"


def _describe_bound(roofline: Mapping[str, Any] | None) -> dict[str, str]:
    """Return rows with what is computed, and not measured."""
    if roofline is None:
        return {"per token": "unknown", "bound": "unknown"}
    bound = roofline["bound"]
    reached = "unknown"
    if bound is not None:
        speed = format_count(bound["tokens_per_second"])
        reached = f"{speed} tokens/s of a process, by {bound['by']}; {_share(roofline['share_of_bound'])} of it reached"
    return {
        "per token": f"{format_count(roofline['flops_per_token'])} FLOPs and "
        f"{format_count(roofline['recomputed_flops_per_token'])} recomputed, {format_count(roofline['bytes_per_token'])} "
        f"bytes moved in memory (computed; kernels: {roofline['kernels']})",
        "bound": reached,
    }


def show_bench(row: Mapping[str, Any]) -> str:
    """Return the figures as a table."""
    times, batch, plan = row["step_seconds"], row["batch"], row.get("plan")
    planned = f"no prediction, measured {_gib(_most(row['process_memory_gib']))}"
    if plan:
        planned = _describe_pair(plan, "predicted_gib", "measured_gib")
    if plan and "measured_total_gib" in plan:
        planned = f"tensors {planned}; GPU {_describe_pair(plan, 'predicted_total_gib', 'measured_total_gib')}"
    lines = {
        "run": f"{row['task']}, preset {row['preset']}, {row['precision']}, {row['processes']} x {row['device']}",
        "model": f"{format_count(row['parameters'])} parameters, {format_count(row['trained_parameters'])} of them trained",
        "batch": f"{batch['total']} samples a step, up to {batch['micro']} in a forward pass",
        "steps": f"{row['steps']} measured, after {row['warmup_steps']} others",
        "tokens/s": format_count(row["tokens_per_second"]),
        "samples/s": f"{row['samples_per_second']:.4g}",
        "step": f"mean {times['mean']:.4g} s, "
        + ", ".join(f"p{rank} {times[f'p{rank}']:.4g} s" for rank in PERCENTILES),
        "waiting for data": _share(row["data_wait_share"]),
        "padding": _share(row["padding_share"]),
        "FLOPs per step": "unknown" if row["flops_per_step"] is None else format_count(row["flops_per_step"]),
        "MFU": _share(row["mfu"]),
        **_describe_bound(row.get("roofline")),
        "peak GPU memory": _gib(row["peak_memory_gib"]),
        "peak host memory": _gib(row["host_memory_gib"]),
        "plan": planned,
    }
    return "\n".join(f"{name:18} {value}" for name, value in lines.items())
