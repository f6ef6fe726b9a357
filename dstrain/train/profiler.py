"""A close look at a few steps: a torch profiler trace of each rank, DeepSpeed's flops table, the memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from dstrain.config.schema import ProfileConfig
from dstrain.models.params.zero3 import full_numel
from dstrain.train.engine.base import Engine

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000
"""Of the memory history: some KB each in its file, and the newest stay."""


class Recorder(Protocol):
    """Something that watches the steps from its construction on."""

    def write(self, path: Path) -> None:
        """Stop watching, and write what was seen."""


class StepProfiler:
    """Watches the steps that `profile.steps` names, as far as this process takes them. Never stops the run."""

    def __init__(
        self,
        config: ProfileConfig | None,
        output_dir: Path,
        engine: Engine,
        total_steps: int,
        log_event: Callable[..., None],
    ) -> None:
        """`folder`: where files go; `steps`: the last step of the run; `tell`: writes an event."""
        self._config, self._output_dir, self._engine, self._log_event = config, output_dir, engine, log_event
        self._first_step: int | None = None
        self._recorders: list[tuple[str, Recorder]] = []
        self._errors: list[str] = []
        self._step_range: Any = None
        if config is not None and config.steps[1] > total_steps and engine.world.rank == 0:
            what = f"profile.steps is {list(config.steps)}, but the run ends with step {total_steps}"
            log.warning("%s: what comes after it is not profiled", what)
            log_event("warning", what=what)

    def begin_step(self, step: int) -> None:
        """Call it before each step, which is counted from 1 as in metrics.jsonl."""
        if self._config is None or not self._config.steps[0] <= step <= self._config.steps[1]:
            return
        if self._first_step is None:
            self._first_step = step
            self._start_recorders(step, self._config.memory)
        self._step_range = torch.profiler.record_function(f"step {step}")
        self._step_range.__enter__()

    def end_step(self, step: int, is_last: bool) -> bool:
        """Call it after each step: whether `write` is due, since the last step to profile was taken or the run is over."""
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None
        return self._config is not None and self._first_step is not None and (is_last or step >= self._config.steps[1])

    def write(self, step: int) -> None:
        """Write the files, and say where they lie. Collective."""
        world, first = self._engine.world, self._first_step
        files = []
        for name, record in reversed(self._recorders):
            path = self._output_dir / name.format(rank=world.rank, first=first, last=step)
            with self._errors_as_warnings(path.name):
                path.parent.mkdir(parents=True, exist_ok=True)
                record.write(path)
                files.append(path.name)
        told = world.gather((files, self._errors))
        self._config, self._recorders = None, []
        for rank, (_, faults) in enumerate(told):
            for fault in faults:
                self._log_event("profile_failed", rank=rank, why=fault)
        found = sorted(name for names, _ in told for name in names)
        self._log_event("profiled", steps=[first, step], files=found)
        if world.rank == 0 and found:
            print(
                f"profiled steps {first} to {step}: {self._output_dir}; open its .json.gz files at https://ui.perfetto.dev "
                f"or in chrome://tracing",
                flush=True,
            )

    def _start_recorders(self, step: int, with_memory: bool) -> None:
        """Begin to watch; the trace comes last, so that it does not show the others begin."""
        device, rank = self._engine.world.device, self._engine.world.rank
        wanted: list[tuple[str, Callable[[], Recorder]]] = []
        if rank == 0:
            wanted.append(("flops.txt", lambda: FlopsTable(self._engine, step)))
        if with_memory and device.type == "cuda":
            wanted.append(("memory-rank-{rank:05d}-steps-{first}-{last}.pickle", MemoryHistory))
        wanted.append(("trace-rank-{rank:05d}-steps-{first}-{last}.json.gz", lambda: Trace(device, with_memory)))
        for name, start in wanted:
            with self._errors_as_warnings(name.partition("-")[0]):
                self._recorders.append((name, start()))

    @contextlib.contextmanager
    def _errors_as_warnings(self, name: str) -> Iterator[None]:
        """Inside, an exception becomes a warning: nobody wants to lose a run over a look at it."""
        try:
            yield
        except Exception as error:
            self._errors.append(f"{name}: {error}")
            log.warning("the profile goes without %s (%s: %s)", name, type(error).__name__, error)


class Trace:
    """Every operation, with its shapes, on the CPU and where there is one on the GPU."""

    def __init__(self, device: torch.device, with_memory: bool) -> None:
        kinds = torch.profiler.ProfilerActivity
        self._device = device
        self._profiler = torch.profiler.profile(
            activities=[kinds.CPU, kinds.CUDA] if device.type == "cuda" else [kinds.CPU],
            record_shapes=True,
            profile_memory=with_memory,
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
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

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
        with _skip_count_errors(profiler):
            self._profiler.start_profile()
        for module in objective.modules():  # DeepSpeed counts what a shard holds, at stage 3 nothing
            module.__params__ = sum(full_numel(parameter) for parameter in module.parameters())
        # The first forward pass alone: recomputation in the backward pass would count as a second one.
        self._first_pass_hook = objective.register_forward_hook(lambda *_: _with_fallback(self._stop, None)())

    def write(self, path: Path) -> None:
        self._stop()
        try:
            with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
                self._profiler.print_model_profile(profile_step=self._step)
        finally:
            self._profiler.end_profile()

    def _stop(self) -> None:
        self._first_pass_hook.remove()
        self._profiler.stop_profile()


@contextlib.contextmanager
def _skip_count_errors(profiler: Any) -> Iterator[None]:
    """Inside, DeepSpeed patches torch so that a call it cannot count is not counted.

    Its counting functions know most arguments by place only, and would raise within the model's forward pass.
    """
    wrap, hooks = profiler.wrapFunc, profiler.MODULE_HOOK_MAPPING
    profiler.wrapFunc = lambda function, count: wrap(function, _with_fallback(count, (0, 0)))
    profiler.MODULE_HOOK_MAPPING = {kind: _with_fallback(hook, None) for kind, hook in hooks.items()}
    try:
        yield
    finally:
        profiler.wrapFunc, profiler.MODULE_HOOK_MAPPING = wrap, hooks


def _with_fallback(function: Callable[..., Any], fallback: Sequence[int] | None) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception:
            return fallback

    return wrapper
