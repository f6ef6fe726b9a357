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

from dstrain.commands.temp_dirs import keep_scratch, make_scratch, scratch_path
from dstrain.config import RunConfig
from dstrain.launch.command import Launch, LaunchOptions
from dstrain.launch.multihost.plan import HostsLaunch, crowded, plan_launch
from dstrain.launch.topology import Worker, worker_from
from dstrain.preset import Device

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World

ALONE = Worker(0, 0, 1, "dstrain", 1)
"""This process, where nothing is launched."""
RESULT = "result.json"


class Ready(Protocol):
    """What a process has made ready before it meets the others."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """How the model is held."""


class Job(Protocol):
    """A command's work."""

    @property
    def many(self) -> bool:
        """Whether several processes do it sooner than one."""

    def words(self) -> list[str]:
        """The command and its options, for a worker."""

    def check(self) -> RunConfig:
        """The recipe. Raises UsageError for what can be known wrong without torch."""

    def ready(self, processes: int, device: Device) -> Any:
        """A `Ready`: all that one process can do alone. Raises UsageError."""

    def read_weights(self, ready: Any) -> None:
        """Hash what `run` compares by its hash into the cache: rank 0 does so while nobody waits in a collective."""

    def run(self, ready: Any, world: World) -> Any:
        """What came of it, as JSON has it; rank 0's counts. Collective."""


@dataclass(frozen=True)
class Reply:
    """How a command ended on this process."""

    code: int
    """The exit code."""
    value: Any = None
    """What to print; None on a process that is one of many and not the one to print."""


def spread(job: Job, launch: Mapping[str, Any], scratch: Path | None) -> Reply:
    """Run a job on the processes that the launch options or a launcher's environment name.

    `scratch`: the folder of a launch of ours, of which this process is a worker.
    """
    worker = worker_from(os.environ)
    if worker is None:
        config = job.check()
        place = scratch_path()
        options = LaunchOptions(**launch)
        # `python -m` would import from the working folder first, and that may be the folder that was handed over.
        env = {**os.environ, "PYTHONSAFEPATH": "1"}
        made = plan_launch(options, [*job.words(), "--scratch", str(place)], env, config.launch)
        if job.many and (line := crowded(made)):
            print(f"warning: {line}", file=sys.stderr, flush=True)
        if (made.processes > 1 and job.many) or isinstance(made, HostsLaunch):
            return _launched(made, place)
        if made.devices:
            os.environ["CUDA_VISIBLE_DEVICES"] = made.devices[0]
        with clean_stdout():
            return Reply(0, work(job, ALONE, None))
    from dstrain.launch.worker import follow_parent

    follow_parent()
    if scratch is not None:
        return Reply(_as_part(job, worker, scratch))
    with clean_stdout():
        value = work(job, worker, None)
    return Reply(0, value if worker.rank == 0 else None)


def work(job: Job, worker: Worker, shared: Path | None) -> Any:
    """The job as this process's share of it. `shared`: a folder that all its processes see, if any. Collective."""
    from dstrain.models.zero3 import sharded
    from dstrain.train.engine.inference import clear
    from dstrain.train.plan import device_of, set_up_process
    from dstrain.train.rendezvous import Rendezvous

    config = job.check()
    device = set_up_process(worker, config)
    together = Rendezvous(worker, timedelta(minutes=config.timeout_minutes))
    with together:
        with together.first_of_host():
            ready = job.ready(worker.world_size, device_of(device))
        if worker.rank == 0:
            job.read_weights(ready)
    alone = worker.world_size == 1 and not sharded(ready.ds_config)
    try:
        with meet(None if alone else worker, device, (config, together.store), shared) as world:
            return job.run(ready, world)
    finally:
        clear(ready.ds_config)


@contextlib.contextmanager
def meet(
    worker: Worker | None, device: torch.device, how: tuple[RunConfig, Any], shared: Path | None
) -> Iterator[World]:
    """The world of this launch, left at the end; None: of this process alone. Collective.

    `how`: the recipe, and the store where the processes have met, if any.

    Raises LostError where another process ends or falls silent, by name where there is a folder to leave word in.
    """
    from dstrain.distributed.world import SoloWorld, TorchWorld, close, join
    from dstrain.train.health.watchdog import watched

    if worker is None:
        yield SoloWorld(device)
        return
    if worker is ALONE:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    config, store = how
    timeout = timedelta(minutes=config.timeout_minutes)
    join(device, timeout, store)
    try:
        world = TorchWorld(device, timeout)
        with watched(shared, world, timeout, "the work", "fix the cause and run the command again"):
            yield world
    finally:
        close()


@contextlib.contextmanager
def clean_stdout() -> Iterator[None]:
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


def _as_part(job: Job, worker: Worker, scratch: Path) -> int:
    """A worker of a launch of ours: rank 0 leaves what came of it in the folder."""
    from dstrain.launch.worker import live

    os.dup2(2, 1)  # rank 0's output is copied to where its stdout went

    def share() -> int:
        value = work(job, worker, scratch)
        if worker.rank == 0:
            (scratch / RESULT).write_text(json.dumps(value), encoding="utf-8")
        return 0

    return live(scratch, worker.rank, share)


def _launched(made: Launch | HostsLaunch, place: Path) -> Reply:
    """Start the workers and wait for them; their logs are kept where they failed."""
    from dstrain.launch.exit_code import DONE, FAILED
    from dstrain.launch.multihost.job import gathered
    from dstrain.launch.supervise import Watch, supervise

    make_scratch(place)
    watch = Watch(saves=False)
    code, value = FAILED, None
    try:
        with clean_stdout(), gathered(made, place) as crew:
            code = supervise(crew, watch)
        if code == DONE:
            value = json.loads((place / RESULT).read_text(encoding="utf-8"))
    finally:
        if code == FAILED and not watch.killed:
            keep_scratch(place)
            print(f"dstrain: what the processes wrote is kept in {place / 'logs'}", file=sys.stderr)
        else:
            shutil.rmtree(place, ignore_errors=True)
    return Reply(code, value)
