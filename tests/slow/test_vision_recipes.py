"""Families of 2026, trained through `dstrain train` with several images in a record and exported to transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

import dstrain
from dstrain.torchvision_fit import find_torchvision_problem
from tests.vision_families import FAMILIES, PACKED, save_family
from tests.vision_recipes import picture
from tests.vocabulary import read_jsonl, run_dstrain

PROBLEM = find_torchvision_problem()
pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(600),
    pytest.mark.skipif(PROBLEM is not None, reason=f"their processors need torchvision: {PROBLEM}"),
]  # fmt: skip
EXAMPLES = 8
TRAINED = ["qwen3_vl", "qwen3_5", "internvl", "glm4v_moe"]


def write_records(folder: Path, task: str) -> Path:
    """Write records with 0, 1 and 2 images in turn."""
    lines = []
    for index in range(EXAMPLES):
        names = [f"{index}-{number}.png" for number in range(index % 3)]
        for number, name in enumerate(names):
            picture(3 * index + number, (24 + 8 * (index % 2), 16 + 8 * number)).save(folder / name)
        question = [{"role": "user", "content": f"{'<image>' * len(names)}How many?"}]
        chosen, rejected = f"I see {len(names)}.", "No idea."
        answers = {"prompt": question, "chosen": chosen, "rejected": rejected}
        if task == "vlm":
            answers = {"messages": [*question, {"role": "assistant", "content": chosen}]}
        lines.append(json.dumps({"images": names, **answers}) + "\n")
    file = folder / "records.jsonl"
    file.write_text("".join(lines))
    return file


def train(name: str, task: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Train for two steps, the last one's held-out metrics included. Returns the exported folder and the metrics."""
    records = str(write_records(folder, task))
    recipe = {
        "task": task,
        "model": {"path": str(save_family(name, folder / "base"))},
        "data": {"train": records, "eval": records, "max_length": 600},
        "batch": {"total": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": 2,
        "precision": "fp32",
        "log": {"every": 1, "tensorboard": False},
        "ds_config": "zero2",
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    run = folder / "run"
    console = run_dstrain("train", folder / "recipe.yaml", "--run-dir", run)
    assert ("padded" in console) is (name not in PACKED), console
    run_dstrain("export", run, "--to", folder / "out")
    (row,) = [row for row in read_jsonl(run / "metrics.jsonl") if row["split"] == "eval"]
    return folder / "out", row


def read_images(folder: Path, record: dict[str, Any]) -> list[Image.Image]:
    return [Image.open(folder / name).convert("RGB") for name in record["images"]]


def encode(processor: Any, question: str, answer: str, images: Sequence[Image.Image]) -> tuple[dict[str, Any], int]:
    """Return what the processor makes of a question with its images and an answer, and the tokens of the question."""
    parts = [{"type": "image"} for _ in images] + [{"type": "text", "text": question.replace("<image>", "")}]
    asked = [{"role": "user", "content": parts}]
    said = [*asked, {"role": "assistant", "content": [{"type": "text", "text": answer}]}]
    shown = {"images": [*images]} if images else {}
    prompt = processor.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    text = processor.apply_chat_template(said, tokenize=False)
    made = [processor(text=[one], **shown, add_special_tokens=False, return_tensors="pt") for one in (prompt, text)]
    return {**made[1]}, made[0]["input_ids"].shape[1]


@torch.no_grad()
def score_answer(model: Any, inputs: dict[str, Any], begin: int) -> tuple[float, int]:
    """Return the summed log-probability of the tokens after the question, and their number."""
    logits = model(**inputs).logits[0]
    targets = inputs["input_ids"][0, begin:]
    log_probs = logits[begin - 1 : -1].log_softmax(-1).gather(1, targets[:, None])
    return float(log_probs.sum()), len(targets)


@pytest.mark.parametrize(("task", "name"), [("vlm", name) for name in TRAINED] + [("dpo", name) for name in FAMILIES])
def test_transformers_computes_the_held_out_metric_of_the_run_from_its_export(
    task: str, name: str, tmp_path: Path
) -> None:
    out, metrics = train(name, task, tmp_path)
    processor = AutoProcessor.from_pretrained(out)
    model = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32).eval()
    sums = []
    for record in read_jsonl(tmp_path / "records.jsonl"):
        if task == "vlm":
            question, answer = (turn["content"] for turn in record["messages"])
        else:
            question, answer = record["prompt"][0]["content"], record["chosen"]
        sums.append(score_answer(model, *encode(processor, question, answer, read_images(tmp_path, record))))
    total, tokens = (sum(values) for values in zip(*sums, strict=True))
    expected = {"loss": -total / tokens} if task == "vlm" else {"logp_chosen": total / EXAMPLES}
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", TRAINED)
def test_an_exported_reward_model_gives_the_scores_of_the_run(name: str, tmp_path: Path) -> None:
    out, metrics = train(name, "rm", tmp_path)
    processor, model = AutoProcessor.from_pretrained(out), dstrain.load_reward_model(out)
    margins = []
    for record in read_jsonl(tmp_path / "records.jsonl"):
        scores = []
        for answer in (record["chosen"], record["rejected"]):
            inputs, _ = encode(processor, record["prompt"][0]["content"], answer, read_images(tmp_path, record))
            with torch.no_grad():
                scores.append(float(model(**inputs).logits[0, 0]))
        margins.append(scores[0] - scores[1])
    assert sum(margins) / EXAMPLES == pytest.approx(metrics["margin"], rel=1e-4)
