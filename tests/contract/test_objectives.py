"""Reward models with several objectives: labels, losses, scores and exports."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.errors import BadRecord, TaskError
from dstrain.tasks import make_task
from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, read_jsonl, write_recipe
from tests.workers import Workers

CASES = "tests.contract.export_cases:"
NAMES = ["helpful", "brief"]


def recipe_of(folder: Path, **options: Any) -> dict[str, Any]:
    """Return the recipe of a tiny run whose records have labels, a part of them null."""
    values = tiny_recipe("rm", folder) | {"options": {"objectives": NAMES, **options}}
    paired = options.get("loss_type", "bradley_terry") == "bradley_terry"
    for split in ("train", "eval"):
        path, rows = folder / f"{split}.jsonl", []
        for number, row in enumerate(read_jsonl(path)):
            longer = len(row["chosen"]) > len(row["rejected"])
            brief = [None, None] if number % 3 == 0 else [0.0, 1.0] if longer else [1.0, 0.0]
            if paired:
                rows.append(
                    row
                    | {"chosen_helpful": 4, "rejected_helpful": 1, "chosen_brief": brief[0], "rejected_brief": brief[1]}
                )
                continue
            prompt, _, good = row["chosen"].rpartition("\n\nAssistant:")
            bad = row["rejected"].rpartition("\n\nAssistant:")[2]
            prompt += "\n\nAssistant:"
            rows.append({"prompt": prompt, "completions": [good, bad], "helpful": [1, 0], "brief": brief})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return values


@pytest.mark.parametrize("loss_type", ["bradley_terry", SLOW("mse"), SLOW("cross_entropy")])  # both of one function
def test_a_run_is_scored_and_exported_with_a_score_per_objective(
    loss_type: str, tmp_path: Path, two: Workers, one: Workers
) -> None:
    values = recipe_of(tmp_path, loss_type=loss_type, objective_weights=[3.0, 1.0]) | {"eval": {"every": 4}}
    write_recipe(tmp_path, values)
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    last = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if row["split"] == "eval"][-1]
    data = {"folder": str(tmp_path / "run"), "data": str(tmp_path / "eval.jsonl")}
    rows = one(CASES + "score", out="-", **data)[0]["rows"]
    records = read_jsonl(tmp_path / "eval.jsonl")
    paired = loss_type == "bradley_terry"
    total = weight = 0.0
    for row, record in zip(rows, records, strict=True):
        for name, importance in zip(NAMES, (3.0, 1.0), strict=True):
            if paired:
                labels = [record[f"{side}_{name}"] for side in ("chosen", "rejected")]
                scores = [row[f"{side}_score_{name}"] for side in ("chosen", "rejected")]
            else:
                labels, scores = record[name], row[f"score_{name}s"]
            if labels[0] is None or labels[1] is None:
                continue
            weight += importance * (1 if paired else 2)
            if paired:
                sign = 1 if labels[0] > labels[1] else -1
                total += importance * math.log1p(math.exp(-sign * (scores[0] - scores[1])))
                continue
            for label, score in zip(labels, scores, strict=True):
                p = 1 / (1 + math.exp(-score))
                cross = -(label * math.log(p) + (1 - label) * math.log(1 - p))
                total += importance * (cross if loss_type == "cross_entropy" else (score - label) ** 2)
    assert total / weight == pytest.approx(last["loss"], rel=1e-4)
    assert {name for name in last if name.startswith(("accuracy", "mse"))} == {
        "accuracy" if paired else "mse", *(f"{'accuracy' if paired else 'mse'}_{name}" for name in NAMES),
    }  # fmt: skip
    side = "chosen_" if paired else ""
    first = [rows[0][f"{side}score{'' if paired else 's'}"], rows[0][f"{side}score_helpful{'' if paired else 's'}"]]
    assert all(isinstance(value, float if paired else list) for value in first)
    one(CASES + "export_only", run=str(tmp_path / "run"), to=str(tmp_path / "out"))
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == dict(enumerate(NAMES))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    task: Any = make_task(RunConfig.model_validate(values))
    example = task.examples("eval")[0]
    ids = example["chosen" if paired else "answer"]
    with torch.no_grad():
        found = model(torch.tensor([[*map(int, ids)]])).logits[0]
    wanted = [rows[0][f"{side}score_{name}"] if paired else rows[0][f"score_{name}s"][0] for name in NAMES]
    assert found.tolist() == pytest.approx(wanted, abs=1e-4)
    assert len(tokenizer) == 320


@pytest.mark.parametrize("loss_type", ["bradley_terry", "mse"])
def test_packed_and_padded_batches_have_the_same_loss(loss_type: str, tmp_path: Path) -> None:
    values = recipe_of(tmp_path, loss_type=loss_type)
    found = []
    for packing in (True, False):
        task: Any = make_task(
            RunConfig.model_validate(values | {"batch": {"total": 4, "micro": 4, "packing": packing}})
        )
        torch.manual_seed(0)
        model, examples = task.build_model().eval(), task.examples("train")
        batch = task.collate([examples[at] for at in range(4)])
        loss = task.loss(model, batch)
        loss.total.backward()
        found.append((float(loss.total.detach()), batch.weight, model.score.weight.grad.flatten()))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == found[1][1]
    torch.testing.assert_close(found[0][2], found[1][2], rtol=1e-4, atol=1e-6)


PAIR: dict[str, Any] = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
LIST: dict[str, Any] = {"prompt": "2+2?", "completions": ["4", "5"]}


@pytest.mark.parametrize(
    ("loss_type", "record", "wanted"),
    [
        ("bradley_terry", PAIR, "no label of helpful, brief"),
        ("bradley_terry", PAIR | {"chosen_helpful": 1, "rejected_helpful": 1}, "no objective whose labels say"),
        ("bradley_terry", PAIR | {"chosen_helpful": 1}, "no objective whose labels say"),
        ("bradley_terry", {"prompt": "2+2?", "completion": "4", "helpful": 1}, "is not a pair of answers"),
        ("mse", LIST | {"helpful": [1]}, "'helpful' is not a list of 2 labels"),
        ("mse", LIST | {"helpful": [1, "good"]}, "'helpful' is 'good', not a finite number"),
        ("mse", LIST | {"helpful": [1, True]}, "'helpful' is True, not a finite number"),
        (
            "cross_entropy",
            LIST | {"helpful": [1, 4]},
            "'helpful' is 4, and loss_type cross_entropy takes labels from 0 to 1",
        ),
    ],
)
def test_a_record_without_a_usable_label_is_bad(
    loss_type: str, record: dict[str, Any], wanted: str, tmp_path: Path
) -> None:
    task: Any = make_task(RunConfig.model_validate(recipe_of(tmp_path, loss_type=loss_type)))
    with pytest.raises(BadRecord, match=wanted):
        task.parse(record)


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({"objectives": []}, "objectives is empty"),
        ({"objectives": ["a", "a"]}, "names a column twice"),
        ({"objectives": ["a"], "objective_weights": [1.0, 2.0]}, "has to hold 1 numbers"),
        ({"objectives": ["a"], "objective_weights": [0.0]}, "not all 0"),
        ({"objectives": ["a"], "loss_type": "mse", "label_smoothing": 0.1}, "are for loss_type bradley_terry"),
        ({"loss_type": "mse"}, "loss_type and objective_weights need objectives"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    values = tiny_recipe("rm", tmp_path) | {"options": options}
    with pytest.raises(TaskError, match=wanted):
        make_task(RunConfig.model_validate(values))
