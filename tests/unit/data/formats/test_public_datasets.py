"""Records in the columns in which public data sets are served: nothing is refused, dropped or trained by mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.formats.columns import find_unused, parse_record
from dstrain.data.formats.conversations import Conversation, read_conversation, read_prompt
from dstrain.data.formats.images import read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, has_images
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.records import BadRecord, Record

USER, YES, NO = (
    {"role": role, "content": text} for role, text in (("user", "hi"), ("assistant", "yes"), ("assistant", "no"))
)
HUMAN, GPT = {"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}
IMAGE = {"bytes": b"\x89PNG", "path": "x.png"}
SHOWN = f"{IMAGE_PLACEHOLDER}\nhi"


def describe(task: str, record: dict[str, Any]) -> list[str]:
    """Return all texts of a record in order: the prompt, then the answers; `=` before those that are learnt."""
    readers: dict[str, Any] = {
        "sft": read_conversation,
        "dpo": lambda one: read_with_images(one, read_preference),
        "vlm": lambda one: read_with_images(one, read_conversation),
    }
    found: Any = parse_record(readers[task], record)
    found = getattr(found, "parsed", found)
    if isinstance(found, Conversation):
        return ["=" * (at in found.trained_turns) + turn["content"] for at, turn in enumerate(found.messages)]
    prompt = [found.prompt] if isinstance(found.prompt, str) else [turn["content"] for turn in found.prompt]
    return [*prompt, *([found.chosen, found.rejected] if task == "dpo" else [f"={found.answer}"])]


PUBLIC: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "RLAIF-V": ("dpo", {"ds_name": "x", "image": IMAGE, "question": "hi", "chosen": "yes", "rejected": "no", "idx": 1,
                        "origin_split": "{}", "image_path": "a/b.jpg"}, [SHOWN, "yes", "no"]),
    "RLHF-V": ("dpo", {"image": IMAGE, "image_path": "a/b.jpg", "idx": 1,
                       "text": json.dumps({"question": "hi", "chosen": "yes", "rejected": "no"})}, [SHOWN, "yes", "no"]),
    "RLHF-V for sft": ("vlm", {"image": IMAGE, "text": json.dumps({"question": "hi", "chosen": "yes", "rejected": "no"})},
                       [SHOWN, "=yes"]),
    "Flickr30k": ("vlm", {"image": IMAGE, "caption": "yes", "sentids": ["1"], "img_id": "0", "filename": "100.jpg"},
                  [IMAGE_PLACEHOLDER, "=yes"]),
    "COCO": ("vlm", {"image": IMAGE, "question": "hi", "answer": "yes", "file_name": "00.jpg",
                     "coco_url": "http://images.cocodataset.org/0.jpg"}, [SHOWN, "=yes"]),
    "VQAv2": ("vlm", {"image": IMAGE, "question": "hi", "answer": "yes", "question_type": "is", "image_id": 1,
                      "answers": [{"answer": "yes", "answer_id": 1}, {"answer": "maybe", "answer_id": 2}]},
              [SHOWN, "=yes"]),
    "The Cauldron": ("vlm", {"images": [IMAGE], "texts": [{"user": "hi", "assistant": "yes", "source": "x"}]},
                     [SHOWN, "=yes"]),
    "llava-instruct-mix-vsft": (
        "vlm", {"messages": [{"role": "user", "content": [{"index": None, "text": "hi\n", "type": "text"},
                                                          {"index": 0, "text": None, "type": "image"}]},
                             {"role": "assistant", "content": [{"index": None, "text": "yes", "type": "text"}]}],
                "images": [IMAGE]}, [f"hi\n{IMAGE_PLACEHOLDER}", "=yes"]),
    "OpenHermes": ("sft", {"conversations": [{**HUMAN, "weight": None}, {**GPT, "weight": None}], "views": 3.0,
                           "title": "A Title", "avatarUrl": "https://a.com/b.png", "system_prompt": None},
                   ["hi", "=yes"]),
    "OpenHermes, system": ("sft", {"conversations": [{"from": "system", "value": "Be."}, HUMAN, GPT],
                                   "system_prompt": "Be."}, ["Be.", "hi", "=yes"]),
    "SlimOrca": ("sft", {"conversations": [{"from": "system", "value": "Be.", "weight": None}, {**HUMAN, "weight": 0.0},
                                           {**GPT, "weight": 1.0}]}, ["Be.", "hi", "=yes"]),
    "Dolly": ("sft", {"instruction": "hi", "context": "some text", "response": "yes", "category": "qa"},
              ["hi\nsome text", "=yes"]),
    "LIMA": ("sft", {"conversations": ["hi", "yes", "more", "ok"], "source": "x"}, ["hi", "=yes", "more", "=ok"]),
    "Capybara": ("sft", {"source": "x", "conversation": [{"input": "hi", "output": "yes"}, {"input": "more", "output": "ok"}]},
                 ["hi", "=yes", "more", "=ok"]),
    "Capybara, binarized": ("dpo", {"conversation": [{"input": "hi", "output": "an older answer"}], "chosen": [USER, YES],
                                    "rejected": [USER, NO], "generation_prompt": ["a b"]}, ["hi", "yes", "no"]),
    "UltraFeedback preferences": ("dpo", {"instruction": "hi", "chosen_response": "yes", "rejected_response": "no",
                                          "chosen_model": "x", "chosen_avg_rating": 5.0}, ["hi", "yes", "no"]),
    "MATH": ("sft", {"problem": "hi", "level": "Level 5", "type": "Algebra", "solution": "yes"}, ["hi", "=yes"]),
    "NuminaMath-1.5": ("sft", {"problem": "hi", "solution": "yes", "answer": "proof", "uuid": "x"}, ["hi", "=yes"]),
    "OpenR1-Math": ("sft", {"problem": "hi", "solution": "another", "answer": "2/5", "messages": [USER, YES]},
                    ["hi", "=yes"]),
    "Aya": ("sft", {"inputs": "hi", "targets": "yes", "language": "English"}, ["hi", "=yes"]),
    "code instructions": ("sft", {"instruction": "Write a sum of a list", "input": "[1, 2]", "output": "sum([1, 2])",
                                  "prompt": "Below.\n### Write a sum of a list\n### [1, 2]\n### sum([1, 2])"},
                          ["Write a sum of a list\n[1, 2]", "=sum([1, 2])"]),
    "nulls of a table": ("sft", {"messages": [{**USER, "tool_calls": None, "name": None, "weight": None},
                                              {**YES, "tool_calls": [], "function_call": None, "reasoning": None}],
                                 "tools": None, "system": None, "image": None}, ["hi", "=yes"]),
    "NaN of pandas": ("sft", {"instruction": "hi", "input": float("nan"), "output": "yes", "system": float("nan")},
                      ["hi", "=yes"]),
    "NaN as image": ("vlm", {"question": "hi", "answer": "yes", "image": float("nan")}, ["hi", "=yes"]),
    "images of null": ("vlm", {"question": "hi", "answer": "yes", "images": [None]}, ["hi", "=yes"]),
    "an image of nulls": ("vlm", {"question": "hi", "answer": "yes", "image": {"bytes": None, "path": None}}, ["hi", "=yes"]),
    "images of null as text": ("sft", {"question": "hi", "answer": "yes", "images": [None]}, ["hi", "=yes"]),
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_data_set_is_read_as_it_is_served(name: str) -> None:
    task, record, expected = PUBLIC[name]
    assert describe(task, record) == expected


@pytest.mark.parametrize(
    ("task", "record", "reason"),
    [
        ("sft", {"messages": [USER, YES, USER], "answer": "final"}, "'answer' looks like an answer"),
        ("vlm", {"question": "hi", "answer": "yes", "image": IMAGE, "image_2": "b.png"}, "'image_2' looks like an image"),
        ("vlm", {"question": "hi", "answer": "yes", "image_path": "b.png"}, "'image_path' looks like an image"),
        ("dpo", {"conversation": [{"input": "another", "output": "x"}], "chosen": [USER, YES], "rejected": [USER, NO]},
         "'conversation' looks like a part of the prompt"),
        ("sft", {"question": "hi", "context": "a text", "answer": "yes"},
         "data.columns {context: input, question: instruction}"),
        ("sft", {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "image": "a.png"}]}, YES]},
         "a part of type 'text' with 'image' too"),
        ("vlm", {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "text": "hi"}]}, YES]},
         "has a 'text' too"),
        ("sft", {"instruction": "hi", "output": "yes", "kto_tag": 0.0}, "'kto_tag' is 0.0: the answer was not wanted"),
        ("sft", {"prompt": "hi", "completion": "yes", "label": 0}, "'label' is 0: the answer was not wanted"),
        ("sft", {"prompt": "hi", "completion": "yes", "label": "False"}, "'label' is \"False\": the answer was not wanted"),
    ],
)  # fmt: skip
def test_what_would_be_lost_or_was_not_wanted_is_refused(task: str, record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=re.escape(reason)):
        describe(task, record)


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({" prompt": "hi", "completion": "yes"}, "the keys are ' prompt', completion;"),
        ({}, "the keys are none;"),
    ],
)
def test_the_names_of_unknown_keys_can_be_seen(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord, match=re.escape(reason)):
        read_conversation(record)


def test_a_label_of_null_is_named_as_such() -> None:
    """The message asked: did you mean 'label'?"""
    with pytest.raises(BadRecord, match="'label' is null; write true or false"):
        read_unpaired({"prompt": "hi", "completion": "yes", "label": None})


def test_a_column_beside_a_document_is_information() -> None:
    def read(record: Any) -> Any:
        return record["document"], record["question"], record["answer"]

    asked = {"document": "a.pdf", "question": "hi", "answer": "yes"}
    assert parse_record(read, {**asked, "filename": "page.png"})
    with pytest.raises(
        BadRecord, match=r"'context' looks like a part of the prompt.*; rename it with data.columns, or"
    ):
        parse_record(read, {**asked, "context": "some text"})


def test_an_image_of_nan_is_no_image() -> None:
    assert not has_images({"question": "hi", "image": float("nan")})


def test_a_class_of_a_text_is_no_label_of_an_answer() -> None:
    assert describe("sft", {"text": "hello there", "label": 0}) == ["", "=hello there"]


def test_an_unread_key_of_a_part_is_named() -> None:
    record = Record(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": "x"}]}, YES]}
    )
    parse_record(read_conversation, record)
    assert [*find_unused(record)] == ["messages[].content[].cache_control"]


def test_two_labels_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(BadRecord, match="'label' and 'kto_tag' contradict each other"):
        read_unpaired({"instruction": "hi", "output": "yes", "label": 1.0, "kto_tag": False})


@pytest.mark.parametrize(
    "record",
    [
        {"conversations": ["hi", "yes"]},
        {"conversations": ["hi"]},
        {"texts": [{"user": "hi", "assistant": "yes", "source": "x"}]},
        {"conversation": [{"input": "hi", "output": "yes"}]},
        {"problem": "hi"},
        {"inputs": "hi", "targets": "yes"},
        {"instruction": "hi", "input": float("nan")},
        {"instruction": "hi", "output": "yes, this is the answer", "prompt": "### hi\n### yes, this is the answer"},
    ],
)
def test_generation_asks_what_training_asks(record: dict[str, Any]) -> None:
    assert parse_record(read_prompt, record, is_prompt=True).prompt == [USER]


def test_nulls_that_a_table_adds_to_calls_are_not_learnt(tmp_path: Path) -> None:
    """A table gives the arguments of every call the names of all calls."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    from dstrain.data.sources.open import open_source

    def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    def tool(name: str, argument: str) -> dict[str, Any]:
        return {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}}

    rows = [
        {"messages": [USER, call("a", {"city": "Oslo"})], "tools": [tool("a", "city")], "image": None},
        {"messages": [USER, call("b", {"days": [1, None]})], "tools": [tool("b", "days")], "image": None},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    source = open_source(tmp_path / "a.parquet")
    for index, (arguments, names) in enumerate([({"city": "Oslo"}, {"city"}), ({"days": [1, None]}, {"days"})]):
        record = source[index]
        found: Any = read_conversation(record)
        assert found.messages[1]["tool_calls"][0]["function"]["arguments"] == arguments
        assert found.tools[0]["function"]["parameters"]["properties"].keys() == names
        assert "image" in record, "a null column stays"
