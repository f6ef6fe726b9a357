"""`dstrain train`: checks and launch, or training in a process that a launcher started."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from dstrain.commands.preflight import check_data, check_launch
from dstrain.commands.recipe_args import TrainRequest, get_run_dir, resolve_recipe
from dstrain.commands.runs import rewrite_report
from dstrain.config import Recipe, RunConfig, dump_recipe
from dstrain.ds_config import Device, batch_warnings, check_offload_folders, resolve_precision
from dstrain.errors import EXIT_FAILED, EXIT_STOPPED, EXIT_USAGE, ResumeError, UsageError
from dstrain.host_limits import describe_ignored_threads
from dstrain.launch.lease import Lease
from dstrain.launch.plan import Launch, LaunchOptions, cpu_overload_warning, plan_launch
from dstrain.launch.slurm import OUTPUT_FILE, SlurmLaunch, plan_slurm_launch, submit
from dstrain.launch.supervise import exit_without_workers, supervise
from dstrain.launch.topology import Worker, gpus_support_bf16
from dstrain.planner.choose import AUTO
from dstrain.planner.workload import Cluster
from dstrain.process_setup import handle_signals, limit_spinning, log_stderr, log_stdout
from dstrain.schedule import scale_lr
from dstrain.tasks import Task, make_task
from dstrain.training.run_dir import check_run_dir_writable, discard_run_dir
from dstrain.training.start import START_ENV, ResumeOptions, Start, decide_start, find_point_by_sizes
from dstrain.training.state.manifest import find_latest_complete, list_checkpoint_names

if TYPE_CHECKING:
    from dstrain.training.health.signals import SignalHandler


@dataclass(frozen=True, kw_only=True)
class TrainPlan:
    """What a launch runs: checked as far as it can be without torch, before any process starts."""

    recipe: Recipe
    run_dir: Path
    resume: ResumeOptions
    launch: Launch | SlurmLaunch
    task: Task
    device: Device
    """The device of the ranks, as far as this host knows."""
    start: Start
    ds_config: dict[str, Any]


def launch_training(request: TrainRequest, launch_options: Mapping[str, Any], dry_run: bool) -> int:
    """Check the recipe and start the ranks, each of which calls `train_as_rank`. Returns the exit code."""
    with handle_signals(exit_without_workers):
        plan = check_training(resume_on_restart(request, os.environ), launch_options, dry_run)
        if not dry_run:
            return run_plan(plan)
        if plan.start.auto:
            log_stderr(plan.start.auto)
        log_stdout(show_dry_run(plan))
        return 0


def check_training(request: TrainRequest, launch_options: Mapping[str, Any], dry_run: bool = False) -> TrainPlan:
    """Check what needs no torch, and decide what the run starts with. Raises UsageError.

    Before any process starts: a fault costs seconds here, minutes on a cluster.
    """
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    resume = ResumeOptions(request.resume, request.allowed_changes)
    options, arguments = LaunchOptions(**launch_options), request.to_argv(run_dir)
    launch: Launch | SlurmLaunch
    if options.launcher == "slurm":
        launch = plan_slurm_launch(options, arguments, os.environ, recipe.config.launch, run_dir)
    else:
        launch = plan_launch(options, arguments, os.environ, recipe.config.launch)
        threads = None if launch.hosts else int(launch.environment["OMP_NUM_THREADS"])
        for warning in (cpu_overload_warning(launch), describe_ignored_threads(os.environ, threads)):
            if warning:
                log_stderr(f"warning: {warning}")
    task = make_task(recipe.config)
    device = Device("cpu", True) if launch.use_cpu else Device("cuda", gpus_support_bf16() is not False)
    start = _decide_start(recipe.config, run_dir, resume, launch, device)
    if dry_run and device.kind == "cpu" and resolve_precision(start.preset, recipe.config.precision, device) == "fp16":
        log_stderr("warning: fp16 needs a GPU, and this machine shows none, where the launch itself would be refused")
        device = Device("cuda", bf16=False)
    ds_config = check_launch(task, start, run_dir, launch.world_size, device)
    check_data(task, start, resume.allowed_keys)
    if isinstance(launch, Launch) and not launch.hosts:  # on other hosts each rank checks its own folders
        check_offload_folders(ds_config, run_dir)
    return TrainPlan(
        recipe=recipe, run_dir=run_dir, resume=resume, launch=launch, task=task, device=device, start=start,
        ds_config=ds_config,
    )  # fmt: skip


def _decide_start(
    config: RunConfig, run_dir: Path, resume: ResumeOptions, launch: Launch | SlurmLaunch, device: Device
) -> Start:
    """Return what the run of a launch starts with on such a device."""
    devices: tuple[str, ...] = ()
    if isinstance(launch, SlurmLaunch):
        per_node, nodes = launch.tasks_per_node, launch.nodes
    elif launch.hosts:
        per_node, nodes = max(len(host.slots) for host in launch.hosts), len(launch.hosts)
    else:
        per_node, devices = len(launch.ranks), launch.devices
        nodes = max(1, launch.world_size // per_node)
    cluster = Cluster(gpus_per_node=per_node, nodes=nodes, kind=device.kind, bf16=device.bf16)
    point = find_point_by_sizes(run_dir, resume)
    return decide_start(config, resume, launch.world_size, cluster, point, devices)


def run_plan(plan: TrainPlan) -> int:
    """Submit the job, or start the ranks and wait for them. Returns the exit code."""
    launch, run_dir = plan.launch, plan.run_dir
    if isinstance(launch, SlurmLaunch):
        with hold_run_folder(run_dir, acquires=False):
            job = submit(launch)
        log_stdout(f"submitted job {job}; its output goes to {run_dir / OUTPUT_FILE.format(job=job)}")
        return 0
    code = _launch_ranks(plan, launch)
    if code == EXIT_FAILED and 0 in launch.ranks and has_progress(run_dir):
        rewrite_report(run_dir)  # rank 0 may have been killed before it wrote the last page
    return code


def train_in_process(request: TrainRequest) -> int:
    """Train in this process, after the checks of `launch_training`. Returns the exit code; raises DstrainError.

    Output stays where it is, so that there are no logs of ranks. The environment is restored.
    """
    limit_spinning()
    from dstrain.training.health.signals import SignalHandler, run_with_signals

    plan, environment = check_training(request, {"num_gpus": 1}), dict(os.environ)
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    worker, run_dir = Worker(0, 0, 1, "dstrain", 1, names), plan.run_dir
    signal_handler, is_folder_lost, code = SignalHandler(), False, EXIT_FAILED

    def stop_without_folder(reason: str) -> None:
        nonlocal is_folder_lost
        is_folder_lost, signal_handler.received_signal = True, "SIGTERM"

    try:
        with hold_run_folder(run_dir) as (lease, _), signal_handler:
            lease.on_lost = stop_without_folder
            start = plan.start.to_json(run_dir)
            run = partial(_run_rank, plan.recipe, run_dir, plan.resume, worker, lease, None, start)
            code = run_with_signals(run, signal_handler, run_dir)
            return code
    finally:
        # Later commands must not take this process for a rank.
        os.environ.clear()
        os.environ.update(environment)
        if signal_handler.received_signal and code != EXIT_STOPPED and not is_folder_lost:
            # It came before the first step or after the last one, so it has its usual effect.
            signal.raise_signal(signal.Signals[signal_handler.received_signal])


def _run_rank(
    recipe: Recipe, run_dir: Path, resume: ResumeOptions, worker: Worker, lease: Lease, screen: TextIO | None,
    start_handed_on: str, signal_handler: SignalHandler,
) -> int:  # fmt: skip
    """Train as one rank, whose rows go to `screen` if it is given. Returns the exit code."""
    from dstrain.training.build_run import run_training
    from dstrain.training.plan import make_plan
    from dstrain.training.rendezvous import Rendezvous

    rendezvous = Rendezvous(worker, timedelta(minutes=recipe.config.timeout_minutes))
    plan = make_plan(recipe, run_dir, resume, worker, rendezvous, start_handed_on)
    return run_training(replace(plan, launch_id=lease.launch_id), screen, signal_handler, rendezvous)


def resume_on_restart(request: TrainRequest, env: Mapping[str, str]) -> TrainRequest:
    """Return the request that resumes what this run has saved, whatever --resume says, in a restarted process.

    These are ranks that torchrun restarts, and requeued Slurm jobs.
    """
    if all(env.get(name, "0") == "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")):
        return request
    has_saved = request.run_dir is not None and find_latest_complete(request.run_dir / "checkpoints")
    return replace(request, resume="auto") if request.resume == "never" or has_saved else request


@contextlib.contextmanager
def hold_run_folder(
    run_dir: Path, acquires: bool = True, is_shared: bool = False
) -> Iterator[tuple[Lease, Callable[[], None]]]:
    """Create the run folder, and acquire its lease. Raises UsageError.

    A new folder is removed again if the run is refused inside, or ends before it starts, with nothing trained: by an
    exception, or where the caller says so by the function that is yielded. `is_shared`: other commands use the folder too.
    """
    is_new = not run_dir.exists() and not is_shared
    check_run_dir_writable(run_dir)

    def discard() -> None:
        if is_new and not has_progress(run_dir):
            discard_run_dir(run_dir)

    with Lease(run_dir) as lease:
        if acquires:
            lease.acquire()
        try:
            yield lease, discard
        except (UsageError, SystemExit):
            discard()
            raise


def _launch_ranks(plan: TrainPlan, launch: Launch) -> int:
    """Hold the run folder, start the processes and supervise them. Returns the exit code."""
    from dstrain.launch.hosts import MultiHostWorkerGroup, open_worker_group
    from dstrain.launch.worker import LAUNCH_ID_ENV, remove_worker_files

    # With --no-ssh each host has its own command: that of rank 0 holds the lease.
    is_shared = not launch.has_all_ranks
    with hold_run_folder(plan.run_dir, 0 in launch.ranks, is_shared) as (lease, discard):
        if not is_shared:
            remove_worker_files(plan.run_dir, launch.ranks)
        # The memory of other hosts is not known here: their rank 0 chooses the preset of `auto`.
        is_open = bool(launch.hosts) and plan.recipe.config.ds_config == AUTO
        handed_on = {LAUNCH_ID_ENV: lease.launch_id, START_ENV: "" if is_open else plan.start.to_json(plan.run_dir)}
        launch = replace(launch, environment={**launch.environment, **handed_on})
        log_stderr(describe_start(launch))
        with open_worker_group(launch, plan.run_dir) as group:
            lease.on_lost = partial(setattr, group, "abort_reason")
            if isinstance(group, MultiHostWorkerGroup):  # the hosts have reported their devices by now
                device = Device("cpu", True) if group.use_cpu else Device("cuda", group.supports_bf16)
                if device != plan.device:
                    start = _decide_start(plan.recipe.config, plan.run_dir, plan.resume, launch, device)
                    check_launch(plan.task, start, plan.run_dir, launch.world_size, device)
            code = supervise(group)
        if code == EXIT_USAGE:
            discard()
        return code


def describe_start(launch: Launch) -> str:
    """Return the line that is printed before the first output of a worker."""
    count = launch.world_size
    where = f" on {len(launch.hosts)} hosts" if launch.hosts else ""
    return f"starting {count} process{'es' * (count != 1)}{where}; loading torch and DeepSpeed takes some seconds"


def has_progress(run_dir: Path) -> bool:
    """Return True if the run has written a checkpoint or metrics."""
    metrics = run_dir / "metrics.jsonl"
    return bool(list_checkpoint_names(run_dir / "checkpoints")) or (metrics.is_file() and metrics.stat().st_size > 0)


def show_dry_run(plan: TrainPlan) -> str:
    """Return the resolved recipe, DeepSpeed JSON, batch, start and launch command or job script."""
    launch, start = plan.launch, plan.start
    command = launch.script if isinstance(launch, SlurmLaunch) else show_launch(launch)
    checkpoint = start.point.checkpoint
    begin = "a new run" if checkpoint is None else f"from {checkpoint.path}, unless its files turn out to be damaged"
    return (
        f"# recipe\n{dump_recipe(start.config)}\n# DeepSpeed JSON\n{json.dumps(plan.ds_config, indent=2)}\n\n"
        f"# batch\n{show_batch(start, launch.world_size)}\n\n"
        f"# start\n{begin}\n\n# launch\n{command}"
    )


def show_launch(launch: Launch) -> str:
    """Return the command lines of the ssh sessions, and of each rank. What only the hosts know is in angle brackets."""
    from dstrain.launch.hosts import host_command

    lines = [shlex.join(host_command(host, launch.heartbeat_timeout)) for host in launch.hosts]
    first = launch.hosts[0].name if launch.hosts else ""
    address = launch.master_addr or f"<address of {first}>"
    port = launch.master_port or f"<free port{f' on {first}' if first else ''}>"
    for ranks in [launch.ranks_of(index) for index in range(len(launch.hosts))] or [launch.ranks]:
        rank, local_rank = str(ranks[0]), "0"
        if len(ranks) > 1:
            rank, local_rank = f"<{ranks[0]} to {ranks[-1]}>", f"<0 to {len(ranks) - 1}>"
        place = f"RANK={rank} LOCAL_RANK={local_rank} WORLD_SIZE={launch.world_size} LOCAL_WORLD_SIZE={len(ranks)}"
        lines.append(f"{place} MASTER_ADDR={address} MASTER_PORT={port} {shlex.join(launch.argv)}")
    return "\n".join(lines)


def show_batch(start: Start, world_size: int) -> str:
    """Return the split of a step into micro-batches, and warnings, for --dry-run."""
    batch, optim = start.batch, start.config.optim
    warnings = [f"warning: {line}" for line in batch_warnings(batch, world_size)]
    lines = [f"steps of {batch.describe(world_size)}"]
    if optim.scale_lr != "none" and optim.lr is not None:
        peak = scale_lr(optim.lr, optim.scale_lr, batch.total, optim.scale_lr_base)
        lines.append(
            f"peak learning rate {peak:.3g}: optim.lr {optim.lr:g}, scaled ({optim.scale_lr}) from steps of "
            f"{optim.scale_lr_base} to {batch.total} samples"
        )
    return "\n".join([*lines, *warnings])


def train_as_rank(worker: Worker, request: TrainRequest) -> int:
    """Train as one rank of a launcher. Returns the exit code, which is also recorded for the supervisor.

    If the input is refused, torchrun does not start this rank again.
    """
    from dstrain.launch.worker import end_elastic_agent

    try:
        code = _train(worker, resume_on_restart(request, os.environ))
    except UsageError:
        atexit.register(end_elastic_agent, os.environ)  # after the error is printed
        raise
    if code == EXIT_USAGE:
        atexit.register(end_elastic_agent, os.environ)
    return code


def _train(worker: Worker, request: TrainRequest) -> int:
    from dstrain.launch.worker import LAUNCH_ID_ENV, exit_with_parent, run_worker
    from dstrain.training.health.signals import SignalHandler, run_with_signals

    exit_with_parent()
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    check_run_dir_writable(run_dir)
    has_terminal = worker.rank == 0 and os.isatty(1)
    screen = os.fdopen(os.dup(1), "w") if has_terminal else None

    resume = ResumeOptions(request.resume, request.allowed_changes)
    with Lease(run_dir, os.environ.get(LAUNCH_ID_ENV)) as lease:
        if LAUNCH_ID_ENV not in os.environ and worker.rank == 0:  # else the launching `dstrain` holds the folder
            _acquire_lease(lease, worker, timedelta(minutes=recipe.config.timeout_minutes))
            lease.on_lost = _abort_process
        start = os.environ.get(START_ENV, "")
        run = partial(_run_rank, recipe, run_dir, resume, worker, lease, screen, start)
        with SignalHandler() as signal_handler:  # until the exit is recorded
            return run_worker(run_dir, worker.rank, lambda: run_with_signals(run, signal_handler, run_dir))


def _abort_process(reason: str) -> None:
    """Exit at once, on rank 0: another launch has its run folder. The other ranks end without rank 0."""
    log_stderr(f"error: {reason}")
    os._exit(EXIT_FAILED)


def _acquire_lease(lease: Lease, worker: Worker, timeout: timedelta) -> None:
    """Acquire the run folder before its logs are opened.

    Raises ResumeError, on all ranks, if another launch holds it.
    """
    from dstrain.training.rendezvous import Rendezvous

    try:
        lease.acquire()
    except ResumeError as refusal:
        os.environ.update(worker.environment)
        with Rendezvous(worker, timeout):
            raise refusal from None
