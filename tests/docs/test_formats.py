"""The table of other frameworks' record formats in docs/data.md: each record is read as its row says."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from functools import cache
from typing import Any

import pytest

from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.formats.conversations import PromptCompletion, read_conversation
from dstrain.data.formats.images import read_with_images
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.records import parse_record
from dstrain.errors import BadRecord
from dstrain.tasks.prm import read_solution
from tests.chat_templates import tokenizer_of
from tests.workers import ROOT

TEMPLATE = (
    "{% if tools %}[tools]{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text if part.type == 'text' else '<image>' }}{% endfor %}{% endif %}"
    "{% for call in message.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Writes every part of a conversation: `[role]text</s>`."""


@cache
def tokenizer() -> Any:
    made = copy.deepcopy(tokenizer_of("byte-level"))
    made.chat_template = TEMPLATE
    return made


def learnt_text(ids: list[int], mask: list[int]) -> list[str]:
    """The texts of the runs of learnt tokens."""
    runs: list[list[int]] = []
    for at, (token, learnt) in enumerate(zip(ids, mask, strict=True)):
        if learnt:
            if not (at and mask[at - 1]):
                runs.append([])
            runs[-1].append(token)
    return [tokenizer().decode(run) for run in runs]


def describe(task: str, record: dict[str, Any]) -> str:
    """What a task learns from a record: `context ⇒ answer`, or why it refuses it."""
    return find_targets(task, record).replace("\n", "\\n")


def find_targets(task: str, record: dict[str, Any]) -> str:
    try:
        if task == "dpo":
            parsed = parse_record(lambda one: read_with_images(one, read_preference), record)
            (row,) = encode_preferences(tokenizer(), [without_marks(parsed.parsed)], 512)
            assert not isinstance(row, BadRecord), row
            start = int(row["prompt_length"])
            sides = [tokenizer().decode(row[side][start:]) for side in ("chosen", "rejected")]
            return f"{tokenizer().decode(row['chosen'][:start])} ⇒ {sides[0]} over {sides[1]}"
        if task == "prm":
            solution = parse_record(read_solution, record)
            told = [
                f"{step} {('wrong', 'right')[label]}"
                for step, label in zip(solution.steps, solution.labels, strict=True)
            ]
            return f"{solution.prompt} ⇒ {' … '.join(told)}"
        if task == "kto":
            (unpaired,) = parse_record(read_unpaired, record)
            sample = unpaired.build_sample(unpaired)
            return f"{render(sample)} {'wanted' if unpaired.desirable else 'not wanted'}"
        parsed = parse_record(
            lambda one: read_with_images(one, read_conversation) if task == "vlm" else Wrapped(read_conversation(one)),
            record,
        )
        return render(without_marks(parsed.parsed))
    except BadRecord as fault:
        return f"refused: {fault.reason}"


class Wrapped:
    def __init__(self, parsed: Any) -> None:
        self.parsed = parsed


def without_marks(parsed: Any) -> Any:
    """The record with `<image>` for the private-use character of an image."""

    def plain(value: Any) -> Any:
        if isinstance(value, str):
            return value.replace("\ue002", "<image>")
        if isinstance(value, list):
            return [plain(item) for item in value]
        return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value

    return dataclasses.replace(
        parsed, **{field.name: plain(getattr(parsed, field.name)) for field in dataclasses.fields(parsed)}
    )


def render(sample: Any) -> str:
    if isinstance(sample, PromptCompletion) and not sample.prompt:
        return f"⇒ {sample.answer}</s>"  # all of it, but for the first token, which nothing comes before
    (row,) = encode_conversations(tokenizer(), [sample], EncodingConfig(max_length=512))
    assert not isinstance(row, BadRecord), row
    ids, mask = [*row["input_ids"]], [*row["loss_mask"]]
    text, learnt = tokenizer().decode(ids[: mask.index(1)]), learnt_text(ids, mask)
    return f"{text} ⇒ {' … '.join(learnt)}" if text else f"⇒ {' … '.join(learnt)}"


def rows() -> list[tuple[str, str, str, str]]:
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    section = page.split("\n## Formats of other frameworks\n")[1].split("\n## ")[0]
    return [
        tuple(cells)
        for cells in re.findall(r"^\| ([^|]+?) \| `(\{.*\})` \| (\w+) \| `?(.*?)`? \|$", section, flags=re.M)
    ]


@pytest.mark.parametrize(("name", "record", "task", "learnt"), rows(), ids=lambda value: value[:40])
def test_a_record_of_another_framework_is_read_as_the_table_says(
    name: str, record: str, task: str, learnt: str
) -> None:
    assert describe(task, json.loads(record)) == learnt


def test_the_table_has_every_framework() -> None:
    named = {name.split(":")[0] for name, *_ in rows()}
    assert named >= {"TRL", "LLaMA-Factory", "axolotl", "ms-swift", "OpenRLHF", "align-anything", "OpenAI", "ShareGPT"}
    assert len(rows()) > 60
