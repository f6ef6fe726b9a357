"""Time series: options, records, patches, synthetic curves."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.data.content import describe_range
from dstrain.data.encoding.conversations import SOFT_TOKEN_ID
from dstrain.data.records import LABEL_NAMES, Record, as_record, yaml_key
from dstrain.data.sources.base import BaseSource
from dstrain.task import BadRecord, check_limits

if TYPE_CHECKING:
    import torch


MIN_SCALE = 1e-8
"""Channels with a smaller standard deviation, relative to their mean, are constant, and are not divided by it."""


@dataclass(frozen=True)
class SeriesRecord:
    """A series with what the task trains on."""

    values: np.ndarray
    """(C, T) float32: each channel normalized to mean 0 and standard deviation 1, NaN where missing."""
    stats: np.ndarray
    """(C, 2) float32: asinh of each channel's mean and of its standard deviation."""
    captions: tuple[str, ...] = ()
    label: str | None = None
    prompt: str | None = None
    """The user's turn; None: the task's own."""


def read_series_record(record: Mapping[str, Any]) -> SeriesRecord:
    """Return a record `{"series", "caption" or "captions", "label", "prompt"}`. Raises BadRecord."""
    if "series" not in record:
        raise BadRecord(f"the record has no 'series'; {_suggest_series(record)}")
    values, stats = normalize(read_values(record["series"]))
    return SeriesRecord(
        values,
        stats,
        captions=_read_captions(record),
        label=read_label(record),
        prompt=_read_text(record, "prompt"),
    )


MIN_PAIRS = 8
"""Channels of two values, the first of which ascend, from which on they are taken for pairs of time and value."""


def _suggest_series(record: Mapping[str, Any]) -> str:
    """Return how a record without a series becomes one: a list of numbers, or numbers in columns of their own."""
    columns = record.columns if isinstance(record, Record) else dict(record)
    lists = [name for name, value in columns.items() if _is_series(value)]
    if len(lists) == 1:
        return f"rename '{lists[0]}' with data.columns {{{lists[0]}: series}}"
    numbers = [name for name, value in columns.items() if isinstance(value, int | float)]
    if len(numbers) > 1:
        named = ", ".join(numbers[:3])
        return f"write the numbers of the columns {named} … as one list 'series', or the table as .csv or .parquet"
    return "write a list of numbers, or a list of channels"


def _is_series(value: Any) -> bool:
    if not isinstance(value, list) or not value:
        return False
    first = value[0][0] if isinstance(value[0], list) and value[0] else value[0]
    return isinstance(first, int | float) and not isinstance(first, bool)


def suggest_label(record: Mapping[str, Any]) -> str:
    """Return how a record without a label gets one: a column with another of its names, if there is one."""
    columns = record.columns if isinstance(record, Record) else dict(record)
    names = [name for name, value in columns.items() if name.lower() in LABEL_NAMES and not isinstance(value, list)]
    return (
        f"rename '{names[0]}' with data.columns {{{yaml_key(names[0])}: label}}, or write one" if names else "write one"
    )


def read_label(record: Mapping[str, Any]) -> str | None:
    """Return the label as a text; None where there is none, or NaN as in tables. Raises BadRecord."""
    label = record.get("label")
    if label is None or label != label:  # NaN
        return None
    if not isinstance(label, str | int | float) or not (text := str(label).strip()):
        raise BadRecord(f"'label' is {label!r:.20}, not a text or a number; write one, or null")
    return text


def read_values(series: Any) -> np.ndarray:
    """Return a list of numbers, or of channels, as (C, T) float64 with NaN for null. Raises BadRecord."""
    if isinstance(series, np.ndarray):
        return np.atleast_2d(series).astype(np.float64)
    if not isinstance(series, Sequence) or isinstance(series, str):
        raise BadRecord("'series' is not a list; write a list of numbers, or a list of channels")
    channels = series if series and all(isinstance(one, list) for one in series) else [series]
    lengths = [len(channel) for channel in channels]
    if not min(lengths, default=0):
        raise BadRecord("'series' is empty; write at least one value, or remove the record")
    if len({*lengths}) > 1:
        told = ", ".join(map(str, lengths[:8]))
        raise BadRecord(f"the channels of 'series' have {told} values; make them equal, with null for missing values")
    for number, channel in enumerate(channels, 1):
        for at, value in enumerate(channel):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                place = f"value {at + 1} of channel {number}"
                raise BadRecord(f"{place} of 'series' is {value!r:.20}, not a number; correct it, or write null")
    try:
        values = np.array(
            [[np.nan if one is None else one for one in channel] for channel in channels], dtype=np.float64
        )
    except OverflowError:
        raise BadRecord("'series' has a number that does not fit into 64 bits; correct it, or write null") from None
    if values.shape[1] == 2 and len(values) >= MIN_PAIRS and (np.diff(values[:, 0]) > 0).all():
        problem = f"'series' looks like {len(values)} pairs of time and value, and each would be a channel"
        raise BadRecord(f"{problem}; write the values alone, in Python [v for t, v in series]")
    return values


SHOWN_VALUES = 4
"""Values at each end of a channel in `summarize_values`."""


def summarize_values(channel: np.ndarray) -> str:
    """Return the first and last values of a channel, (T,), its range, and how many are missing."""
    ends = [f"{value:.6g}" for value in channel]
    shown = ends if len(ends) <= 2 * SHOWN_VALUES else [*ends[:SHOWN_VALUES], "…", *ends[-SHOWN_VALUES:]]
    missing = int(np.isnan(channel).sum())
    told = "" if missing == len(channel) else f"from {np.nanmin(channel):.6g} to {np.nanmax(channel):.6g}"
    return f"{', '.join(shown)} ({told}{f', {missing} missing' * (missing > 0)})"


def normalize(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the channels with mean 0 and deviation 1, (C, T) float32, and their statistics, (C, 2) float32.

    asinh keeps the sign of a mean and compresses large values like a logarithm. Raises BadRecord where a value is
    infinite, or where no value is observed.
    """
    observed = ~np.isnan(values)
    if np.isinf(values).any():
        raise BadRecord("'series' has an infinite value; correct it, or write null")
    if not observed.any():
        raise BadRecord("'series' has no value, all are missing; remove the record")
    if (np.abs(values[observed]) > 1e100).any():
        raise BadRecord("'series' has a value above 1e100; correct it, or write null")
    count = np.maximum(observed.sum(1, keepdims=True), 1)
    mean = np.where(observed, values, 0.0).sum(1, keepdims=True) / count  # (C, 1)
    centred = np.where(observed, values - mean, 0.0)
    deviation = np.sqrt((centred**2).sum(1, keepdims=True) / count)  # (C, 1)
    constant = deviation <= MIN_SCALE * np.maximum(np.abs(mean), 1e-30)
    # Their centred values are rounding errors.
    centred, deviation = np.where(constant, 0.0, centred), np.where(constant, 0.0, deviation)
    scaled = np.where(observed, centred / np.where(constant, 1.0, deviation), np.nan)
    stats = np.arcsinh(np.concatenate([mean, deviation], axis=1))
    return scaled.astype(np.float32), stats.astype(np.float32)


def _read_captions(record: Mapping[str, Any]) -> tuple[str, ...]:
    record = as_record(record)
    given = [key for key in ("captions", "caption") if key in record.present]
    if not given:
        return ()
    if len(given) > 1:
        raise BadRecord("both 'captions' and 'caption' are set; keep one of them")
    captions = record[given[0]]
    found = [captions] if isinstance(captions, str) else captions
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise BadRecord("'captions' is not a text or a list of texts; write one")
    if not all(one.strip() for one in found) or not found:
        raise BadRecord("a caption is empty; write one, or remove the record")
    return tuple(one.strip() for one in found)


def _read_text(record: Mapping[str, Any], key: str) -> str | None:
    text = record.get(key)
    if text is not None and (not isinstance(text, str) or not text.strip()):
        raise BadRecord(f"'{key}' is not a text; write one, or remove it")
    return text


# Shapes: B series, C channels, T time steps, N patches of all channels of a series, P values of a patch.


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

    @staticmethod
    def stack(series: Sequence[Patches]) -> dict[str, torch.Tensor]:
        """Return the encoder's inputs for a batch of prompts."""
        return stack_patches(series)

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


_CONFIG_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "dropout": "hidden_dropout_prob",
}
"""Option of the encoder -> its name in a `TemporalConfig`."""


@dataclass(frozen=True)
class EncoderOptions:
    """Sizes of a new temporal encoder. A model.path that holds an encoder keeps its own."""

    patch_length: int = 8
    """Time steps of a patch."""
    patches_per_token: int = 1
    """Neighbouring patches of a channel that become one soft token of the language model."""
    hidden_size: int = 128
    """Width of the encoder."""
    num_layers: int = 4
    """Transformer layers of the encoder."""
    num_heads: int = 4
    """Attention heads of each layer; they divide hidden_size."""
    dropout: float = 0.0
    """Dropout probability in the encoder."""

    def __post_init__(self) -> None:
        check_limits(self, "patch_length", "patches_per_token", "hidden_size", "num_layers", "num_heads", least=1)
        if self.hidden_size % self.num_heads or self.hidden_size % 2:
            raise ValueError(f"hidden_size is {self.hidden_size}, but it must be even and a multiple of num_heads")
        check_limits(self, "dropout", below=1)

    @property
    def patches(self) -> PatchConfig:
        """How series are cut into patches."""
        return PatchConfig(self.patch_length, self.patches_per_token)

    def config_values(self) -> dict[str, Any]:
        """Return the settings of a `TemporalConfig`."""
        values = {_CONFIG_NAMES.get(name, name): value for name, value in asdict(self).items()}
        return {**values, "intermediate_size": 4 * self.hidden_size, "series_token_id": SOFT_TOKEN_ID}

    def find_mismatched(self, config: Any, given: Mapping[str, Any]) -> list[str]:
        """Return the options in `given` whose value here is not that of the config."""
        values, default = asdict(EncoderOptions(**given)), asdict(EncoderOptions())
        return [
            name
            for name, value in values.items()
            if value != default[name] and getattr(config, _CONFIG_NAMES.get(name, name)) != value
        ]


GENERATOR_VERSION = 1
"""Increase it when the same seed gives other curves, so that old token caches are ignored."""
Draw = Callable[["np.random.Generator", int], tuple[np.ndarray, str]]
"""(random generator, number of values) -> (curve of height about 1, its caption)."""


@dataclass(frozen=True)
class SyntheticOptions:
    """Synthetic captioned curves: trends, peaks, dips, plateaus, periodic curves and anomalies."""

    num_samples: int = 100_000
    """Number of curves."""
    seed: int = 0
    """Seed of the curves; each is a function of this seed and its index."""
    min_length: int = 24
    """Least number of values of a curve."""
    max_length: int = 96
    """Largest number of values of a curve."""
    noise: float = 0.05
    """Standard deviation of the noise, as a share of the pattern's height."""
    missing: float = 0.0
    """Share of missing values, below 1."""

    def __post_init__(self) -> None:
        check_limits(self, "num_samples", least=1)
        if not 8 <= self.min_length <= self.max_length:
            raise ValueError("min_length must be at least 8, and max_length at least min_length")
        check_limits(self, "noise", "seed")
        check_limits(self, "missing", below=1)


class SyntheticCurves(BaseSource):
    """Curves as records {"series", "caption", "pattern"}; nothing is stored, and any process can make any range."""

    def __init__(self, options: SyntheticOptions) -> None:
        super().__init__("synthetic curves", Path(), {})
        self.options = options
        described = json.dumps([GENERATOR_VERSION, asdict(options)], sort_keys=True)
        self.digest = hashlib.sha256(f"synthetic curves {described}".encode()).hexdigest()

    def __len__(self) -> int:
        return self.options.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return make_curve(self.options, index)


def make_curve(options: SyntheticOptions, index: int) -> dict[str, Any]:
    """Return curve `index`: a pattern with noise, at a random mean and scale."""
    rng = np.random.Generator(np.random.Philox(key=options.seed, counter=[0, 0, 0, index]))
    length = int(rng.integers(options.min_length, options.max_length + 1))
    pattern = CURVES[int(rng.integers(len(CURVES)))]
    curve, caption = pattern(rng, length)
    curve = curve + options.noise * rng.standard_normal(length)
    if options.missing:
        hidden = rng.random(length) < options.missing
        hidden[int(rng.integers(length))] = False  # one value at least is observed
        curve[hidden] = np.nan
    scale, mean = 10.0 ** rng.uniform(-1, 3), rng.uniform(-5, 5)
    return {"series": scale * (curve + mean), "caption": caption, "pattern": pattern.__name__}


def trend(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    rises, bend = rng.random() < 0.5, float(rng.choice([0.5, 1.0, 2.0]))
    line = np.linspace(0, 1, length) ** bend
    pace = {0.5: "quickly at first", 1.0: "steadily", 2.0: "faster and faster"}[bend]
    return (line, f"increases {pace}") if rises else (1 - line, f"decreases {pace}")


def peak(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    bump, place = _bump(rng, length)
    return bump, f"peaks {place}"


def dip(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    bump, place = _bump(rng, length)
    return -bump, f"dips {place}"


def plateau(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    rises, at_end = rng.random() < 0.5, rng.random() < 0.5
    end = int(length * rng.uniform(0.35, 0.65))
    ramp = np.concatenate([np.linspace(0, 1, end), np.ones(length - end)])
    if at_end:
        return (ramp, "increases, then stays flat") if rises else (1 - ramp, "decreases, then stays flat")
    return (1 - ramp[::-1], "stays flat, then increases") if rises else (ramp[::-1], "stays flat, then decreases")


def periodic(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    cycles = int(rng.integers(2, 6))
    phase = rng.uniform(0, 2 * np.pi)
    wave = 0.5 * np.sin(np.linspace(0, 2 * np.pi * cycles, length) + phase)
    return wave, f"repeats in {('two', 'three', 'four', 'five')[cycles - 2]} cycles"


def anomaly(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    start, at = rng.uniform(0, 1), rng.uniform(0.1, 0.9)
    line = np.full(length, start)
    above = rng.random() < 0.5
    line[int(at * length)] += 1.5 if above else -1.5
    return line, f"is constant with a {'high' if above else 'low'} outlier {_name_place(at)}"


CURVES: tuple[Draw, ...] = (trend, peak, dip, plateau, periodic, anomaly)


def _bump(rng: np.random.Generator, length: int) -> tuple[np.ndarray, str]:
    centre, width = rng.uniform(0.1, 0.9), rng.uniform(0.04, 0.12)
    steps = np.linspace(0, 1, length)
    return np.exp(-(((steps - centre) / width) ** 2) / 2), _name_place(centre)


def _name_place(share: float) -> str:
    return ("near the beginning", "in the middle", "near the end")[min(int(3 * share), 2)]


# ---- what the series of a file hold, for `dstrain data check`

TRANSPOSE = "[*zip(*series)]"
"""Python for the other orientation of a series."""


def count_series(shape: Sequence[int], patch_length: int) -> Mapping[str, int]:
    """Return what `describe_series` reads, for a series of this shape, (C, T), which is cut into patches."""
    channels, steps = shape
    return {f"series {channels} {steps}": 1, f"patch {patch_length}": 1}


def describe_series(counts: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return (clauses on the series of a file, notes on what is unusual of them), from the sums of `count_series`."""
    shapes, patch_length = Counter[tuple[int, int]](), 1
    for key, count in counts.items():
        kind, *values = key.split(" ")
        if kind == "series":
            shapes[int(values[0]), int(values[1])] += count
        else:
            patch_length = max(patch_length, int(values[0]))
    return [describe_shapes(shapes)], _find_notes(shapes, patch_length)


def describe_shapes(shapes: Mapping[tuple[int, int], int]) -> str:
    """Return the shapes of series, (channels, values) -> how many: `6 series: 1 channel, 12, 16, 20 values (…)`."""
    channels, values = Counter[int](), Counter[int]()
    for (width, length), count in shapes.items():
        channels[width] += count
        values[length] += count
    number = f"{min(channels)} to {max(channels)}" if len(channels) > 1 else str(min(channels))
    plural = "" if number == "1" else "s"
    value = "value" if [*values] == [1] else "values"
    return f"{sum(shapes.values())} series: {number} channel{plural}, {describe_range(values, value)}"


def _find_notes(shapes: Mapping[tuple[int, int], int], patch_length: int) -> list[str]:
    flat = sum(count for (channels, steps), count in shapes.items() if channels > 1 and steps < channels)
    short = sum(count for (_, steps), count in shapes.items() if steps < patch_length)
    notes = []
    if 2 * flat > sum(shapes.values()):  # among longer series a short one is no sign of it
        problem = f"fewer values than channels in {flat} series: they look transposed"
        notes.append(f"{problem}; a series is a list of channels, each with all its values, in Python {TRANSPOSE}")
    if short:
        problem = f"fewer values than options.encoder.patch_length ({patch_length}) in {short} series"
        notes.append(f"{problem}: each channel is one padded patch; lower it, or see whether records are time steps")
    return notes
