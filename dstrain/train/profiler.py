"""A close look at a few steps: a torch profiler trace of each rank, DeepSpeed's flops table, the memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dstrain.config.schema import ProfileConfig
from dstrain.models.zero3 import numel
from dstrain.train.engine.deepspeed import Engine

log = logging.getLogger(__name__)

MOST_ALLOCATIONS = 100_000
"""Of the memory history: some KB each in its file, and the newest stay."""


class Record(Protocol):
    """Something that watches the steps from its construction on."""

    def write(self, path: Path) -> None:
        """Stop watching, and write what was seen."""


class Profile:
    """Watches the steps that `profile.steps` names, as far as this process takes them. Never stops the run."""

    def __init__(
        self, wanted: ProfileConfig | None, folder: Path, engine: Engine, steps: int, tell: Callable[..., None]
    ) -> None:
        """`folder`: where files go; `steps`: the last step of the run; `tell`: writes an event."""
        self._wanted, self._folder, self._engine, self._tell = wanted, folder, engine, tell
        self._began: int | None = None
        self._records: list[tuple[str, Record]] = []
        self._faults: list[str] = []
        self._mark: Any = None
        if wanted is not None and wanted.steps[1] > steps and engine.world.rank == 0:
            what = f"profile.steps is {list(wanted.steps)}, but the run ends with step {steps}"
            log.warning("%s: what comes after it is not profiled", what)
            tell("warning", what=what)

    def begin(self, step: int) -> None:
        """Call it before each step, which is counted from 1 as in metrics.jsonl."""
        if self._wanted is None or not self._wanted.steps[0] <= step <= self._wanted.steps[1]:
            return
        if self._began is None:
            self._began = step
            self._start(step, self._wanted.memory)
        self._mark = torch.profiler.record_function(f"step {step}")
        self._mark.__enter__()

    def ends(self, step: int, over: bool) -> bool:
        """Call it after each step: whether `write` is due, since the last step to profile was taken or the run is over."""
        if self._mark is not None:
            self._mark.__exit__(None, None, None)
            self._mark = None
        return self._wanted is not None and self._began is not None and (over or step >= self._wanted.steps[1])

    def write(self, step: int) -> None:
        """Write the files, and say where they lie. Collective."""
        world, first = self._engine.world, self._began
        files = []
        for name, record in reversed(self._records):
            path = self._folder / name.format(rank=world.rank, first=first, last=step)
            with self._unharmed(path.name):
                path.parent.mkdir(parents=True, exist_ok=True)
                record.write(path)
                files.append(path.name)
        told = world.gather((files, self._faults))
        self._wanted, self._records = None, []
        for rank, (_, faults) in enumerate(told):
            for fault in faults:
                self._tell("profile_failed", rank=rank, why=fault)
        found = sorted(name for names, _ in told for name in names)
        self._tell("profiled", steps=[first, step], files=found)
        if world.rank == 0 and found:
            print(
                f"profiled steps {first} to {step}: {self._folder}; open its .json.gz files at https://ui.perfetto.dev "
                f"or in chrome://tracing",
                flush=True,
            )

    def _start(self, step: int, memory: bool) -> None:
        """Begin to watch; the trace comes last, so that it does not show the others begin."""
        device, rank = self._engine.world.device, self._engine.world.rank
        wanted: list[tuple[str, Callable[[], Record]]] = []
        if rank == 0:
            wanted.append(("flops.txt", lambda: FlopsTable(self._engine, step)))
        if memory and device.type == "cuda":
            wanted.append(("memory-rank-{rank:05d}-steps-{first}-{last}.pickle", MemoryHistory))
        wanted.append(("trace-rank-{rank:05d}-steps-{first}-{last}.json.gz", lambda: Trace(device, memory)))
        for name, start in wanted:
            with self._unharmed(name.partition("-")[0]):
                self._records.append((name, start()))

    @contextlib.contextmanager
    def _unharmed(self, what: str) -> Iterator[None]:
        """Inside, an exception becomes a warning: nobody wants to lose a run over a look at it."""
        try:
            yield
        except Exception as error:
            self._faults.append(f"{what}: {error}")
            log.warning("the profile goes without %s (%s: %s)", what, type(error).__name__, error)


class Trace:
    """Every operation, with its shapes, on the CPU and where there is one on the GPU."""

    def __init__(self, device: torch.device, memory: bool) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._device = device
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU],
            record_shapes=True,
            profile_memory=memory,
            with_stack=False,
        )
        self._profiler.start()

    def write(self, path: Path) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))


class MemoryHistory:
    """What was allocated where, for https://pytorch.org/memory_viz."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MOST_ALLOCATIONS)

    def write(self, path: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


class FlopsTable:
    """DeepSpeed's table of modules: parameters, operations and time of one forward pass of one micro-batch."""

    def __init__(self, engine: Any, step: int) -> None:
        from deepspeed.profiling.flops_profiler import profiler

        objective, self._step = engine.objective, step
        self._profiler = profiler.FlopsProfiler(objective, getattr(engine, "engine", None))
        with _forgiving(profiler):
            self._profiler.start_profile()
        for module in objective.modules():  # DeepSpeed counts what a shard holds, at stage 3 nothing
            module.__params__ = sum(numel(parameter) for parameter in module.parameters())
        # The first forward pass alone: recomputation in the backward pass would count as a second one.
        self._first = objective.register_forward_hook(lambda *_: _or_else(self._stop, None)())

    def write(self, path: Path) -> None:
        self._stop()
        try:
            with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
                self._profiler.print_model_profile(profile_step=self._step)
        finally:
            self._profiler.end_profile()

    def _stop(self) -> None:
        self._first.remove()
        self._profiler.stop_profile()


@contextlib.contextmanager
def _forgiving(profiler: Any) -> Iterator[None]:
    """Inside, DeepSpeed patches torch so that a call it cannot count is not counted.

    Its counting functions know most arguments by place only, and would raise within the model's forward pass.
    """
    wrap, hooks = profiler.wrapFunc, profiler.MODULE_HOOK_MAPPING
    profiler.wrapFunc = lambda function, count: wrap(function, _or_else(count, (0, 0)))
    profiler.MODULE_HOOK_MAPPING = {kind: _or_else(hook, None) for kind, hook in hooks.items()}
    try:
        yield
    finally:
        profiler.wrapFunc, profiler.MODULE_HOOK_MAPPING = wrap, hooks


def _or_else(function: Callable[..., Any], otherwise: Sequence[int] | None) -> Callable[..., Any]:
    def counted(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception:
            return otherwise

    return counted
