"""The interface of datasets: samples by index, with their sources, weights and lengths."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths of the sequences of N samples, in tokens."""

    sequences: np.ndarray
    """(N, R): a pair has R = 2 sequences."""
    prefixes: np.ndarray
    """(N,) tokens at the start that all sequences of a sample share; 0 where that is unknown."""


SequenceLengthsFunction = Callable[["np.ndarray"], SequenceLengths]
"""(N,) sample ids -> the lengths of all their sequences."""


class Samples(Protocol):
    """Samples by index: a list, a task's own sequence, a `Dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class Dataset(Samples, Protocol):
    """The samples of one split. Thread-safe: several threads of the loader index it."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of each source; those of one source are next to one another."""

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Times that an epoch uses each source; None: once each."""

    @property
    def sequence_lengths(self) -> SequenceLengthsFunction | None:
        """The lengths of all sequences of samples, which micro-batches are divided by; None: unknown."""

    @property
    def report(self) -> Mapping[str, Any] | None:
        """Counts of records read, used, skipped and truncated, for events.jsonl; None: unknown."""

    @property
    def image_digest(self) -> str | None:
        """A hash of the content of all images; None where there are none."""

    def summarize(self) -> dict[str, Any]:
        """Return the figures that `dstrain prepare` prints; `samples` is one of them."""


@dataclass(frozen=True)
class SequenceDataset:
    """A task's own sequence of samples as a `Dataset` of one source."""

    samples: Samples
    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None = None
    sequence_lengths: SequenceLengthsFunction | None = None
    report: Mapping[str, Any] | None = None
    image_digest: str | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]

    def select(self, keep: np.ndarray) -> SequenceDataset:
        """Return the samples where `keep`, (N,) bool, is true."""
        samples = [self.samples[index] for index in keep.nonzero()[0].tolist()]
        return replace(self, samples=samples, sizes=count_selected(keep, self.sizes))

    def summarize(self) -> dict[str, Any]:
        return {"samples": len(self), **(self.report or {})}


def count_selected(keep: np.ndarray, sizes: Sequence[int]) -> tuple[int, ...]:
    """Return the samples of each source where `keep`, (N,) bool, is true; `sizes`: samples of each source."""
    starts = [sum(sizes[:source]) for source in range(len(sizes))]
    return tuple(int(keep[start : start + size].sum()) for start, size in zip(starts, sizes, strict=True))


def of_one_sequence(lengths: Callable[[np.ndarray], np.ndarray]) -> SequenceLengthsFunction:
    """Return the sequence lengths of samples of one sequence each."""
    return lambda ids: SequenceLengths(sequences=lengths(ids)[:, None], prefixes=0 * ids)


def takes_positions(collate: Callable[..., Any]) -> bool:
    """Return whether a `collate` has a parameter `positions`."""
    try:
        parameters = inspect.signature(collate).parameters
    except (TypeError, ValueError):  # a callable without a signature
        return False
    return "positions" in parameters or any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
