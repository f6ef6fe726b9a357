"""From a record to answers that people wanted or did not want, and to their tokens beside answers to other prompts."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dstrain.data.encoding.conversations import EncodingConfig, encode_conversations
from dstrain.data.encoding.rendering import Prompt
from dstrain.data.formats.conversations import (
    Conversation,
    PromptCompletion,
    Sample,
    get_message_field,
    read_conversation,
)
from dstrain.data.formats.preferences import Response, read_preference
from dstrain.data.formats.transcripts import Message
from dstrain.data.records import BadRecord, EncodeResult
from dstrain.errors import suggest_name

LABEL_KEYS = ("label", "kto_tag")
"""TRL's name and LLaMA-Factory's."""


@dataclass(frozen=True)
class UnpairedPreference:
    """An answer that people wanted, or one that they did not."""

    prompt: Prompt
    """A text that the answer continues as it stands, or a dialog with a user's turn in it."""
    answer: Response
    """A text where the prompt is one; else one or more messages."""
    desirable: bool
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, for the chat template."""

    def build_sample(self, answer_source: UnpairedPreference) -> Sample:
        """The prompt with another's answer, which alone is learnt; with its own, what the record says."""
        if isinstance(self.prompt, str) and isinstance(answer_source.answer, str):
            return PromptCompletion(self.prompt, answer_source.answer)
        asked, said = _to_messages(self.prompt, "user"), _to_messages(answer_source.answer, "assistant")
        turns = enumerate(said, len(asked))
        learnt = tuple(
            at for at, turn in turns if turn["role"] == "assistant" and get_message_field(turn, "weight") != 0
        )
        return Conversation(asked + said, learnt, self.tools)


def _to_messages(text: Prompt | Response, role: str) -> list[Message]:
    """A text as one message; the space between prompt and answer belongs to neither."""
    return [{"role": role, "content": text.removeprefix(" ")}] if isinstance(text, str) else text


def read_unpaired(record: Mapping[str, Any]) -> list[UnpairedPreference]:
    """The answer in a record of any known form, with its label; of a preference, both answers. Raises BadRecord."""
    if any(record.get(key) is not None for key in ("chosen", "rejected")) or isinstance(record.get("output"), list):
        return _from_preference(record)
    desirable = _read_label(record)
    sample = read_conversation({key: value for key, value in record.items() if key not in LABEL_KEYS})
    if isinstance(sample, PromptCompletion):
        if not sample.prompt:
            raise BadRecord("'text' does not say where the answer begins; write 'prompt' and 'completion'")
        return [UnpairedPreference(sample.prompt, sample.answer, desirable)]
    return [_split_last_answer(sample, desirable)]


def _from_preference(record: Mapping[str, Any]) -> list[UnpairedPreference]:
    """The chosen answer was wanted, the rejected one was not."""
    found = read_preference(record)
    if found.images:
        raise BadRecord("'images' are no text, and text is all that is learnt from here; remove the record")
    answers = found.chosen, found.rejected
    if not isinstance(found.prompt, str):
        answers = _to_messages(found.chosen, "assistant"), _to_messages(found.rejected, "assistant")
    return [
        UnpairedPreference(found.prompt, answer, desirable, found.tools)
        for answer, desirable in zip(answers, (True, False), strict=True)
    ]


def _read_label(record: Mapping[str, Any]) -> bool:
    name = next((name for name in LABEL_KEYS if record.get(name) is not None), None)
    if name is None:
        near = suggest_name(LABEL_KEYS[0], list(record))
        raise BadRecord(f"no '{LABEL_KEYS[0]}' ({near}); write true or false, or rename a column with data.columns")
    value = record[name]
    if not isinstance(value, int | float) or value not in (0, 1):
        raise BadRecord(
            f"'{name}' is {value!r:.40}; write true for an answer that was wanted, false for one that was not"
        )
    return bool(value)


def _split_last_answer(sample: Conversation, desirable: bool) -> UnpairedPreference:
    """What the assistant says, and does with tools, after the last turn of somebody else. Raises BadRecord."""
    end = sample.trained_turns[-1] + 1
    others = [at for at in range(end) if sample.messages[at]["role"] in ("system", "user")]
    start = others[-1] + 1 if others else 0
    if not any(turn["role"] == "user" for turn in sample.messages[:start]):
        raise BadRecord("no user's turn comes before the answer; write the prompt in front of it")
    return UnpairedPreference(sample.messages[:start], sample.messages[start:end], desirable, sample.tools)


def make_unpaired_encoder(tokenizer: Any, config: EncodingConfig, with_mismatched: bool) -> UnpairedEncoder:
    """Turns what `read_labelled` read of a chunk of records into their examples; asked for one chunk after another.

    `answer` holds the ids, `answer_learnt` is 1 where a token is the answer's, `desirable` is 1 or 0. Where they are asked
    for, `mismatched` and `mismatched_learnt` are the same prompt with the answer to the next other prompt of the chunk.
    """
    return UnpairedEncoder(tokenizer, config, with_mismatched)


@dataclass
class UnpairedEncoder:
    """See `labelled_encoder`."""

    tokenizer: Any
    config: EncodingConfig
    with_mismatched: bool
    previous_answers: list[UnpairedPreference] = field(default_factory=list)
    """The last good answer before the chunk, for a last chunk that holds one prompt alone."""

    def __call__(self, records: list[list[UnpairedPreference]]) -> list[list[EncodeResult]]:
        items = [item for record in records for item in record]
        examples = _encode_matched(self.tokenizer, items, self.config)
        if self.with_mismatched:
            good = [at for at, example in enumerate(examples) if not isinstance(example, BadRecord)]
            ring = [items[at] for at in good] + self.previous_answers
            pairs = zip(ring, mismatched_indices([item.prompt for item in ring]), strict=True)
            crossed = [item.build_sample(ring[other]) for item, other in pairs][: len(good)]
            for at, example in zip(good, encode_conversations(self.tokenizer, crossed, self.config), strict=True):
                examples[at] = _merge_examples(examples[at], example)
            self.previous_answers = [items[at] for at in good[-1:]] or self.previous_answers
        following = iter(examples)
        return [[next(following) for _ in record] for record in records]

    def restore_context(self, previous_records: Iterable[list[UnpairedPreference]]) -> None:
        """Go on as if the records before had been encoded; they come with the last one first."""
        coded = (
            (items, _encode_matched(self.tokenizer, items, self.config))
            for items in previous_records
            if self.with_mismatched
        )
        good = (
            item
            for items, examples in coded
            for item, example in reversed([*zip(items, examples, strict=True)])
            if not isinstance(example, BadRecord)
        )
        self.previous_answers = [*itertools.islice(good, 1)]


def _encode_matched(tokenizer: Any, items: Sequence[UnpairedPreference], config: EncodingConfig) -> list[EncodeResult]:
    coded = encode_conversations(tokenizer, [item.build_sample(item) for item in items], config)
    return [
        example
        if isinstance(example, BadRecord)
        else {
            "answer": example["input_ids"],
            "answer_learnt": example["learnt"],
            "desirable": float(item.desirable),
            **{name: cut for name, cut in example.items() if name.endswith("_cut")},
        }
        for item, example in zip(items, coded, strict=True)
    ]


def _merge_examples(matched: EncodeResult, mismatched: EncodeResult) -> EncodeResult:
    if isinstance(matched, BadRecord) or isinstance(mismatched, BadRecord):
        return matched if isinstance(matched, BadRecord) else mismatched
    return {**matched, "mismatched": mismatched["input_ids"], "mismatched_learnt": mismatched["learnt"]}


def mismatched_indices(prompts: Sequence[Prompt]) -> list[int]:
    """For each place the next one with another prompt, or the next where all are the same; the first follows the last."""
    count = len(prompts)
    found = [(at + 1) % count for at in range(count)]
    if all(prompt == prompts[0] for prompt in prompts):
        return found
    for at in [*reversed(range(count))] * 2:  # once more for those whose next other is behind the end
        after = (at + 1) % count
        found[at] = after if prompts[after] != prompts[at] else found[after]
    return found
