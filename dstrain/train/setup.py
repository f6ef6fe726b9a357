"""Put a run together, in the order in which things can go wrong cheaply: recipe, data, then processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any, TextIO

from dstrain.data.loading.loader import Loader
from dstrain.distributed.world import TorchWorld, World, destroy_process_groups, init_process_group
from dstrain.errors import EXIT_STOPPED, CheckpointError, RunError, UsageError
from dstrain.launch.lease import check_lease
from dstrain.models.params.freeze import build_param_groups, summarize_components
from dstrain.models.zero3 import zero3_init
from dstrain.report.meter import Meter
from dstrain.report.run_log import RunLog
from dstrain.schedule import Every, LRSchedule, scale_lr
from dstrain.tasks.common.registry import copy_task_file
from dstrain.train.build_model import batch_norm_warnings, build_train_module, count_parameters
from dstrain.train.checkpoint.checkpoints import CheckpointStore
from dstrain.train.checkpoint.disk_space import (
    DiskForecast,
    check_disk_space,
    compute_max_checkpoints,
    ensure_disk_space,
    get_free_bytes,
)
from dstrain.train.checkpoint.saver import CheckpointSaver
from dstrain.train.engine.deepspeed import DeepSpeedEngine
from dstrain.train.evaluate import Evaluation
from dstrain.train.health.grace import GracePeriod
from dstrain.train.health.nonfinite import NonFiniteGuard
from dstrain.train.health.signals import SignalHandler, StoppedBySignal
from dstrain.train.health.trainability import TrainabilityCheck
from dstrain.train.health.watchdog import peer_watchdog
from dstrain.train.plan import RunPlan
from dstrain.train.precompute_reference import ReferenceJob, add_reference_outputs
from dstrain.train.profiler import StepProfiler
from dstrain.train.resume.changes import iter_resume_changes
from dstrain.train.resume.fingerprints import check_fingerprints
from dstrain.train.run import Run
from dstrain.train.run_dir import (
    archive_previous_run,
    check_run_dir_shared,
    dump_training_recipe,
    find_checkpoint_at,
    get_library_versions,
    get_run_dir,
    replace_folder,
    write_run_config,
)
from dstrain.train.startup import finish_run, make_sinks, report_changes, report_start, report_warnings
from dstrain.train.state.files import check_state_complete
from dstrain.train.state.load import estimate_checkpoint_bytes
from dstrain.train.state.manifest import CheckpointInfo
from dstrain.units import format_count


def run_training(plan: RunPlan, terminal: TextIO | None, signal_handler: SignalHandler, store: Any = None) -> int:
    """Join the other processes, train, and leave. Returns the exit code. Collective.

    `screen`: rank 0's terminal. `store`: where the processes met (`Rendezvous.store`).

    Raises LostError where another process ends or falls silent, Interrupted for a signal before the first step.
    """
    timeout = timedelta(minutes=plan.config.timeout_minutes)
    init_process_group(plan.device, timeout, store)
    try:
        world = TorchWorld(plan.device, timeout)
        with peer_watchdog(plan.run_dir, world, timeout):
            return _run_and_close(plan, world, terminal, signal_handler)
    finally:
        destroy_process_groups()


def _run_and_close(plan: RunPlan, world: World, terminal: TextIO | None, signal_handler: SignalHandler) -> int:
    run, code = None, 1
    try:
        check_run_dir_shared(plan.run_dir, world)
        archive_previous_run(plan.run_dir, plan.resume, world)
        run = build_run(with_reference_outputs(plan, world), world, terminal, signal_handler)
        code = finish_run(run, _train_to_end(run), plan.resume.source)
        return code
    except StoppedBySignal as stop:
        if run is not None:
            run.run_log.log_event(
                "stopped", step=run.start_checkpoint.step if run.start_checkpoint else 0, signal=stop.signal_name
            )
        code = EXIT_STOPPED
        raise
    finally:
        if run is not None:
            for sink in run.sinks:
                sink.close(code)
            run.run_log.close()


def _train_to_end(run: Run) -> int:
    """Train; the step that was reached. What a task finds wrong with its data in mid-training is no bad usage: it exits with 1."""
    from dstrain.train.loop import train

    try:
        return train(run).step
    except UsageError as error:
        raise RunError(str(error)) from error


def with_reference_outputs(plan: RunPlan, world: World) -> RunPlan:
    """The plan with a reference's answers in its samples, where the task keeps them. Collective."""
    asking = ReferenceJob(task=plan.task, ds_config=plan.ds_config, micro_batch_size=plan.batch.micro, world=world)
    train, test = add_reference_outputs(asking, (plan.train_dataset, plan.eval_dataset))
    assert train is not None
    return replace(plan, train_dataset=train, eval_dataset=test)


def build_run(
    plan: RunPlan, world: World, terminal: TextIO | None = None, signal_handler: SignalHandler | None = None
) -> Run:
    """Build model, engine and everything around them. Collective."""
    config, run_dir, save = plan.config, plan.run_dir, plan.config.save
    apart = world.new_group() if save.background else world
    checkpoints = CheckpointStore(
        folder=run_dir / "checkpoints", world=apart, keep=save.keep, keep_every=save.keep_every, best_mode=config.eval.best,
        check_usable=check_state_complete, check_owner=partial(check_lease, run_dir, plan.launch_id),
    )  # fmt: skip
    journal = RunLog(run_dir, world.rank)
    weights = world.broadcast(plan.fingerprints)
    start = find_start_checkpoint(plan, checkpoints, journal, world)
    if start:
        check_fingerprints(start, weights, plan.task, plan.resume.allowed_keys)
        report_changes(iter_resume_changes(start, plan, weights.get("inputs", {})), journal, world)
    if world.rank == 0:
        _write_run_files(plan, world, start)
    report_start(plan, journal, world, start)
    engine = _build_engine(plan, world, journal)
    return Run(
        engine=engine,
        loader=_build_loader(plan, world),
        evaluation=None if plan.eval_dataset is None else Evaluation(plan.task, plan.eval_dataset, plan.batch.micro),
        checkpoints=checkpoints,
        saver=_build_saver(plan, engine, checkpoints, journal, weights),
        start_checkpoint=start,
        run_log=journal,
        sinks=make_sinks(plan, journal, world, start, terminal),
        meter=Meter(world),
        profiler=StepProfiler(config.profile, run_dir / "profile", engine, plan.steps, journal.log_event),
        nonfinite_guard=NonFiniteGuard(config.on_nonfinite, plan.ds_config["fp16"]["enabled"], journal.log_event),
        trainability=TrainabilityCheck(engine, engine.train_module, journal.log_event),
        signal_handler=signal_handler or SignalHandler(),
        lr_schedule=LRSchedule(
            _scaled_lr(plan, config.optim.peak_lr), config.optim.schedule, plan.steps, config.optim.warmup
        ),
        seed=config.seed,
        total_steps=plan.steps,
        best_metric=config.eval.metric,
        log_every=Every(config.log.every),
        eval_every=Every(_interval_in_steps(plan, config.eval.every)),
        save_every=Every(_interval_in_steps(plan, save.every)),
    )


def _write_run_files(plan: RunPlan, world: World, start: CheckpointInfo | None) -> None:
    """What the run folder says of the run; a finished run that is started again keeps what it says."""
    if start is not None and start.step >= plan.steps and get_run_dir(start) == plan.run_dir:
        return
    write_run_config(plan.run_dir, plan.config, plan.ds_config, {"world_size": world.size, "preset": plan.preset.name})
    copy_task_file(plan.task, plan.run_dir)
    if (
        start is None
        or get_run_dir(start) != plan.run_dir
        or plan.resume.allowed_keys
        or not (plan.run_dir / "tokenizer").is_dir()
    ):
        replace_folder(plan.run_dir / "tokenizer", plan.task.save_extras)


def _build_saver(
    plan: RunPlan,
    engine: DeepSpeedEngine,
    checkpoints: CheckpointStore,
    run_log: RunLog,
    fingerprints: Mapping[str, Any],
) -> CheckpointSaver:
    """How checkpoints are written; says what they will take. Raises CheckpointError where not one fits."""
    save = plan.config.save
    size = estimate_checkpoint_bytes(engine.train_module, plan.config.optim.name)
    every = _interval_in_steps(plan, save.every)
    saves = -(-plan.steps // every)
    free = engine.world.broadcast(get_free_bytes(checkpoints.folder))  # one number, so that all ranks decide alike
    forecast = DiskForecast(size, compute_max_checkpoints(saves, save.keep, (every, save.keep_every)), free)
    run_log.log_event(
        "checkpoint_forecast", each=forecast.checkpoint_size, at_once=forecast.max_checkpoints, free=forecast.free_bytes
    )
    if (warning := check_disk_space(forecast, checkpoints.folder, save.prune_when_full)) and engine.world.rank == 0:
        run_log.log_event("warning", what=warning)
        print(warning, flush=True)
    return CheckpointSaver(
        checkpoints=checkpoints,
        engine=engine,
        run_info=_checkpoint_metadata(plan) | dict(fingerprints),
        log_event=run_log.log_event,
        checkpoint_size=size,
        background=save.background,
        is_state_on_nvme="nvme" in (plan.preset.offload_optimizer, plan.preset.offload_param),
        prune_when_full=save.prune_when_full,
        local_world_size=plan.local_world_size,
        grace=GracePeriod(plan.config.launch.grace_seconds, run_log.log_event, engine.world.rank == 0),
    )


def _interval_in_steps(plan: RunPlan, every: int | str) -> int:
    per_epoch = -(-plan.sample_plan.samples_per_epoch // plan.batch.total)
    return per_epoch if isinstance(every, str) else every


def _checkpoint_metadata(plan: RunPlan) -> dict[str, Any]:
    """What each checkpoint says of its run."""
    preset = plan.preset
    about: dict[str, Any] = {"recipe": dump_training_recipe(plan.config)}
    about |= {
        "preset": preset.name,
        "zero_stage": preset.stage,
        "steps": plan.steps,
        "versions": get_library_versions(),
    }
    return about | {"batch_total": plan.batch.total, "began_with": plan.initial_world_size}


def find_start_checkpoint(
    plan: RunPlan, checkpoints: CheckpointStore, run_log: RunLog, world: World
) -> CheckpointInfo | None:
    """The checkpoint to go on from; metrics.jsonl is cut back to its step. Collective."""
    removed = checkpoints.remove_incomplete()
    if plan.resume.source not in ("auto", "never"):
        chosen = find_checkpoint_at(plan.resume.source)
        start: CheckpointInfo | None = chosen
        passed_over: list[CheckpointInfo] = []
        if fault := checkpoints.find_fault(chosen.path):
            raise CheckpointError(f"--resume {plan.resume.source}: {chosen.path} is damaged ({fault}); choose another")
    else:
        start, passed_over = checkpoints.find_latest_valid()
        if start is None and passed_over:
            raise CheckpointError(
                f"{checkpoints.folder}: none of its {len(passed_over)} checkpoints is whole, {passed_over[0].path.name} is "
                f"{passed_over[0].status}; put a whole one there, or give a new --run-dir to begin anew"
            )
    if start is not None and plan.config.save.prune_when_full:  # metrics.jsonl is about to be written anew
        ensure_disk_space(checkpoints, start.size, True, run_log.log_event)
    for name in removed:
        run_log.log_event("partial_checkpoint_removed", checkpoint=name)
    for info in passed_over:
        run_log.log_event("checkpoint_passed_over", checkpoint=info.path.name, why=info.status)
    dropped = run_log.truncate_after(start.step if start else 0)
    if start:
        for name in checkpoints.supersede_newer(start):
            run_log.log_event("checkpoint_set_aside", checkpoint=name, why=f"the run goes on from step {start.step}")
        run_log.log_event("resumed", step=start.step, checkpoint=str(start.path), rows_dropped=dropped)
    return start


def _build_engine(plan: RunPlan, world: World, run_log: RunLog) -> DeepSpeedEngine:
    with zero3_init(plan.ds_config):
        objective = build_train_module(plan.task, run_log)
    groups = build_param_groups(objective.model, plan.config.optim)
    total, trained = count_parameters(objective.model)
    parts = summarize_components(objective.model, plan.config.optim, _scaled_lr(plan, 1.0))
    about = {"parts": [asdict(part) for part in parts]} if parts else {}
    run_log.log_event("model", parameters=total, trainable=trained, reference=plan.task.reference_kind, **about)
    report_warnings(batch_norm_warnings(objective.model), run_log, world)
    if world.rank == 0:
        print(f"model: {format_count(total)} parameters, {format_count(trained)} of them trained", flush=True)
        for part in parts:
            print(f"  {part}", flush=True)
        if objective.reference_model is not None:
            where = "in shards" if plan.preset.stage == 3 else "whole in every process; zero3 would shard it"
            print(f"reference: a frozen model beside it, {where}", flush=True)
    return DeepSpeedEngine(objective, groups, plan.config.optim, plan.ds_config, world)


def _scaled_lr(plan: RunPlan, lr: float) -> float:
    """A learning rate for as many processes as the run began with."""
    optim = plan.config.optim
    return scale_lr(lr, optim.scale_lr, plan.initial_world_size, optim.scale_lr_base)


def _build_loader(plan: RunPlan, world: World) -> Loader:
    data = plan.config.data
    return Loader(
        examples=plan.train_dataset,
        collate=plan.task.collate,
        sampler=plan.sample_plan,
        rank=world.rank,
        workers=data.workers,
        prefetch=data.prefetch,
        pin_memory=data.pin and world.device.type == "cuda",
    )
