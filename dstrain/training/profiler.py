"""Profiling of selected steps: torch trace, FLOPs per module, CUDA memory history."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.flop_counter import FlopCounterMode

from dstrain.config.schema import ProfileConfig
from dstrain.files import make_folder
from dstrain.models.params import full_numel
from dstrain.process_setup import log_stdout
from dstrain.report.flops import FLOP_FORMULAS
from dstrain.training.engine.base import Engine
from dstrain.units import format_count

log = logging.getLogger(__name__)

MAX_ALLOCATIONS = 100_000
"""Limit of the memory history: each takes a few KB in its file, and the newest are kept."""


class Recorder(Protocol):
    """Recorder of steps, from its construction on."""

    def write(self, path: Path) -> None:
        """Stop recording and write the file."""


class StepProfiler:
    """Profiler of the steps in `profile.steps`. An error in it never stops the run."""

    def __init__(
        self,
        config: ProfileConfig,
        output_dir: Path,
        engine: Engine,
        total_steps: int,
        log_event: Callable[..., None],
    ) -> None:
        """Write files to `output_dir`."""
        self._config, self._output_dir, self._engine, self._log_event = config, output_dir, engine, log_event
        self._first_step: int | None = None
        self._recorders: list[tuple[str, Recorder]] = []
        self._errors: list[str] = []
        self._step_range: Any = None
        if config.steps[1] > total_steps and engine.world.rank == 0:
            what = f"profile.steps is {list(config.steps)}, but the run ends with step {total_steps}"
            log.warning("%s: later steps are not profiled", what)
            log_event("warning", what=what)

    def begin_step(self, step: int) -> None:
        """Begin to record if the step, counted from 1 as in metrics.jsonl, is to be profiled."""
        if not self._config.steps[0] <= step <= self._config.steps[1]:
            return
        if self._first_step is None:
            self._first_step = step
            self._start_recorders(step, self._config.memory)
        self._step_range = torch.profiler.record_function(f"step {step}")
        self._step_range.__enter__()

    def end_step(self, step: int, is_last: bool) -> bool:
        """End the mark of a step; return True if `write` is due: after the last profiled step or the run's end."""
        if self._step_range is not None:
            self._step_range.__exit__(None, None, None)
            self._step_range = None
        return self._first_step is not None and (is_last or step >= self._config.steps[1])

    def write(self, step: int) -> None:
        """Write the files of the steps up to `step`, and report their folder. Collective."""
        world, first = self._engine.world, self._first_step
        files = []
        # The trace was started last and is written first, so that it does not show the others being written.
        for name, record in reversed(self._recorders):
            path = self._output_dir / name.format(rank=world.rank, first=first, last=step)
            with self._errors_as_warnings(path.name):
                make_folder(path.parent)
                record.write(path)
                files.append(path.name)
        # A rank without a file takes part too.
        results = world.gather((files, self._errors))
        self._first_step, self._recorders = None, []
        for rank, (_, errors) in enumerate(results):
            for error in errors:
                self._log_event("profile_failed", rank=rank, why=error)
        found = sorted(name for names, _ in results for name in names)
        self._log_event("profiled", steps=[first, step], files=found)
        if world.rank == 0 and found:
            log_stdout(
                f"profiled steps {first} to {step}: {self._output_dir}; open its .json.gz files at https://ui.perfetto.dev "
                f"or in chrome://tracing",
            )

    def _start_recorders(self, step: int, with_memory: bool) -> None:
        """Start the recorders; the trace comes last, so that it does not show the start of the others."""
        device, rank = self._engine.world.device, self._engine.world.rank
        wanted: list[tuple[str, Callable[[], Recorder]]] = []
        if rank == 0:
            wanted.append(("flops.txt", lambda: FlopsTable(self._engine.train_module, step)))
        if with_memory and device.type == "cuda":
            wanted.append(("memory-rank-{rank:05d}-steps-{first}-{last}.pickle", MemoryHistory))
        wanted.append(("trace-rank-{rank:05d}-steps-{first}-{last}.json.gz", lambda: Trace(device, with_memory)))
        for name, start in wanted:
            with self._errors_as_warnings(name.partition("-")[0]):
                self._recorders.append((name, start()))

    @contextlib.contextmanager
    def _errors_as_warnings(self, name: str) -> Iterator[None]:
        """Context that turns an exception into a warning: a profile is not worth losing a run."""
        try:
            yield
        except Exception as error:
            self._errors.append(f"{name}: {error}")
            log.warning("the profile lacks %s (%s: %s)", name, type(error).__name__, error)


class Trace:
    """Trace of every operation, with its shapes, on the CPU and the GPU."""

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
            # Kernels of the last step may still run; the trace must have them.
            torch.cuda.synchronize(self._device)
        self._profiler.stop()
        self._profiler.export_chrome_trace(str(path))


class MemoryHistory:
    """History of CUDA allocations, for https://pytorch.org/memory_viz."""

    def __init__(self) -> None:
        torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def write(self, path: Path) -> None:
        try:
            torch.cuda.memory._dump_snapshot(str(path))
        finally:
            # Off in any case: recording slows each allocation.
            torch.cuda.memory._record_memory_history(enabled=None)


class FlopsTable:
    """Table of modules: parameters, floating point operations and time of one forward pass of one micro-batch.

    Operations are counted by torch's FlopCounterMode. It knows matrix products, convolutions and attention.
    """

    def __init__(self, module: torch.nn.Module, step: int) -> None:
        self._module, self._step = module, step
        self._counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        self._totals: dict[torch.nn.Module, _ModuleTotals] = {}
        self._open: list[tuple[float, int]] = []
        """(start time, operations before) of each module whose forward pass is running, outermost first."""
        # On the root and before its other hooks: they read the total of the counter.
        self._hooks = [module.register_forward_pre_hook(self._start_counter, prepend=True)]
        for child in module.modules():
            self._hooks.append(child.register_forward_pre_hook(self._enter_module))
            self._hooks.append(child.register_forward_hook(self._leave_module, always_call=True))
        # Only the first forward pass: recomputation in the backward pass would count as a second one.
        self._hooks.append(module.register_forward_hook(lambda *_: self._stop(), always_call=True))

    def write(self, path: Path) -> None:
        """Write the table as text."""
        self._stop()
        rows = [("module", "class", "parameters", "FLOPs", "seconds")]
        # Modules that were not called have no row: containers such as ModuleList, unused layers.
        called = {name: self._totals[child] for name, child in self._module.named_modules() if child in self._totals}
        for name, total in called.items():
            child = self._module.get_submodule(name)
            size = sum(full_numel(parameter) for parameter in child.parameters())  # under ZeRO-3 of all shards
            parts = name.split(".")
            prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
            parents = [prefix for prefix in prefixes if prefix in called]
            own_name = name.removeprefix(f"{parents[-1]}.") if parents else name or "(all)"
            label = "  " * (len(parents) + bool(name)) + own_name
            numbers = format_count(size), format_count(total.flops), f"{total.seconds:.4f}"
            rows.append((label, type(child).__name__, *numbers))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"One forward pass of one micro-batch on rank 0 at step {self._step}", ""]
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row[:2], widths[:2], strict=True)]
            cells += [cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True)]
            lines.append("  ".join(cells))
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _start_counter(self, *_: Any) -> None:
        self._counter.__enter__()

    def _enter_module(self, *_: Any) -> None:
        self._open.append((self._read_clock(), self._counter.get_total_flops()))

    def _leave_module(self, module: torch.nn.Module, *_: Any) -> None:
        start, flops = self._open.pop()
        totals = self._totals.setdefault(module, _ModuleTotals())
        totals.seconds += self._read_clock() - start
        totals.flops += self._counter.get_total_flops() - flops

    def _read_clock(self) -> float:
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # kernels run after the call that queued them has returned
        return time.perf_counter()

    def _stop(self) -> None:
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._counter.mode is not None:
            self._counter.__exit__(None, None, None)


@dataclass
class _ModuleTotals:
    """Totals of a module over its calls in one forward pass, its submodules included."""

    seconds: float = 0.0
    flops: int = 0
