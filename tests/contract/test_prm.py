"""Process reward models: records, the loss of each step, the F1 of the first error, exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dstrain.config.schema import RunConfig
from dstrain.errors import BadRecord, RecipeError
from dstrain.tasks import find_task, make_task
from dstrain.tasks.prm import NO_LABEL, Solution, first_error_sums
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, message, read_jsonl, write_jsonl, write_recipe
from tests.workers import Workers

STEPS: dict[str, Any] = {"prompt": "2+2+1?", "completions": ["2+2=4", "4+1=6"], "labels": [True, False]}
SOLUTIONS: list[dict[str, Any]] = [
    {name: STEPS[name] for name in ("prompt", "completions")},
    {"prompt": "2+2?", "completions": ["2+2=4"], "labels": [False]},
    {"input": "Two? Step 1: 2=2 ки", "id": 3},
]
"""Solutions to score: without labels, with them, and in Math-Shepherd's form."""
SHEPHERD = "Bob has 2 pens and buys 3. How many? Step 1: 2+3=5 {}\nStep 2: The answer is: 5 {}"


def make(folder: Path, **changes: Any) -> Any:
    return make_task(RunConfig.model_validate(tiny_recipe("prm", folder) | changes))


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (STEPS, Solution("2+2+1?", ["2+2=4", "4+1=6"], [1, 0])),
        (STEPS | {"labels": [1, None]}, Solution("2+2+1?", ["2+2=4", "4+1=6"], [1, NO_LABEL])),
        (STEPS | {"prompt": [message("user", "2?")]}, Solution([message("user", "2?")], STEPS["completions"], [1, 0])),
        (
            {"input": SHEPHERD.format("ки", "ки"), "label": SHEPHERD.format("+", "-"), "task": "GSM8K"},
            Solution("Bob has 2 pens and buys 3. How many? ", ["Step 1: 2+3=5", "Step 2: The answer is: 5"], [1, 0]),
        ),
    ],
)
def test_published_forms_are_read(record: dict[str, Any], wanted: Solution, tmp_path: Path) -> None:
    assert make(tmp_path).parse(record) == wanted


@pytest.mark.parametrize(("limit", "is_cut"), [(8, 1), (None, 0)])
def test_prompts_that_are_cut_are_counted(limit: int | None, is_cut: int, tmp_path: Path) -> None:
    values = tiny_recipe("prm", tmp_path)
    task = make(tmp_path, data=values["data"] | {"max_prompt_length": limit})
    (found,) = task.encode([task.parse(STEPS | {"prompt": "How much is 2+2+1 if one adds all of them up?"})], None)
    assert found["prompt_cut"] == is_cut


def test_a_system_text_that_the_template_drops_is_counted(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    task = make(tmp_path, model=tiny_recipe("prm", tmp_path)["model"] | {"chat_template": template})
    asked = [message("system", "Add up."), message("user", "2+2+1?")]
    (found,) = task.encode([task.parse(STEPS | {"prompt": asked})], None)
    assert found["system_lost"] == 1


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        (STEPS | {"completions": "2+2=4"}, "'completions' is not a list of steps"),
        (STEPS | {"completions": ["2+2=4", " "]}, "'completions' is not a list of steps"),
        (STEPS | {"labels": [True]}, "'labels' is not a list of 2 labels"),
        (STEPS | {"labels": [True, "no"]}, "'labels' has 'no'"),
        (STEPS | {"labels": [True, 2]}, "'labels' has 2"),
        (STEPS | {"labels": [None, None]}, "no step has a label"),
        ({"prompt": "2+2?", "completion": "4"}, "'completions' is not a list of steps"),
        ({"input": "2+2?", "label": "4"}, "steps end with 'ки'"),
        (
            {"input": SHEPHERD.format("ки", "ки"), "label": SHEPHERD.format("+", "?")},
            "'label' is not the text of 'input'",
        ),
        ({"input": "Step 1: 2 ки", "label": "Step 1: 2 +"}, "has no question before"),
    ],
)
def test_a_record_that_is_not_labelled_step_by_step_is_bad(record: dict[str, Any], wanted: str, tmp_path: Path) -> None:
    with pytest.raises(BadRecord, match=wanted):
        make(tmp_path).parse(record)


def test_the_loss_is_the_cross_entropy_at_the_end_of_each_step(tmp_path: Path) -> None:
    """As TRL's PRMTrainer labels tokens: each step and the separator are tokenized alone, all but the last are ignored."""
    found = []
    for packing in (True, False):
        task = make(tmp_path, batch={"total": 4, "micro": 4, "packing": packing})
        torch.manual_seed(0)
        model, examples = task.build_model().eval(), task.examples("train")
        batch = task.collate([examples[at] for at in range(4)])
        loss = task.loss(model, batch)
        loss.total.backward()
        found.append((loss.total.detach(), model.score.weight.grad.clone(), batch.weight))
    tokenizer, total, count = task.tokenizer, torch.zeros(()), 0
    for record in read_jsonl(tmp_path / "train.jsonl")[:4]:
        ids = [*tokenizer(record["prompt"])["input_ids"]]
        if tokenizer.eos_token_id == ids[-1]:
            ids.pop()
        labels = [NO_LABEL] * len(ids)
        for step, label in zip(record["completions"], record["labels"], strict=True):
            more = (
                tokenizer(step, add_special_tokens=False)["input_ids"]
                + tokenizer("\n", add_special_tokens=False)["input_ids"]
            )
            ids, labels = ids + more, labels + [NO_LABEL] * (len(more) - 1) + [int(label)]
        ids, labels = ids[:48], labels[:48]
        count += sum(label != NO_LABEL for label in labels)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        total += F.cross_entropy(logits, torch.tensor(labels), ignore_index=NO_LABEL, reduction="sum")
    assert found[0][2] == found[1][2] == count
    for loss_sum, gradient, _ in found:
        torch.testing.assert_close(loss_sum, total, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, found[0][1], rtol=1e-4, atol=1e-6)


def test_the_first_error_is_found_or_not() -> None:
    labels = torch.tensor([1, 0, 0, 1, 1, 0, 1, 1])
    rows = torch.tensor([0, 0, 0, 1, 1, 2, 3, 3])  # wrong at 1; right; wrong at 0; right
    predicted = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1])  # found; a false alarm; missed; right
    sums = first_error_sums(predicted, labels, rows)
    assert {name: [int(value) for value in pair] for name, pair in sums.items()} == {
        "first_error_accuracy": [1, 2],
        "no_error_accuracy": [1, 2],
    }


def test_the_f1_is_that_of_all_solutions(tmp_path: Path) -> None:
    task = make(tmp_path)
    sums = {"first_error_accuracy": (1.0, 4.0), "no_error_accuracy": (3.0, 4.0)}
    assert task.finish_metrics(sums) == {"first_error_f1": pytest.approx(2 * 0.25 * 0.75)}
    assert task.finish_metrics({"first_error_accuracy": (1.0, 4.0)}) == {}
    assert task.finish_metrics(dict.fromkeys(sums, (0.0, 4.0))) == {"first_error_f1": 0.0}


@pytest.mark.slow
def test_a_run_of_two_processes_is_exported_for_transformers(tmp_path: Path, one: Workers, two: Workers) -> None:
    values = tiny_recipe("prm", tmp_path) | {"eval": {"every": 4}, "ds_config": "zero3"}
    write_recipe(tmp_path, values)
    two(RUN, recipe=str(tmp_path / "recipe.yaml"), run_dir=str(tmp_path / "run"))
    last = [row for row in read_jsonl(tmp_path / "run/metrics.jsonl") if row["split"] == "eval"][-1]
    asked = {"folder": str(tmp_path / "run"), "data": str(tmp_path / "eval.jsonl")}
    alone = one("tests.contract.export_cases:evaluate", **asked)[0]
    names = ("loss", *find_task("prm").metric_names)
    assert {name: alone[name] for name in names} == pytest.approx({name: last[name] for name in names}, rel=1e-5)
    one("tests.contract.export_cases:export_only", run=str(tmp_path / "run"), to=str(tmp_path / "out"))
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == {0: "wrong", 1: "right"}
    task = make(tmp_path)
    example = task.examples("eval")[0]
    ids = torch.tensor([[*map(int, example["input_ids"])]])
    with torch.no_grad():
        assert model(ids).logits.shape == (1, ids.shape[1], 2)
    asked["data"] = str(write_jsonl(tmp_path / "steps.jsonl", SOLUTIONS))
    rows = one("tests.contract.export_cases:score", out="-", **asked)[0]["rows"]
    tokenizer, lengths = task.tokenizer, list[int]()
    for row, record, steps in zip(rows, SOLUTIONS, (["2+2=4", "4+1=6"], ["2+2=4"], ["Step 1: 2=2"]), strict=True):
        assert {name: row[name] for name in record} == record
        ids = [*tokenizer(record.get("prompt", "Two? "))["input_ids"]]
        ids = ids[:-1] if ids[-1] == tokenizer.eos_token_id else ids
        wanted = []
        for step in steps:
            ids += tokenizer(f"{step}", add_special_tokens=False)["input_ids"]
            ids += tokenizer("\n", add_special_tokens=False)["input_ids"]
            with torch.no_grad():
                wanted.append(float(model(torch.tensor([ids])).logits[0, -1].softmax(-1)[1]))
        assert row["step_scores"] == pytest.approx(wanted, abs=1e-5)
        lengths.append(len(ids))
    for hold in (None, "zero3"):
        shared = two("tests.contract.export_cases:score", out="-", ds_config=hold, **asked)[0]
        assert [row["step_scores"] for row in shared["rows"]] == [pytest.approx(row["step_scores"]) for row in rows]
    cut = one("tests.contract.export_cases:score", out="-", sets=[f"data.max_length={lengths[0] - 1}"], **asked)[0][
        "rows"
    ][0]
    assert cut["step_scores"] == [pytest.approx(rows[0]["step_scores"][0], abs=1e-6), None]


def test_a_family_without_token_classification_is_refused(tmp_path: Path) -> None:
    values = tiny_recipe("prm", tmp_path)
    values["model"]["config"] |= {"model_type": "granite"}
    task: Any = make_task(RunConfig.model_validate(values))
    with pytest.raises(RecipeError, match="transformers has no token classification for models of type granite"):
        task.checks.run()
