"""Accumulator of step results: weighted means over all ranks, and throughput."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from dstrain.batch import StepResult
from dstrain.device_copies import to_floats
from dstrain.distributed.world import World

FinishMetrics = Callable[[Mapping[str, tuple[float, float]]], Mapping[str, float]]
"""Name -> (sum, weight) over all ranks -> further metrics, or others in the place of means."""


class Meter:
    """Accumulator of StepResults on the device; `drain` returns their means and starts from zero."""

    def __init__(
        self, world: World, finish: FinishMetrics = lambda sums: {}, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """`finish`: the task's `finish_metrics`."""
        self._world, self._clock, self._finish = world, clock, finish
        self._sums, self._start_time, self._paused_seconds = _MeterSums(), clock(), 0.0

    def add(self, result: StepResult) -> None:
        """Add one step. Never waits for the device."""
        self._sums.add(result)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Exclude the time spent inside (evaluation, a save) from the rates."""
        self._sums.to_host([])  # waits for the device: its queued steps belong to the time before the pause
        start = self._clock()
        try:
            yield
        finally:
            self._paused_seconds += self._clock() - start

    def drain(self, data_wait_seconds: float | None = None) -> dict[str, float]:
        """Return means over all ranks and micro-batches since the last drain, and rates, alike on every rank.

        A mean is one sum divided by one weight; the key of a metric with weight 0 is left out, and that of one whose
        name begins with an underscore. `finish` adds to the row, or replaces means in it.
        `data_wait_seconds` is the time this rank waited for data since the last drain; give it on all
        ranks or on none. Collective.
        """
        sums = self._sums
        # A metric that only some batches have (for example of images) may be missing on this rank, and
        # every rank has to sum the same values in the same order.
        names = sorted(set().union(*self._world.gather(sorted(sums.metrics))))
        mine = sums.to_host(names)
        # After the copy above, which waits for the device: its queued steps are in the time.
        seconds = self._clock() - self._start_time - self._paused_seconds
        self._sums, self._start_time, self._paused_seconds = _MeterSums(), self._clock(), 0.0
        seconds, waited, samples, tokens, computed, padding, *pairs = self._world.sum(
            [seconds, data_wait_seconds or 0.0, *mine]
        )
        of_all = zip(["loss", *names], pairs[::2], pairs[1::2], strict=True)
        totals = {name: (total, weight) for name, total, weight in of_all if weight}
        row = {name: total / weight for name, (total, weight) in totals.items() if not name.startswith("_")}
        row |= self._finish(totals)
        if sums.grad_norm is not None:
            row["grad_norm"] = sums.grad_norm
        if sums.skipped:
            row["skipped"] = sums.skipped
        if computed:
            row["padding"] = padding / computed
        if sums.steps and seconds > 0:
            # The mean over the ranks, which took about the same time.
            seconds = seconds / self._world.size
            if tokens:  # a task may have none
                row["tokens_per_second"] = tokens / seconds
            row["samples_per_second"] = samples / seconds
            row["step_seconds"] = seconds / sums.steps
        if sums.steps and data_wait_seconds is not None:
            row["data_wait_seconds"] = waited / self._world.size / sums.steps
        return row


@dataclass
class _MeterSums:
    """Sums since the last drain, on this rank."""

    loss: Tensor | float | None = None
    weight: float = 0.0
    metrics: dict[str, tuple[Tensor | float, Tensor | float]] = field(default_factory=dict)
    samples: int = 0
    tokens: int = 0
    computed_tokens: int = 0
    padding_tokens: int = 0
    steps: int = 0
    skipped: int = 0
    grad_norm: float | None = None

    def add(self, result: StepResult) -> None:
        if result.applied:  # a skipped step is not part of the means: its loss is not finite
            self.loss = _add_float64(0.0 if self.loss is None else self.loss, result.loss)
            self.weight += result.weight
            for name, (total, weight) in result.metrics.items():
                before = self.metrics.get(name, (0.0, 0.0))
                self.metrics[name] = _add_float64(before[0], total), _add_float64(before[1], weight)
        self.samples += result.samples
        self.tokens += result.tokens
        self.computed_tokens += result.computed_tokens
        self.padding_tokens += result.padding_tokens
        self.steps += 1
        self.skipped += not result.applied
        # The newest one; it is the same on every rank.
        self.grad_norm = result.grad_norm

    def to_host(self, names: Sequence[str]) -> list[float]:
        """Return counts, loss, its weight, and (sum, weight) of each name, in one copy from the device.

        The counts are samples, tokens without padding, computed tokens, and padding tokens.
        """
        counts = [float(count) for count in (self.samples, self.tokens, self.computed_tokens, self.padding_tokens)]
        if self.loss is None:
            return [*counts, 0.0, 0.0, *[0.0] * (2 * len(names))]
        pairs = [value for name in names for value in self.metrics.get(name, (0.0, 0.0))]
        return [*counts, *to_floats([self.loss, self.weight, *pairs])]


def _add_float64(total: Tensor | float, value: Tensor | float) -> Tensor | float:
    """Return the sum in float64: in float32 small terms vanish next to a large sum."""
    return total + (value.detach().double() if isinstance(value, Tensor) else value)
