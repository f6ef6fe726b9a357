"""One command on all ranks of this host: start, results, temporary folders."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dstrain.config import RunConfig
from dstrain.ds_config import Device
from dstrain.errors import OutOfMemoryError, UsageError
from dstrain.files import get_host_id, parse_json
from dstrain.launch.plan import Launch, LaunchOptions, cpu_overload_warning, plan_launch
from dstrain.launch.processes import is_process_alive, start_time
from dstrain.launch.topology import Worker, worker_from_env
from dstrain.process_setup import log_stderr
from dstrain.report.allocation_errors import find_allocation_failure
from dstrain.report.device_errors import explain_device_error

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import World
    from dstrain.training.rendezvous import Rendezvous


# While a command runs, `owner.json` in its folder names its process. The folder of a failed command
# is kept for its logs, without that file. A folder whose owner has ended was left by a killed
# command; the next command of the same user on the same host removes it.


OWNER_FILE = "owner.json"
_SCRATCH_NAME = re.compile(r"dstrain-[0-9a-f]{16}")
_MAX_SCANNED, _MAX_REMOVED = 10_000, 20
"""Limits per command: TMPDIR is shared with other users, and may be slow."""


def make_scratch_path() -> Path:
    """Return a new path in TMPDIR."""
    return Path(tempfile.gettempdir()) / f"dstrain-{secrets.token_hex(8)}"


def make_scratch(scratch_dir: Path) -> None:
    """Create the folder, for this user only, and remove those of killed commands. Raises UsageError."""
    try:
        scratch_dir.mkdir(mode=0o700)
        owner = {"machine": get_host_id(), "pid": os.getpid(), "started": start_time(os.getpid())}
        (scratch_dir / OWNER_FILE).write_text(json.dumps(owner), encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{scratch_dir} cannot be created ({error.strerror}); set TMPDIR to another folder") from None
    with contextlib.suppress(OSError):
        remove_stale_scratch(scratch_dir.parent)


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in TMPDIR, and remove it at the end. Raises UsageError."""
    folder = make_scratch_path()
    make_scratch(folder)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def keep_scratch(scratch_dir: Path) -> None:
    """Keep the folder for the user to read: remove its owner file."""
    with contextlib.suppress(OSError):
        (scratch_dir / OWNER_FILE).unlink()


def remove_stale_scratch(folder: Path) -> None:
    """Remove the folders of this user's commands on this host whose process has ended."""
    removed = 0
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MAX_SCANNED) if _SCRATCH_NAME.fullmatch(entry.name)]
    for name in names:
        if removed < _MAX_REMOVED and _is_stale(folder / name):
            shutil.rmtree(folder / name, ignore_errors=True)
            removed += 1


def _is_stale(scratch_dir: Path) -> bool:
    """Return True for a folder of this user, made on this host, whose process is known to have ended."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        found = scratch_dir.lstat()
        # lstat: another user could place a link of that name in TMPDIR.
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        # No link is followed and no pipe waited for: TMPDIR is shared.
        with os.fdopen(os.open(scratch_dir / OWNER_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            owner = parse_json(file.read(4096))
        return (
            bool(owner["machine"] == get_host_id())
            and is_process_alive(int(owner["pid"]), str(owner["started"])) is False
        )
    return False


SINGLE_WORKER = Worker(0, 0, 1, "dstrain", 1)
"""The worker of a process that no launcher started."""
RESULT_FILE = "result.json"


@dataclass(frozen=True)
class Prepared:
    """What a job has on one process before the process group starts."""

    ds_config: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    """DeepSpeed JSON with which the model is held; empty for a job that makes its own."""


class Job(ABC):
    """Work of a command, on one process or several."""

    trains: ClassVar[bool] = False
    """True if the job takes optimizer steps, for which DeepSpeed needs a process group."""

    @property
    def is_parallel(self) -> bool:
        """True if several processes are faster than one."""
        return True

    @abstractmethod
    def to_argv(self) -> list[str]:
        """Return the command and its options as arguments of a worker."""

    @abstractmethod
    def check_recipe(self) -> RunConfig:
        """Return the recipe. Raises UsageError for faults that are found without torch."""

    def prepare(self, world_size: int, device: Device) -> Any:
        """Do the work that a process does alone; return a `Prepared`, or what has its `ds_config`. Raises UsageError."""
        return Prepared()

    def cache_weight_hashes(self, prepared: Any) -> None:  # noqa: B027  most jobs have none
        """Cache the hashes that `run` compares: rank 0 computes them before others wait in a collective."""

    @abstractmethod
    def run(self, prepared: Any, world: World) -> Any:
        """Run the job and return its result, as JSON; rank 0's is used. Collective."""


@dataclass(frozen=True)
class JobResult:
    """Exit code and result of a command on this process."""

    exit_code: int
    value: Any = None
    """Result to print; None on processes that do not print it."""


def run_job(job: Job, launch_options: Mapping[str, Any], scratch_dir: Path | None) -> JobResult:
    """Run a job in this process or several, as the launch options or a launcher's environment say.

    `scratch_dir`: the folder of the launch if this process is a worker of one by `dstrain`, else
    None.
    """
    worker = worker_from_env(os.environ)
    if worker is None:
        config = job.check_recipe()
        new_scratch_dir = make_scratch_path()
        options = LaunchOptions(**launch_options)
        arguments = [*job.to_argv(), "--scratch", str(new_scratch_dir)]
        launch = plan_launch(options, arguments, os.environ, config.launch)
        if job.is_parallel and (line := cpu_overload_warning(launch)):
            log_stderr(f"warning: {line}")
        if (launch.world_size > 1 and job.is_parallel) or launch.hosts:
            return _launch_workers(launch, new_scratch_dir)
        if launch.devices:
            # Before torch is loaded, which reads it once.
            os.environ["CUDA_VISIBLE_DEVICES"] = launch.devices[0]
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
    """Run this process's share of the job and return the result. Collective.

    `shared_dir`: a folder that all processes of the job see, if any.
    """
    from dstrain.distributed.world import SingleProcessWorld
    from dstrain.models.params import is_zero3
    from dstrain.training.engine.base import remove_private_nvme_path
    from dstrain.training.plan import get_preset_device, set_up_process, use_device
    from dstrain.training.rendezvous import Rendezvous

    config = job.check_recipe()
    device = set_up_process(worker, config)
    use_device(device)
    timeout = timedelta(minutes=config.timeout_minutes)
    rendezvous = Rendezvous(worker, timeout)
    command = job.to_argv()[0]
    with explain_failure(command, device), rendezvous:
        with rendezvous.local_main_process_first():
            prepared = job.prepare(worker.world_size, get_preset_device(device))
        if worker.rank == 0:
            job.cache_weight_hashes(prepared)
    # DeepSpeed shards over a process group, also of one process.
    alone = worker.world_size == 1 and not job.trains and not is_zero3(prepared.ds_config)
    if worker is SINGLE_WORKER and not alone:
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1")
    try:
        with (
            explain_failure(command, device),
            contextlib.nullcontext(SingleProcessWorld(device))
            if alone
            else join_world(rendezvous, device, timeout, shared_dir) as world,
        ):
            if worker.world_size % config.parallel.sequence == 0:  # else each process computes whole sequences
                world.share_sequences(config.parallel.sequence)
            return job.run(prepared, world)
    finally:
        remove_private_nvme_path(prepared.ds_config)


@contextlib.contextmanager
def join_world(
    rendezvous: Rendezvous, device: torch.device, timeout: timedelta, shared_dir: Path | None
) -> Iterator[World]:
    """Yield the world of this launch, and leave it at the end. Collective.

    `shared_dir`: a folder that all processes of the job see, if any, for the stacks of a stalled job. Raises
    PeerFailureError if another process ends or stops answering.
    """
    from dstrain.distributed.world import joined_world
    from dstrain.training.health.watchdog import peer_watchdog

    fix = "fix the cause and run the command again"
    with (
        joined_world(device, timeout, rendezvous.store) as world,
        peer_watchdog(rendezvous.liveness, shared_dir, world, timeout, "the job", fix),
    ):
        yield world


@contextlib.contextmanager
def redirect_stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr inside, also for C libraries: stdout is for the result only."""
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
    """Run the job as a worker of a launch by `dstrain`; rank 0 writes the result into the folder."""
    from dstrain.launch.worker import run_worker

    os.dup2(2, 1)  # the copy of rank 0's log goes to stderr

    def run() -> int:
        value = run_in_process(job, worker, scratch_dir)
        if worker.rank == 0:
            (scratch_dir / RESULT_FILE).write_text(json.dumps(value), encoding="utf-8")
        return 0

    return run_worker(scratch_dir, worker.rank, run)


def _launch_workers(launch: Launch, scratch_dir: Path) -> JobResult:
    """Start the workers and wait for them. If they fail, their logs are kept."""
    from dstrain.errors import EXIT_DONE, EXIT_FAILED
    from dstrain.launch.hosts import open_worker_group
    from dstrain.launch.supervise import StopState, supervise

    make_scratch(scratch_dir)
    stop_state = StopState(saves_checkpoint=False)
    code, value = EXIT_FAILED, None
    try:
        with redirect_stdout_to_stderr(), open_worker_group(launch, scratch_dir) as group:
            code = supervise(group, stop_state)
        if code == EXIT_DONE:
            value = json.loads((scratch_dir / RESULT_FILE).read_text(encoding="utf-8"))  # noqa: TID251  of this user, and of any size
    finally:
        if code == EXIT_FAILED and not stop_state.killed:
            keep_scratch(scratch_dir)
            log_stderr(f"dstrain: the logs of the processes are kept in {scratch_dir / 'logs'}")
        else:
            shutil.rmtree(scratch_dir, ignore_errors=True)
    return JobResult(code, value)


SMALLER_PASSES = {"generate": "ask for fewer prompts per pass (--batch 1)"}
"""Command -> what makes its passes smaller; the others take the recipe's micro-batch."""


@contextlib.contextmanager
def explain_failure(command: str, device: torch.device) -> Iterator[None]:
    """Raise OutOfMemoryError, with what helps `dstrain COMMAND`, for a failed allocation inside, and DeviceError."""
    try:
        yield
    except Exception as error:
        failure = find_allocation_failure(error)
        device_error = explain_device_error(error, device, f"dstrain {command}")
        if device_error is not None and failure is None:
            raise device_error from error
        if failure is None or isinstance(error, OutOfMemoryError):
            raise
        smaller = SMALLER_PASSES.get(command, "make its passes smaller (--set batch.micro=1)")
        shards = "or divide the weights among processes (--ds-config zero3 --num-gpus N)"
        if failure.place == "host":
            shards = "or start fewer processes on this host (--num-gpus N)"
        raise OutOfMemoryError(
            f"dstrain {command}: {failure.describe()} could not be allocated; {smaller}, {shards}"
        ) from error
