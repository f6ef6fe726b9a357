"""Encoding of captioned series: conversations with placeholders of soft tokens."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from dstrain.data.encoding.conversations import EncodingConfig, encode_conversations
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.messages import Message
from dstrain.data.records import BadRecord, EncodeResult
from dstrain.data.series.patches import PatchConfig, insert_soft_tokens, to_columns
from dstrain.data.series.record import SeriesRecord


@dataclass(frozen=True)
class CaptionEncoder:
    """Encodes each caption of a series as the answer to a prompt, after the soft tokens of the series."""

    tokenizer: Any
    config: EncodingConfig
    patches: PatchConfig
    prompt: str
    """The user's turn where a record has none."""

    def encode(self, samples: Sequence[SeriesRecord]) -> list[list[EncodeResult]]:
        """Return the examples of each record, one for each caption."""
        pairs = [(sample, caption) for sample in samples for caption in sample.captions]
        conversations = [Conversation(self._messages(*pair), (1,)) for pair in pairs]
        examples = encode_conversations(self.tokenizer, conversations, self.config)
        answers = examples
        if not self.config.assistant_only:  # then the loss mask does not say where the prompt ends
            answers = encode_conversations(self.tokenizer, conversations, replace(self.config, assistant_only=True))
        rows = zip(examples, answers, strict=True)
        return [[self._finish(sample, *next(rows)) for _ in sample.captions] for sample in samples]

    def _messages(self, sample: SeriesRecord, caption: str) -> list[Message]:
        asked: Message = {"role": "user", "content": sample.prompt or self.prompt}
        return [asked, {"role": "assistant", "content": caption}]

    def _finish(self, sample: SeriesRecord, example: EncodeResult, answer: EncodeResult) -> EncodeResult:
        """Return the example with the series, all its captions, and the length of its prompt.

        `answer`: the example with a loss mask of the answer alone.
        """
        if isinstance(example, BadRecord) or isinstance(answer, BadRecord):
            return example if isinstance(example, BadRecord) else answer
        count = self.patches.count_tokens(*sample.values.shape)
        ids = insert_soft_tokens(self.tokenizer, example["input_ids"], count)
        loss_mask = [0] * count + [*example["learnt"]]
        if len(ids) > self.config.max_length:
            total = f"{count} soft tokens and {len(ids) - count} tokens of text"
            fix = "raise data.max_length or options.encoder.patch_length, or shorten the record"
            return BadRecord(f"the record has {total}, above data.max_length {self.config.max_length}; {fix}")
        captions = json.dumps(sample.captions, ensure_ascii=False).encode()
        columns = {"input_ids": ids, "learnt": loss_mask, "answers": [*captions]}
        numbers = {"prompt_length": float(count + [*answer["learnt"]].index(1))}
        return {**example, **columns, **numbers, **to_columns(sample.values, sample.stats)}
