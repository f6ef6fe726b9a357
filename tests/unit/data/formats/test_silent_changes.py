"""Texts, calls and images of a record that reach the model as the record has them, or are refused."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.data.encoding.rendering import render_prompt
from dstrain.data.formats.conversations import read_conversation, read_prompt
from dstrain.data.formats.images import read_with_images
from dstrain.data.formats.messages import has_images, read_tool_function
from dstrain.data.records import is_image, parse_record
from dstrain.errors import BadRecord
from dstrain.tasks.prm import read_solution
from tests.unit.data.encoding.test_rendering import tokenizer_with

CUTTING = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_the_parameters_of_a_call_are_its_arguments() -> None:
    found = read_tool_function({"name": "f", "parameters": {"city": "Paris"}}, "tool_calls", "arguments")
    assert found["function"] == {"name": "f", "arguments": {"city": "Paris"}}
    assert read_tool_function({"name": "f"}, "tool_calls", "arguments")["function"]["arguments"] == {}
    with pytest.raises(BadRecord, match=r"calls 'f' with 'kwargs'; write its values under 'arguments'"):
        read_tool_function({"name": "f", "kwargs": {"a": 1}}, "tool_calls", "arguments")


def test_thoughts_that_a_template_cuts_from_an_answer_are_counted() -> None:
    rendered = render_prompt(tokenizer_with(CUTTING), "2+2?", ("<think>two and two</think>4", "5"))
    assert rendered.lost["thoughts_lost"] == 1


@pytest.mark.parametrize("role", ["assistant", "Assistant", "model", "gpt"])
def test_the_answer_of_a_record_is_no_part_of_its_prompt(role: str) -> None:
    asked = {"role": "user", "content": "q"}
    assert read_prompt({"messages": [asked, {"role": role, "content": "gold"}]}).prompt == [asked]


def test_parts_with_an_index_are_those_images() -> None:
    parts: list[Any] = [{"type": "image", "index": 1}, {"type": "text", "text": "q"}, {"type": "image", "index": 0}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "a"}]
    found = read_with_images({"images": ["first.png", "second.png"], "messages": turns}, read_conversation)
    assert [*found.images] == ["second.png", "first.png"]


def test_images_under_input_messages_are_seen() -> None:
    turn = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}}]}
    assert has_images({"input": {"messages": [turn]}})


def test_a_text_that_ends_with_an_address_is_no_image() -> None:
    assert is_image("my holiday photo 3.jpg")
    assert not is_image("The area is half of the base times the height as in https://example.org/a/triangle.jpg?")


@pytest.mark.parametrize("end", ["", "\n", " "])
def test_a_solution_may_end_with_white_space(end: str) -> None:
    record = {"input": f"Q? Step 1: a ки\nStep 2: b ки{end}", "label": f"Q? Step 1: a +\nStep 2: b -{end}"}
    assert read_solution(record).labels == [1, 0]


@pytest.mark.parametrize("name", ["options", "choices", "passages", "paragraph"])
def test_what_belongs_to_a_question_is_not_left_out(name: str) -> None:
    record = {"question": "Which?", name: ["A: yes", "B: no"], "answer": "B"}
    with pytest.raises(BadRecord, match=name):
        parse_record(read_conversation, record)
    assert parse_record(read_conversation, {**record, name: []})
