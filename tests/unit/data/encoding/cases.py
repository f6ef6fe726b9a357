"""A single preference encoded, and tokenizers that frame a text or tell no offsets."""

from __future__ import annotations

import copy
from typing import Any

from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.formats.preferences import Preference
from dstrain.errors import BadRecord


def encode_preference(
    tokenizer: Any, preference: Preference, max_length: int, max_prompt_length: int | None = None
) -> dict[str, Any]:
    """Return the example of one preference. Raises BadRecord."""
    example = encode_preferences(tokenizer, [preference], max_length, max_prompt_length)[0]
    if isinstance(example, BadRecord):
        raise example
    return example


def with_frame(tokenizer, start: str, end: str = ""):
    """A tokenizer that puts these tokens around by itself, as Llama's does with <s>."""
    from tokenizers import processors

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"bos_token": start})
    single = f"{start} $A {end}".strip()
    special = [(token, tokenizer.convert_tokens_to_ids(token)) for token in (start, end) if token]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


class Slow:
    """A tokenizer that does not tell where its tokens stand."""

    is_fast = False

    def __init__(self, fast: Any) -> None:
        self._fast = fast

    def __len__(self) -> int:
        return len(self._fast)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast, name)

    def __call__(self, text: Any, **settings: Any) -> Any:
        assert not settings.get("return_offsets_mapping")
        return self._fast(text, **settings)
