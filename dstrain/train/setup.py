"""Put a run together, in the order in which things can go wrong cheaply: recipe, data, then processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, TextIO

from dstrain.data.loading.loader import Loader
from dstrain.distributed.world import TorchWorld, World, close, join
from dstrain.errors import CheckpointError, RunError, UsageError
from dstrain.launch.exit_code import STOPPED
from dstrain.launch.lease import check_lease
from dstrain.models.params.freeze import parameter_groups, part_counts
from dstrain.models.zero3 import sharded_construction
from dstrain.report.meter import Meter
from dstrain.report.run_log import Journal
from dstrain.schedule import Every, LearningRate, scale
from dstrain.tasks.common.registry import keep_task_file
from dstrain.train.build_model import build_objective, count, depends_on_split
from dstrain.train.checkpoint.checkpoints import Checkpoints
from dstrain.train.checkpoint.disk_space import Forecast, check_room, free_bytes, make_room, most_at_once
from dstrain.train.checkpoint.saver import Saving
from dstrain.train.engine.deepspeed import DeepSpeedEngine
from dstrain.train.evaluate import Evaluation
from dstrain.train.health.grace import Grace
from dstrain.train.health.nonfinite import NonFiniteGuard
from dstrain.train.health.signals import Interrupt, Interrupted
from dstrain.train.health.trainability import Learning
from dstrain.train.health.watchdog import watched
from dstrain.train.plan import Plan
from dstrain.train.precompute_reference import Asking, add_references
from dstrain.train.profiler import Profile
from dstrain.train.resume.changes import changes
from dstrain.train.resume.fingerprints import check_fingerprints
from dstrain.train.run import Run
from dstrain.train.run_dir import (
    check_shared,
    chosen_checkpoint,
    recorded_recipe,
    replace_folder,
    run_of,
    set_run_aside,
    versions,
    write_start,
)
from dstrain.train.startup import describe_start, finish, make_sinks, tell_changes, tell_warnings
from dstrain.train.state.files import check_complete
from dstrain.train.state.load import checkpoint_bytes
from dstrain.train.state.manifest import CheckpointInfo
from dstrain.units import show_count


def run_training(plan: Plan, screen: TextIO | None, interrupt: Interrupt, store: Any = None) -> int:
    """Join the other processes, train, and leave. Returns the exit code. Collective.

    `screen`: rank 0's terminal. `store`: where the processes met (`Rendezvous.store`).

    Raises LostError where another process ends or falls silent, Interrupted for a signal before the first step.
    """
    timeout = timedelta(minutes=plan.config.timeout_minutes)
    join(plan.device, timeout, store)
    try:
        world = TorchWorld(plan.device, timeout)
        with watched(plan.run_dir, world, timeout):
            return _trained(plan, world, screen, interrupt)
    finally:
        close()


def _trained(plan: Plan, world: World, screen: TextIO | None, interrupt: Interrupt) -> int:
    run, code = None, 1
    try:
        check_shared(plan.run_dir, world)
        set_run_aside(plan.run_dir, plan.resume, world)
        run = assemble(with_references(plan, world), world, screen, interrupt)
        code = finish(run, _learned(run), plan.resume.wanted)
        return code
    except Interrupted as stop:
        if run is not None:
            run.journal.event("stopped", step=run.start.step if run.start else 0, signal=stop.signal)
        code = STOPPED
        raise
    finally:
        if run is not None:
            for sink in run.sinks:
                sink.close(code)
            run.journal.close()


def _learned(run: Run) -> int:
    """Train; the step that was reached. What a task finds wrong with its data in mid-training is no bad usage: it exits with 1."""
    from dstrain.train.loop import train

    try:
        return train(run).step
    except UsageError as error:
        raise RunError(str(error)) from error


def with_references(plan: Plan, world: World) -> Plan:
    """The plan with a reference's answers in its samples, where the task keeps them. Collective."""
    asking = Asking(task=plan.task, ds_config=plan.ds_config, micro=plan.batch.micro, world=world)
    train, test = add_references(asking, (plan.train, plan.test))
    assert train is not None
    return replace(plan, train=train, test=test)


def assemble(plan: Plan, world: World, screen: TextIO | None = None, interrupt: Interrupt | None = None) -> Run:
    """Build model, engine and everything around them. Collective."""
    config, run_dir, save = plan.config, plan.run_dir, plan.config.save
    apart = world.apart() if save.background else world
    checkpoints = Checkpoints(
        folder=run_dir / "checkpoints", world=apart, keep=save.keep, keep_every=save.keep_every, best=config.eval.best,
        check=check_complete, owned=partial(check_lease, run_dir, plan.launch),
    )  # fmt: skip
    journal = Journal(run_dir, world.rank)
    weights = world.broadcast(plan.fingerprints)
    start = _starting_point(plan, checkpoints, journal, world)
    if start:
        check_fingerprints(start, weights, plan.task, plan.resume.allowed)
        tell_changes(changes(start, plan, weights.get("inputs", {})), journal, world)
    if world.rank == 0:
        _write_start(plan, world, start)
    describe_start(plan, journal, world, start)
    engine = _engine(plan, world, journal)
    return Run(
        engine=engine,
        loader=_loader(plan, world),
        evaluation=None if plan.test is None else Evaluation(plan.task, plan.test, plan.batch.micro),
        checkpoints=checkpoints,
        saving=_saving(plan, engine, checkpoints, journal, weights),
        start=start,
        journal=journal,
        sinks=make_sinks(plan, journal, world, start, screen),
        meter=Meter(world),
        profile=Profile(config.profile, run_dir / "profile", engine, plan.steps, journal.event),
        guard=NonFiniteGuard(config.on_nonfinite, plan.ds_config["fp16"]["enabled"], journal.event),
        learning=Learning(engine, engine.objective, journal.event),
        interrupt=interrupt or Interrupt(),
        lr=LearningRate(_rate(plan, config.optim.peak_lr), config.optim.schedule, plan.steps, config.optim.warmup),
        seed=config.seed,
        steps=plan.steps,
        metric=config.eval.metric,
        log=Every(config.log.every),
        test=Every(_steps_between(plan, config.eval.every)),
        save=Every(_steps_between(plan, save.every)),
    )


def _write_start(plan: Plan, world: World, start: CheckpointInfo | None) -> None:
    """What the run folder says of the run; a finished run that is started again keeps what it says."""
    if start is not None and start.step >= plan.steps and run_of(start) == plan.run_dir:
        return
    write_start(plan.run_dir, plan.config, plan.ds_config, {"world_size": world.size, "preset": plan.preset.name})
    keep_task_file(plan.task, plan.run_dir)
    if (
        start is None
        or run_of(start) != plan.run_dir
        or plan.resume.allowed
        or not (plan.run_dir / "tokenizer").is_dir()
    ):
        replace_folder(plan.run_dir / "tokenizer", plan.task.save_extras)


def _saving(
    plan: Plan, engine: DeepSpeedEngine, checkpoints: Checkpoints, journal: Journal, weights: Mapping[str, Any]
) -> Saving:
    """How checkpoints are written; says what they will take. Raises CheckpointError where not one fits."""
    save = plan.config.save
    size = checkpoint_bytes(engine.objective, plan.config.optim.name)
    every = _steps_between(plan, save.every)
    saves = -(-plan.steps // every)
    free = engine.world.broadcast(free_bytes(checkpoints.folder))  # one number, so that all ranks decide alike
    forecast = Forecast(size, most_at_once(saves, save.keep, (every, save.keep_every)), free)
    journal.event("checkpoint_forecast", each=forecast.each, at_once=forecast.at_once, free=forecast.free)
    if (warning := check_room(forecast, checkpoints.folder, save.prune_when_full)) and engine.world.rank == 0:
        journal.event("warning", what=warning)
        print(warning, flush=True)
    return Saving(
        checkpoints=checkpoints,
        engine=engine,
        record=_record(plan) | dict(weights),
        tell=journal.event,
        size=size,
        background=save.background,
        on_disk="nvme" in (plan.preset.offload_optimizer, plan.preset.offload_param),
        prune_when_full=save.prune_when_full,
        processes_here=plan.processes_here,
        grace=Grace(plan.config.launch.grace_seconds, journal.event, engine.world.rank == 0),
    )


def _steps_between(plan: Plan, every: int | str) -> int:
    per_epoch = -(-plan.data.samples_per_epoch // plan.batch.total)
    return per_epoch if isinstance(every, str) else every


def _record(plan: Plan) -> dict[str, Any]:
    """What each checkpoint says of its run."""
    preset = plan.preset
    about: dict[str, Any] = {"recipe": recorded_recipe(plan.config)}
    about |= {"preset": preset.name, "zero_stage": preset.stage, "steps": plan.steps, "versions": versions()}
    return about | {"batch_total": plan.batch.total, "began_with": plan.began_with}


def _starting_point(plan: Plan, checkpoints: Checkpoints, journal: Journal, world: World) -> CheckpointInfo | None:
    """The checkpoint to go on from; metrics.jsonl is cut back to its step. Collective."""
    removed = checkpoints.clean()
    if plan.resume.wanted not in ("auto", "never"):
        chosen = chosen_checkpoint(plan.resume.wanted)
        start: CheckpointInfo | None = chosen
        passed_over: list[CheckpointInfo] = []
        if fault := checkpoints.fault(chosen.path):
            raise CheckpointError(f"--resume {plan.resume.wanted}: {chosen.path} is damaged ({fault}); choose another")
    else:
        start, passed_over = checkpoints.newest()
        if start is None and passed_over:
            raise CheckpointError(
                f"{checkpoints.folder}: none of its {len(passed_over)} checkpoints is whole, {passed_over[0].path.name} is "
                f"{passed_over[0].state}; put a whole one there, or give a new --run-dir to begin anew"
            )
    if start is not None and plan.config.save.prune_when_full:  # metrics.jsonl is about to be written anew
        make_room(checkpoints, start.size, True, journal.event)
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
        objective = build_objective(plan.task, journal)
    groups = parameter_groups(objective.model, plan.config.optim)
    total, trained = count(objective.model)
    parts = part_counts(objective.model, plan.config.optim, _rate(plan, 1.0))
    about = {"parts": [asdict(part) for part in parts]} if parts else {}
    journal.event("model", parameters=total, trainable=trained, reference=plan.task.reference, **about)
    tell_warnings(depends_on_split(objective.model), journal, world)
    if world.rank == 0:
        print(f"model: {show_count(total)} parameters, {show_count(trained)} of them trained", flush=True)
        for part in parts:
            print(f"  {part}", flush=True)
        if objective.reference is not None:
            where = "in shards" if plan.preset.stage == 3 else "whole in every process; zero3 would shard it"
            print(f"reference: a frozen model beside it, {where}", flush=True)
    return DeepSpeedEngine(objective, groups, plan.config.optim, plan.ds_config, world)


def _rate(plan: Plan, lr: float) -> float:
    """A learning rate for as many processes as the run began with."""
    optim = plan.config.optim
    return scale(lr, optim.scale_lr, plan.began_with, optim.scale_lr_base)


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
