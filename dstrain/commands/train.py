"""dstrain train: check, then launch; or, where a launcher started us, train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from dstrain.commands.find import Wish, resolve_wish, run_folder
from dstrain.config import BatchPlan, Recipe, resolve_batch, show_recipe
from dstrain.launch.command import Launch, LaunchOptions
from dstrain.launch.several import HostsLaunch, plan_launch, show_launch
from dstrain.launch.topology import Worker, gpu_has_bf16, worker_from
from dstrain.preset import Device, Preset, read_preset
from dstrain.tasks import make_task
from dstrain.train.settings import batch_warnings, check_offload_folders, resolved_ds_config


def launch_or_train(wish: Wish, launch: Mapping[str, Any], dry_run: bool) -> int:
    """The exit code of `dstrain train`."""
    worker = None if dry_run else worker_from(os.environ)
    if worker is not None:
        return train_as(worker, wish)
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe.name)
    ready = plan_launch(LaunchOptions(**launch), wish.arguments(run_dir), os.environ, recipe.config.launch)
    ds_config = check(recipe, ready.processes, device_there(ready), run_dir)
    if not isinstance(ready, HostsLaunch):  # of other hosts each rank looks for itself
        check_offload_folders(ds_config, run_dir)
    if dry_run:
        print(f"# recipe\n{show_recipe(recipe.config)}\n# DeepSpeed JSON\n{json.dumps(ds_config, indent=2)}\n")
        print(f"# batch\n{show_batch(recipe, ready.processes)}\n")
        print(f"# launch\n{show_launch(ready, run_dir)}")
        return 0
    from dstrain.launch.hosts import HostsCrew, gathered
    from dstrain.launch.supervise import supervise
    from dstrain.train.folder import check_writable

    check_writable(run_dir)
    with gathered(ready, run_dir) as crew:
        if isinstance(crew, HostsCrew):  # now that the hosts have said what they have
            check(recipe, ready.processes, Device("cpu", True) if crew.cpu else Device("cuda", crew.bf16), run_dir)
        return supervise(crew)


def check(recipe: Recipe, processes: int, device: Device, run_dir: Path) -> dict[str, Any]:
    """What can be known wrong without torch, before anything starts. Returns the DeepSpeed JSON. Raises UsageError."""
    config = recipe.config
    make_task(config).check_named()
    preset = read_preset(config.ds_config)
    batch = _batch(recipe, preset, processes)
    return resolved_ds_config(config, preset, batch, (processes, device), run_dir)


def show_batch(recipe: Recipe, processes: int) -> str:
    """How a step is cut up, and what to warn of."""
    batch = _batch(recipe, read_preset(recipe.config.ds_config), processes)
    warnings = [f"warning: {line}" for line in batch_warnings(batch, processes)]
    return "\n".join([f"steps of {batch.show(processes)}", *warnings])


def _batch(recipe: Recipe, preset: Preset, processes: int) -> BatchPlan:
    return resolve_batch(recipe.config.batch, processes, preset.micro, preset.accumulate)


def device_there(launch: Launch | HostsLaunch) -> Device:
    """What the ranks compute on, as far as this machine can tell."""
    return Device("cpu", True) if launch.cpu else Device("cuda", gpu_has_bf16() is not False)


def train_as(worker: Worker, wish: Wish) -> int:
    """One worker's whole life. Its exit code counts even if the launcher's does not."""
    from dstrain.launch.worker import LAUNCH, follow_parent, live
    from dstrain.train.folder import Resume, check_writable
    from dstrain.train.interrupt import Interrupt, stoppable

    follow_parent()
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe.name)
    check_writable(run_dir)
    # mpirun gives rank 0 a terminal of its own, which nobody looks at.
    seen = worker.rank == 0 and os.isatty(1) and LAUNCH not in os.environ
    screen = os.fdopen(os.dup(1), "w") if seen else None

    def work(interrupt: Interrupt) -> int:
        from dstrain.train.assemble import run_training
        from dstrain.train.plan import make_plan
        from dstrain.train.rendezvous import Rendezvous

        together = Rendezvous(worker, timedelta(minutes=recipe.config.timeout_minutes))
        plan = make_plan(recipe, run_dir, Resume(wish.resume, wish.allowed), worker, together)
        return run_training(plan, screen, interrupt, together.store)

    with Interrupt() as interrupt:  # until the end is recorded
        return live(run_dir, worker.rank, lambda: stoppable(work, interrupt, run_dir))
