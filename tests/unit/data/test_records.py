"""No column of a record is dropped without a word."""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.formats.conversations import Conversation, read_conversation, read_prompt
from dstrain.data.formats.images import read_with_images
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.records import (
    ColumnReport,
    Record,
    add_record,
    describe_columns,
    find_unused,
    is_empty,
    parse_record,
    try_parse,
)
from dstrain.errors import BadRecord


def with_images(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda record: read_with_images(record, read)


READERS: dict[str, Callable[[Any], Any]] = {
    "sft": read_conversation,
    "rm": with_images(read_preference),
    "dpo": with_images(read_preference),
    "kto": read_unpaired,
    "vlm": with_images(read_conversation),
}
SFT = {"question": "What is two?", "answer": "It is 2."}
PAIR = {"prompt": "What is two?", "chosen": "It is 2.", "rejected": "It is 3."}


@pytest.mark.parametrize("key", ["question", "query", "prompt", "instruction"])
@pytest.mark.parametrize("task", ["rm", "dpo", "sft", "kto"])
def test_a_pair_is_read_with_its_question(task: str, key: str) -> None:
    """formats.md A1: `question` of RLHF-V, SPA-VL and Orca was dropped, and the common words became the prompt."""
    parsed = READERS[task]({key: "What is 3+3?", "chosen": "Sure, it is 6.", "rejected": "Sure, it is 3."})
    assert "What is 3+3?" in [*strings(parsed)]
    assert "Sure, it is 6." in [*strings(parsed)]


def test_align_anything_and_openai_pairs_are_read_with_their_questions() -> None:
    numbered = {"question": "What is two?", "response_0": "It is 3.", "response_1": "It is 2.", "better_response_id": 1}
    expected = read_preference({"question": "What is two?", "chosen": "It is 2.", "rejected": "It is 3."})
    assert read_preference(numbered) == expected
    from_one = {"question": "What is two?", "response_1": "It is 2.", "response_2": "It is 3.", "overall_response": 1}
    assert read_preference(from_one) == expected
    openai = {
        "input": {"messages": [{"role": "user", "content": "What is two?"}], "tools": [], "parallel_tool_calls": True},
        "preferred_output": [{"role": "assistant", "content": "It is 2."}],
        "non_preferred_output": [{"role": "assistant", "content": "It is 3."}],
    }
    assert read_preference(openai).prompt == [{"role": "user", "content": "What is two?"}]
    assert (read_preference(openai).chosen, read_preference(openai).rejected) == ("It is 2.", "It is 3.")


def test_full_conversations_need_no_messages_beside_them() -> None:
    """formats.md B9."""
    asked, better, worse = (
        {"role": role, "content": text} for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
    )
    record = {"messages": [asked, better], "chosen": [asked, better], "rejected": [asked, worse]}
    found = parse_record(read_preference, record)
    assert (found.prompt, found.chosen, found.rejected) == ([asked], "a", "b")
    other = {**record, "messages": [{"role": "user", "content": "another question"}, better]}
    with pytest.raises(BadRecord, match="'messages' looks like a part of the prompt"):
        parse_record(read_preference, other)


IMAGE_COLUMNS = [
    "img",
    "image_path",
    "image_file",
    "Image",
    "picture",
    "image_url",
    "media",
    "imageUrl",
    "images_list",
    "photo",
]


@pytest.mark.parametrize("task", ["vlm", "rm", "dpo", "sft", "kto"])
@pytest.mark.parametrize("name", [*IMAGE_COLUMNS, "whatever"])
def test_an_image_under_another_name_is_refused(task: str, name: str) -> None:
    """users.md A1: seven names were accepted, and the run trained on text alone."""
    record = {**(PAIR if task in ("rm", "dpo", "kto") else SFT), name: "images/train_0.png"}
    with pytest.raises(BadRecord, match=rf"'{name}' looks like an image.*data\.columns \{{{name}: image\}}"):
        parse_record(READERS[task], record)


@pytest.mark.parametrize(
    ("column", "value"),
    [("question", "Another?"), ("context", "Once upon a time"), ("system_prompt", "Be brief."), ("choices", ["one", "two"]),
     ("history", [["q", "a"]]), ("response", "Another answer."), ("loss_weight", 0), ("train", False), ("sample_weight", 0.5),
     ("chat_template_kwargs", {"enable_thinking": True})],
)  # fmt: skip
def test_what_looks_needed_is_read_or_refused(column: str, value: Any) -> None:
    record = {"prompt": "What is two?", "completion": "It is 2.", column: value}
    found = try_parse(parse_record, read_conversation, record)
    if isinstance(found, BadRecord):
        assert f"'{column}'" in found.reason
        assert f"set data.columns to {{{column}: null}}" in found.reason
    else:
        assert {*strings(value)} <= {*strings(found)}


def test_a_text_next_to_two_plain_answers_may_be_their_question() -> None:
    record = {"chosen": "Sure, it is 6.", "rejected": "Sure, it is 3.", "ask": "What is 3+3?"}
    with pytest.raises(BadRecord, match="'ask' may be the question"):
        parse_record(read_preference, record)
    labelled = {"chosen": "\n\nHuman: q\n\nAssistant: a", "rejected": "\n\nHuman: q\n\nAssistant: b", "source": "a b c"}
    assert parse_record(read_preference, labelled).chosen == "a"


def test_what_is_written_twice_is_not_lost() -> None:
    asked, said = {"role": "user", "content": "q1 word"}, {"role": "assistant", "content": "a1 word"}
    assert parse_record(read_conversation, {"messages": [asked, said], "prompt": "q1 word", "id": "7"}).messages == [
        asked,
        said,
    ]


FLAGS: list[tuple[dict[str, Any], str]] = [
    ({"loss": False}, ""),
    ({"loss_scale": 0.0}, ""),
    ({"train": False}, ""),
    ({"training": 0}, ""),
    ({"loss_weight": 0.0}, ""),
    ({"weight": 0}, ""),
    ({"loss_scale": 2.0}, "loss_scale 2.0; write 0 or false"),
    ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, "parts of a turn"),
    ({"weight": 1, "train": False}, "contradict each other"),
    ({"content": [{"type": "text", "text": "never this", "train": False}]}, "a part with train False"),
    ({"content": [{"type": "text", "text": "never this", "weight": 0}]}, "a part with weight 0"),
]


@pytest.mark.parametrize(("flag", "reason"), FLAGS, ids=str)
def test_do_not_train_on_this_turn_is_obeyed_or_refused(flag: dict[str, Any], reason: str) -> None:
    """formats.md A2: ms-swift's, axolotl's and LLaMA-Factory's flags were ignored."""
    said = {"role": "assistant", "content": "never this", **flag}
    record = {
        "messages": [
            {"role": "user", "content": "q"},
            said,
            {"role": "user", "content": "r"},
            {"role": "assistant", "content": "this"},
        ]
    }
    if not reason:
        assert read_conversation(record).trained_turns == (3,)
        return
    with pytest.raises(BadRecord, match=re.escape(reason)):
        read_conversation(record)


def test_a_flag_on_the_users_turn_is_refused() -> None:
    record = {"messages": [{"role": "user", "content": "q", "train": True}, {"role": "assistant", "content": "a"}]}
    with pytest.raises(BadRecord, match="asks to train on a turn of the user"):
        read_conversation(record)


def test_a_column_can_be_left_out(tmp_path: Any) -> None:
    from dstrain.data.sources.open import open_source

    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"better": "It is 2.", "rejected": "It is 3.", "prompt": "What is two?", "query": "another", "id": 3}\n'
    )
    record = open_source(path, {"better": "chosen", "query": None})[0]
    reports: dict[str, ColumnReport] = {}
    parse_record(read_preference, record)
    add_record(reports, "a.jsonl:1", record)
    lines = describe_columns({file: report.to_json() for file, report in reports.items()})
    assert lines == ["a.jsonl: 1 record; read: better as chosen, rejected, prompt; not used: id"]


def strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from strings(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


WORD = re.compile(r"w\d+x")


def markers(value: Any) -> set[str]:
    """The unique words of all texts in a value."""
    return {word for text in strings(value) for word in WORD.findall(text)}


class Forms:
    """Random records of published forms, whose texts are unique words."""

    def __init__(self, seed: int) -> None:
        self.draw, self.count = random.Random(seed), 0

    def text(self) -> str:
        self.count += 2
        return f"w{self.count - 1}x w{self.count}x"

    def message(self, role: str) -> dict[str, Any]:
        if self.draw.random() < 0.3:
            names = {"user": "human", "assistant": "gpt", "system": "system"}
            return {"from": names[role], "value": self.text()}
        if self.draw.random() < 0.3:
            return {"role": role, "content": [{"type": "text", "text": self.text()}]}
        return {"role": role, "content": self.text()}

    def turns(self, ends: str) -> list[dict[str, Any]]:
        found = [self.message("system")] if self.draw.random() < 0.2 else []
        for _ in range(self.draw.randint(0, 1)):
            found += [self.message("user"), self.message("assistant")]
        return found + [self.message("user")] + ([self.message("assistant")] if ends == "assistant" else [])

    def record(self, task: str) -> dict[str, Any]:
        text, draw = self.text, self.draw
        single = [
            lambda: {"messages": self.turns("assistant")},
            lambda: {"conversations": self.turns("assistant"), "system": text()},
            lambda: {"conversation": [{"human": text(), "assistant": text()}]},
            lambda: {"instruction": text(), "input": text(), "output": text(), "history": [[text(), text()]]},
            lambda: {"query": text(), "response": text(), "history": [[text(), text()]], "system": text()},
            lambda: {"question": text(), "answer": text()},
            lambda: {"prompt": text(), "completion": text()},
            lambda: {"prompt": self.turns("user"), "completion": [self.message("assistant")]},
            lambda: {"system_prompt": text(), "question": text(), "response": text()},
            lambda: {"instruction": text(), "context": text(), "response": text()},
            lambda: {"problem": text(), "solution": text()},
            lambda: {"texts": [{"user": text(), "assistant": text(), "source": "x"} for _ in range(2)]},
            lambda: {"conversations": [text(), text()]},
        ]
        pairs = [
            lambda: {"prompt": text(), "chosen": text(), "rejected": text()},
            lambda: {"prompt": self.turns("user"), "chosen": [self.message("assistant")], "rejected": [self.message("assistant")]},
            lambda: {"conversations": self.turns("user"), "chosen": self.message("assistant"), "rejected": self.message("assistant")},
            lambda: {"system": text(), "question": text(), "chosen": text(), "rejected": text()},
            lambda: {"question": text(), "response_0": text(), "response_1": text(), "better_response_id": draw.randint(0, 1)},
            lambda: {"input": {"messages": self.turns("user")}, "preferred_output": [self.message("assistant")],
                     "non_preferred_output": [self.message("assistant")]},
            lambda: {"messages": self.turns("assistant"), "rejected_response": text()},
            lambda: {"instruction": text(), "input": text(), "chosen": text(), "rejected": text()},
            lambda: {"context_messages": self.turns("user"), "chosen": text(), "rejected": text()},
            lambda: {"instruction": text(), "chosen_response": text(), "rejected_response": text()},
            lambda: {"text": json.dumps({"question": text(), "chosen": text(), "rejected": text()})},
        ]  # fmt: skip
        found = draw.choice(pairs if task in ("rm", "dpo") or draw.random() < 0.3 else single)()
        if (
            task == "kto"
            and not {"chosen", "response_0", "preferred_output", "rejected_response", "text"} & found.keys()
        ):
            found["label"] = draw.choice([True, False])
        if task in ("vlm", "rm", "dpo") and draw.random() < 0.5:
            found["image"] = f"{text()}.png"
        return found


OTHER_NAMES = [
    "prompt", "question", "query", "input", "output", "response", "answer", "instruction", "system", "system_prompt", "history",
    "messages", "conversations", "chosen", "rejected", "text", "completion", "caption", "context", "problem", "post", "ask",
    "Question", "Prompt", "user", "title", "body", "reply", "image", "images", "img", "image_path", "picture", "figure", "label",
    "kto_tag", "margin", "weight", "loss", "train", "tools", "functions", "choices", "response_0", "response_1", "id", "source",
    "category", "solution", "score", "better_response_id", "rejected_response", "conversation", "context_messages", "Input",
]  # fmt: skip


def mutate(forms: Forms, record: dict[str, Any]) -> dict[str, Any]:
    """Rename, double, drop and mistype keys."""
    draw, found = forms.draw, copy.deepcopy(record)
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        name, other = draw.choice([*found] or ["prompt"]), draw.choice(OTHER_NAMES)
        kind = draw.randrange(5)
        if kind == 0 and name in found:
            found[other] = found.pop(name)
        elif kind == 1:
            found.setdefault(other, forms.text())
        elif kind == 2:
            found.setdefault(other, draw.choice([f"{forms.text()}.jpg", forms.turns("assistant"), [forms.text()], {"a": forms.text()},
                                                 True, False, 0, 1, 0.5, None, "", []]))  # fmt: skip
        elif kind == 3 and name in found:
            del found[name]
        elif name in found:
            found[name] = draw.choice(
                [None, "", 3, True, [], {}, [forms.text()], {"value": forms.text()}, forms.text()]
            )
    return found


def check_nothing_is_lost(task: str, record: dict[str, Any]) -> bool:
    """Assert that each column is in the parsed record, or named; returns whether the record was accepted."""
    tracked = Record(record)
    parsed = try_parse(parse_record, READERS[task], tracked)
    if isinstance(parsed, BadRecord):
        return False
    unused, kept = find_unused(tracked), markers(parsed)
    for name, value in record.items():
        if is_empty(value) or name in unused:
            continue
        assert name in tracked.used, f"{name} is neither read nor named"
        parts = {key: one for key, one in unused.items() if key.startswith((f"{name}[].", f"{name}."))}
        lost = markers(value) - kept - markers(parts)
        assert not lost, f"{name} was read, and {sorted(lost)} is not in {parsed}, of {record}"
        if task == "kto" and name in ("label", "kto_tag") and tracked.used[name] == name:
            assert all(one.desirable == bool(value) for one in parsed)
    return True


@pytest.mark.parametrize("task", READERS)
def test_no_column_is_unused_without_being_named(task: str) -> None:
    """2,000 records for each of five tasks, with renamed, doubled, missing and mistyped keys."""
    forms, accepted = Forms(READERS.__len__() + [*READERS].index(task)), 0
    for _ in range(2000):
        record = mutate(forms, forms.record(task))
        accepted += check_nothing_is_lost(task, record)
    assert accepted > 400, "the fuzz must also accept records"


@pytest.mark.parametrize("task", READERS)
def test_published_forms_are_accepted_whole(task: str) -> None:
    forms = Forms(99)
    for _ in range(300):
        record = forms.record(task)
        assert check_nothing_is_lost(task, record), record


def test_a_prompt_to_generate_from_needs_no_answer_and_no_label() -> None:
    for record in (
        {"question": "What is two?"},
        {**PAIR, "answer": "gold"},
        {"query": "What is two?", "response": "It is 2."},
    ):
        assert parse_record(read_prompt, record, is_prompt=True).prompt


def test_each_file_may_have_columns_of_its_own(tmp_path: Any) -> None:
    """users.md B6: one `data.columns` for all files refused the file that needed no renaming."""
    import yaml

    from dstrain.config import RunConfig
    from dstrain.errors import DataError
    from dstrain.tasks import make_task

    (tmp_path / "a.jsonl").write_text('{"better": "It is 2.", "worse": "It is 3.", "prompt": "What is two?"}\n')
    (tmp_path / "b.jsonl").write_text('{"chosen": "It is 4.", "rejected": "It is 5.", "prompt": "What is four?"}\n')
    names = {"better": "chosen", "worse": "rejected"}

    def read(data: dict[str, Any]) -> list[str]:
        task = make_task(RunConfig.model_validate(yaml.safe_load(yaml.safe_dump({"task": "rm", "data": data}))))
        source = task.open_sources(task.training_items)  # type: ignore[attr-defined]
        return [parse_record(read_preference, source[index]).chosen for index in range(len(source))]

    a, b = str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")
    assert read({"train": [{"path": a, "columns": names}, b]}) == ["It is 2.", "It is 4."]
    assert read({"train": [a, b], "columns": names}) == ["It is 2.", "It is 4."]
    assert read({"train": [a, {"path": b, "columns": {}}], "columns": names}) == ["It is 2.", "It is 4."]
    with pytest.raises(DataError, match=r"data\.columns\.better: no file has the column 'better'"):
        read({"train": b, "columns": names})


def test_a_csv_file_of_texts_is_refused_with_a_way_out(tmp_path: Any) -> None:
    from dstrain.data.sources.open import open_source
    from dstrain.errors import DataError

    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    with pytest.raises(DataError, match=r"\.csv'; data files end in .*; convert it: python -c"):
        open_source(tmp_path / "a.csv")


# Records in the columns in which public data sets are served: nothing is refused, dropped or trained by mistake.


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
    "a class of a text": ("sft", {"text": "hello there", "label": 0}, ["", "=hello there"]),
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


def test_a_column_beside_a_document_is_information() -> None:
    def read(record: Any) -> Any:
        return record["document"], record["question"], record["answer"]

    asked = {"document": "a.pdf", "question": "hi", "answer": "yes"}
    assert parse_record(read, {**asked, "filename": "page.png"})
    with pytest.raises(
        BadRecord, match=r"'context' looks like a part of the prompt.*; rename it with data.columns, or"
    ):
        parse_record(read, {**asked, "context": "some text"})


def test_an_unread_key_of_a_part_is_named() -> None:
    record = Record(
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi", "cache_control": "x"}]}, YES]}
    )
    parse_record(read_conversation, record)
    assert [*find_unused(record)] == ["messages[].content[].cache_control"]


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
