"""Adds up what steps leave behind and divides once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from dstrain.batch import StepResult, to_floats
from dstrain.distributed.world import World


class Meter:
    """Keeps sums of StepResults on the device; `drain` turns them into numbers and starts anew."""

    def __init__(self, world: World, clock: Callable[[], float] = time.perf_counter) -> None:
        self._world, self._clock = world, clock
        self._sums, self._start_time, self._paused_seconds = _MeterSums(), clock(), 0.0

    def add(self, result: StepResult) -> None:
        """Take in one step. Never waits for the device."""
        self._sums.add(result)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Leave the time spent inside (evaluation, a save) out of the rates."""
        self._sums.to_host([])  # waits for the device, whose work belongs before the pause
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def drain(self, data_wait_seconds: float | None = None) -> dict[str, float]:
        """Means over all ranks and micro-batches since the last drain, the same on every rank, and rates.

        A mean is one sum divided by one weight. Where the weight is 0 there is no mean, and its key
        is left out. `data_wait_seconds` is what this rank waited for data since the last drain; give
        it on all ranks or on none. Collective.
        """
        sums = self._sums
        # A metric that only some batches have (say, of images) may be missing on this rank.
        names = sorted(set().union(*self._world.gather(sorted(sums.metrics))))
        mine = sums.to_host(names)
        seconds = self._clock() - self._start_time - self._paused_seconds
        self._sums, self._start_time, self._paused_seconds = _MeterSums(), self._clock(), 0.0
        seconds, waited, samples, tokens, *pairs = self._world.sum([seconds, data_wait_seconds or 0.0, *mine])
        of_all = zip(["loss", *names], pairs[::2], pairs[1::2], strict=True)
        row = {name: total / weight for name, total, weight in of_all if weight}
        if sums.grad_norm is not None:
            row["grad_norm"] = sums.grad_norm
        if sums.skipped:
            row["skipped"] = sums.skipped
        if sums.steps and seconds > 0:
            seconds = seconds / self._world.size
            row["tokens_per_second"] = tokens / seconds
            row["samples_per_second"] = samples / seconds
            row["step_seconds"] = seconds / sums.steps
        if sums.steps and data_wait_seconds is not None:
            row["data_wait_seconds"] = waited / self._world.size / sums.steps
        return row


@dataclass
class _MeterSums:
    """What came in since the last drain, on this rank."""

    loss: Tensor | float | None = None
    weight: float = 0.0
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    steps: int = 0
    skipped: int = 0
    grad_norm: float | None = None

    def add(self, result: StepResult) -> None:
        if result.applied:  # a step left out has no part in the means
            self.loss = _add_float64(0.0 if self.loss is None else self.loss, result.loss)
            self.weight += result.weight
            for name, (total, weight) in result.metrics.items():
                before = self.metrics.get(name, (0.0, 0.0))
                self.metrics[name] = _add_float64(before[0], total), _add_float64(before[1], weight)
        self.samples += result.samples
        self.tokens += result.tokens
        self.steps += 1
        self.skipped += not result.applied
        self.grad_norm = result.grad_norm

    def to_host(self, names: Sequence[str]) -> list[float]:
        """Samples, tokens, loss, its weight, and the pair of each name; one copy, which waits for the device."""
        if self.loss is None:
            return [float(self.samples), float(self.tokens), 0.0, 0.0, *[0.0] * (2 * len(names))]
        pairs = [value for name in names for value in self.metrics.get(name, (0.0, 0.0))]
        return [float(self.samples), float(self.tokens), *to_floats([self.loss, self.weight, *pairs])]


def _add_float64(total: Tensor | float, value: Tensor | float) -> Tensor | float:
    """The sum in 64 bits: many small sums would drown in a large one of 32."""
    return total + (value.detach().double() if isinstance(value, Tensor) else value)
