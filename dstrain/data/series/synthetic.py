"""Synthetic captioned curves: a source whose records are functions of a seed and an index."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.config.field_types import check_limits
from dstrain.data.records import BadRow

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


class SyntheticCurves:
    """Curves as records {"series", "caption", "pattern"}; nothing is stored, and any process can make any range."""

    def __init__(self, options: SyntheticOptions) -> None:
        self.options = options
        described = json.dumps([GENERATOR_VERSION, asdict(options)], sort_keys=True)
        self.digest = hashlib.sha256(f"synthetic curves {described}".encode()).hexdigest()
        self.bad_rows: list[BadRow] = []

    def __len__(self) -> int:
        return self.options.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return make_curve(self.options, index)

    def location(self, index: int) -> str:
        return f"synthetic curve {index}"

    def get_base_dir(self, index: int) -> Path:
        return Path()


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
