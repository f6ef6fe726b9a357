"""Measure task temporal: captions of TRUCE, labels of UCR archives, and the preparation of synthetic curves.

    DSTRAIN_DATA=DATA python -m benchmarks.temporal truce|ucr|prepare --to FOLDER [--num-gpus 1] [--steps 900]
        [--seeds 0 1 2] [--inputs text soft blind] [--archives GunPoint ItalyPowerDemand]

Prints one JSON object per result. The recipes and runs stay in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from dstrain.tasks.temporal.series import SyntheticCurves, SyntheticOptions, read_series_record
from dstrain.tasks.temporal.tables import open_series
from dstrain.tasks.temporal.task import names_right_pattern

DATA = Path(os.environ.get("DSTRAIN_DATA", "data"))
ASKED, ASKED_SYNTHETIC = "Describe the series.", "Name the pattern."
"""The prompts: captions of TRUCE and of synthetic curves have other words."""
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "initializer_range": 0.125,
}  # fmt: skip
"""A language model from scratch, 0.17 M parameters; weights begin with a deviation of 1 / sqrt(width)."""
BATCH, PATCH_LENGTH = 32, 4
NUM_CURVES = 10_000
WEIGHTS = {"curves": 1.0, "train": 2.0}
"""Passes per epoch over the synthetic curves and over TRUCE's 5,313 training captions: half and half."""
LEARNING_RATES = (3e-3, 6e-3)
PATCH_LENGTHS = {"GunPoint": 10, "ItalyPowerDemand": 3, "ArrowHead": 10, "BasicMotions": 10, "OSULeaf": 10}
"""Archive -> patch length of its encoder."""


def dstrain(*words: str) -> str:
    """Run a command and return its output."""
    done = subprocess.run([sys.executable, "-m", "dstrain", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout[-3000:] + done.stderr[-3000:])
    return done.stdout


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: Path, records: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def train(folder: Path, name: str, recipe: dict[str, Any], num_gpus: int) -> list[dict[str, Any]]:
    """Train a recipe and return the rows of its evaluations, with the seconds of the whole command."""
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    start = time.time()
    dstrain("train", str(folder / f"{name}.yaml"), "--num-gpus", str(num_gpus), "--run-dir", str(folder / name))
    rows = [row for row in read(folder / name / "metrics.jsonl") if row["split"] == "eval"]
    return [{**row, "seconds": time.time() - start} for row in rows]


def truce(folder: Path, args: argparse.Namespace) -> None:
    """Compare soft tokens with the same language model given the numbers as text: same steps, batches and tokenizer.

    Each has the learning rate and the checkpoint of the least loss on its validation series, a tenth of the training
    series. The held-out series are used once, after that.
    """
    records = load_truce(folder)
    for name in args.inputs:
        losses = {lr: train_one(folder, name, lr, args.seeds[0], args)["loss"] for lr in LEARNING_RATES}
        lr = min(losses, key=lambda one: losses[one])
        print(json.dumps({"input": name, "validation_loss": losses, "seed": args.seeds[0], "chosen": lr}), flush=True)
        for seed in args.seeds:
            best = train_one(folder, name, lr, seed, args)
            told = evaluate(folder, f"{name}-{lr:g}-{seed}", name, records["eval"])
            found = {"step": best["step"], "validation_loss": best["loss"], **told}
            print(json.dumps({"input": name, "lr": lr, "seed": seed, **found}), flush=True)
    print(json.dumps({"constant caption": most_common(records), "people": score_people(records["eval"])}))


def train_one(folder: Path, name: str, lr: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train, unless it is done already; return the evaluation with the least validation loss."""
    rows = train(folder, f"{name}-{lr:g}-{seed}", truce_recipe(folder, name, lr, seed, args), args.num_gpus)
    return min(rows, key=lambda row: row["loss"])


def load_truce(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each split; write them as series, as numbers in the text, and without either."""
    names = {"train": ("pilot13finaltrain", "pilot16btrain"), "eval": ("pilot13finalval", "pilot16bval")}
    found = {
        split: [one for name in of for one in read(DATA / f"timeseries/truce/{name}.jsonl")]
        for split, of in names.items()
    }
    parts = {
        "train": [one for index, one in enumerate(found["train"]) if index % 10],
        "validation": found["train"][::10],
        "eval": found["eval"],
        "other": [{**one, "series": found["eval"][index - 7]["series"]} for index, one in enumerate(found["eval"])],
        "curves": make_curves(NUM_CURVES),
    }
    for split, of in parts.items():
        write(folder / f"{split}-soft.jsonl", of)
        for name, shown in (("text", True), ("blind", False)):
            write(
                folder / f"{split}-{name}.jsonl", [as_text(one, text, shown) for one in of for text in one["captions"]]
            )
    return parts


def make_curves(count: int) -> list[dict[str, Any]]:
    """Return synthetic curves as TRUCE has them: 12 whole numbers from 0 to 100, with one caption."""
    source = SyntheticCurves(SyntheticOptions(num_samples=count, min_length=12, max_length=12))
    found = []
    for index in range(count):
        record, random = source[index], np.random.RandomState([index])
        values, low = np.asarray(record["series"]), random.uniform(0, 50)
        scaled = low + (values - values.min()) / np.ptp(values) * (random.uniform(low + 20, 100) - low)
        values = [round(value) for value in scaled]
        found.append({"series": values, "captions": [record["caption"]], "prompt": ASKED_SYNTHETIC})
    return found


def truce_recipe(folder: Path, name: str, lr: float, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Return the recipe of `text`, `soft` or `blind` on synthetic curves and TRUCE; they differ in task and data."""
    mixture = [{"path": f"{folder}/{of}-{name}.jsonl", "weight": weight} for of, weight in WEIGHTS.items()]
    model, every = {"config": LLAMA, "gradient_checkpointing": False}, max(args.steps // 6, 1)
    recipe = {
        "task": "temporal" if name == "soft" else "sft",
        "data": {"train": mixture, "eval": f"{folder}/validation-{name}.jsonl", "max_length": 160},
        "batch": {"total": BATCH, "micro": BATCH // args.num_gpus}, "steps": args.steps, "seed": seed,
        "ds_config": "zero0", "precision": "fp32", "log": {"every": 50, "tensorboard": False},
        "optim": {"lr": lr, "schedule": "cosine", "warmup": 0.05, "weight_decay": 0.1},
        "eval": {"every": every}, "save": {"every": every, "keep": 1},
    }  # fmt: skip
    if not (folder / "tokenizer").is_dir():
        texts = {"train": [f"{folder}/{of}-text.jsonl" for of in WEIGHTS], "max_length": 160}
        config = RunConfig.model_validate({**recipe, "task": "sft", "model": model, "data": texts})
        make_task(config).tokenizer.save_pretrained(str(folder / "tokenizer"))  # type: ignore[attr-defined]
    recipe["model"] = {**model, "tokenizer": str(folder / "tokenizer")}
    encoder = {"patch_length": PATCH_LENGTH, "hidden_size": 64, "num_layers": 2, "num_heads": 4}
    options = {"stage": "sft", "encoder": encoder, "prompt": ASKED}
    shown = {**recipe["eval"], "generate": {"samples": 8}}
    return {**recipe, "options": options, "eval": shown} if name == "soft" else recipe


def as_text(record: dict[str, Any], caption: str, shows_numbers: bool = True) -> dict[str, Any]:
    """Return a conversation with the numbers in the user's turn, or without them."""
    numbers = " ".join(map(str, record["series"])) + "\n" if shows_numbers else ""
    turns = [("user", numbers + record.get("prompt", ASKED)), ("assistant", caption)]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def evaluate(folder: Path, run: str, name: str, records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return metrics of the best checkpoint: also the loss with the series of other records, and of its captions."""
    at, step = str(folder / run), ["--step", "best", "--json"]
    told, other = (
        json.loads(dstrain("evaluate", at, "--data", f"{folder}/{of}-{name}.jsonl", *step)) for of in ("eval", "other")
    )
    asked = [{"series": one["series"]} if name == "soft" else as_text(one, "?", name == "text") for one in records]
    words = ["--data", write(folder / f"asked-{name}.jsonl", asked), "--max-new-tokens", "24", "--batch", "64", *step]
    lines = dstrain("generate", at, *words).splitlines()
    answers = [json.loads(line)["answer"].strip() for line in lines if line.startswith("{")]
    pairs = list(zip(answers, records, strict=True))
    write(folder / f"captions-{run}.jsonl", [{"answer": text, **one} for text, one in pairs])
    score = sum(names_right_pattern(text, one["captions"]) for text, one in pairs) / len(pairs)
    found = {of: told[of] for of in ("loss", "token_accuracy")}
    return {**found, "loss_with_other_series": other["loss"], "pattern_accuracy": score}


def most_common(records: dict[str, Any]) -> float:
    """Return the score of the one training caption that names a right pattern most often in training."""
    texts = ["increases", "decreases", "peaks", "dips", "stays flat"]
    hits = {text: sum(names_right_pattern(text, one["captions"]) for one in records["train"]) for text in texts}
    best = max(hits, key=lambda text: hits[text])
    return sum(names_right_pattern(best, one["captions"]) for one in records["eval"]) / len(records["eval"])


def score_people(records: Sequence[dict[str, Any]]) -> float:
    """Return the share of captions by people that the other captions of the same series call right."""
    scores = [
        names_right_pattern(text, captions[:at] + captions[at + 1 :])
        for captions in (one["captions"] for one in records)
        for at, text in enumerate(captions)
    ]
    return sum(scores) / len(scores)


def ucr(folder: Path, args: argparse.Namespace) -> None:
    """Train classifiers on archives; the baseline is the label of the nearest training series (Euclidean)."""
    for name in args.archives:
        patch = PATCH_LENGTHS[name]
        files = {split: str(DATA / f"timeseries/ucr/{name}/{name}_{split}.ts") for split in ("TRAIN", "TEST")}
        encoder = {"patch_length": patch, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "dropout": 0.2}
        recipe = {
            "task": "temporal",
            "options": {"stage": "classify", "encoder": encoder},
            "model": {"gradient_checkpointing": False},
            "data": {"train": files["TRAIN"], "eval": files["TEST"]},
            "batch": {"total": 16, "micro": 16 // args.num_gpus},
            "optim": {"lr": 1e-3, "schedule": "cosine", "warmup": 0.1, "weight_decay": 0.05},
            "steps": args.steps, "ds_config": "zero0", "precision": "fp32", "log": {"every": 50},
            "eval": {"every": args.steps, "metric": "accuracy", "best": "max"}, "save": {"every": args.steps, "keep": 1},
        }  # fmt: skip
        rows = train(folder, name, recipe, args.num_gpus)
        found = {"accuracy": rows[-1]["accuracy"], "1-NN": nearest_neighbour(files), "seconds": rows[0]["seconds"]}
        print(json.dumps({"run": name, "step": rows[-1]["step"], **found}), flush=True)


def nearest_neighbour(files: dict[str, str]) -> float:
    """Return the accuracy of the label of the nearest training series."""
    found = {}
    for split, file in files.items():
        source = open_series(file)
        records = [source[index] for index in range(len(source))]
        values = np.stack([np.concatenate(one["series"]) for one in records])
        found[split] = values, np.array([read_series_record(one).label for one in records])
    (known, labels), (asked, wanted) = found["TRAIN"], found["TEST"]
    nearest = ((asked[:, None] - known[None]) ** 2).sum(-1).argmin(1)
    return float((labels[nearest] == wanted).mean())


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Time the preparation of 100,000 curves into an empty cache, tokenizer included."""
    os.environ["DSTRAIN_CACHE"] = str(folder / f"cache-{time.time_ns()}")
    recipe = {
        "task": "temporal",
        "options": {"stage": "align", "synthetic": {"num_samples": 100_000, "seed": 0}},
        "model": {"config": LLAMA},
        "data": {"eval_fraction": 0.02, "max_length": 256},
        "steps": args.steps,
    }
    (folder / "prepare.yaml").write_text(yaml.safe_dump(recipe))
    start = time.time()
    told = dstrain("prepare", str(folder / "prepare.yaml"))
    print(json.dumps({"curves": 100_000, "seconds": time.time() - start, "told": told.splitlines()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["truce", "ucr", "prepare"])
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--inputs", nargs="+", default=["text", "soft"], choices=["text", "soft", "blind"])
    parser.add_argument("--archives", nargs="+", default=["GunPoint", "ItalyPowerDemand"], choices=[*PATCH_LENGTHS])
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    {"truce": truce, "ucr": ucr, "prepare": prepare}[args.what](args.to.resolve(), args)


if __name__ == "__main__":
    main()
