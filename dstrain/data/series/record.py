"""Parsing of records with a series and its captions or its label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dstrain.data.records import BadRecord, has

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
        raise BadRecord("the record has no 'series'; write a list of numbers, or a list of channels")
    values, stats = normalize(read_values(record["series"]))
    return SeriesRecord(
        values,
        stats,
        captions=_read_captions(record),
        label=read_label(record),
        prompt=_read_text(record, "prompt"),
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
    return values


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
    given = [key for key in ("captions", "caption") if has(record, key)]
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
