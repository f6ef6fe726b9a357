"""Measure random kernels with a ridge classifier on UCR and UEA archives: the baseline of task temporal's classifier.

    DSTRAIN_DATA=DATA python -m benchmarks.random_kernels [ARCHIVE ...] [--kernels 2000] [--seeds 0 1 2]

After ROCKET (Dempster et al., arXiv 1910.13051, section 3): kernels of random length, weights, bias, dilation and
padding; of each output the maximum and the share of positive values; a ridge whose strength leave-one-out chooses.
Prints one JSON object per archive.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dstrain.tasks.temporal.series import read_values
from dstrain.tasks.temporal.tables import open_series

DATA = Path(os.environ.get("DSTRAIN_DATA", "data"))
ARCHIVES = ("OSULeaf", "ArrowHead", "BasicMotions", "GunPoint", "ItalyPowerDemand")
LENGTHS = (7, 9, 11)
STRENGTHS = np.logspace(-3, 3, 10)
"""Strengths of the ridge that are tried."""

# Shapes: N series, C channels, T values, F features, K classes.


@dataclass(frozen=True)
class Kernel:
    """A dilated convolution over some channels."""

    weights: np.ndarray
    """(channels, length), centred."""
    channels: np.ndarray
    bias: float
    dilation: int
    padding: int

    @classmethod
    def draw(cls, num_channels: int, num_steps: int, random: np.random.RandomState) -> Kernel:
        """Return a random kernel that fits series of this shape."""
        length = int(random.choice([size for size in LENGTHS if size <= num_steps] or [num_steps]))
        count = int(2 ** random.uniform(0, np.log2(min(num_channels, length) + 1)))
        channels = random.permutation(num_channels)[:count]
        weights = random.normal(size=(count, length))
        dilation = int(2 ** random.uniform(0, np.log2((num_steps - 1) / max(length - 1, 1))))
        padding = (length - 1) * dilation // 2 if random.randint(2) else 0
        centred = weights - weights.mean(1, keepdims=True)
        return cls(centred, channels, random.uniform(-1, 1), dilation, padding)

    def apply(self, values: np.ndarray) -> np.ndarray:
        """Return the maximum and the share of positive outputs of each series, (N, 2); `values`: (N, C, T)."""
        padded = np.pad(values[:, self.channels], ((0, 0), (0, 0), (self.padding, self.padding)))
        steps = padded.shape[2] - (self.weights.shape[1] - 1) * self.dilation
        output = np.full((len(values), steps), self.bias)
        for at, column in enumerate(self.weights.T):
            part = padded[:, :, at * self.dilation : at * self.dilation + steps]
            output += np.einsum("nct,c->nt", part, column)
        return np.stack([output.max(1), (output > 0).mean(1)], axis=1)


def fit_ridge(features: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Return weights (F, K) with the strength whose leave-one-out error is least. Targets are centred."""
    left, sizes, right = np.linalg.svd(features, full_matrices=False)
    best, weights = np.inf, np.zeros((features.shape[1], targets.shape[1]))
    for strength in STRENGTHS:
        shrunk = sizes**2 / (sizes**2 + strength)
        fitted = left @ (shrunk[:, None] * (left.T @ targets))
        leverage = (left**2 @ shrunk)[:, None] + 1 / len(features)  # of the mean too
        error = (((targets - fitted) / (1 - leverage).clip(1e-9)) ** 2).sum()
        if error < best:
            best = error
            weights = right.T @ ((sizes / (sizes**2 + strength))[:, None] * (left.T @ targets))
    return weights


def score_kernels(splits: dict[str, tuple[np.ndarray, np.ndarray]], num_kernels: int, seed: int) -> float:
    """Return the accuracy on the held-out series."""
    (known, labels), (asked, wanted) = splits["TRAIN"], splits["TEST"]
    random = np.random.RandomState(seed)
    kernels = [Kernel.draw(*known.shape[1:], random) for _ in range(num_kernels)]
    train, test = (np.concatenate([kernel.apply(part) for kernel in kernels], axis=1) for part in (known, asked))
    mean, deviation = train.mean(0), train.std(0) + 1e-8
    classes = np.unique(labels)
    targets = np.where(labels[:, None] == classes, 1.0, -1.0)  # (N, K)
    weights = fit_ridge((train - mean) / deviation, targets - targets.mean(0))
    scores = (test - mean) / deviation @ weights + targets.mean(0)
    return float((classes[scores.argmax(1)] == wanted).mean())


def read_archive(name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return series (N, C, T), each channel with mean 0 and deviation 1, and labels of each split."""
    splits = {}
    for split in ("TRAIN", "TEST"):
        source = open_series(DATA / f"timeseries/ucr/{name}/{name}_{split}.ts")
        records = [source[index] for index in range(len(source))]
        values = np.stack([read_values(record["series"]) for record in records])
        scaled = (values - values.mean(2, keepdims=True)) / (values.std(2, keepdims=True) + 1e-8)
        splits[split] = scaled, np.array([record["label"] for record in records])
    return splits


def score_nearest(splits: dict[str, tuple[np.ndarray, np.ndarray]]) -> float:
    """Return the accuracy of the label of the nearest training series."""
    (known, labels), (asked, wanted) = splits["TRAIN"], splits["TEST"]
    distances = ((asked[:, None] - known[None]) ** 2).sum((2, 3))
    return float((labels[distances.argmin(1)] == wanted).mean())


def measure(name: str, num_kernels: int, seeds: Sequence[int]) -> dict[str, object]:
    splits, start = read_archive(name), time.monotonic()
    scores = [score_kernels(splits, num_kernels, seed) for seed in seeds]
    seconds = (time.monotonic() - start) / len(seeds)
    counts = {split: len(values) for split, (values, _) in splits.items()}
    most_common = max(float((splits["TEST"][1] == label).mean()) for label in np.unique(splits["TRAIN"][1]))
    found = {"random kernels": [round(score, 3) for score in scores], "mean": round(float(np.mean(scores)), 3)}
    nearest = {"1-NN": round(score_nearest(splits), 3), "most common": round(most_common, 3)}
    return {"archive": name, **counts, **found, **nearest, "seconds": round(seconds, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archives", nargs="*", default=ARCHIVES)
    parser.add_argument("--kernels", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    for name in args.archives:
        if (DATA / f"timeseries/ucr/{name}").is_dir():
            print(json.dumps(measure(name, args.kernels, args.seeds)), flush=True)


if __name__ == "__main__":
    main()
