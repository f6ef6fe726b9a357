"""Captioned series as token ids."""

from __future__ import annotations

import pytest

from dstrain.data.encoding.conversations import EncodingConfig
from dstrain.data.series import PatchConfig, read_series_record
from dstrain.tasks.temporal import CaptionEncoder
from tests.chat_templates import tokenizer_of


@pytest.mark.parametrize("assistant_only", [True, False])
def test_the_prompt_of_a_caption_is_whole(assistant_only: bool) -> None:
    """training.md 7: without assistant_only_loss captions were generated from the first token of the prompt."""
    tokenizer = tokenizer_of("byte-level")
    config = EncodingConfig(max_length=200, assistant_only=assistant_only)
    sample = read_series_record({"series": [1.0, 2.0, 4.0, 3.0], "caption": "rises"})
    encoder = CaptionEncoder(tokenizer, config, PatchConfig(length=2, per_token=1), "Curve?")
    ((example,),) = encoder.encode([sample])
    prompt = [*example["input_ids"]][: int(example["prompt_length"])]  # type: ignore[index, call-overload]
    prompt = [token for token in prompt if token >= 0]  # without soft tokens
    assert tokenizer.decode(prompt).endswith("\n\nHuman: Curve?\n\nAssistant:")
