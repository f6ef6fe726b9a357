"""What the processes of a fault do: train a small model on two ranks, save under a fault, and start anew.

Imported before they are forked. The state after each step is a function of the step alone, so that a state made of two
steps is seen.
"""

from __future__ import annotations

import hashlib
import os
import resource
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dstrain.batch import Batch, Progress
from dstrain.config import BatchPlan, RunConfig
from dstrain.distributed.store import find_connection_error, unknown_peer_message
from dstrain.distributed.world import SingleProcessWorld, TorchWorld, World
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.errors import DstrainError
from dstrain.models.params import build_param_groups, zero3_init
from dstrain.preset import read_preset
from dstrain.report.run_log import RunLog
from dstrain.tasks import Task
from dstrain.tasks.common.task import Loss
from dstrain.training import checkpoints
from dstrain.training.build_model import build_train_module
from dstrain.training.build_run import prepare_start
from dstrain.training.checkpoints import CheckpointStore
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.engine.torch import TorchEngine
from dstrain.training.saver import CheckpointSaver
from dstrain.training.start import ResumeOptions, find_resume_point
from dstrain.training.state.engine_state import open_checkpoint
from dstrain.training.state.manifest import find_checkpoints
from tests.faults.kill_points import Points
from tests.vocabulary import read_jsonl

WIDTH = 48
SAMPLES = 4
"""Of a step."""
BEFORE = 3
"""Steps that were saved before the fault, one by one; the next is the one under the fault."""
KEEP = 2
TIMEOUT = timedelta(seconds=20)
"""Of the process group."""
checkpoints.RETRY_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class Squares(Task):
    """Learns to double numbers; its model has a buffer and a frozen part."""

    def examples(self, split: str) -> Sequence[int]:
        return range(1000)

    def collate(self, examples: Sequence[int]) -> Batch:
        rows = [torch.randn(WIDTH, generator=torch.Generator().manual_seed(sample)) for sample in examples]
        return Batch(tensors={"x": torch.stack(rows)}, weight=float(len(examples)), samples=tuple(examples))

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        model[2].requires_grad_(False)
        model.register_buffer("seen", torch.arange(7.0))
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        return Loss((model(batch.tensors["x"]) - 2 * batch.tensors["x"]).square().sum())


@dataclass(frozen=True)
class Saved:
    """How a rank came out of a save."""

    points: list[str]
    error: str | None
    """`CheckpointError: …`; None where all went well."""
    ours: bool
    """Whether the error is one that dstrain raises on purpose."""


@dataclass(frozen=True)
class Started:
    """What a rank found at a new start."""

    step: int
    samples: int
    state: str
    """Hash of what all ranks hold after loading."""
    passed_over: dict[str, str]
    """Checkpoint -> why."""
    removed: list[str]
    later: dict[int, str]
    """Step -> hash, of the steps that were taken and saved after it."""
    left: list[str]
    """Names in the folder of checkpoints at the end."""


class Scene:
    """One rank's engine and checkpoints over a run folder."""

    def __init__(self, store: str, rank: int, size: int, folder: Path, engine: str = "torch") -> None:
        torch.set_num_threads(1)
        self.world: World = SingleProcessWorld()  # without threads, so that the process may be forked
        if size > 1:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
            self.world = TorchWorld(torch.device("cpu"), TIMEOUT)
        self.folder, self._task = folder, Squares(recipe=_recipe())
        self.engine = self._engine(engine)
        self.journal = RunLog(folder, rank)
        self.checkpoints = CheckpointStore(folder=folder / "checkpoints", world=self.world, keep=KEEP)

    def _engine(self, kind: str) -> Any:
        recipe, size = self._task.recipe, self.world.size
        if kind == "torch":
            objective = build_train_module(self._task)
            engine = TorchEngine(
                objective, build_param_groups(objective.model, recipe.optim), recipe.optim, self.world.device
            )
            engine.world = self.world
            return engine
        batch = BatchPlan(SAMPLES, SAMPLES // size, 1)
        config = resolve_ds_config(recipe, read_preset(kind), batch, size, Device("cpu", True), self.folder)
        with zero3_init(config):
            objective = build_train_module(self._task)
        groups = build_param_groups(objective.model, recipe.optim)
        return DeepSpeedEngine(objective, groups, recipe.optim, config, self.world)

    def advance(self, first: int, last: int) -> None:
        """Take the steps after `first` up to `last`."""
        for step in range(first, last):
            samples = list(range(step * SAMPLES, (step + 1) * SAMPLES))
            if isinstance(self.engine, DeepSpeedEngine):
                samples = samples[self.world.rank :: self.world.size]
            self.engine.step([self._task.collate(samples)], 1e-2)

    def state(self) -> str:
        """Hash of what all ranks hold."""
        digest = hashlib.sha256()
        for shard in self.engine.state_files():
            for name, tensor in shard.tensors:
                digest.update(name.encode() + tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
            digest.update(repr(sorted(shard.scalars.items())).encode())
        return hashlib.sha256(repr(self.world.gather(digest.hexdigest())).encode()).hexdigest()[:16]

    def saving(self, background: bool = False) -> CheckpointSaver:
        size = 12 * 3 * WIDTH * WIDTH
        checkpoints = CheckpointStore(
            folder=self.checkpoints.folder, world=self.world.new_group() if background else self.world, keep=KEEP
        )
        record = {"zero_stage": 0, "preset": "tests"}
        return CheckpointSaver(
            checkpoints=checkpoints, engine=self.engine, run_info=record, log_event=self.journal.log_event, checkpoint_size=size,
            background=background,
        )  # fmt: skip


def _recipe() -> RunConfig:
    values = {"task": "squares", "model": {"gradient_checkpointing": False}, "optim": {"lr": 1e-2}, "precision": "fp32"}
    return RunConfig.model_validate(values)


def unbroken(store: str, rank: int, size: int, folder: str, steps: int, engine: str = "torch") -> dict[int, str]:
    """Train from nothing and save each step up to BEFORE; returns the state after each of `steps`. Collective."""
    scene = Scene(store, rank, size, Path(folder), engine)
    saving, states = scene.saving(), {}
    for step in range(1, steps + 1):
        scene.advance(step - 1, step)
        states[step] = scene.state()
        if step <= BEFORE:
            saving.save(Progress(step, step * SAMPLES), 1 / step)
    return states


def save(store: str, rank: int, size: int, folder: str, again: bool = False, background: bool = False,
         engine: str = "torch", at: tuple[int, int] | None = None, act: str = "kill") -> Saved:  # fmt: skip
    """Go on from step BEFORE and save the next, with a fault. Collective.

    `at`: (rank, number of the point) of the fault, -1 for before the save; None counts points. `act`: see `_actor`.
    `again`: save that step once before, so that it is replaced.
    """
    scene = Scene(store, rank, size, Path(folder), engine)
    start, _ = scene.checkpoints.find_latest_valid()
    assert start is not None
    scene.engine.load(open_checkpoint(start.path, scene.world))
    saving, step = scene.saving(background), start.step + 1
    scene.advance(start.step, step)
    if again:
        saving.save(Progress(step, step * SAMPLES), 1 / step, is_last=True)
    mine = at[1] if at is not None and at[0] == rank else None
    actor = _actor(act, scene.folder)
    if mine == -1:
        actor()
    points = Points(scene.checkpoints.folder, mine, actor)
    try:
        with points.watched():
            saving.save(Progress(step, step * SAMPLES), 1 / step)
            if background:
                scene.advance(step, step + 1)  # training changes the values meanwhile
            saving.wait()
    except Exception as error:
        if not isinstance(error, DstrainError) and (why := find_connection_error(error)):
            # Training, not the save, met the killed rank first: in a run the watchdog makes this sentence of it.
            return Saved(points.seen, unknown_peer_message(why), True)
        return Saved(points.seen, f"{type(error).__name__}: {error}", isinstance(error, DstrainError))
    return Saved(points.seen, None, True)


def save_on(store: str, rank: int, size: int, folder: str, delay: float, engine: str = "torch") -> None:
    """Go on from step BEFORE and save each step until the alarm rings. Collective."""
    scene = Scene(store, rank, size, Path(folder), engine)
    start, _ = scene.checkpoints.find_latest_valid()
    assert start is not None
    scene.engine.load(open_checkpoint(start.path, scene.world))
    saving, step = scene.saving(), start.step
    scene.world.barrier()
    signal.setitimer(signal.ITIMER_REAL, delay + 1e-6)
    while True:
        step += 1
        scene.advance(step - 1, step)
        saving.save(Progress(step, step * SAMPLES), 1 / step)


def _actor(act: str, folder: Path) -> Callable[[], None]:
    """`kill`; `raise N`: let the call fail with this errno; `fill N`: fill the disk of the folder but for N bytes;
    `limit N`: let no file of this process grow over N."""
    name, _, size = act.partition(" ")
    acts = {"fill": partial(fill, folder), "limit": limit, "raise": fail}
    return partial(acts[name], int(size)) if size else partial(os.kill, os.getpid(), signal.SIGKILL)


def limit(size: int) -> None:
    """A disk that is full for this process alone: a file that grows over so many bytes fails."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def fail(number: int) -> None:
    raise OSError(number, os.strerror(number))


def fill(folder: Path, left: int) -> None:
    """Take all room of the folder's disk but for so many bytes."""
    size = max(0, os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - left)
    with (folder / "ballast").open("ab") as file:
        os.posix_fallocate(file.fileno(), file.tell(), size) if size else None


def start_anew(store: str, rank: int, size: int, folder: str, engine: str = "torch", more: int = 2) -> Started | str:
    """Start as `dstrain train` does, then take and save `more` steps. Returns the error where it cannot. Collective."""
    scene = Scene(store, rank, size, Path(folder), engine)
    try:
        point = find_resume_point(scene.checkpoints, ResumeOptions("auto"))
        start = prepare_start(point, scene.checkpoints, scene.journal, _recipe().save.prune_when_full)
        assert start is not None
        scene.engine.load(open_checkpoint(start.path, scene.world))
    except DstrainError as error:
        return f"{type(error).__name__}: {error}"
    found, saving, later = scene.state(), scene.saving(), {}
    for step in range(start.step + 1, start.step + 1 + more):
        scene.advance(step - 1, step)
        saving.save(Progress(step, step * SAMPLES), 1 / step)
        later[step] = scene.state()
    told = _events(scene.folder) if rank == 0 else []
    assert all(
        info.is_complete
        for info in find_checkpoints(scene.checkpoints.folder, check_hashes=True)
        if info.step > start.step
    )
    return Started(
        start.step,
        start.progress.samples,
        found,
        {row["checkpoint"]: row["why"] for row in told if row["event"] == "checkpoint_skipped"},
        [row["checkpoint"] for row in told if row["event"] == "partial_checkpoint_removed"],
        later,
        sorted(path.name for path in scene.checkpoints.folder.iterdir()),
    )


def _events(folder: Path) -> list[dict[str, Any]]:
    return read_jsonl(folder / "events.jsonl")
