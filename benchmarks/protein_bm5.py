"""Train task protein on the unbound chains of BM5; compare recovery on held-out chains with two baselines.

    DSTRAIN_DATA=DATA python -m benchmarks.protein_bm5 [--run DIR] [--num-gpus 2] [--masks 10] [KEY=VALUE ...]

Trains the recipe `protein` on DATA/pdb/bm5 with a fifth of the chains held out by similarity, and scores the last
checkpoint on hidden residues of the held-out chains, drawn anew for each of --masks seeds. KEY=VALUE overrides the recipe.
The baselines know the frequencies of the residue types in the training chains.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import ROOT, certificate, table
from dstrain.commands.trained_model import load_trained_model
from dstrain.data.dataset import Samples
from dstrain.data.loading.loader import make_batch
from dstrain.tasks.protein.task import Protein
from tests.vocabulary import read_jsonl, run_dstrain


def with_seeds(task: Protein, count: int) -> Iterator[Protein]:
    """Yield the task with other masks."""
    for seed in range(count):
        yield replace(task, recipe=task.recipe.model_copy(update={"seed": 1000 + seed}))


def score(task: Protein, model: torch.nn.Module, chains: Samples, masks: int) -> dict[str, float]:
    """Return the means of all metrics over all hidden residues of all masks."""
    sums, weights = Counter[str](), Counter[str]()
    for masked in with_seeds(task, masks):
        for index in range(len(chains)):
            batch = make_batch(chains, masked.collate, [index], 0)
            with torch.no_grad():
                found = masked.loss(model, batch)
            for name, value in found.metrics.items():
                total, weight = value if isinstance(value, tuple) else (value, batch.weight)
                sums[name] += float(total)
                weights[name] += float(weight)
    means = {name: sums[name] / weights[name] for name in sums}
    return {**means, "perplexity": math.exp(means["perplexity"]), "hidden": weights["accuracy"]}


def baselines(task: Protein, train: Samples, chains: Samples, masks: int) -> dict[str, dict[str, float]]:
    """Return accuracy and perplexity of guesses from the frequencies in the training chains."""
    counts, hidden = np.ones(20), np.zeros(20)  # one more of each type, so that none has probability 0
    for index in range(len(train)):
        types = np.asarray(train[index]["residues"])
        counts += np.bincount(types[types < 20], minlength=20)
    for masked in with_seeds(task, masks):
        for index in range(len(chains)):
            sample = masked.hide(chains[index])
            hidden += np.bincount(sample.chain.types[sample.hides_type], minlength=20)
    shares, total = counts / counts.sum(), hidden.sum()
    return {
        "most common type": {"accuracy": float(hidden[counts.argmax()] / total)},
        "unigram": {
            "accuracy": float((hidden * shares).sum() / total),
            "perplexity": math.exp(-float((hidden * np.log(shares)).sum() / total)),
        },
    }


def measure(data: Path, run: Path, processes: int, masks: int, sets: list[str]) -> dict[str, Any]:
    """Train, then score the last checkpoint."""
    words = [f"data.train={data}", "data.eval_fraction=0.2", *sets]
    run_dstrain("train", "protein", "--run-dir", str(run), "--num-gpus", str(processes),
                *(word for pair in words for word in ("--set", pair)))  # fmt: skip
    loaded = load_trained_model(run, "last")
    task = loaded.task
    assert isinstance(task, Protein)
    train, held_out = task.examples("train"), task.examples("eval")
    assert train is not None
    assert held_out is not None
    times = {event["event"]: event["time"] for event in read_jsonl(run / "events.jsonl")}
    began, ended = (datetime.fromisoformat(times[name]).timestamp() for name in ("started", "finished"))
    return {
        "minutes": (ended - began) / 60,
        "chains": (len(train), len(held_out)),
        "curve": [row for row in read_jsonl(run / "metrics.jsonl") if row["split"] == "eval"],
        "model": score(task, loaded.model, held_out, masks),
        "training chains": score(task, loaded.model, train, 1),
        "baselines": baselines(task, train, held_out, masks),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, default=None)
    parser.add_argument("--num-gpus", type=int, default=2)
    parser.add_argument("--masks", type=int, default=10)
    parser.add_argument("sets", nargs="*", metavar="KEY=VALUE")
    told = parser.parse_args()
    data = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data")) / "pdb" / "bm5"
    run = told.run or Path(tempfile.mkdtemp()) / "bm5"
    found = measure(data, run, told.num_gpus, told.masks, told.sets)
    for key, value in certificate().items():
        print(f"{key}: {value}")
    train, held_out = found["chains"]
    print(f"{train} training chains, {held_out} held out; {found['minutes']:.1f} minutes of training and evaluations\n")
    names = ("step", "epoch", "loss", "accuracy", "perplexity", "rmsd", "coordinate_loss")
    print(table([{name: row[name] for name in names} for row in found["curve"]]), "\n")
    rows = [{"guess": "model, held out", **found["model"]}, {"guess": "model, trained on", **found["training chains"]}]
    print(table(rows), "\n")
    print(table([{"guess": name, **{"perplexity": "", **row}} for name, row in found["baselines"].items()]))


if __name__ == "__main__":
    main()
