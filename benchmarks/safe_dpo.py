"""Run the chain of docs/safety.md on hh-rlhf with a small model, and compare plain with safe DPO at equal steps.

    DSTRAIN_DATA=DATA python -m benchmarks.safe_dpo [--to DIR] [--steps 60]

Two processes train a base (sft), both reward models (zero2 and zero3), and policies. The order of the pairs is drawn by
a coin, so that it says nothing about harmlessness; `chosen_safe` and `rejected_safe` label the answer that people found
more harmless as safe. Prints the held-out margins of the runs as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, certificate, table
from dstrain.commands.export import export_model
from tests.vocabulary import read_events, read_jsonl, write_jsonl
from tests.workers import Workers

CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
VLM_CONFIG = {
    "model_type": "llava", "vision_feature_select_strategy": "default", "vision_feature_layer": -1,
    "text_config": {"model_type": "llama", **{key: value for key, value in CONFIG.items() if key not in ("model_type", "max_position_embeddings")}},
    "vision_config": {
        "model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "hidden_size": 48, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 48,
    },
}  # fmt: skip
COMMON = {
    "model.gradient_checkpointing": False, "model.lora": None, "data.max_length": 96, "data.on_error": "skip",
    "data.workers": 0, "log.tensorboard": False, "epochs": None, "batch.micro": 8,
}  # fmt: skip
POLICY = {"batch.total": 16, "optim.lr": 5e-4, "optim.schedule": "constant", "options.precompute_ref_log_probs": True}
SECONDS = "seconds"


def write_mixed(data: Path, folder: Path) -> dict[str, Path]:
    """Write hh-rlhf's harmless pairs in an order drawn by a coin, with a safety label of each answer."""
    files = {}
    for split, count in (("train", 900), ("test", 200)):
        draw, records = random.Random(f"order/{split}"), []
        for pair in read_jsonl(data / f"harmless-{split}.jsonl")[:count]:
            swap = draw.random() < 0.5
            sides = ("rejected", "chosen") if swap else ("chosen", "rejected")
            labels = {"chosen_safe": not swap, "rejected_safe": swap}
            records.append({"chosen": pair[sides[0]], "rejected": pair[sides[1]], **labels})
        files[split] = write_jsonl(folder / f"mixed-{split}.jsonl", records)
    return files


def train(workers: Workers, recipe: str, run: Path, values: Mapping[str, Any]) -> dict[str, Any]:
    """Train a recipe in the worker processes; return its seconds and its evaluations."""
    began = time.perf_counter()
    sets = [f"{key}={json.dumps(value)}" for key, value in {**COMMON, **values}.items()]
    workers("tests.resume.cases:run", recipe=recipe, run_dir=str(run), sets=sets)
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["split"] == "eval"]
    print(f"{run.name}: {time.perf_counter() - began:.0f} s, {rows[-1] if rows else ''}", flush=True)
    return {SECONDS: time.perf_counter() - began, "rows": rows, "data": read_events(run, "data")}


def train_reward_models(workers: Workers, data: Path, folder: Path) -> dict[str, Any]:
    """Train and export a base and both reward models, at ZeRO 2 and 3; return their evaluations."""
    (folder / "sft.yaml").write_text("task: sft\n")
    pairs = [str(data / f"{name}-train.jsonl") for name in ("helpful", "harmless")]
    base = {"model.config": CONFIG, "data.train": pairs, "batch.total": 16, "steps": 100, "optim.lr": 2e-3}
    train(workers, str(folder / "sft.yaml"), folder / "sft", {**base, "ds_config": "zero2", "save.every": 100})
    export_model(folder / "sft", "last", folder / "base")
    found = {}
    for name, preset in (("helpful", "zero2"), ("harmless", "zero3")):
        values = {
            "model.path": str(folder / "base"), "data.train": str(data / f"{name}-train.jsonl"), "ds_config": preset,
            "data.eval": str(data / f"{name}-test.jsonl"), "data.max_samples": 1300, "batch.total": 32, "steps": 80,
            "optim.lr": 1e-3, "eval.every": 40, "eval.metric": "accuracy", "eval.best": "max", "save.every": 40,
        }  # fmt: skip
        found[name] = train(workers, f"rm-{name}", folder / f"{name}-run", values)["rows"]
        export_model(folder / f"{name}-run", "best", folder / f"rm-{name}")
    return found


def train_policies(workers: Workers, files: Mapping[str, Path], folder: Path, steps: int) -> dict[str, Any]:
    """Train plain and safe DPO with the same settings; return their evaluations, by labels and by scores."""
    rest = {"options.safety.scaling_weight": 0.0, "options.safety.helpful_rm": None}
    values = {
        **POLICY, **rest, "model.path": str(folder / "base"), "data.train": str(files["train"]),
        "data.eval": str(files["test"]), "steps": steps, "eval.every": steps // 4, "save.every": steps,
    }  # fmt: skip
    methods = {
        "none": {"method": "none"},
        "safedpo": {"method": "safedpo"},
        "delta 0": {"method": "safedpo", "delta": 0.0},
    }
    found = {}
    for kind, harmless in (("labels", None), ("scores", str(folder / "rm-harmless"))):
        for name, options in methods.items():
            own = {f"options.safety.{key}": value for key, value in {**options, "harmless_rm": harmless}.items()}
            run = folder / f"{kind}-{name.replace(' ', '')}"
            found[f"{kind}, {name}"] = train(workers, "safe-mm-dpo", run, {**values, **own})
    return found


def train_at_each_stage(workers: Workers, files: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Take a few steps of the whole recipe with both reward models, cached and online, with adapters."""
    rms = {f"options.safety.{name}_rm": str(folder / f"rm-{name}") for name in ("helpful", "harmless")}
    values = {
        **rms, "model.path": str(folder / "base"), "model.lora": {"rank": 8}, "data.train": str(files["train"]),
        "data.eval": str(files["test"]), "steps": 6, "eval.every": 6, "save.every": 6, "batch.total": 16,
    }  # fmt: skip
    sets = [f"{key}={json.dumps(value)}" for key, value in {**COMMON, **values}.items()]
    prepared = workers("tests.contract.export_cases:prepare", recipe="safe-mm-dpo", sets=sets)[0]
    print(json.dumps(prepared["splits"]["train"], default=str)[:600], flush=True)
    runs = {}
    for preset, scoring in (("zero2", "cached"), ("zero3", "cached"), ("zero2", "online"), ("zero3", "online")):
        name = f"{preset}, {scoring}"
        own = {"ds_config": preset, "options.safety.scoring": scoring}
        runs[name] = train(workers, "safe-mm-dpo", folder / name.replace(", ", "-"), {**values, **own})
    return runs


def train_with_images(workers: Workers, data: Path, folder: Path) -> dict[str, Any]:
    """Run the chain on pairs about images for a few steps: every model is a LLaVA; return the policies' evaluations.

    The data has one kind of preference, a right answer before a wrong one: both reward models learn it, from other seeds.
    """
    (folder / "vlm.yaml").write_text("task: vlm\n")
    few = {"data.max_length": 640, "batch.total": 8, "batch.micro": 2, "optim.lr": 1e-3, "steps": 6, "save.every": 6}
    questions = {
        "model.config": VLM_CONFIG,
        "model.freeze": ["*.post_layernorm"],
        "data.train": str(data / "questions.jsonl"),
    }
    train(workers, str(folder / "vlm.yaml"), folder / "sft", {**few, **questions, "ds_config": "zero2"})
    export_model(folder / "sft", "last", folder / "base")
    pairs = {
        **few, "model.path": str(folder / "base"), "data.train": str(data / "preferences-train.jsonl"),
        "data.eval": str(data / "preferences-test.jsonl"), "eval.every": 6,
    }  # fmt: skip
    rms = {}
    for seed, (name, preset) in enumerate((("helpful", "zero2"), ("harmless", "zero3"))):
        train(workers, f"rm-{name}", folder / f"{name}-run", {**pairs, "ds_config": preset, "seed": seed})
        export_model(folder / f"{name}-run", "last", folder / f"rm-{name}")
        rms[f"options.safety.{name}_rm"] = str(folder / f"rm-{name}")
    runs = {}
    for preset, scoring in (("zero2", "cached"), ("zero3", "cached"), ("zero3", "online")):
        own = {"ds_config": preset, "options.safety.scoring": scoring, "model.lora": {"rank": 8}, "model.freeze": []}
        runs[f"{preset}, {scoring}"] = train(
            workers, "safe-mm-dpo", folder / f"{preset}-{scoring}", {**pairs, **rms, **own}
        )
    return runs


def show(found: Mapping[str, Any], names: tuple[str, ...]) -> str:
    rows = [
        {"run": name, "step": row["step"], **{key: row.get(key) for key in names}}
        for name, run in found.items()
        for row in run["rows"]
    ]
    return table(rows)


def measure_text(workers: Workers, data: Path, folder: Path, steps: int) -> None:
    files = write_mixed(data, folder)
    rewards = train_reward_models(workers, data, folder)
    rows = [{"reward model": name, **row} for name, found in rewards.items() for row in found]
    print(table([{key: row[key] for key in ("reward model", "step", "loss", "accuracy")} for row in rows]), "\n")
    policies = train_policies(workers, files, folder, steps)
    print(show(policies, ("loss", "accuracy", "harmless_margin")), "\n", flush=True)
    stages = train_at_each_stage(workers, files, folder)
    print(show(stages, ("loss", "accuracy", "harmless_margin", "helpful_margin")), "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--images", action="store_true", help="the chain on MATH-V's pairs with images, a few steps")
    asked = parser.parse_args()
    folder = asked.to or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    data = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data"))
    workers = Workers(2)
    try:
        if asked.images:
            runs = train_with_images(workers, data / "mm" / "mathv", folder)
            print(show(runs, ("loss", "accuracy", "harmless_margin", "helpful_margin")), "\n")
        else:
            measure_text(workers, data / "hh", folder, asked.steps)
    finally:
        workers.close()
    for key, value in certificate().items():
        print(f"{key}: {value}")


if __name__ == "__main__":
    main()
