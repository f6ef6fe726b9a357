"""Encoding of a single preference, for tests."""

from __future__ import annotations

from typing import Any

from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.formats.preferences import Preference
from dstrain.data.records import BadRecord


def encode_preference(
    tokenizer: Any, preference: Preference, max_length: int, max_prompt_length: int | None = None
) -> dict[str, Any]:
    """Return the example of one preference. Raises BadRecord."""
    example = encode_preferences(tokenizer, [preference], max_length, max_prompt_length)[0]
    if isinstance(example, BadRecord):
        raise example
    return example
