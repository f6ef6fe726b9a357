"""Encoding of unpaired preferences (KTO), with mismatched pairs for the KL estimate."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstrain.data.encoding.conservation import LOST_COLUMNS
from dstrain.data.encoding.conversations import EncodingConfig, encode_conversations
from dstrain.data.encoding.tokenization import CUT_COLUMNS
from dstrain.data.formats.preferences import Prompt
from dstrain.data.formats.unpaired import UnpairedPreference
from dstrain.data.records import BadRecord, EncodeResult


@dataclass
class UnpairedEncoder:
    """Encodes the answers of parsed records, one chunk after another.

    `answer` holds the ids, `answer_learnt` is 1 where a token is the answer's, `desirable` is 1 or
    0. If requested, `mismatched` and `mismatched_learnt` are the same prompt with the answer to the
    next other prompt of the chunk.
    """

    tokenizer: Any
    config: EncodingConfig
    with_mismatched: bool
    previous_answers: list[UnpairedPreference] = field(default_factory=list)
    """The last good answer before the chunk, for a last chunk that holds a single prompt."""

    def __call__(self, records: list[list[UnpairedPreference]]) -> list[list[EncodeResult]]:
        """Return for each record of a chunk the examples of its answers."""
        items = [item for record in records for item in record]
        examples = _encode_matched(self.tokenizer, items, self.config)
        if self.with_mismatched:
            good = [at for at, example in enumerate(examples) if not isinstance(example, BadRecord)]
            # A chunk with a single prompt borrows an answer from the chunk before it.
            ring = [items[at] for at in good] + self.previous_answers
            pairs = zip(ring, mismatched_indices([item.prompt for item in ring]), strict=True)
            samples = [item.build_sample(ring[other]) for item, other in pairs][: len(good)]
            for at, example in zip(good, encode_conversations(self.tokenizer, samples, self.config), strict=True):
                examples[at] = _merge_examples(examples[at], example)
            self.previous_answers = [items[at] for at in good[-1:]] or self.previous_answers
        following = iter(examples)
        return [[next(following) for _ in record] for record in records]

    def restore_context(self, previous_records: Iterable[list[UnpairedPreference]]) -> None:
        """Set the state as if the records before a chunk had been encoded, given the last one first."""
        if not self.with_mismatched:
            self.previous_answers = []
            return
        # Generators: only as many records are read and encoded as it takes to find one good answer.
        good = (
            item
            for items in previous_records
            for item, example in reversed(
                [*zip(items, _encode_matched(self.tokenizer, items, self.config), strict=True)]
            )
            if not isinstance(example, BadRecord)
        )
        self.previous_answers = [*itertools.islice(good, 1)]


def _encode_matched(tokenizer: Any, items: Sequence[UnpairedPreference], config: EncodingConfig) -> list[EncodeResult]:
    encoded = encode_conversations(tokenizer, [item.build_sample(item) for item in items], config)
    return [
        example
        if isinstance(example, BadRecord)
        else {
            "answer": example["input_ids"],
            "answer_learnt": example["learnt"],
            "desirable": float(item.desirable),
            **{name: cut for name, cut in example.items() if name in (*CUT_COLUMNS, *LOST_COLUMNS)},
        }
        for item, example in zip(items, encoded, strict=True)
    ]


def _merge_examples(matched: EncodeResult, mismatched: EncodeResult) -> EncodeResult:
    if isinstance(matched, BadRecord) or isinstance(mismatched, BadRecord):
        return matched if isinstance(matched, BadRecord) else mismatched
    return {**matched, "mismatched": mismatched["input_ids"], "mismatched_learnt": mismatched["learnt"]}


def mismatched_indices(prompts: Sequence[Prompt]) -> list[int]:
    """Return for each prompt the index of the next different one, or of the next if all are equal.

    The list is treated as a ring: the first follows the last.
    """
    count = len(prompts)
    found = [(at + 1) % count for at in range(count)]
    if all(prompt == prompts[0] for prompt in prompts):
        return found
    # Twice around: the next different prompt of the last items is found only in the second pass.
    for at in [*reversed(range(count))] * 2:
        after = (at + 1) % count
        found[at] = after if prompts[after] != prompts[at] else found[after]
    return found
