"""dstrain train: check, then launch; or, where a launcher started us, train."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.commands.checks.preflight import check_data, check_launch
from dstrain.commands.recipe_args import TrainRequest, get_run_dir, resolve_recipe
from dstrain.config import Recipe, dump_recipe, resolve_batch
from dstrain.errors import EXIT_FAILED, EXIT_USAGE, ResumeError
from dstrain.launch.command import LaunchOptions, LocalLaunch
from dstrain.launch.lease import Lease
from dstrain.launch.multihost.plan import MultiHostLaunch, cpu_overload_warning, plan_launch, show_launch
from dstrain.launch.topology import Worker, gpus_support_bf16, worker_from_env
from dstrain.preset import Device, read_preset
from dstrain.train.ds_config import batch_warnings, check_offload_folders
from dstrain.train.resume.recorded import ResumeOptions
from dstrain.train.run_dir import check_run_dir_writable


def launch_or_train(request: TrainRequest, launch_options: Mapping[str, Any], dry_run: bool) -> int:
    """The exit code of `dstrain train`."""
    request = resume_on_restart(request, os.environ)
    worker = None if dry_run else worker_from_env(os.environ)
    if worker is not None:
        return train_worker(worker, request)
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    ready = plan_launch(LaunchOptions(**launch_options), request.to_argv(run_dir), os.environ, recipe.config.launch)
    if line := cpu_overload_warning(ready):
        print(f"warning: {line}", file=sys.stderr, flush=True)
    resume = ResumeOptions(request.resume, request.allowed_changes)
    ds_config = check_launch(recipe, run_dir, resume, ready.world_size, detect_device(ready))
    check_data(recipe.config, run_dir, resume)
    if not isinstance(ready, MultiHostLaunch):  # of other hosts each rank looks for itself
        check_offload_folders(ds_config, run_dir)
    if dry_run:
        print(f"# recipe\n{dump_recipe(recipe.config)}\n# DeepSpeed JSON\n{json.dumps(ds_config, indent=2)}\n")
        print(f"# batch\n{show_batch(recipe, ready.world_size)}\n")
        print(f"# launch\n{show_launch(ready, run_dir)}")
        return 0
    return _launch_training(ready, recipe, run_dir, resume)


def resume_on_restart(request: TrainRequest, env: Mapping[str, str]) -> TrainRequest:
    """The wish with `--resume never` taken at its word once: ranks that torchrun starts again, and requeued Slurm jobs, go on."""
    again = any(env.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return replace(request, resume="auto") if request.resume == "never" and again else request


def _launch_training(
    launch: LocalLaunch | MultiHostLaunch, recipe: Recipe, run_dir: Path, resume: ResumeOptions
) -> int:
    """Start the processes and watch over them, while the run folder is held for this launch. Returns the exit code."""
    from dstrain.launch.multihost.job import MultiHostJob, open_job
    from dstrain.launch.supervise import supervise
    from dstrain.launch.worker import LAUNCH_ID_ENV, remove_port_files, remove_rank_records

    made = not run_dir.exists()
    check_run_dir_writable(run_dir)
    with Lease(run_dir) as lease:
        alone = (
            isinstance(launch, MultiHostLaunch) or launch.local_ranks is None
        )  # else each host has a command: that of rank 0 holds it
        if alone or 0 in launch.ranks:
            lease.acquire()
        if alone:
            remove_rank_records(run_dir, launch.ranks)
            remove_port_files(run_dir)
        launch = replace(launch, environment={**launch.environment, LAUNCH_ID_ENV: lease.launch_id})
        code = EXIT_USAGE
        try:
            with open_job(launch, run_dir) as crew:
                lease.on_lost = partial(setattr, crew, "abort_reason")
                if isinstance(crew, MultiHostJob):  # now that the hosts have said what they have
                    device = Device("cpu", True) if crew.use_cpu else Device("cuda", crew.supports_bf16)
                    check_launch(recipe, run_dir, resume, launch.world_size, device)
                code = EXIT_FAILED
                code = supervise(crew)
        finally:
            if made and alone and code == EXIT_USAGE and not has_progress(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
        return code


def has_progress(run_dir: Path) -> bool:
    """Whether anything was trained there."""
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("step-*")) or (metrics.is_file() and metrics.stat().st_size > 0)


def show_batch(recipe: Recipe, world_size: int) -> str:
    """How a step is cut up, and what to warn of."""
    preset = read_preset(recipe.config.ds_config)
    batch = resolve_batch(recipe.config.batch, world_size, preset.micro, preset.accumulate)
    warnings = [f"warning: {line}" for line in batch_warnings(batch, world_size)]
    return "\n".join([f"steps of {batch.describe(world_size)}", *warnings])


def detect_device(launch: LocalLaunch | MultiHostLaunch) -> Device:
    """What the ranks compute on, as far as this machine can tell."""
    return Device("cpu", True) if launch.use_cpu else Device("cuda", gpus_support_bf16() is not False)


def train_worker(worker: Worker, request: TrainRequest) -> int:
    """One worker's whole life. Its exit code counts even if the launcher's does not."""
    from dstrain.launch.worker import LAUNCH_FILE_ENV, LAUNCH_ID_ENV, exit_with_parent, run_worker
    from dstrain.train.health.signals import SignalHandler, run_with_signals

    exit_with_parent()
    recipe = resolve_recipe(request)
    run_dir = get_run_dir(request, recipe.name)
    check_run_dir_writable(run_dir)
    # mpirun gives rank 0 a terminal of its own, which nobody looks at.
    seen = worker.rank == 0 and os.isatty(1) and LAUNCH_FILE_ENV not in os.environ
    screen = os.fdopen(os.dup(1), "w") if seen else None

    def run(interrupt: SignalHandler) -> int:
        from dstrain.train.plan import make_plan
        from dstrain.train.rendezvous import Rendezvous
        from dstrain.train.setup import run_training

        together = Rendezvous(worker, timeout)
        plan = make_plan(recipe, run_dir, ResumeOptions(request.resume, request.allowed_changes), worker, together)
        return run_training(replace(plan, launch_id=lease.launch_id), screen, interrupt, together.store)

    timeout = timedelta(minutes=recipe.config.timeout_minutes)
    with Lease(run_dir, os.environ.get(LAUNCH_ID_ENV)) as lease:
        if LAUNCH_ID_ENV not in os.environ and worker.rank == 0:  # else `dstrain` launched us and holds the folder
            _acquire_lease(lease, worker, timeout)
            lease.on_lost = _abort_process
        with SignalHandler() as interrupt:  # until the end is recorded
            return run_worker(run_dir, worker.rank, lambda: run_with_signals(run, interrupt, run_dir))


def _abort_process(reason: str) -> None:
    """End rank 0 at once: another launch has its run folder. The other ranks cannot go on without it."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


def _acquire_lease(lease: Lease, worker: Worker, timeout: timedelta) -> None:
    """Hold the run folder before its logs are opened. Raises ResumeError where another launch does, in the other ranks too."""
    from dstrain.train.rendezvous import Rendezvous

    try:
        lease.acquire()
    except ResumeError as refusal:
        os.environ.update(worker.environment)
        with Rendezvous(worker, timeout):
            raise refusal from None
