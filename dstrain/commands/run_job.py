"""One piece of work on one process or on many, and what came of it: how evaluate, generate and prepare run."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dstrain.commands.temp_dirs import keep_scratch, make_scratch, make_scratch_path
from dstrain.config import RunConfig
from dstrain.launch.command import LaunchOptions, LocalLaunch
from dstrain.launch.multihost.plan import MultiHostLaunch, cpu_overload_warning, plan_launch
from dstrain.launch.topology import Worker, worker_from_env
from dstrain.preset import Device

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World

SINGLE_WORKER = Worker(0, 0, 1, "dstrain", 1)
"""This process, where nothing is launched."""
RESULT_FILE = "result.json"


class PreparedJob(Protocol):
    """What a process has made ready before it meets the others."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """How the model is held."""


class Job(Protocol):
    """A command's work."""

    @property
    def is_parallel(self) -> bool:
        """Whether several processes do it sooner than one."""

    def to_argv(self) -> list[str]:
        """The command and its options, for a worker."""

    def check_recipe(self) -> RunConfig:
        """The recipe. Raises UsageError for what can be known wrong without torch."""

    def prepare(self, world_size: int, device: Device) -> Any:
        """A `Ready`: all that one process can do alone. Raises UsageError."""

    def cache_weight_hashes(self, prepared: Any) -> None:
        """Hash what `run` compares by its hash into the cache: rank 0 does so while nobody waits in a collective."""

    def run(self, prepared: Any, world: World) -> Any:
        """What came of it, as JSON has it; rank 0's counts. Collective."""


@dataclass(frozen=True)
class JobResult:
    """How a command ended on this process."""

    exit_code: int
    """The exit code."""
    value: Any = None
    """What to print; None on a process that is one of many and not the one to print."""


def run_job(job: Job, launch_options: Mapping[str, Any], scratch_dir: Path | None) -> JobResult:
    """Run a job on the processes that the launch options or a launcher's environment name.

    `scratch`: the folder of a launch of ours, of which this process is a worker.
    """
    worker = worker_from_env(os.environ)
    if worker is None:
        config = job.check_recipe()
        place = make_scratch_path()
        options = LaunchOptions(**launch_options)
        # `python -m` would import from the working folder first, and that may be the folder that was handed over.
        env = {**os.environ, "PYTHONSAFEPATH": "1"}
        made = plan_launch(options, [*job.to_argv(), "--scratch", str(place)], env, config.launch)
        if job.is_parallel and (line := cpu_overload_warning(made)):
            print(f"warning: {line}", file=sys.stderr, flush=True)
        if (made.world_size > 1 and job.is_parallel) or isinstance(made, MultiHostLaunch):
            return _launch_workers(made, place)
        if made.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = made.devices[0]
        with redirect_stdout_to_stderr():
            return JobResult(0, run_in_process(job, SINGLE_WORKER, None))
    from dstrain.launch.worker import exit_with_parent

    exit_with_parent()
    if scratch_dir is not None:
        return JobResult(_run_as_worker(job, worker, scratch_dir))
    with redirect_stdout_to_stderr():
        value = run_in_process(job, worker, None)
    return JobResult(0, value if worker.rank == 0 else None)


def run_in_process(job: Job, worker: Worker, shared_dir: Path | None) -> Any:
    """The job as this process's share of it. `shared`: a folder that all its processes see, if any. Collective."""
    from dstrain.models.params.zero3 import is_zero3
    from dstrain.train.engine.inference import remove_private_nvme_path
    from dstrain.train.plan import get_preset_device, set_up_process
    from dstrain.train.rendezvous import Rendezvous

    config = job.check_recipe()
    device = set_up_process(worker, config)
    together = Rendezvous(worker, timedelta(minutes=config.timeout_minutes))
    with together:
        with together.local_main_process_first():
            ready = job.prepare(worker.world_size, get_preset_device(device))
        if worker.rank == 0:
            job.cache_weight_hashes(ready)
    alone = worker.world_size == 1 and not is_zero3(ready.ds_config)
    try:
        with join_world(None if alone else worker, device, (config, together.store), shared_dir) as world:
            return job.run(ready, world)
    finally:
        remove_private_nvme_path(ready.ds_config)


@contextlib.contextmanager
def join_world(
    worker: Worker | None, device: torch.device, config_and_store: tuple[RunConfig, Any], shared_dir: Path | None
) -> Iterator[World]:
    """The world of this launch, left at the end; None: of this process alone. Collective.

    `how`: the recipe, and the store where the processes have met, if any.

    Raises LostError where another process ends or falls silent, by name where there is a folder to leave word in.
    """
    from dstrain.distributed.world import SingleProcessWorld, joined_world
    from dstrain.train.health.watchdog import peer_watchdog

    if worker is None:
        yield SingleProcessWorld(device)
        return
    if worker is SINGLE_WORKER:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    config, store = config_and_store
    timeout = timedelta(minutes=config.timeout_minutes)
    with (
        joined_world(device, timeout, store) as world,
        peer_watchdog(shared_dir, world, timeout, "the work", "fix the cause and run the command again"),
    ):
        yield world


@contextlib.contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Inside, whatever prints does so to stderr, C libraries too: stdout belongs to what was asked for."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _run_as_worker(job: Job, worker: Worker, scratch_dir: Path) -> int:
    """A worker of a launch of ours: rank 0 leaves what came of it in the folder."""
    from dstrain.launch.worker import run_worker

    os.dup2(2, 1)  # rank 0's output is copied to where its stdout went

    def run() -> int:
        value = run_in_process(job, worker, scratch_dir)
        if worker.rank == 0:
            (scratch_dir / RESULT_FILE).write_text(json.dumps(value), encoding="utf-8")
        return 0

    return run_worker(scratch_dir, worker.rank, run)


def _launch_workers(launch: LocalLaunch | MultiHostLaunch, scratch_dir: Path) -> JobResult:
    """Start the workers and wait for them; their logs are kept where they failed."""
    from dstrain.errors import EXIT_DONE, EXIT_FAILED
    from dstrain.launch.multihost.job import open_job
    from dstrain.launch.supervise import StopState, supervise

    make_scratch(scratch_dir)
    watch = StopState(saves_checkpoint=False)
    code, value = EXIT_FAILED, None
    try:
        with redirect_stdout_to_stderr(), open_job(launch, scratch_dir) as crew:
            code = supervise(crew, watch)
        if code == EXIT_DONE:
            value = json.loads((scratch_dir / RESULT_FILE).read_text(encoding="utf-8"))
    finally:
        if code == EXIT_FAILED and not watch.killed:
            keep_scratch(scratch_dir)
            print(f"dstrain: what the processes wrote is kept in {scratch_dir / 'logs'}", file=sys.stderr)
        else:
            shutil.rmtree(scratch_dir, ignore_errors=True)
    return JobResult(code, value)
