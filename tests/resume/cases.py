"""Worker functions of the resume tests: a complete run, interrupted on request."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import torch

from dstrain.batch import Batch, StepResult
from dstrain.commands.recipe_args import TrainRequest, resolve_recipe
from dstrain.data.loading.loader import Loader, Step
from dstrain.launch.topology import Worker
from dstrain.training import build_run as build
from dstrain.training.build_run import build_run, with_frozen_outputs
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.messages import finish_run
from dstrain.training.plan import make_plan
from dstrain.training.run import train
from dstrain.training.start import ResumeOptions
from dstrain.training.state import files
from dstrain.training.state.files import CheckpointReader
from tests.memory_limits import limit_micro_batch
from tests.parity.cases import share_sequences, world


class Crash(Exception):
    """Simulates kill -9: nothing is cleaned up."""


def _build_limited_engine(
    build_engine: Callable[..., DeepSpeedEngine], limit: Mapping[str, Any], *args: Any, **options: Any
) -> DeepSpeedEngine:
    engine = build_engine(*args, **options)
    limit_micro_batch(engine, **limit)
    return engine


def run(recipe: str, run_dir: str, sets: Sequence[str] = (), crash_at: int | None = None, stop_at: int | None = None, save_at: int | None = None,
        resume: str = "auto", allowed: Sequence[str] = (), poison: Sequence[int] = (), full: bool = False,
        memory: int | None = None, limit: Mapping[str, Any] | None = None) -> dict[str, Any]:  # fmt: skip
    """Train as a worker does. `crash_at`: die in that step. `stop_at`: a signal reaches rank 0 in that step.
    `save_at`: SIGUSR1 does.

    `poison`: ids of samples whose loss becomes inf. `full`: rank 1 cannot write. `memory`: free bytes of the host.
    `limit`: arguments of `limit_micro_batch`.
    """
    ranks = world()
    torch.set_num_threads(1)
    worker = Worker(ranks.rank, ranks.rank, ranks.size, "tests", ranks.size)
    asked = resolve_recipe(TrainRequest(recipe=recipe, overrides=sets))
    plan = make_plan(asked, Path(run_dir), ResumeOptions(resume, allowed), worker)
    share_sequences(ranks, plan.batch.sequence)
    if memory is not None:
        mock.patch.object(
            psutil, "virtual_memory", return_value=SimpleNamespace(available=memory, total=1, used=1)
        ).start()
    if limit is not None:
        mock.patch.object(build, "build_engine", partial(_build_limited_engine, build.build_engine, limit)).start()
    made = build_run(with_frozen_outputs(plan, ranks), ranks)
    seen: list[tuple[int, ...]] = []
    take = made.engine.step

    def step(batches: Sequence[Batch], lr: float, *more: Any) -> StepResult:
        seen.append(tuple(sample for batch in batches for sample in batch.samples))
        number = len(seen) + (made.start_checkpoint.step if made.start_checkpoint else 0)
        if number == crash_at:
            raise Crash
        if number == stop_at and ranks.rank == 0:
            made.signal_handler.received_signal = "SIGTERM"
        if number == save_at and ranks.rank == 0:
            made.signal_handler.is_save_requested = True
        return take([_poisoned(batch) if set(batch.samples) & set(poison) else batch for batch in batches], lr, *more)

    made.engine.step = step  # type: ignore[method-assign]
    try:
        write = _no_room if full and ranks.rank == 1 else files.write_state_file
        with mock.patch.object(files, "write_state_file", write), made.memory.explain():
            code = finish_run(made, train(made).step)
    except Crash:
        return {"crashed": True, "samples": seen}
    finally:
        mock.patch.stopall()
        for sink in made.sinks:
            sink.close()
    made.run_log.close()
    return {"code": code, "samples": seen}


def count_sums(recipe: str, run_dir: str, sets: Sequence[str] = ()) -> list[int]:
    """Train, each step when the data of the next is there; return the sums over all ranks from one step to the next."""
    ranks = world()
    counts = [0]
    sum_values, iter_steps = type(ranks).sum, Loader.iter_steps

    def count(*args: Any) -> list[float]:
        counts[-1] += 1
        return sum_values(*args)

    def wait_for_next(loader: Loader, consumed: int) -> Iterator[Step]:
        for step in iter_steps(loader, consumed):
            consumed += step.num_samples
            while loader.workers and loader.sampler.step_size(consumed) and step.next_weight() is None:
                time.sleep(0.001)
            counts.append(0)
            yield step

    with mock.patch.object(type(ranks), "sum", count), mock.patch.object(Loader, "iter_steps", wait_for_next):
        run(recipe, run_dir, sets)
    return counts[1:]


def _no_room(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _poisoned(batch: Batch) -> Batch:
    return batch.with_tensors({"margin": batch.tensors["margin"] * 0 + float("inf")})


def weights_in(checkpoint: str) -> list[str]:
    """Return the names of the weights in a checkpoint, in any rank's file."""
    return sorted(CheckpointReader(Path(checkpoint)).shapes)
