"""`dstrain train`: checks and launch, or training in a process that a launcher started."""

from __future__ import annotations

import atexit
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.commands.preflight import check_data, check_launch
from dstrain.commands.recipe_args import TrainRequest, get_run_dir, resolve_recipe
from dstrain.commands.runs import rewrite_report
from dstrain.config import Recipe, dump_recipe, resolve_batch
from dstrain.errors import EXIT_FAILED, EXIT_USAGE, ResumeError, UsageError
from dstrain.launch.command import Launch, LaunchOptions, cpu_overload_warning
from dstrain.launch.lease import Lease
from dstrain.launch.multihost.plan import plan_launch, show_launch
from dstrain.launch.slurm import OUTPUT_FILE, SlurmLaunch, plan_slurm_launch, submit
from dstrain.launch.topology import Worker, gpus_support_bf16, worker_from_env
from dstrain.planner.choose import AUTO
from dstrain.planner.workload import Cluster
from dstrain.preset import Device, read_preset
from dstrain.process_setup import log_stderr, log_stdout
from dstrain.schedule import scale_lr
from dstrain.train.ds_config import batch_warnings, check_offload_folders, resolve_auto
from dstrain.train.memory.reduced_batch import apply_reduced_batch
from dstrain.train.resume import ResumeOptions
from dstrain.train.setup.run_dir import check_run_dir_writable
from dstrain.train.state.manifest import find_latest_complete, list_checkpoint_names

AnyLaunch = Launch | SlurmLaunch


def launch_or_train(request: TrainRequest, launch_options: Mapping[str, Any], dry_run: bool) -> int:
    """Run `dstrain train`. Returns its exit code."""
    request = resume_on_restart(request, os.environ)
    worker = None if dry_run else worker_from_env(os.environ)
    if worker is not None:
        return _train_without_retries(worker, request)
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    launch = _plan_request(request, recipe, run_dir, launch_options)
    if recipe.config.ds_config == AUTO:
        request = resolve_auto_request(request, recipe, run_dir, launch)
        recipe = resolve_recipe(request)
        launch = _plan_request(request, recipe, run_dir, launch_options)
    written_recipe = recipe
    recipe = apply_reduced_batch(written_recipe, run_dir, launch.world_size, request.resume)
    if not isinstance(launch, SlurmLaunch) and (line := cpu_overload_warning(launch)):
        log_stderr(f"warning: {line}")
    resume = ResumeOptions(request.resume, request.allowed_changes)
    ds_config = check_launch(recipe, run_dir, resume, launch.world_size, detect_device(launch))
    # Before any process starts: a fault costs seconds here, minutes on a cluster.
    check_data(recipe.config, run_dir, resume)
    if not isinstance(launch, SlurmLaunch) and not launch.hosts:  # on other hosts each rank checks its own folders
        check_offload_folders(ds_config, run_dir)
    if dry_run:
        log_stdout(show_dry_run(recipe, ds_config, launch, run_dir))
        return 0
    if isinstance(launch, SlurmLaunch):
        _submit_job(launch, run_dir)
        return 0
    code, restart = _launch_training(launch, recipe, run_dir, resume)
    while restart:
        # With the smaller micro-batch that the workers have written, from the newest checkpoint of this run.
        request = resume_own_run(request, run_dir)
        launch = _plan_request(request, recipe, run_dir, launch_options)
        assert not isinstance(launch, SlurmLaunch)
        reduced = apply_reduced_batch(written_recipe, run_dir, launch.world_size, request.resume)
        if reduced.config.batch == recipe.config.batch:  # micro_batch.json was removed meanwhile
            return code
        recipe, resume = reduced, ResumeOptions(request.resume, request.allowed_changes)
        code, restart = _launch_training(launch, recipe, run_dir, resume)
    if code == EXIT_FAILED and 0 in launch.ranks and has_progress(run_dir):
        rewrite_report(run_dir)  # rank 0 may have been killed before it wrote the last page
    return code


def _plan_request(request: TrainRequest, recipe: Recipe, run_dir: Path, launch_options: Mapping[str, Any]) -> AnyLaunch:
    """Return the launch of a request."""
    options, arguments = LaunchOptions(**launch_options), request.to_argv(run_dir)
    if options.launcher == "slurm":
        return plan_slurm_launch(options, arguments, os.environ, recipe.config.launch, run_dir)
    return plan_launch(options, arguments, os.environ, recipe.config.launch)


def _submit_job(launch: SlurmLaunch, run_dir: Path) -> None:
    """Submit the job and print where its output goes. Raises UsageError, and leaves no new run folder then."""
    is_new = not run_dir.exists()
    try:
        check_run_dir_writable(run_dir)
        job = submit(launch)
    except UsageError:
        if is_new:
            shutil.rmtree(run_dir, ignore_errors=True)
        raise
    log_stdout(f"submitted job {job}; its output goes to {run_dir / OUTPUT_FILE.format(job=job)}")


def resume_own_run(request: TrainRequest, run_dir: Path) -> TrainRequest:
    """Return the request of a restart: it continues from this run's own checkpoint where there is one."""
    if request.resume == "never" or find_latest_complete(run_dir / "checkpoints"):
        return replace(request, resume="auto")
    return request


def resolve_auto_request(request: TrainRequest, recipe: Recipe, run_dir: Path, launch: AnyLaunch) -> TrainRequest:
    """Return the request with the preset and micro-batch that `ds_config: auto` means here; print them.

    They become options, so that all processes of the launch take the same, and the run folder's recipe names them.
    Raises PresetError where nothing fits.
    """
    device = detect_device(launch)
    devices: tuple[str, ...] = ()
    if isinstance(launch, SlurmLaunch):
        per_node, nodes = launch.tasks_per_node, launch.nodes
    elif launch.hosts:
        per_node, nodes = max(len(host.slots) for host in launch.hosts), len(launch.hosts)
    else:
        per_node, devices = len(launch.ranks), launch.devices
        nodes = max(1, launch.world_size // per_node)
    cluster = Cluster(gpus_per_node=per_node, nodes=nodes, kind=device.kind, bf16=device.bf16)
    resume = ResumeOptions(request.resume, request.allowed_changes)
    (name, micro), line = resolve_auto(recipe.config, run_dir, resume, cluster, devices)
    log_stderr(line)
    overrides = request.overrides if micro is None else (*request.overrides, f"batch.micro={micro}")
    return replace(request, ds_config=name, overrides=overrides)


def resume_on_restart(request: TrainRequest, env: Mapping[str, str]) -> TrainRequest:
    """Return the request that resumes what this run has saved, whatever --resume says, in a restarted process.

    These are ranks that torchrun restarts, and requeued Slurm jobs.
    """
    again = any(env.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    if request.resume == "never" and again:
        return replace(request, resume="auto")
    return resume_own_run(request, request.run_dir) if again and request.run_dir is not None else request


def _launch_training(launch: Launch, recipe: Recipe, run_dir: Path, resume: ResumeOptions) -> tuple[int, bool]:
    """Acquire the run folder's lease, start the processes and supervise them.

    Returns the exit code, and True if the workers ran out of memory and the next start has a smaller micro-batch.
    """
    from dstrain.launch.multihost.worker_group import MultiHostWorkerGroup, open_worker_group
    from dstrain.launch.supervise import StopState, supervise
    from dstrain.launch.worker import LAUNCH_ID_ENV, remove_worker_files

    is_new = not run_dir.exists()
    check_run_dir_writable(run_dir)
    with Lease(run_dir) as lease:
        # With --no-ssh each host has its own command: that of rank 0 holds the lease.
        alone = launch.has_all_ranks
        if alone or 0 in launch.ranks:
            lease.acquire()
        if alone:
            remove_worker_files(run_dir, launch.ranks)
        launch = replace(launch, environment={**launch.environment, LAUNCH_ID_ENV: lease.launch_id})
        # With --no-ssh this command cannot start the ranks of other hosts again.
        code, stop_state = EXIT_USAGE, StopState(can_restart=alone)
        try:
            log_stderr(describe_start(launch))
            with open_worker_group(launch, run_dir) as group:
                lease.on_lost = partial(setattr, group, "abort_reason")
                if isinstance(group, MultiHostWorkerGroup):  # the hosts have reported their devices by now
                    device = Device("cpu", True) if group.use_cpu else Device("cuda", group.supports_bf16)
                    check_launch(recipe, run_dir, resume, launch.world_size, device)
                code = EXIT_FAILED
                code = supervise(group, stop_state)
        finally:
            if is_new and alone and code == EXIT_USAGE and not has_progress(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
        return code, bool(stop_state.restart)


def describe_start(launch: Launch) -> str:
    """Return the line that is printed before the first output of a worker."""
    count = launch.world_size
    where = f" on {len(launch.hosts)} hosts" if launch.hosts else ""
    return f"starting {count} process{'es' * (count != 1)}{where}; loading torch and DeepSpeed takes some seconds"


def has_progress(run_dir: Path) -> bool:
    """Return True if the run has written a checkpoint or metrics."""
    metrics = run_dir / "metrics.jsonl"
    return bool(list_checkpoint_names(run_dir / "checkpoints")) or (metrics.is_file() and metrics.stat().st_size > 0)


def show_dry_run(recipe: Recipe, ds_config: Mapping[str, Any], launch: AnyLaunch, run_dir: Path) -> str:
    """Return the resolved recipe, DeepSpeed JSON, batch and launch command or job script."""
    command = launch.script if isinstance(launch, SlurmLaunch) else show_launch(launch)
    return (
        f"# recipe\n{dump_recipe(recipe.config)}\n# DeepSpeed JSON\n{json.dumps(ds_config, indent=2)}\n\n"
        f"# batch\n{show_batch(recipe, launch.world_size)}\n\n# launch\n{command}"
    )


def show_batch(recipe: Recipe, world_size: int) -> str:
    """Return the split of a step into micro-batches, and warnings, for --dry-run."""
    preset = read_preset(recipe.config.ds_config)
    batch = resolve_batch(recipe.config.batch, world_size, preset.micro, preset.accumulate)
    warnings = [f"warning: {line}" for line in batch_warnings(batch, world_size)]
    optim, lines = recipe.config.optim, [f"steps of {batch.describe(world_size)}"]
    if optim.scale_lr != "none" and optim.lr is not None:
        peak = scale_lr(optim.lr, optim.scale_lr, batch.total, optim.scale_lr_base)
        lines.append(
            f"peak learning rate {peak:.3g}: optim.lr {optim.lr:g}, scaled ({optim.scale_lr}) from steps of "
            f"{optim.scale_lr_base} to {batch.total} samples"
        )
    return "\n".join([*lines, *warnings])


def detect_device(launch: AnyLaunch) -> Device:
    """Return the device of the ranks, as far as this host knows."""
    return Device("cpu", True) if launch.use_cpu else Device("cuda", gpus_support_bf16() is not False)


def _train_without_retries(worker: Worker, request: TrainRequest) -> int:
    """Train as one rank; if the input is refused, torchrun does not start it again."""
    from dstrain.launch.worker import end_elastic_agent

    try:
        code = train_worker(worker, request)
    except UsageError:
        atexit.register(end_elastic_agent, os.environ)  # after the error is printed
        raise
    if code == EXIT_USAGE:
        atexit.register(end_elastic_agent, os.environ)
    return code


def train_worker(worker: Worker, request: TrainRequest) -> int:
    """Train as one rank of a launcher.

    Returns the exit code, which is also recorded for the supervisor.
    """
    from dstrain.launch.worker import AGENT_ENV, LAUNCH_ID_ENV, exit_with_parent, run_worker
    from dstrain.train.health.signals import SignalHandler, run_with_signals

    exit_with_parent()
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    recipe = apply_reduced_batch(recipe, run_dir, worker.world_size, request.resume)
    check_run_dir_writable(run_dir)
    has_terminal = worker.rank == 0 and os.isatty(1) and AGENT_ENV not in os.environ
    screen = os.fdopen(os.dup(1), "w") if has_terminal else None

    def run(signal_handler: SignalHandler) -> int:
        from dstrain.train.rendezvous import Rendezvous
        from dstrain.train.setup.build_run import run_training
        from dstrain.train.setup.plan import make_plan

        rendezvous = Rendezvous(worker, timeout)
        plan = make_plan(recipe, run_dir, ResumeOptions(request.resume, request.allowed_changes), worker, rendezvous)
        return run_training(replace(plan, launch_id=lease.launch_id), screen, signal_handler, rendezvous)

    timeout = timedelta(minutes=recipe.config.timeout_minutes)
    with Lease(run_dir, os.environ.get(LAUNCH_ID_ENV)) as lease:
        if LAUNCH_ID_ENV not in os.environ and worker.rank == 0:  # else the launching `dstrain` holds the folder
            _acquire_lease(lease, worker, timeout)
            lease.on_lost = _abort_process
        with SignalHandler() as signal_handler:  # until the exit is recorded
            return run_worker(run_dir, worker.rank, lambda: run_with_signals(run, signal_handler, run_dir))


def _abort_process(reason: str) -> None:
    """Exit at once, on rank 0: another launch has its run folder.

    The other ranks end without rank 0.
    """
    log_stderr(f"error: {reason}")
    os._exit(EXIT_FAILED)


def _acquire_lease(lease: Lease, worker: Worker, timeout: timedelta) -> None:
    """Acquire the run folder before its logs are opened.

    Raises ResumeError, on all ranks, if another launch holds it.
    """
    from dstrain.train.rendezvous import Rendezvous

    try:
        lease.acquire()
    except ResumeError as refusal:
        os.environ.update(worker.environment)
        with Rendezvous(worker, timeout):
            raise refusal from None
