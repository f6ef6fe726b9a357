"""A template that writes the time writes that of the run."""

from __future__ import annotations

import copy
from datetime import datetime
from typing import Any

import pytest

from dstrain.data.encoding.chat_template import (
    describe_written_times,
    get_written_times,
    reads_clock,
    render_conversation,
    set_template_time,
    tokenizer_fingerprint,
)
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.formats.conversations import read_conversation
from dstrain.errors import BadRecord

ASKED = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
DATED = (
    "{%- if strftime_now is defined %}{%- set today = strftime_now('%d %b %Y') %}{%- else %}{%- set today = '?' %}{% endif %}"
    "Today: {{ today }} {{ strftime_now(format=\"%Y\") }}\n{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}</s>{% endgeneration %}{% else %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
FIRST, SECOND = datetime(2026, 11, 28, 23, 59), datetime(2026, 11, 29, 0, 1)


def tokenizer_at(tokenizer: Any, time: datetime | None, template: Any = DATED) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    if time is not None:
        set_template_time(tokenizer, time)
    return tokenizer


@pytest.mark.parametrize("template", [DATED, {"default": DATED, "tool_use": "{{ messages }}"}], ids=["one", "several"])
def test_the_template_writes_the_time_that_was_set(tokenizer: Any, template: Any) -> None:
    dated = tokenizer_at(tokenizer, FIRST, template)
    assert render_conversation(dated, ASKED).startswith("Today: 28 Nov 2026 2026\n")
    assert get_written_times(dated) == ["2026", "28 Nov 2026"]
    assert dated.chat_template == template, "an export asks for the time of its own day"
    (line,) = describe_written_times(dated)
    assert line.startswith("the chat template writes the time: 2026, 28 Nov 2026 in all samples")


def test_what_is_learnt_is_found_in_the_text_of_that_time(tokenizer: Any) -> None:
    dated = tokenizer_at(tokenizer, FIRST)
    (example,) = encode_conversations(dated, [read_conversation({"messages": ASKED})], EncodingConfig(max_length=99))
    assert not isinstance(example, BadRecord)
    assert dated.decode(example["input_ids"]).startswith("Today: 28 Nov 2026")
    learnt = [token for token, mark in zip(example["input_ids"], example["loss_mask"], strict=True) if mark]
    assert dated.decode(learnt) == "yes</s>"


def test_examples_of_another_day_are_other_examples(tokenizer: Any) -> None:
    first, later = tokenizer_at(tokenizer, FIRST), tokenizer_at(tokenizer, FIRST.replace(hour=1))
    assert tokenizer_fingerprint(first) == tokenizer_fingerprint(later), "the hour is not written"
    assert tokenizer_fingerprint(first) != tokenizer_fingerprint(tokenizer_at(tokenizer, SECOND))


def test_a_template_without_a_clock_has_no_time(tokenizer: Any) -> None:
    plain = tokenizer_at(tokenizer, FIRST, "{% for m in messages %}{{ m.content }}{% endfor %}")
    assert not reads_clock(plain)
    assert describe_written_times(plain) == []
    assert tokenizer_fingerprint(plain) == tokenizer_fingerprint(tokenizer_at(tokenizer, None, plain.chat_template))
    assert not reads_clock(tokenizer)
