"""What a chat template trips over is a bad record with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.data.encoding.rendering import render_conversation
from dstrain.data.encoding.tokenization import train_tokenizer
from dstrain.data.records import BadRecord

ASKED: Any = [{"role": "user", "content": "hi"}]


def tokenizer_with(template: str) -> Any:
    tokenizer = train_tokenizer(["some text"], 270, "bytes")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", ""),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ [][1].x.y }}", "no element 1"),
    ],
)
def test_what_a_template_trips_over_is_a_bad_record(template: str, why: str) -> None:
    with pytest.raises(BadRecord, match=f"chat template refuses the dialog .*{why}"):
        render_conversation(tokenizer_with(template), ASKED)
