"""Put a run together, in the order in which things can go wrong cheaply: recipe, data, then processes."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch

from dstrain.config import BatchPlan, Recipe, RunConfig, resolve_batch, resolve_steps
from dstrain.data.loader import Loader
from dstrain.data.plan import DataPlan
from dstrain.errors import DataError
from dstrain.launch.command import free_port
from dstrain.launch.threads import cores_here, threads_per_process
from dstrain.launch.topology import Worker, wants_cpu
from dstrain.models.freeze import freeze, parameter_groups
from dstrain.models.sharded import numel, sharded_construction
from dstrain.preset import Device, Preset, read_preset
from dstrain.report.journal import Journal
from dstrain.report.meter import Meter
from dstrain.report.sinks import Console, Jsonl, Sink, TensorBoard, as_line
from dstrain.schedule import Every, LearningRate, scale
from dstrain.tasks import Task, make_task
from dstrain.train.checkpoint import Checkpoints
from dstrain.train.engine import DeepSpeedEngine, Objective
from dstrain.train.evaluate import Evaluation
from dstrain.train.folder import (
    Resume,
    check_resume,
    check_shared,
    check_writable,
    chosen_checkpoint,
    versions,
    write_start,
)
from dstrain.train.guard import NonFiniteGuard
from dstrain.train.interrupt import Interrupt
from dstrain.train.manifest import CheckpointInfo
from dstrain.train.settings import resolved_ds_config
from dstrain.train.state import Run
from dstrain.units import show_count
from dstrain.world import TorchWorld, World, close, join, set_timeouts


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


def set_up_process(worker: Worker, config: RunConfig) -> torch.device:
    """Threads, device and noise of this process, the same under every launcher."""
    os.environ.update(worker.environment)
    os.environ.setdefault("MASTER_PORT", str(free_port()))  # left open only where one process is alone
    torch.set_num_threads(threads_per_process(worker.local_size, cores_here()))
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.(distributed|jit)")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if wants_cpu(os.environ) or not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return torch.device("cpu")
    index = worker.local_rank % torch.cuda.device_count()  # Slurm may show each task one GPU
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def make_plan(recipe: Recipe, run_dir: Path, resume: Resume, worker: Worker) -> Plan:
    """Check and prepare everything that one process can check alone. Raises UsageError."""
    config = recipe.config
    check_writable(run_dir)
    device = set_up_process(worker, config)
    preset = read_preset(config.ds_config)
    batch = resolve_batch(config.batch, worker.world_size, preset.micro, preset.accumulate)
    ds_config = resolved_ds_config(config, preset, batch, (worker.world_size, device_of(device)), run_dir)
    task = make_task(config)
    task.check()
    check_resume(run_dir, resume, config, worker.world_size, preset.stage)
    train, test = task.examples("train"), task.examples("eval")
    if not train:
        raise DataError("data.train: holds no sample to train on; give a file with records that the task can use")
    data = data_plan(config, train, batch, worker.world_size)
    steps, total = resolve_steps(config, data.samples_per_epoch, batch.total)
    return Plan(
        config=config, preset=preset, ds_config=ds_config, batch=batch, task=task, train=train, test=test,
        data=replace(data, total_samples=total), steps=steps, device=device, run_dir=run_dir, resume=resume,
    )  # fmt: skip


def device_of(device: torch.device) -> Device:
    """What this process computes on, for presets."""
    if device.type == "cpu":
        return Device("cpu", True)
    return Device("cuda", torch.cuda.is_bf16_supported(including_emulation=False))


def data_plan(config: RunConfig, train: Sequence[Any], batch: BatchPlan, world_size: int) -> DataPlan:
    """The order of the samples; a task's examples may say how they are made up of weighted sources."""
    return DataPlan(
        sizes=tuple(getattr(train, "sizes", (len(train),))),
        weights=getattr(train, "weights", None),
        seed=config.seed,
        samples_per_step=batch.total,
        world_size=world_size,
        accumulate=batch.accumulate,
    )


def run_training(plan: Plan, screen: TextIO | None) -> int:
    """Join the other processes, train, and leave. Returns the exit code. `screen`: rank 0's terminal. Collective."""
    from dstrain.train.loop import train

    timeout = timedelta(minutes=plan.config.timeout_minutes)
    join(plan.device, timeout)
    run = None
    try:
        world = TorchWorld(plan.device, timeout)
        check_shared(plan.run_dir, world)
        run = assemble(plan, world, screen)
        set_timeouts(timeout)  # DeepSpeed has made groups of its own meanwhile
        return finish(run, train(run).step)
    finally:
        if run is not None:
            for sink in run.sinks:
                sink.close()
            run.journal.close()
        close()


def finish(run: Run, step: int) -> int:
    """Say how it ended; the exit code."""
    folder = run.checkpoints.folder.parent
    if step < run.steps:
        run.journal.event("stopped", step=step, signal=run.interrupt.received)
        line, code = f"stopped at step {step} of {run.steps}; the same command goes on from there", 75
    elif run.start is not None and run.start.step >= run.steps:
        run.journal.event("already_finished", step=step)
        line, code = f"this run is finished already: all {run.steps} steps are done", 0
    else:
        run.journal.event("finished", step=step)
        line, code = f"finished: {run.steps} steps", 0
    if run.engine.world.rank == 0:
        print("\n".join(filter(None, [line, last_held_out(folder), f"run folder: {folder}"])), flush=True)
    return code


def last_held_out(run_dir: Path) -> str:
    """The last held-out numbers of a run, for people."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    tests = [row for row in rows if row["split"] == "eval"]
    return f"held-out: {as_line(tests[-1], tests[-1]['step'])}" if tests else ""


def assemble(plan: Plan, world: World, screen: TextIO | None = None) -> Run:
    """Build model, engine and everything around them. Collective."""
    config, run_dir = plan.config, plan.run_dir
    save, best = config.save, config.eval.best
    folder = run_dir / "checkpoints"
    checkpoints = Checkpoints(folder=folder, world=world, keep=save.keep, keep_every=save.keep_every, best=best)
    journal = Journal(run_dir, world.rank)
    start = _starting_point(plan, checkpoints, journal, world)
    if world.rank == 0:
        write_start(run_dir, config, plan.ds_config, {"world_size": world.size, "preset": plan.preset.name})
        plan.task.save_extras(run_dir / "tokenizer")
    _describe_start(plan, journal, world, start)
    engine = _engine(plan, world, journal)
    per_epoch = -(-plan.data.samples_per_epoch // plan.batch.total)
    peak = scale(config.optim.lr, config.optim.scale_lr, world.size, config.optim.scale_lr_base)
    return Run(
        engine=engine,
        loader=_loader(plan, world),
        evaluation=None if plan.test is None else Evaluation(plan.task, plan.test, plan.batch.micro),
        checkpoints=checkpoints,
        start=start,
        journal=journal,
        sinks=_sinks(plan, journal, start, screen) if world.rank == 0 else (),
        meter=Meter(world),
        guard=NonFiniteGuard(config.on_nonfinite, plan.ds_config["fp16"]["enabled"], journal.event),
        interrupt=Interrupt(world),
        lr=LearningRate(peak, config.optim.schedule, plan.steps, config.optim.warmup),
        seed=config.seed,
        steps=plan.steps,
        metric=config.eval.metric,
        log=Every(config.log.every),
        test=Every(per_epoch if config.eval.every == "epoch" else config.eval.every),
        save=Every(per_epoch if save.every == "epoch" else save.every),
        record=_record(plan),
    )


def _record(plan: Plan) -> dict[str, Any]:
    """What each checkpoint says of its run."""
    preset = plan.preset
    return {"preset": preset.name, "zero_stage": preset.stage, "steps": plan.steps, "versions": versions()}


def _starting_point(plan: Plan, checkpoints: Checkpoints, journal: Journal, world: World) -> CheckpointInfo | None:
    """The checkpoint to go on from; metrics.jsonl is cut back to its step. Collective."""
    removed = checkpoints.clean()
    if plan.resume.wanted not in ("auto", "never"):
        start: CheckpointInfo | None = chosen_checkpoint(plan.resume.wanted)
        passed_over: list[CheckpointInfo] = []
    else:
        start, passed_over = checkpoints.newest()
    for name in removed:
        journal.event("partial_checkpoint_removed", checkpoint=name)
    for info in passed_over:
        journal.event("checkpoint_passed_over", checkpoint=info.path.name, why=info.state)
    dropped = journal.cut_back(start.step if start else 0)
    if start:
        for name in checkpoints.set_aside_after(start):
            journal.event("checkpoint_set_aside", checkpoint=name, why=f"the run goes on from step {start.step}")
        journal.event("resumed", step=start.step, checkpoint=str(start.path), rows_dropped=dropped)
    return start


def _engine(plan: Plan, world: World, journal: Journal) -> DeepSpeedEngine:
    with sharded_construction(plan.ds_config):
        model = plan.task.build_model()
    freeze(model, plan.config.model.freeze)
    groups = parameter_groups(model, plan.config.optim)
    trained = sum(numel(p) for p in model.parameters() if p.requires_grad)
    total = sum(numel(p) for p in model.parameters())
    journal.event("model", parameters=total, trainable=trained)
    if world.rank == 0:
        print(f"model: {show_count(total)} parameters, {show_count(trained)} of them trained", flush=True)
    return DeepSpeedEngine(Objective(plan.task, model), groups, plan.config.optim, plan.ds_config, world)


def _loader(plan: Plan, world: World) -> Loader:
    data = plan.config.data
    return Loader(
        examples=plan.train,
        collate=plan.task.collate,
        plan=plan.data,
        rank=world.rank,
        workers=data.workers,
        prefetch=data.prefetch,
        pin=data.pin and world.device.type == "cuda",
    )


def _sinks(plan: Plan, journal: Journal, start: CheckpointInfo | None, screen: TextIO | None) -> list[Sink]:
    """Rank 0's. A terminal gets a progress bar, everything else lines."""
    sinks: list[Sink] = [Jsonl(journal), Console(plan.steps, screen)]
    if plan.config.log.tensorboard:
        sinks.append(TensorBoard(plan.run_dir, start.step if start else 0))
    return sinks


def _describe_start(plan: Plan, journal: Journal, world: World, start: CheckpointInfo | None) -> None:
    about = {
        "world_size": world.size,
        "preset": plan.preset.name,
        "batch": {"total": plan.batch.total, "micro": plan.batch.micro, "accumulate": plan.batch.accumulate},
        "steps": plan.steps,
        "train_samples": len(plan.train),
        "eval_samples": None if plan.test is None else len(plan.test),
    }
    journal.event("started", step=start.step if start else 0, **about)
    for split, examples in (("train", plan.train), ("eval", plan.test)):
        report = getattr(examples, "report", None)
        if report is not None:
            journal.event("data", split=split, **report)
    if world.rank == 0:
        print(
            f"{plan.config.task}: {len(plan.train)} samples, {plan.steps} steps of {plan.batch.total} samples "
            f"= {world.size} processes x {plan.batch.accumulate} x {plan.batch.micro}, preset {plan.preset.name}"
            + (f", going on from step {start.step}" if start else ""),
            flush=True,
        )
