"""Conversations as text and as token ids: rendering, image placeholders, special tokens, truncation."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np

from dstrain.data.encoding.answer_spans import ANSWER_SENTINEL, with_sentinel
from dstrain.data.encoding.chat_template import ASSISTANT_PREFIX, has_chat_template, render_conversation
from dstrain.data.encoding.rendered_text import (
    Rendered,
    check_inner_ends,
    end_by_next_turn,
    find_answer_end,
    find_template_marks,
    read_rendered,
)
from dstrain.data.encoding.template_check import (
    NOTHING_LOST,
    RENDERED_COUNTS,
    TEMPLATE_COLUMNS,
    TEMPLATE_FIX,
    TemplateCheck,
    check_answers,
    check_template,
)
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.messages import HUMAN_PREFIX, Message, common_prefix_length
from dstrain.data.formats.preferences import Prompt, Response
from dstrain.data.records import encode_valid, try_parse
from dstrain.data.vision.processor import VisionProcessor
from dstrain.errors import BadRecord, DataError

ID_COLUMNS = {"input_ids", "chosen", "rejected"}
"""Columns of an example that hold image tokens."""
Shifts = Sequence[tuple[int, int]]
"""For each expanded placeholder (its start in the text, characters that the text grew by)."""


@dataclass(frozen=True)
class RenderedPrompt:
    """A prompt and its answers as text; each answer continues the prompt."""

    prompt: str
    answers: tuple[str, ...]
    used_chat_template: bool
    """True if the tokenizer's chat template wrote it: then nothing is appended to an answer."""
    extra_generation_prompt: str = ""
    """Text that the template writes before an answer to generate, but not before a given answer,
    such as an empty block of thoughts."""
    lost: Mapping[str, int] = field(default_factory=lambda: NOTHING_LOST)
    """TEMPLATE_COLUMNS of the example."""

    @property
    def texts(self) -> tuple[str, ...]:
        """The prompt as the model sees it before it answers, and the prompt with each answer."""
        return self.prompt + self.extra_generation_prompt, *(self.prompt + answer for answer in self.answers)


def render_prompt(
    tokenizer: Any,
    prompt: Prompt,
    answers: Sequence[Response] = (),
    tools: Sequence[Mapping[str, Any]] = (),
    rendered_texts: Rendered = "auto",
    is_common_prefix: bool = False,
) -> RenderedPrompt:
    """Return the text of a prompt and its answers.

    `rendered_texts`: data.rendered. `is_common_prefix`: as in `read_rendered`. Raises BadRecord if the chat template
    rejects the conversation or does not keep it (`check_template`), tools have no template, or a text contains
    control tokens (`read_rendered`).
    """
    if has_chat_template(tokenizer):
        taken = read_rendered(tokenizer, prompt, answers, rendered_texts, tools, is_common_prefix)
        if taken is not None:
            return RenderedPrompt(taken.prompt, taken.answers, True, lost=RENDERED_COUNTS)
        rendered = _render_with_template(tokenizer, prompt, answers, tools)
        checks = [
            _check_answer(tokenizer, prompt, answer, text, tools)
            for answer, text in zip(answers, rendered.answers, strict=True)
        ]
        checks = checks or [_check_prompt(tokenizer, prompt, tools)]
        lost = {name: max(check.counts[name] for check in checks) for name in TEMPLATE_COLUMNS}
        return replace(rendered, lost=lost)
    if tools:
        raise BadRecord("'tools' need a chat template, and the tokenizer has none; give it one")
    if isinstance(prompt, str):
        assert all(isinstance(answer, str) for answer in answers), "messages answer messages"
        for answer in answers:
            check_inner_ends(find_template_marks(tokenizer), str(answer))
        return RenderedPrompt(prompt, tuple(map(str, answers)), False)
    # Transcripts are plain concatenation: prompt and answer can be rendered separately.
    texts = tuple(render_conversation(tokenizer, _to_messages(answer, "assistant")) for answer in answers)
    return RenderedPrompt(
        render_conversation(tokenizer, prompt, True),
        tuple(text.removeprefix(ASSISTANT_PREFIX) for text in texts),
        False,
    )


def _render_with_template(
    tokenizer: Any, prompt: Prompt, answers: Sequence[Response], tools: Sequence[Mapping[str, Any]]
) -> RenderedPrompt:
    render_fn = partial(render_conversation, tokenizer, tools=tools or None)
    messages = _to_messages(prompt, "user")
    if isinstance(prompt, str):  # the space between prompt and answer belongs to neither message
        answers = [answer.removeprefix(" ") if isinstance(answer, str) else answer for answer in answers]
    opening = render_fn(messages, add_generation_prompt=True)
    full = [render_fn(messages + _to_messages(answer, "assistant")) for answer in answers]
    # Some templates open an answer with text that they omit where the answer is given, such as an
    # empty block of thoughts: the prompt ends where the texts diverge.
    start = common_prefix_length([opening, *full])
    marks, texts = find_template_marks(tokenizer), list[str]()
    for answer, text in zip(answers, full, strict=True):
        last_turn = _to_messages(answer, "assistant")[-1]
        end = find_answer_end(text, start, len(text), last_turn, marks.added_tokens)
        ended, end = end_by_next_turn(marks, text, end)
        texts.append(ended[start:end])
    return RenderedPrompt(opening[:start], tuple(texts), True, opening[start:])


def _check_prompt(tokenizer: Any, prompt: Prompt, tools: Sequence[Mapping[str, Any]]) -> TemplateCheck:
    """Return what the template does with a prompt that no answer follows."""

    def locate(sample: Conversation) -> tuple[str, list[tuple[int, int]]]:
        return _render_with_template(tokenizer, sample.messages, (), tools).prompt, []

    sample = Conversation(_to_messages(prompt, "user"), (), tuple(dict(tool) for tool in tools))
    return check_template(tokenizer, sample, "prompt", locate)


def _check_answer(
    tokenizer: Any, prompt: Prompt, answer: Response, text: str, tools: Sequence[Mapping[str, Any]]
) -> TemplateCheck:
    """Return what the template does with a prompt and an answer to it, rendered as `text`. Raises BadRecord."""
    before, after = _to_messages(prompt, "user"), _to_messages(answer, "assistant")
    count = len(before)

    def locate(sample: Conversation) -> tuple[str, list[tuple[int, int]]]:
        rendered = _render_with_template(tokenizer, sample.messages[:count], [sample.messages[count:]], tools)
        return rendered.texts[1], [(len(rendered.prompt), len(rendered.texts[1]))]

    trained = tuple(turn for turn in range(count, count + len(after)) if after[turn - count]["role"] == "assistant")
    sample = Conversation([*before, *after], trained, tuple(dict(tool) for tool in tools))
    check = check_template(tokenizer, sample, "answer", locate, count)
    if check.reason:
        raise BadRecord(check.reason)
    if check.removed_turns:
        raise BadRecord(f"the chat template writes the result of a tool into the answer; {TEMPLATE_FIX}")
    return replace(check, lost=check.lost | frozenset(check_answers(sample, text)))


def keep_system_text(tokenizer: Any, messages: list[Message], num_context: int) -> list[Message]:
    """Return the messages with the system text in the last user turn of the context, where the template needs it there.

    Some templates, such as Mistral's, write the system text before the last message only if that is the user's: a
    conversation that ends with an answer would lose it, and the prompt of the same answer would not.
    """
    users = [turn for turn in range(num_context) if messages[turn]["role"] == "user"]
    if not has_chat_template(tokenizer) or not users or messages[0]["role"] != "system":
        return messages
    glue = _find_system_glue(tokenizer)
    if glue is None:
        return messages
    moved = messages[users[-1]]
    moved = cast("Message", {**moved, "content": messages[0]["content"] + glue + moved["content"]})
    return [*messages[1 : users[-1]], moved, *messages[users[-1] + 1 :]]


_system_glue: dict[str, str | None] = {}


def _find_system_glue(tokenizer: Any) -> str | None:
    """Return what the template writes between system text and question; None: it keeps the system text with an answer."""
    template = str(tokenizer.chat_template)
    if template not in _system_glue:
        _system_glue[template] = None
        system, question, answer = "\ue012system", "\ue012question", "\ue012answer"
        asked: list[Message] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        try:
            opening = render_conversation(tokenizer, asked, True)
            full = render_conversation(tokenizer, [*asked, {"role": "assistant", "content": answer}])
            glue = opening.partition(system)[2].partition(question)[0]
            merged: list[Message] = [{"role": "user", "content": system + glue + question}]
            if system not in full and render_conversation(tokenizer, merged, True) == opening:
                _system_glue[template] = glue
        except BadRecord:  # a template without system turns
            return None
    return _system_glue[template]


def _to_messages(value: Response, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


@dataclass(frozen=True)
class PlaceholderExpansion:
    """Images of a chunk of samples, in the form in which they appear in the texts."""

    vision_processor: VisionProcessor
    image_texts: Sequence[Sequence[str]]
    """For each sample the expanded text of each of its images, in order."""

    def expand(self, index: int, text: str) -> tuple[str, Shifts]:
        """Return the text of sample `index` with its placeholders expanded, and the shifts.

        Raises BadRecord if the text has more or fewer placeholders than the sample has images.
        """
        return self.vision_processor.expand_images(text, self.image_texts[index])

    def mask_image_tokens(self, ids: list[int], loss_mask: list[int]) -> list[int]:
        """Return the loss mask with 0 for every token that belongs to an image."""
        image_ids = self.vision_processor.image_related_ids
        return [0 if token in image_ids else mask for token, mask in zip(ids, loss_mask, strict=True)]

    def check_truncation(
        self, index: int, example: dict[str, Any] | BadRecord, limit_name: str
    ) -> dict[str, Any] | BadRecord:
        """Return the example, or a BadRecord if truncation removed a part of an image.

        `limit_name`: the limit, for the message.
        """
        if isinstance(example, BadRecord):
            return example
        processor = self.vision_processor
        needed = sum(processor.count_in_text(text) for text in self.image_texts[index])
        # Truncation removes tokens only, so a complete image is one whose tokens are all there.
        for name in ID_COLUMNS & example.keys():
            # Counted by special ids, since line breaks around an image occur in text too.
            found = processor.count_image_ids(example[name])
            if found < needed:
                return BadRecord(
                    f"its images take {needed} tokens, and {limit_name} cuts {needed - found} of them off; "
                    "raise it, or remove the record"
                )
            if found > needed:
                return BadRecord(
                    f"its text contains {processor.image_token}, which stands for an image; write it in another way"
                )
        return example


def shift_offset(offset: int, shifts: Shifts) -> int:
    """Return where the character at `offset` of a text is after the expansion with these shifts."""
    return offset + sum(grown for start, grown in shifts if start < offset)


def shift_spans(spans: Sequence[tuple[int, int]], shifts: Shifts) -> tuple[tuple[int, int], ...]:
    """Return where spans of a text are after the expansion with these shifts."""
    return tuple((shift_offset(start, shifts), shift_offset(end, shifts)) for start, end in spans)


# ---- token ids


CUT_COLUMNS = ("response_cut", "prompt_cut", "last_turn_cut")
"""Columns that count truncated samples."""


def tokenize(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Return the token ids of each text, without special tokens."""
    if not texts:
        return []
    # verbose=False: samples are truncated later, so texts longer than the model need no warning.
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def tokenize_with_offsets(tokenizer: Any, texts: Sequence[str]) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield each text's ids and, per token, where its characters start (N,) and end (N,).

    The tokenizer must be a fast one.
    """
    if not texts:
        return
    encoding = tokenizer(
        list(texts),
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    for ids, offsets in zip(encoding["input_ids"], encoding["offset_mapping"], strict=True):
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        # A token without characters of its own counts as part of the character after it.
        yield ids, starts, np.maximum(ends, starts + 1)


def count_tokens_before(tokenizer: Any, text: str, ids: Sequence[int], char_index: int) -> int:
    """Return how many of the text's `ids` end at or before the character at `char_index`."""
    if not char_index:
        return 0
    if not tokenizer.is_fast:
        # Slow tokenizers have no offsets: the ids that the beginning has in common with the whole.
        return common_prefix_length([ids, tokenize(tokenizer, [text[:char_index]])[0]])
    ((_, _, ends),) = tokenize_with_offsets(tokenizer, [text])
    return int(np.argmax([*(ends > char_index), True]))


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids around a prompt and its answer: BOS or CLS, and EOS or SEP."""

    prefix_ids: tuple[int, ...]
    """BOS or CLS, if the tokenizer adds one itself."""
    suffix_ids: tuple[int, ...]
    """EOS, a part of the answer; or the SEP of a BERT."""
    has_sep: bool
    """True for a BERT: the suffix is not a part of the answer and is never truncated."""
    template_bos_id: int | None = None
    """BOS that a chat template may write even if the tokenizer adds none."""

    def for_template(self, used_chat_template: bool, has_images: bool) -> SpecialTokens:
        """Return the special tokens to add to a text, none in front if a chat template wrote it.

        The template writes the BOS itself, as for `apply_chat_template(tokenize=True)`, inference
        servers and TRL. Two exceptions add their own: processors of vision-language models
        (transformers, ProcessorMixin.apply_chat_template) add a BOS, and a BERT adds its CLS.
        """
        if used_chat_template and not has_images and not self.has_sep:
            return replace(self, prefix_ids=())
        return self


def get_special_tokens(tokenizer: Any) -> SpecialTokens:
    """Return the special tokens that the tokenizer adds to a text, found by a call, and its EOS.

    EOS is asked for by name, because causal tokenizers rarely add it.
    """
    bare, full = tokenize(tokenizer, ["a"])[0], tokenizer("a", verbose=False)["input_ids"]
    openers = tokenizer.bos_token_id, tokenizer.cls_token_id
    # Where the bare ids stand among those of a full call shows what was put around them.
    starts = (at for at in range(len(full)) if full[at : at + len(bare)] == bare)
    # A vocabulary without "a" gives no ids for it: then count the known first tokens.
    start = next(starts, 0) if bare else sum(token in openers for token in full)
    prefix, suffix = tuple(full[:start]), tuple(full[start + len(bare) :])
    # Only if it was really added: many tokenizers name a SEP that they never write.
    if tokenizer.sep_token_id is not None and tokenizer.sep_token_id in suffix:
        return SpecialTokens(prefix, suffix, True)
    eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return SpecialTokens(prefix, eos, False, tokenizer.bos_token_id)


def split_bos(ids: list[int], special_tokens: SpecialTokens) -> tuple[list[int], list[int]]:
    """Split ids into the first tokens, which truncation never removes, and the rest.

    The prefix is added if the text does not start with it.
    """
    prefix = list(special_tokens.prefix_ids)
    if prefix and ids[: len(prefix)] == prefix:
        return prefix, ids[len(prefix) :]
    if special_tokens.template_bos_id is not None and ids[:1] == [special_tokens.template_bos_id]:
        return ids[:1], ids[1:]
    return prefix, ids


def has_suffix(ids: list[int], suffix: list[int]) -> bool:
    """Return whether `ids` end with `suffix`; False for an empty suffix."""
    return bool(suffix) and ids[-len(suffix) :] == suffix


@dataclass(frozen=True)
class TruncationResult:
    """Sizes of a sample after truncation."""

    prompt_tokens: int
    """Tokens of the prompt that remain, counted from its end."""
    remaining_tokens: int
    """Room for what follows the prompt."""
    cuts: dict[str, int]
    """`prompt_cut`: the prompt was truncated; `last_turn_cut`: its last user turn was. 1 or 0."""


@dataclass(frozen=True)
class TokenBudget:
    """Limits on the tokens of a sample."""

    max_length: int
    max_prompt_length: int | None
    """Tokens of the prompt with its BOS; a limit set by the user, which may cut the last turn."""
    prefix_tokens: int
    """Tokens in front that are never removed: BOS or CLS."""
    suffix_tokens: int = 0
    """Tokens at the end that are never removed: SEP of a BERT."""

    def truncate(
        self, prompt_tokens: int, answer_tokens: int, count_last_turn: Callable[[], int]
    ) -> TruncationResult | BadRecord:
        """Return how many tokens of prompt and answer fit.

        `answer_tokens`: the longer answer of a pair. `count_last_turn` returns the prompt's tokens
        from its last user turn on; called only if something must be removed. A record whose last
        user turn leaves no room for an answer is bad: a sample without its question would teach
        p(answer), not p(answer | question).
        """
        room = self.max_length - self.prefix_tokens - self.suffix_tokens
        most = (
            prompt_tokens
            if self.max_prompt_length is None
            else min(prompt_tokens, max(self.max_prompt_length - self.prefix_tokens, 0))
        )
        if most == prompt_tokens and prompt_tokens + answer_tokens <= room:
            return TruncationResult(prompt_tokens, room - prompt_tokens, {"prompt_cut": 0, "last_turn_cut": 0})
        turn = count_last_turn() if prompt_tokens else 0
        # A limit set by the user may cut even the last turn; max_length alone may not.
        least = min(turn, most)
        # The prompt gives way to the answer, down to its last turn.
        kept = max(min(most, room - answer_tokens), least)
        if kept >= room:
            return BadRecord(self._overflow_message(self.prefix_tokens + least + self.suffix_tokens, least == turn))
        cuts = {"prompt_cut": int(kept < prompt_tokens), "last_turn_cut": int(kept < turn)}
        return TruncationResult(kept, room - kept, cuts)

    def _overflow_message(self, used_tokens: int, is_full_turn: bool) -> str:
        """Return why `used_tokens` of prompt and special tokens leave no room, and the fix."""
        subject = "its last user turn and the start of the answer take" if is_full_turn else "its prompt, cut, takes"
        most = self.max_length - 1 - self.suffix_tokens
        less = f", data.max_prompt_length to {most} or less" + (" (then texts of the turn are cut)" * is_full_turn)
        return (
            f"{subject} {used_tokens} tokens, and data.max_length {self.max_length} leaves none for the answer; set "
            f"data.max_length to {used_tokens + 1} or more{less}, or remove the record"
        )


def find_last_turn(
    tokenizer: Any,
    prompt: Prompt,
    num_prompt_messages: int,
    text: str,
    *,
    add_generation_prompt: bool = False,
    tools: Sequence[Mapping[str, Any]] = (),
) -> int:
    """Return where the last user turn of the prompt starts in the text that was rendered from it; 0 if unknown.

    `prompt`: a text that was rendered as it is, or the messages of the text, of which `num_prompt_messages` come before
    the answer. `add_generation_prompt`: the text ends with what opens the assistant's next answer.
    """
    if isinstance(prompt, str):
        return max(prompt.rfind(HUMAN_PREFIX), 0)
    users = [turn for turn in range(num_prompt_messages) if prompt[turn]["role"] == "user"]
    if not users or not users[-1]:
        return 0
    last, render = users[-1], partial(render_conversation, tokenizer, tools=list(tools) or None)
    with suppress(BadRecord):  # of a template that requires a user's turn
        before = render(prompt[:last])
        if text.startswith(before):
            return len(before)
    # Some templates write the system text inside the first user turn.
    if prompt[last - 1]["role"] == "system":
        return 0
    # Some render a turn differently if others follow: the turn starts where the one before it ends.
    marked, earlier = with_sentinel(prompt[last - 1]), prompt[: last - 1]
    try:
        full = render([*earlier, marked, *prompt[last:]], add_generation_prompt=add_generation_prompt)
        ending = render([*earlier, marked]).partition(ANSWER_SENTINEL)[2]
    except BadRecord:
        return 0
    tail = full.partition(ANSWER_SENTINEL)[2]
    if not tail or not text.endswith(tail):
        return 0
    return len(text) - len(tail) + (len(ending) if tail.startswith(ending) else 0)


def describe_limits(max_length: int, max_prompt_length: int | None) -> str:
    """Return the settings that truncate a sample, for a message."""
    more = "" if max_prompt_length is None else f" (data.max_prompt_length {max_prompt_length})"
    return f"data.max_length {max_length}{more}"


@dataclass(frozen=True, kw_only=True)
class EncodingConfig:
    """Settings for the encoding of conversations."""

    max_length: int
    """Tokens of a whole conversation."""
    max_prompt_length: int | None = None
    """Tokens before the first answer, including the BOS."""
    assistant_only: bool = True
    """True to train on the answers only, False to train on every token."""
    with_thinking: bool = True
    """False to leave the thoughts of answers out of what is trained on."""
    rendered: Rendered = "auto"
    """data.rendered: whether texts went through the chat template already."""


@dataclass(frozen=True)
class Encoder:
    """Tokenizer, settings and images of the samples of one call."""

    tokenizer: Any
    config: EncodingConfig
    expansion: PlaceholderExpansion | None

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        return get_special_tokens(self.tokenizer)

    def encode(
        self,
        samples: Sequence[Any],
        render: Callable[[Encoder, int, Any], Any],
        encode_rendered: Callable[[Encoder, list[Any]], list[dict[str, Any] | BadRecord]],
    ) -> list[dict[str, Any] | BadRecord]:
        """Return the example of each sample, or why it has none.

        `render` may raise BadRecord; `encode_rendered` gets what it returns of all good samples. Raises DataError if
        max_length leaves no room for text.
        """
        max_length, max_prompt_length = self.config.max_length, self.config.max_prompt_length
        if max_length <= len(self.special_tokens.prefix_ids) + len(self.special_tokens.suffix_ids):
            raise DataError(f"data.max_length {max_length} leaves no room for text; make it larger")
        rendered = [try_parse(render, self, *item) for item in enumerate(samples)]
        examples = encode_valid(rendered, partial(encode_rendered, self))
        if self.expansion is None:
            return examples
        limits = describe_limits(max_length, max_prompt_length)
        return [self.expansion.check_truncation(at, item, limits) for at, item in enumerate(examples)]

    def expand(self, index: int, text: str) -> tuple[str, Shifts]:
        """Return the text of a sample with its image placeholders expanded, and the shifts. Raises BadRecord."""
        return (text, ()) if self.expansion is None else self.expansion.expand(index, text)
