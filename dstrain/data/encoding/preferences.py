"""Preference pairs and unpaired labels to tokens."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.rendered_text import Rendered, find_template_marks
from dstrain.data.encoding.rendering import (
    CUT_COLUMNS,
    Encoder,
    EncodingConfig,
    PlaceholderExpansion,
    RenderedPrompt,
    Shifts,
    TokenBudget,
    count_tokens_before,
    find_last_turn,
    has_suffix,
    keep_system_text,
    render_prompt,
    shift_offset,
    split_bos,
    tokenize,
)
from dstrain.data.encoding.template_check import RENDERED, TEMPLATE_COLUMNS
from dstrain.data.formats.messages import common_prefix_length
from dstrain.data.formats.preferences import Preference, Prompt
from dstrain.data.formats.unpaired import UnpairedPreference
from dstrain.data.records import EncodeResult, as_record, encode_valid, parse_record, try_parse
from dstrain.data.sources.base import Source
from dstrain.errors import BadRecord


@dataclass(frozen=True)
class _RenderedPair:
    """A preference as text, before and after its image placeholders were expanded."""

    preference: Preference
    rendered: RenderedPrompt
    expanded: RenderedPrompt
    shifts: Shifts


def encode_preferences(
    tokenizer: Any,
    preferences: Sequence[Preference],
    max_length: int,
    max_prompt_length: int | None = None,
    expansion: PlaceholderExpansion | None = None,
    rendered_texts: Rendered = "auto",
) -> list[dict[str, Any] | BadRecord]:
    """Return for each preference `chosen` and `rejected`, ids of prompt and answer, and `prompt_length`.

    Prompt and answer are tokenized as one text, as the model sees them. The answers start where
    the two rows and the prompt's own ids diverge, as in TRL's DPOTrainer. `prompt_cut`,
    `response_cut` and `last_turn_cut` are 1 if something was truncated, else 0. `expansion`: the
    images of the preferences. `rendered_texts`: data.rendered. Raises DataError if max_length leaves no room for text.
    """
    config = EncodingConfig(max_length=max_length, max_prompt_length=max_prompt_length, rendered=rendered_texts)
    return Encoder(tokenizer, config, expansion).encode(preferences, _render, _encode_rendered)


def _render(encoder: Encoder, index: int, preference: Preference) -> _RenderedPair:
    """Render prompt and answers. Raises BadRecord."""
    if isinstance(preference.prompt, list):
        prompt_messages = keep_system_text(encoder.tokenizer, preference.prompt, len(preference.prompt))
        preference = replace(preference, prompt=prompt_messages)
    answers = preference.chosen, preference.rejected
    rendered = render_prompt(
        encoder.tokenizer,
        preference.prompt,
        answers,
        preference.tools,
        encoder.config.rendered,
        preference.is_common_prefix,
    )
    prompt, shifts = encoder.expand(index, rendered.prompt)
    return _RenderedPair(preference, rendered, replace(rendered, prompt=prompt), shifts)


def _encode_rendered(encoder: Encoder, pairs: list[_RenderedPair]) -> list[dict[str, Any] | BadRecord]:
    ids = iter(tokenize(encoder.tokenizer, [text for pair in pairs for text in pair.expanded.texts]))
    return [_build_example(encoder, pair, next(ids), [next(ids), next(ids)]) for pair in pairs]


def _tokens_before_last_turn(encoder: Encoder, pair: _RenderedPair, chosen_ids: list[int]) -> int:
    """Return how many ids of the chosen row come before the last user turn of the prompt."""
    prompt, rendered = pair.preference.prompt, pair.rendered
    text, tools = rendered.texts[0], pair.preference.tools
    if rendered.lost[RENDERED]:
        start = find_template_marks(encoder.tokenizer).find_last_question(text)
    elif isinstance(prompt, str) and rendered.used_chat_template:  # the prompt is a single user turn
        start = 0
    else:
        start = find_last_turn(encoder.tokenizer, prompt, len(prompt), text, add_generation_prompt=True, tools=tools)
    expanded = pair.expanded.texts[1]
    return count_tokens_before(encoder.tokenizer, expanded, chosen_ids, shift_offset(start, pair.shifts))


def _build_example(
    encoder: Encoder, pair: _RenderedPair, prompt_ids: list[int], rows: list[list[int]]
) -> dict[str, Any] | BadRecord:
    """Split, frame and truncate the ids; the truncated prompt is the same in both rows.

    `rows`: ids of the prompt with the chosen and with the rejected answer.
    """
    # Tokens at the border may merge prompt and answer: compared by ids, not by lengths.
    splits = [common_prefix_length([prompt_ids, row]) for row in rows]
    for key, row, split in zip(("chosen", "rejected"), rows, splits, strict=True):
        if split == len(row):
            return BadRecord(f"'{key}' becomes no token; write an answer or remove the record")
    templated = pair.expanded.used_chat_template
    special = encoder.special_tokens.for_template(templated, encoder.expansion is not None)
    # A token that holds the end of the prompt and the start of an answer belongs to both answers.
    begin = min(splits)
    prefix, prompt = split_bos(rows[0][:begin], special)
    ending = [] if templated and not special.has_sep else list(special.suffix_ids)
    answers = [_without_suffix(row[begin:], ending) for row in rows]
    if not special.has_sep:  # EOS is a part of the answer and may be truncated; SEP is not
        answers, ending = [answer + ending for answer in answers], []
    # One truncated prompt for both rows, so that they differ in the answer only.
    longest = max(map(len, answers))
    budget = TokenBudget(encoder.config.max_length, encoder.config.max_prompt_length, len(prefix), len(ending))

    def count_last_turn() -> int:
        return min(begin - _tokens_before_last_turn(encoder, pair, rows[0]), len(prompt))

    fit = budget.truncate(len(prompt), longest, count_last_turn)
    if isinstance(fit, BadRecord):
        return fit
    head = prefix + prompt[len(prompt) - fit.prompt_tokens :]
    chosen, rejected = (head + answer[: fit.remaining_tokens] + ending for answer in answers)
    cuts = {**fit.cuts, "response_cut": int(longest > fit.remaining_tokens), **pair.rendered.lost}
    return {"chosen": chosen, "rejected": rejected, "prompt_length": len(head), **cuts}


def _without_suffix(ids: list[int], suffix: list[int]) -> list[int]:
    return ids[: len(ids) - len(suffix)] if has_suffix(ids, suffix) else ids


FindFollowing = Callable[[Prompt], UnpairedPreference | None]
"""prompt -> the next answer in the data to another prompt; None where all prompts are equal."""


@dataclass
class UnpairedEncode:
    """An `Encode` of single answers with labels.

    `answer` holds the ids, `answer_loss_mask` is 1 where a token is the answer's, `desirable` is 1 or 0.
    """

    tokenizer: Any
    config: EncodingConfig
    parse: Callable[[dict[str, Any]], list[UnpairedPreference]]
    """Raises BadRecord."""
    source: Source | None = None
    """The records, where each example also needs `mismatched` and `mismatched_loss_mask`: its prompt with the answer to
    the next other prompt of the data, in which the first record follows the last."""
    has_one_prompt: bool = False
    """True once all prompts of the data are known to be equal."""

    def __call__(self, rows: list[tuple[int, dict[str, Any]]]) -> Sequence[EncodeResult | list[EncodeResult]]:
        """Return for each record the examples of its answers."""
        records = [try_parse(parse_record, self.parse, record) for _, record in rows]
        following = partial(self._find_following, rows[-1][0] + 1) if rows and self.source is not None else None
        return encode_valid(records, partial(encode_unpaired, self.tokenizer, self.config, following))

    def _find_following(self, start: int, prompt: Prompt) -> UnpairedPreference | None:
        """Return the first usable answer to another prompt from record `start` on."""
        assert self.source is not None, "asked for by `mismatched` only"
        if self.has_one_prompt:
            return None
        for index in itertools.chain(range(start, len(self.source)), range(start)):
            try:
                items = self.parse(as_record(self.source[index]))
            except BadRecord:
                continue  # reported where its own chunk is encoded
            for item in items:
                if item.prompt == prompt:
                    continue
                (example,) = _encode_matched(self.tokenizer, [item], self.config)
                if not isinstance(example, BadRecord):
                    return item
        self.has_one_prompt = True
        return None


def encode_unpaired(
    tokenizer: Any,
    config: EncodingConfig,
    find_following: FindFollowing | None,
    records: Sequence[Sequence[UnpairedPreference]],
) -> list[list[EncodeResult]]:
    """Return for each record the examples of its answers, with mismatched answers where `find_following` is given."""
    items = [item for record in records for item in record]
    examples = _encode_matched(tokenizer, items, config)
    if find_following is not None:
        usable = [at for at, example in enumerate(examples) if not isinstance(example, BadRecord)]
        answers = choose_mismatched([items[at] for at in usable], find_following)
        samples = [items[at].build_sample(answer) for at, answer in zip(usable, answers, strict=True)]
        for at, example in zip(usable, encode_conversations(tokenizer, samples, config), strict=True):
            examples[at] = _merge_examples(examples[at], example)
    following = iter(examples)
    return [[next(following) for _ in record] for record in records]


def choose_mismatched(items: Sequence[UnpairedPreference], find_following: FindFollowing) -> list[UnpairedPreference]:
    """Return for each item the next one with another prompt; the next one where all prompts are equal."""
    if not items:
        return []
    chosen, answer = list[UnpairedPreference](), find_following(items[-1].prompt)
    if answer is None:
        return [*items[1:], items[0]]
    for at in reversed(range(len(items))):
        if at + 1 < len(items) and items[at + 1].prompt != items[at].prompt:
            answer = items[at + 1]
        chosen.append(answer)
    return chosen[::-1]


def _encode_matched(tokenizer: Any, items: Sequence[UnpairedPreference], config: EncodingConfig) -> list[EncodeResult]:
    encoded = encode_conversations(tokenizer, [item.build_sample(item) for item in items], config)
    results: list[EncodeResult] = []
    for item, example in zip(items, encoded, strict=True):
        if isinstance(example, BadRecord):
            results.append(example)
            continue
        counts = {name: value for name, value in example.items() if name in (*CUT_COLUMNS, *TEMPLATE_COLUMNS)}
        answer = {"answer": example["input_ids"], "answer_loss_mask": example["loss_mask"]}
        results.append({**answer, "desirable": float(item.desirable), **counts})
    return results


def _merge_examples(matched: EncodeResult, mismatched: EncodeResult) -> EncodeResult:
    if isinstance(matched, BadRecord) or isinstance(mismatched, BadRecord):
        return matched if isinstance(matched, BadRecord) else mismatched
    return {**matched, "mismatched": mismatched["input_ids"], "mismatched_loss_mask": mismatched["loss_mask"]}
