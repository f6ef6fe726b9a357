"""Conversations as text, by the chat template or as hh-rlhf transcripts, with image placeholders expanded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, cast

from dstrain.data.encoding.chat_template import (
    ASSISTANT_PREFIX,
    has_chat_template,
    render_conversation,
)
from dstrain.data.encoding.rendered_text import (
    Rendered,
    check_inner_ends,
    end_by_next_turn,
    find_answer_end,
    find_template_marks,
    read_rendered,
)
from dstrain.data.encoding.template_check import (
    FIX,
    NOTHING_LOST,
    RENDERED_COUNTS,
    TEMPLATE_COLUMNS,
    TemplateCheck,
    check_answers,
    check_template,
)
from dstrain.data.encoding.tokenization import SpecialTokens, describe_limits, get_special_tokens
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.messages import (
    Message,
    common_prefix_length,
)
from dstrain.data.formats.preferences import Prompt, Response
from dstrain.data.records import BadRecord, encode_valid, try_parse
from dstrain.data.vision.processor import VisionProcessor

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
        raise BadRecord(f"the chat template writes the result of a tool into the answer; {FIX}")
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
        self.special_tokens.check_max_length(max_length)
        rendered = [try_parse(render, self, *item) for item in enumerate(samples)]
        examples = encode_valid(rendered, partial(encode_rendered, self))
        if self.expansion is None:
            return examples
        limits = describe_limits(max_length, max_prompt_length)
        return [self.expansion.check_truncation(at, item, limits) for at, item in enumerate(examples)]

    def expand(self, index: int, text: str) -> tuple[str, Shifts]:
        """Return the text of a sample with its image placeholders expanded, and the shifts. Raises BadRecord."""
        return (text, ()) if self.expansion is None else self.expansion.expand(index, text)
