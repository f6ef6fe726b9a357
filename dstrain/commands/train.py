"""dstrain train: check, then launch; or, where a launcher started us, train."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dstrain.commands.find import Wish, resolve_wish
from dstrain.config import Recipe, resolve_batch, show_recipe
from dstrain.launch.command import Launch, LaunchOptions, prepare_launch
from dstrain.launch.topology import Worker, gpu_has_bf16, worker_from
from dstrain.preset import Device, read_preset
from dstrain.tasks import make_task
from dstrain.train.settings import resolved_ds_config


def launch_or_train(wish: Wish, launch: Mapping[str, Any], dry_run: bool) -> int:
    """The exit code of `dstrain train`."""
    worker = None if dry_run else worker_from(os.environ)
    if worker is not None:
        return train_as(worker, wish)
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe)
    ready = prepare_launch(LaunchOptions(**launch), wish.arguments(run_dir), os.environ)
    ds_config = check(recipe, ready, run_dir)
    if dry_run:
        print(f"# recipe\n{show_recipe(recipe.config)}\n# DeepSpeed JSON\n{json.dumps(ds_config, indent=2)}\n")
        print(f"# launch\n{shlex.join(ready.argv)}")
        return 0
    from dstrain.launch.supervise import supervise
    from dstrain.train.folder import check_writable

    check_writable(run_dir)
    return supervise(ready.argv, ready.environment, run_dir, ready.processes)


def run_folder(wish: Wish, recipe: Recipe) -> Path:
    """--run-dir, or runs/NAME of the recipe: the same for the same command, so that it resumes."""
    return (wish.run_dir or Path("runs") / recipe.name).expanduser().resolve()


def check(recipe: Recipe, ready: Launch, run_dir: Path) -> dict[str, Any]:
    """What can be known wrong without torch, before anything starts. Returns the DeepSpeed JSON. Raises UsageError."""
    config = recipe.config
    make_task(config)
    preset = read_preset(config.ds_config)
    batch = resolve_batch(config.batch, ready.processes, preset.micro, preset.accumulate)
    on_cpu = ready.environment.get("DS_ACCELERATOR") == "cpu"
    device = Device("cpu", True) if on_cpu else Device("cuda", gpu_has_bf16() is not False)
    return resolved_ds_config(config, preset, batch, (ready.processes, device), run_dir)


def train_as(worker: Worker, wish: Wish) -> int:
    """One worker's whole life. Its exit code counts even if the launcher's does not."""
    from dstrain.launch.worker import follow_parent, live
    from dstrain.train.folder import Resume, check_writable

    follow_parent()
    recipe = resolve_wish(wish)
    run_dir = run_folder(wish, recipe)
    check_writable(run_dir)
    screen = os.fdopen(os.dup(1), "w") if worker.rank == 0 and os.isatty(1) else None

    def work() -> int:
        from dstrain.train.assemble import run_training
        from dstrain.train.plan import make_plan

        return run_training(make_plan(recipe, run_dir, Resume(wish.resume, wish.allowed), worker), screen)

    return live(run_dir, worker.rank, work)
