"""Construction of a run from its plan: process group, model, engine, loader, saver, sinks."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from dstrain.config.schema import OptimConfig
from dstrain.distributed.world import World, joined_world
from dstrain.errors import EXIT_STOPPED, RunError, UsageError
from dstrain.launch.lease import check_lease
from dstrain.models.params import (
    COMPONENTS,
    build_param_groups,
    components_by_name,
    find_group_and_lr,
    full_numel,
    full_shape,
    unwrap_peft,
    zero3_init,
)
from dstrain.patching import installed_versions
from dstrain.process_setup import keep_freed_memory, log_if_slow, log_stdout
from dstrain.report.device_errors import explain_device_error
from dstrain.report.meter import Meter
from dstrain.report.run_log import RunLog
from dstrain.schedule import EarlyStopping
from dstrain.tasks.common.registry import copy_task_files
from dstrain.training.build_model import batch_norm_warnings, build_train_module, count_parameters
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.evaluate import Evaluation
from dstrain.training.fit_batch import build_fitting_engine
from dstrain.training.health.signals import GracePeriod, SignalHandler, StoppedBySignal
from dstrain.training.health.trainability import NonFiniteGuard, TrainabilityCheck
from dstrain.training.health.watchdog import peer_watchdog
from dstrain.training.input_digests import check_fingerprints, dump_training_recipe, with_selected_samples
from dstrain.training.memory import MemoryMonitor
from dstrain.training.messages import finish_run, iter_resume_changes, make_sinks, report_failure, report_start
from dstrain.training.plan import (
    RunPlan,
    build_loader,
    build_schedule,
    interval_in_steps,
    make_memory_monitor,
    scaled_lr,
)
from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select
from dstrain.training.profiler import StepProfiler
from dstrain.training.rendezvous import Rendezvous
from dstrain.training.run import Run, train
from dstrain.training.run_dir import LIBRARIES, archive_previous_run, replace_folder, save_base_config, write_run_config
from dstrain.training.saver import (
    CheckpointSaver,
    check_disk_space,
    compute_max_checkpoints,
    ensure_disk_space,
    get_free_bytes,
)
from dstrain.training.start import ResumePoint, get_run_dir
from dstrain.training.state.files import check_state_complete
from dstrain.training.state.manifest import CheckpointInfo
from dstrain.units import format_count

if TYPE_CHECKING:
    import torch

COMPILING = "building the engine; at the first start DeepSpeed compiles kernels, which can take minutes"


def run_training(plan: RunPlan, terminal: TextIO | None, signal_handler: SignalHandler, rendezvous: Rendezvous) -> int:
    """Join the process group, train, and leave it. Returns the exit code. Collective.

    `terminal` is that of rank 0, None on other ranks and without a terminal. Raises PeerFailureError if another process
    ends or stops responding, StoppedBySignal for a signal before the first step.
    """
    timeout = timedelta(minutes=plan.config.timeout_minutes)
    with (
        joined_world(plan.device, timeout, rendezvous.store) as world,
        peer_watchdog(rendezvous.liveness, plan.run_dir, world, timeout),
    ):
        world.share_sequences(plan.batch.sequence)
        memory = make_memory_monitor(plan, world)
        with memory.explain():
            return _run_and_close(plan, memory, terminal, signal_handler)


def _run_and_close(plan: RunPlan, memory: MemoryMonitor, terminal: TextIO | None, signal_handler: SignalHandler) -> int:
    run, code, world = None, 1, memory.world
    try:
        # Only now: a plan that is refused must leave an earlier run where it is.
        archive_previous_run(plan.run_dir, plan.resume, world)
        inputs = plan.task.loss_inputs
        if inputs.caches_outputs or inputs.select is not None:
            plan = with_frozen_outputs(plan, world)
        run = build_run(plan, world, terminal, signal_handler, memory)
        step = _train_to_end(run)
        memory.finish_comparison(run.run_log)
        if plan.config.save.copy_to:
            run.saver.wait_for_copies()
        code = finish_run(run, step, plan.resume.source)
        return code
    except StoppedBySignal as stop:
        if run is not None:
            run.run_log.log_event(
                "stopped", step=run.start_checkpoint.step if run.start_checkpoint else 0, signal=stop.signal_name
            )
        code = EXIT_STOPPED
        raise
    except Exception as error:
        where = ", ".join(filter(None, [f"rank {world.rank}", world.log.phase, world.log.activity]))
        failure = explain_device_error(error, world.device, where) or error
        if run is not None:
            report_failure(run, failure)
        if failure is error:
            raise
        raise failure from error
    finally:
        if run is not None:
            run.close(code)


def _train_to_end(run: Run) -> int:
    """Train and return the step that was reached.

    An error that a task finds in its data during training exits with 1 (run failed), not with 2
    (bad usage): processes have started and may have saved checkpoints.
    """
    try:
        return train(run).step
    except UsageError as error:
        raise RunError(str(error)) from error


def with_frozen_outputs(plan: RunPlan, world: World) -> RunPlan:
    """Return the plan with the outputs of the task's cached frozen models in its samples. Collective."""
    world.log.activity = "computing the outputs of frozen models"
    job = OutputsJob(task=plan.task, ds_config=plan.ds_config, micro_batch_size=plan.batch.micro, world=world)
    splits = add_outputs_and_select(job, {"train": plan.train_dataset, "eval": plan.eval_dataset})
    train_dataset = splits["train"]
    assert train_dataset is not None
    new_plan = replace(plan, train_dataset=train_dataset, eval_dataset=splits["eval"])
    if "inputs" in plan.fingerprints:  # on rank 0
        inputs = with_selected_samples(plan.fingerprints["inputs"], plan.task, train_dataset)
        new_plan = replace(new_plan, fingerprints={**plan.fingerprints, "inputs": inputs})
    is_shorter = len(train_dataset) < len(plan.train_dataset)
    return new_plan.with_training_samples(train_dataset, world.size) if is_shorter else new_plan


def build_run(
    plan: RunPlan,
    world: World,
    terminal: TextIO | None = None,
    signal_handler: SignalHandler | None = None,
    memory: MemoryMonitor | None = None,
) -> Run:
    """Build the components of a run, and write its configuration to the run folder. Collective."""
    config, run_dir, checkpoints = plan.config, plan.run_dir, _open_checkpoints(plan, world)
    run_id = find_run_id(plan)
    if config.save.copy_to is not None:
        _claim_copies(plan, world, run_id)
    run_log = RunLog(run_dir, world.rank, partial(check_lease, run_dir, plan.launch_id))
    weights = world.broadcast(plan.fingerprints)
    start = prepare_start(plan.start.point, checkpoints, run_log, config.save.prune_when_full)
    if start:
        check_fingerprints(start, weights, plan.task, plan.resume.allowed_keys)
        for change in iter_resume_changes(start, plan, weights.get("inputs", {})):
            run_log.announce(change.message, change.event_name, **change.event_fields)
    early_stopping = _build_early_stopping(plan, start)
    is_finished = start is not None and (start.step >= plan.steps or early_stopping.is_due)
    if world.rank == 0 and not (is_finished and start is not None and get_run_dir(start) == plan.run_dir):
        _write_run_files(plan, world, start)
    report_start(plan, run_log, world, start)
    memory = memory or make_memory_monitor(plan, world)
    build = partial(build_engine, world=world, run_log=run_log)
    if config.batch.on_oom == "shrink":
        plan, engine = build_fitting_engine(plan, memory, run_log, build)
    else:
        engine = build(plan)
    if world.device.type == "cpu":
        keep_freed_memory()  # only now: what loading the weights needed goes back to the kernel
    saver = _build_saver(plan, engine, checkpoints, run_log, {"run_id": run_id, **weights}, early_stopping)
    sinks, display = make_sinks(plan, run_log, world, start, terminal, is_finished)
    profiler = None
    if config.profile is not None:
        profiler = StepProfiler(config.profile, run_dir / "profile", engine, plan.steps, run_log.log_event)
    return Run(
        engine=engine,
        loader=build_loader(plan, world),
        evaluation=None
        if plan.eval_dataset is None
        else Evaluation(
            plan.task,
            plan.eval_dataset,
            plan.batch.generation_micro,
            config.eval.metric,
            plan.batch.to_config(config.batch),
        ),
        early_stopping=early_stopping,
        saver=saver,
        start_checkpoint=start,
        run_log=run_log,
        sinks=sinks,
        display=display,
        meter=Meter(world, plan.task.finish_metrics),
        profiler=profiler,
        trainability=TrainabilityCheck(engine, engine.train_module, run_log.log_event),
        nonfinite=NonFiniteGuard(config.on_nonfinite, plan.ds_config["fp16"]["enabled"], run_log.log_event),
        signal_handler=signal_handler or SignalHandler(),
        schedule=build_schedule(plan),
        memory=memory,
        seed=config.seed,
    )


def find_run_id(plan: RunPlan) -> str:
    """Return the id of the run: that of the checkpoint in its folder, else a new one. Rank 0's counts."""
    checkpoint = plan.start.point.checkpoint
    is_own = checkpoint is not None and get_run_dir(checkpoint).resolve() == plan.run_dir.resolve()
    # The other run may go on elsewhere, with that id.
    is_taken_over = plan.copy is not None and plan.copy.is_taken_over
    run_id = checkpoint.run_info.get("run_id") if checkpoint is not None and is_own and not is_taken_over else None
    return run_id if isinstance(run_id, str) else secrets.token_hex(8)


def _claim_copies(plan: RunPlan, world: World, run_id: str) -> None:
    """Record the run as the owner of its copies. Raises UsageError on every rank if another one was faster. Collective."""
    fault = ""
    if plan.copy is not None:  # on rank 0
        try:
            plan.copy.claim(run_id)
        except UsageError as error:
            fault = str(error)
    fault = world.broadcast(fault)
    if fault:
        raise UsageError(fault)


def _open_checkpoints(plan: RunPlan, world: World) -> CheckpointStore:
    """Return the checkpoints of the run. Collective for background saves."""
    save = plan.config.save
    # A background save exchanges values while training does: on one group the two would be mixed up.
    save_world = world.new_group() if save.background else world
    return CheckpointStore(
        folder=plan.run_dir / "checkpoints", world=save_world, keep=save.keep, keep_every=save.keep_every,
        check_usable=check_state_complete,
        in_use=lambda: plan.copy.in_use if plan.copy else (),
        check_owner=partial(check_lease, plan.run_dir, plan.launch_id),
    )  # fmt: skip


def _build_early_stopping(plan: RunPlan, start: CheckpointInfo | None) -> EarlyStopping:
    wanted = plan.config.eval
    early_stopping = EarlyStopping(metric=wanted.metric, mode=wanted.best, patience=wanted.patience)
    if start is not None:
        early_stopping.load_state_dict(start.run_info.get("early_stopping", {}))
    return early_stopping


def _write_run_files(plan: RunPlan, world: World, start: CheckpointInfo | None) -> None:
    """Write configuration, task file and tokenizer to the run folder."""
    write_run_config(plan.run_dir, plan.config, plan.ds_config, {"world_size": world.size, "preset": plan.preset.name})
    save_base_config(plan.task, plan.run_dir / "model")
    copy_task_files(plan.task, plan.run_dir)
    if (
        start is None
        or get_run_dir(start) != plan.run_dir
        or plan.resume.allowed_keys
        or not (plan.run_dir / "tokenizer").is_dir()
    ):
        replace_folder(plan.run_dir / "tokenizer", plan.task.export.save_extras)


def _build_saver(
    plan: RunPlan,
    engine: DeepSpeedEngine,
    checkpoints: CheckpointStore,
    run_log: RunLog,
    fingerprints: Mapping[str, Any],
    early_stopping: EarlyStopping,
) -> CheckpointSaver:
    """Build the saver and log a forecast of disk use. Raises CheckpointError if not even one checkpoint fits."""
    save = plan.config.save
    size = engine.train_module.stored_model.estimate_checkpoint_bytes(plan.config.optim.name)
    every = interval_in_steps(plan, save.every)
    saves = -(-plan.steps // every)
    free = engine.world.broadcast(get_free_bytes(checkpoints.folder))  # one number, so that all ranks decide alike
    count = compute_max_checkpoints(saves, save.keep, every, save.keep_every)
    run_log.log_event("checkpoint_forecast", each=size, at_once=count, free=free)
    if warning := check_disk_space(size, count, free, checkpoints.folder, save.prune_when_full):
        run_log.warn(warning)
    return CheckpointSaver(
        checkpoints=checkpoints,
        engine=engine,
        run_info={
            "recipe": dump_training_recipe(plan.config),
            "preset": plan.preset.name,
            "zero_stage": plan.preset.stage,
            "steps": plan.steps,
            "versions": installed_versions(LIBRARIES),
            "batch_total": plan.batch.total,
            **fingerprints,
        },
        log_event=run_log.log_event,
        checkpoint_size=size,
        background=save.background,
        is_state_on_nvme="nvme" in (plan.preset.offload_optimizer, plan.preset.offload_param),
        prune_when_full=save.prune_when_full,
        local_world_size=plan.local_world_size,
        copy=plan.copy,
        early_stopping=early_stopping,
        grace=GracePeriod(plan.config.launch.grace_seconds, run_log.log_event, engine.world.rank == 0),
    )


def build_engine(plan: RunPlan, world: World, run_log: RunLog) -> DeepSpeedEngine:
    """Build the model, its optimizer and the engine around both. Collective."""
    world.log.activity = "building the model"
    is_first = world.rank == 0
    # At stage 3 no rank could hold the whole model, so it is sharded as it is built.
    with log_if_slow("loading the model", is_first), zero3_init(plan.ds_config):
        train_module = build_train_module(plan.task, run_log)
    groups = build_param_groups(train_module.model, plan.config.optim)
    total, trained = count_parameters(train_module.model)
    components = summarize_components(train_module.model, plan.config.optim, scaled_lr(plan, 1.0))
    fields: dict[str, Any] = {"parts": [asdict(part) for part in components]} if components else {}
    reference = plan.task.loss_inputs.reference.kind
    scorers = {s.name: "cached" if s.is_cached else "model" for s in plan.task.loss_inputs.scorers}
    fields |= {"reward_models": scorers} if scorers else {}
    run_log.log_event("model", parameters=total, trainable=trained, reference=reference, **fields)
    for line in batch_norm_warnings(train_module.model):
        run_log.warn(line)
    if world.rank == 0:
        log_stdout(f"model: {format_count(total)} parameters, {format_count(trained)} of them trained")
        for part in components:
            log_stdout(f"  {part}")
        if train_module.reference_model is not None:
            where = "sharded" if plan.preset.stage == 3 else "replicated in every process; zero3 would shard it"
            log_stdout(f"reference: a frozen second model, {where}")
    world.log.activity = "building the engine and its optimizer"
    with log_if_slow(COMPILING, is_first):
        engine = DeepSpeedEngine(train_module, groups, plan.config.optim, plan.ds_config, world)
    world.log.activity = ""
    return engine


@dataclass(frozen=True)
class ComponentSummary:
    """Size and training settings of one component."""

    component: str
    num_parameters: int
    num_trainable: int
    peak_lrs: tuple[float, ...]
    """Peak learning rates of the trainable parameters, largest first."""

    def __str__(self) -> str:
        all_trained = self.num_trainable == self.num_parameters
        share = "all" if all_trained else f"{format_count(self.num_trainable)} of them"
        lrs = " and ".join(f"{lr:.3g}" for lr in self.peak_lrs)
        state = f"{share} trained at lr {lrs}" if self.num_trainable else "frozen"
        return f"{self.component:10} {format_count(self.num_parameters)} parameters, {state}"


def summarize_components(model: torch.nn.Module, optim: OptimConfig, lr_factor: float = 1.0) -> list[ComponentSummary]:
    """Return one summary per component; an empty list for a text-only model.

    `lr_factor` multiplies every rate (optim.scale_lr).
    """
    components, parameters = components_by_name(model), dict(unwrap_peft(model).named_parameters())
    summaries = []
    for component in COMPONENTS:
        names = [name for name, own in components.items() if own == component]
        if not names:
            continue
        trainable = [name for name in names if parameters[name].requires_grad]
        own_lrs = (
            find_group_and_lr(name, component, optim, len(full_shape(parameters[name])))[1] for name in trainable
        )
        lrs = {(optim.peak_lr if lr is None else lr) * lr_factor for lr in own_lrs}
        total, trained = (sum(full_numel(parameters[name]) for name in some) for some in (names, trainable))
        summaries.append(ComponentSummary(component, total, trained, tuple(sorted(lrs, reverse=True))))
    return summaries


def prepare_start(
    point: ResumePoint, checkpoints: CheckpointStore, run_log: RunLog, prune_when_full: bool
) -> CheckpointInfo | None:
    """Make the run folder fit the start: no partial or newer checkpoints, no later rows in metrics.jsonl.

    Returns the checkpoint to continue from, None if a new run begins. Collective.
    """
    removed, checkpoint = checkpoints.remove_incomplete(), point.checkpoint
    is_own = checkpoint is not None and checkpoint.path.parent.resolve() == checkpoints.folder.resolve()
    if checkpoint is not None and is_own and checkpoint.path.suffix == ".old":
        # Left by a process that was killed between the two renames of a commit; the cleanup has restored its name.
        checkpoint = replace(checkpoint, path=checkpoint.path.with_suffix(""))
    if checkpoint is not None and prune_when_full:  # the events below take room
        ensure_disk_space(checkpoints, checkpoint.size, True, run_log.log_event)
    for name in removed:
        run_log.log_event("partial_checkpoint_removed", checkpoint=name)
    for info in point.skipped:
        run_log.log_event("checkpoint_skipped", checkpoint=info.path.name, why=info.status)
    # Rows after the checkpoint will be written again.
    dropped = run_log.truncate_after(point.step)
    if checkpoint is not None:
        why = f"the run continues from step {checkpoint.step}"
        for name in checkpoints.supersede_newer(checkpoint):
            run_log.log_event("checkpoint_superseded", checkpoint=name, why=why)
        run_log.log_event("resumed", step=checkpoint.step, checkpoint=str(checkpoint.path), rows_dropped=dropped)
    return checkpoint
