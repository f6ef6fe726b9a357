"""Patches of series: cutting, padding to a batch, and masking."""

# Shapes: B series, C channels, T time steps, N patches of all channels of a series, P values of a patch.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


SERIES_TOKEN_ID = -1
"""Placeholder of a soft token in input ids. No tokenizer has it, so no vocabulary has to be extended."""


@dataclass(frozen=True)
class PatchConfig:
    """Sizes of patches and of the groups that become one soft token."""

    length: int
    """Time steps of a patch."""
    per_token: int = 1
    """Neighbouring patches of a channel that become one soft token."""

    def count_tokens(self, num_channels: int, num_steps: int) -> int:
        """Return the number of soft tokens of a series."""
        return num_channels * -(-num_steps // (self.length * self.per_token))

    def count_patches(self, num_channels: int, num_steps: int) -> int:
        """Return the number of patches of a series; each channel is padded to whole groups."""
        return self.count_tokens(num_channels, num_steps) * self.per_token


@dataclass(frozen=True)
class Patches:
    """The patches of one series, those of a channel next to each other."""

    values: np.ndarray
    """(N, 2P) float32: values with 0 where missing, then 1 where observed."""
    stats: np.ndarray
    """(N, 2) float32: mean and scale of the patch's channel."""
    positions: np.ndarray
    """(N, 2) int64: index of the patch in its channel, index of the channel."""
    num_tokens: int
    """Soft tokens that the series becomes."""

    @property
    def observed(self) -> np.ndarray:
        """(N, P) bool."""
        return self.values[:, self.values.shape[1] // 2 :] > 0


def to_columns(values: np.ndarray, stats: np.ndarray) -> dict[str, Any]:
    """Return a normalized series as columns of a token store, which are flat."""
    return {"series": values.astype(np.float32).reshape(-1), "series_stats": stats.astype(np.float32).reshape(-1)}


def from_columns(example: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return values (C, T) and statistics (C, 2), the inverse of `to_columns`."""
    stats = example["series_stats"].reshape(-1, 2)
    return example["series"].reshape(len(stats), -1), stats


def cut_patches(values: np.ndarray, stats: np.ndarray, config: PatchConfig) -> Patches:
    """Return the patches of a series (C, T); each channel is padded to whole groups with missing values."""
    channels, steps = values.shape
    count = config.count_patches(1, steps)
    padded = np.full((channels, count * config.length), np.nan, dtype=np.float32)
    padded[:, :steps] = values
    pieces = padded.reshape(channels * count, config.length)
    observed = ~np.isnan(pieces)
    positions = np.stack(np.meshgrid(np.arange(count), np.arange(channels)), axis=-1).reshape(-1, 2)
    return Patches(
        np.concatenate([np.where(observed, pieces, 0.0), observed], axis=1).astype(np.float32),
        np.repeat(stats, count, axis=0),
        positions.astype(np.int64),
        config.count_tokens(channels, steps),
    )


def stack_patches(series: Sequence[Patches]) -> dict[str, torch.Tensor]:
    """Return the encoder's inputs, padded on the right: names and shapes as in `TemporalEncoder.forward`."""
    import torch

    rows, longest, size = len(series), max(len(one.values) for one in series), series[0].values.shape[1]
    values = np.zeros((rows, longest, size + 2), dtype=np.float32)
    positions = np.zeros((rows, longest, 3), dtype=np.int64)
    for row, one in enumerate(series):
        count = len(one.values)
        values[row, :count] = np.concatenate([one.values, one.stats], axis=1)
        positions[row, :count, :2], positions[row, :count, 2] = one.positions, 1
    return {"series": torch.from_numpy(values), "series_positions": torch.from_numpy(positions)}


def choose_masked(patches: Patches, ratio: float, rng: np.random.RandomState) -> np.ndarray:
    """Return (N,) bool, true for the patches to hide: a share of those with an observed value, at least one."""
    candidates = np.flatnonzero(patches.observed.any(1))
    count = min(max(1, round(ratio * len(candidates))), len(candidates))
    hidden = np.zeros(len(patches.values), dtype=bool)
    hidden[rng.permutation(candidates)[:count]] = True
    return hidden


def insert_soft_tokens(tokenizer: Any, ids: Sequence[int], count: int) -> list[int]:
    """Return the ids with placeholders of soft tokens at the start, after the BOS."""
    first = 1 if ids and ids[0] == tokenizer.bos_token_id else 0
    return [*ids[:first], *[SERIES_TOKEN_ID] * count, *ids[first:]]
