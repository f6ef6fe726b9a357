"""What series and structures hold, counted over the records of a file, in sentences: nothing else shows their shape."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

Content = Mapping[str, int]
"""What a record holds -> how often: `series 3 16` is a series of 3 channels of 16 values."""
MAX_LISTED_NAMES = 12
"""Names of unknown residues in a sentence."""
TRANSPOSE = "[*zip(*series)]"
"""Python for the other orientation of a series."""


def count_series(shape: Sequence[int], patch_length: int) -> Content:
    """Return the content of a series of this shape, (C, T), which is cut into patches."""
    channels, steps = shape
    return {f"series {channels} {steps}": 1, f"patch {patch_length}": 1}


def count_chains(chains: Sequence[tuple[int, Mapping[str, int]]]) -> Content:
    """Return the content of a structure: the length of each chain, and the names of its residues of unknown type."""
    counts = Counter[str]()
    for length, unknown in chains:
        counts[f"chain {length}"] += 1
        counts.update({f"unknown {name}": count for name, count in unknown.items()})
    return counts


def describe_content(counts: Content) -> tuple[list[str], list[str]]:
    """Return (clauses on the content of a file, notes on what is unusual of it)."""
    shapes, patch_length = Counter[tuple[int, int]](), 1
    lengths, unknown = Counter[int](), Counter[str]()
    for key, count in counts.items():
        kind, *values = key.split(" ")
        if kind == "series":
            shapes[int(values[0]), int(values[1])] += count
        elif kind == "patch":
            patch_length = max(patch_length, int(values[0]))
        elif kind == "chain":
            lengths[int(values[0])] += count
        elif kind == "unknown":
            unknown[values[0]] += count
    clauses = [describe_shapes(shapes)] if shapes else []
    if lengths:
        plural = "s" if lengths.total() != 1 else ""
        clauses.append(f"{lengths.total()} chain{plural}: {_describe_range(lengths)} residues{_legend(lengths)}")
    if unknown:
        clauses.append(describe_unknown(unknown, sum(length * count for length, count in lengths.items())))
    return clauses, _find_notes(shapes, patch_length)


def describe_shapes(shapes: Mapping[tuple[int, int], int]) -> str:
    """Return the shapes of series, (channels, values) -> how many: `6 series: 1 channel, 12, 16, 20 values (…)`."""
    channels, values = Counter[int](), Counter[int]()
    for (width, length), count in shapes.items():
        channels[width] += count
        values[length] += count
    number = f"{min(channels)} to {max(channels)}" if len(channels) > 1 else str(min(channels))
    plural = "" if number == "1" else "s"
    value = "value" if [*values] == [1] else "values"
    return (
        f"{sum(shapes.values())} series: {number} channel{plural}, {_describe_range(values)} {value}{_legend(values)}"
    )


def describe_unknown(unknown: Counter[str], residues: int) -> str:
    """Return the names of residues of unknown type with their numbers, the most frequent first."""
    names = [f"{name} {count}" for name, count in unknown.most_common(MAX_LISTED_NAMES)]
    more = f" and {len(unknown) - len(names)} other names" if len(unknown) > len(names) else ""
    return f"unknown types: {', '.join(names)}{more} ({unknown.total()} of {residues} residues, never a target)"


def _describe_range(counts: Counter[int]) -> str:
    """Return a length, or the least, the median and the largest one."""
    if len(counts) == 1:
        return str(next(iter(counts)))
    return f"{min(counts)}, {find_median(counts)}, {max(counts)}"


def _legend(counts: Counter[int]) -> str:
    return " (min, median, max)" if len(counts) > 1 else ""


def find_median(counts: Counter[int]) -> int:
    """Return the median of lengths that are counted, the lower one of two."""
    left = math.ceil(counts.total() / 2)
    for length in sorted(counts):
        left -= counts[length]
        if left <= 0:
            return length
    raise ValueError("nothing was counted")


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
