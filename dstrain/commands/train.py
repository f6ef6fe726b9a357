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
from dstrain.commands.recipe_args import Wish, resolve_wish, run_folder
from dstrain.config import Recipe, resolve_batch, show_recipe
from dstrain.errors import ResumeError, UsageError
from dstrain.launch.command import Launch, LaunchOptions
from dstrain.launch.exit_code import FAILED
from dstrain.launch.lease import Lease
from dstrain.launch.multihost.plan import HostsLaunch, crowded, plan_launch, show_launch
from dstrain.launch.topology import Worker, gpu_has_bf16, worker_from
from dstrain.preset import Device, read_preset
from dstrain.train.ds_config import batch_warnings, check_offload_folders
from dstrain.train.run_dir import Resume, check_writable


def launch_or_train(wish: Wish, launch: Mapping[str, Any], dry_run: bool) -> int:
    """The exit code of `dstrain train`."""
    wish = begin_once(wish, os.environ)
    worker = None if dry_run else worker_from(os.environ)
    if worker is not None:
        return train_as(worker, wish)
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe.name)
    ready = plan_launch(LaunchOptions(**launch), wish.arguments(run_dir), os.environ, recipe.config.launch)
    if line := crowded(ready):
        print(f"warning: {line}", file=sys.stderr, flush=True)
    resume = Resume(wish.resume, wish.allowed)
    ds_config = check_launch(recipe, run_dir, resume, ready.processes, device_there(ready))
    check_data(recipe.config, run_dir, resume)
    if not isinstance(ready, HostsLaunch):  # of other hosts each rank looks for itself
        check_offload_folders(ds_config, run_dir)
    if dry_run:
        print(f"# recipe\n{show_recipe(recipe.config)}\n# DeepSpeed JSON\n{json.dumps(ds_config, indent=2)}\n")
        print(f"# batch\n{show_batch(recipe, ready.processes)}\n")
        print(f"# launch\n{show_launch(ready, run_dir)}")
        return 0
    return _launched(ready, recipe, run_dir, resume)


def begin_once(wish: Wish, env: Mapping[str, str]) -> Wish:
    """The wish with `--resume never` taken at its word once: ranks that torchrun starts again, and requeued Slurm jobs, go on."""
    again = any(env.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    return replace(wish, resume="auto") if wish.resume == "never" and again else wish


def _launched(ready: Launch | HostsLaunch, recipe: Recipe, run_dir: Path, resume: Resume) -> int:
    """Start the processes and watch over them, while the run folder is held for this launch. Returns the exit code."""
    from dstrain.launch.multihost.job import HostsCrew, gathered
    from dstrain.launch.supervise import supervise
    from dstrain.launch.worker import LAUNCH_ID, forget_ports, forget_records

    made = not run_dir.exists()
    check_writable(run_dir)
    with Lease(run_dir) as lease:
        alone = (
            isinstance(ready, HostsLaunch) or ready.here is None
        )  # else each host has a command: that of rank 0 holds it
        if alone or 0 in ready.ranks:
            lease.take()
        if alone:
            forget_records(run_dir, ready.ranks)
            forget_ports(run_dir)
        ready = replace(ready, environment={**ready.environment, LAUNCH_ID: lease.launch})
        code = UsageError.exit_code
        try:
            with gathered(ready, run_dir) as crew:
                lease.on_lost = partial(setattr, crew, "lost")
                if isinstance(crew, HostsCrew):  # now that the hosts have said what they have
                    device = Device("cpu", True) if crew.cpu else Device("cuda", crew.bf16)
                    check_launch(recipe, run_dir, resume, ready.processes, device)
                code = FAILED
                code = supervise(crew)
        finally:
            if made and alone and code == UsageError.exit_code and not begun(run_dir):
                shutil.rmtree(run_dir, ignore_errors=True)
        return code


def begun(run_dir: Path) -> bool:
    """Whether anything was trained there."""
    metrics = run_dir / "metrics.jsonl"
    return any((run_dir / "checkpoints").glob("step-*")) or (metrics.is_file() and metrics.stat().st_size > 0)


def show_batch(recipe: Recipe, processes: int) -> str:
    """How a step is cut up, and what to warn of."""
    preset = read_preset(recipe.config.ds_config)
    batch = resolve_batch(recipe.config.batch, processes, preset.micro, preset.accumulate)
    warnings = [f"warning: {line}" for line in batch_warnings(batch, processes)]
    return "\n".join([f"steps of {batch.show(processes)}", *warnings])


def device_there(launch: Launch | HostsLaunch) -> Device:
    """What the ranks compute on, as far as this machine can tell."""
    return Device("cpu", True) if launch.cpu else Device("cuda", gpu_has_bf16() is not False)


def train_as(worker: Worker, wish: Wish) -> int:
    """One worker's whole life. Its exit code counts even if the launcher's does not."""
    from dstrain.launch.worker import LAUNCH, LAUNCH_ID, follow_parent, live
    from dstrain.train.health.signals import Interrupt, stoppable

    follow_parent()
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe.name)
    check_writable(run_dir)
    # mpirun gives rank 0 a terminal of its own, which nobody looks at.
    seen = worker.rank == 0 and os.isatty(1) and LAUNCH not in os.environ
    screen = os.fdopen(os.dup(1), "w") if seen else None

    def work(interrupt: Interrupt) -> int:
        from dstrain.train.plan import make_plan
        from dstrain.train.rendezvous import Rendezvous
        from dstrain.train.setup import run_training

        together = Rendezvous(worker, timeout)
        plan = make_plan(recipe, run_dir, Resume(wish.resume, wish.allowed), worker, together)
        return run_training(replace(plan, launch=lease.launch), screen, interrupt, together.store)

    timeout = timedelta(minutes=recipe.config.timeout_minutes)
    with Lease(run_dir, os.environ.get(LAUNCH_ID)) as lease:
        if LAUNCH_ID not in os.environ and worker.rank == 0:  # else `dstrain` launched us and holds the folder
            _take(lease, worker, timeout)
            lease.on_lost = _end
        with Interrupt() as interrupt:  # until the end is recorded
            return live(run_dir, worker.rank, lambda: stoppable(work, interrupt, run_dir))


def _end(why: str) -> None:
    """End rank 0 at once: another launch has its run folder. The other ranks cannot go on without it."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(FAILED)


def _take(lease: Lease, worker: Worker, timeout: timedelta) -> None:
    """Hold the run folder before its logs are opened. Raises ResumeError where another launch does, in the other ranks too."""
    from dstrain.train.rendezvous import Rendezvous

    try:
        lease.take()
    except ResumeError as refusal:
        os.environ.update(worker.environment)
        with Rendezvous(worker, timeout):
            raise refusal from None
