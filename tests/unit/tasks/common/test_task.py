"""data.eval_fraction: no record, and no prompt, is both trained on and held out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from dstrain.tasks.common.task import load_split
from tests.tiny import tiny_recipe

pytestmark = pytest.mark.usefixtures("fresh_cache")


def halves(task: str, folder: Path, records: list[dict[str, Any]], **data: Any) -> tuple[Any, Any]:
    """Return the training and the held-out examples."""
    values = tiny_recipe(task, folder)
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    values["data"] = {"train": str(folder / "records.jsonl"), "eval_fraction": 0.25, "max_length": 512, **data}
    made = make_task(RunConfig.model_validate(values))
    train, held_out = load_split(made, "train"), load_split(made, "eval")
    assert train is not None
    assert held_out is not None
    assert len(train) > len(held_out) > 0
    return [train[index] for index in range(len(train))], [held_out[index] for index in range(len(held_out))]


def chat(number: int, answer: int, **more: Any) -> dict[str, Any]:
    turns = [("user", f"Question {number}?"), ("assistant", f"Answer {answer}."), ("user", "So?"), ("assistant", "So.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns], **more}


FORMS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "sft": chat,
    "rm": lambda n, a: {"prompt": f"Question {n}?", "chosen": f" Answer {a}.", "rejected": " No."},
    "dpo": lambda n, a: {"prompt": f"Question {n}?", "chosen": f" Answer {a}.", "rejected": " No."},
    "kto": lambda n, a: {"prompt": f"Question {n}?", "completion": f" Answer {a}.", "label": a % 2 == 0},
    "temporal": lambda n, a: {"series": [float(n), 1.0, float(n % 7)], "caption": f"rises {a}"},
}


@pytest.mark.parametrize("task", FORMS)
def test_records_with_equal_prompts_are_on_one_side(task: str, tmp_path: Path) -> None:
    train, held_out = halves(task, tmp_path, [FORMS[task](n % 20, n) for n in range(80)])
    numbers = [{example["sample"] % 20 for example in side} for side in (train, held_out)]
    assert not numbers[0] & numbers[1]
    assert (len(held_out), len(numbers[1])) == (20, 5)


def test_both_answers_of_a_pair_are_on_one_side_for_kto(tmp_path: Path) -> None:
    pairs = [{"prompt": f"Question {n}?", "chosen": " Yes.", "rejected": " No."} for n in range(40)]
    train, held_out = halves("kto", tmp_path, pairs)
    records = [{example["sample"] for example in side} for side in (train, held_out)]
    assert not records[0] & records[1]
    assert (len(held_out), len(records[1])) == (20, 10)


def test_all_captions_of_a_series_are_on_one_side(tmp_path: Path) -> None:
    records = [{"series": [float(n), 1.0, 2.0], "captions": ["rises", "falls", "stays"]} for n in range(40)]
    train, held_out = halves("temporal", tmp_path, records)
    assert not {one["sample"] for one in train} & {one["sample"] for one in held_out}
    assert len(held_out) == 30


def test_one_question_about_several_images_is_several_prompts(tmp_path: Path) -> None:
    from PIL import Image

    for n in range(20):
        Image.new("RGB", (16, 16), (n, 0, 0)).save(tmp_path / f"{n}.png")
    records = [{"image": f"{n % 20}.png", "question": "Which colour?", "answer": f"red {n}"} for n in range(40)]
    train, held_out = halves("vlm", tmp_path, records)
    images = [{example["sample"] % 20 for example in side} for side in (train, held_out)]
    assert not images[0] & images[1]
    assert len(images[1]) == 5


def test_records_without_a_prompt_are_each_alone(tmp_path: Path) -> None:
    train, held_out = halves("sft", tmp_path, [{"text": f"Line {n} of a book."} for n in range(40)])
    assert (len(train), len(held_out)) == (30, 10)


def test_a_system_text_alone_is_no_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be kind."}]
    records = [{"messages": [*messages, {"role": "assistant", "content": f"Answer {n}."}]} for n in range(40)]
    assert len(halves("sft", tmp_path, records)[1]) == 10


def test_questions_about_one_document_are_on_one_side_where_asked(tmp_path: Path) -> None:
    from PIL import Image

    for n in range(10):
        (tmp_path / f"doc{n}").mkdir()
        Image.new("RGB", (16, 16), (n, 0, 0)).save(tmp_path / f"doc{n}" / "1.png")
    records = [{"question": f"Line {n}?", "answer": "yes", "document": f"doc{n % 10}"} for n in range(40)]
    train, held_out = halves("docqa", tmp_path, records, eval_group="document")
    documents = [{example["sample"] % 10 for example in side} for side in (train, held_out)]
    assert not documents[0] & documents[1]
    assert len(documents[1]) == 2, "8 of 40 questions; a third document would exceed a quarter"


def test_values_of_pairs_may_be_whole_and_broken_numbers(tmp_path: Path) -> None:
    pairs = [{**FORMS["rm"](n, n), "margin": 1 if n % 2 else 0.5} for n in range(8)]
    train, held_out = halves("rm", tmp_path, pairs)
    assert {one["margin"] for one in (*train, *held_out)} == {1.0, 0.5}
