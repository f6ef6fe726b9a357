"""Where the answers of a dialog stand in its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from dstrain.data.encoding.rendering import common_prefix_length, render_conversation, to_template_messages
from dstrain.data.formats.conversations import Conversation, PromptCompletion, Sample, get_message_field
from dstrain.data.formats.transcripts import Message
from dstrain.data.records import BadRecord

Span = tuple[int, int]
"""Where a part of a text begins and where it ends, in letters."""
RenderFn = Callable[..., str]
"""write(messages, opened=False): a dialog's text, as `write_dialog` gives it."""

ANSWER_SENTINEL = "\ue000answer\ue001"
"""Stands in for an answer, to see where a template puts it; letters for private use, which no data has."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class RenderedSample:
    """A sample as text."""

    text: str
    trained_spans: tuple[Span, ...]
    """The parts that are learnt, in order."""
    used_chat_template: bool
    """True where the tokenizer's chat template wrote it: nothing is to be put at its end."""


def render_sample(
    tokenizer: Any, sample: Sample, end_tokens: Sequence[str] = (), assistant_only: bool = True
) -> RenderedSample:
    """The text of a sample and what of it is learnt; `enders` are tokens that may end a turn.

    Raises BadRecord where the chat template refuses the dialog or does not show where an answer stands.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(sample, PromptCompletion):
        if not (templated and sample.prompt):
            text = sample.prompt + sample.answer
            return RenderedSample(text, ((len(sample.prompt) if assistant_only else 0, len(text)),), False)
        sample = sample.to_conversation()
    if not templated and (sample.tools or any(get_message_field(message, "tool_calls") for message in sample.messages)):
        raise BadRecord("tools and calls of them need a chat template, and the tokenizer has none; give it one")
    writes = partial(render_conversation, tokenizer, tools=list(sample.tools) or None)
    if not assistant_only:
        text = writes(sample.messages)
        return RenderedSample(text, ((0, len(text)),), templated)
    # What stands behind the last learnt turn teaches nothing, and some templates write a turn otherwise before others.
    messages = sample.messages[: sample.trained_turns[-1] + 1]
    text = writes(messages)
    spans = (
        _find_generation_spans(tokenizer, Conversation(messages, sample.trained_turns, sample.tools))
        if templated
        else None
    )
    if spans is None:
        layout = TemplateAligner(writes, messages, text, tuple(end_tokens))
        spans = [layout.find_span(at) for at in sample.trained_turns]
    return RenderedSample(text, tuple(_trim_span(text, span, tuple(end_tokens)) for span in spans), templated)


def _trim_span(text: str, span: Span, end_tokens: tuple[str, ...]) -> Span:
    """The line break that some templates write behind the token that ends a turn is never generated, nor learnt."""
    end = span[0] + len(text[slice(*span)].rstrip())
    return (span[0], end) if text.endswith(end_tokens, span[0], end) else span


def _find_generation_spans(tokenizer: Any, sample: Conversation) -> list[Span] | None:
    """What the template itself says is the assistant's, between {% generation %} and {% endgeneration %}."""
    tools = list(sample.tools) or None
    template = tokenizer.get_chat_template(None, tools)
    if not _GENERATION_TAG.search(template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    _, found = render_jinja_template(
        conversations=[to_template_messages(tokenizer, sample.messages)],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    spoken = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if len(found[0]) != len(spoken):
        return None
    return [tuple(found[0][spoken.index(at)]) for at in sample.trained_turns]


@dataclass(frozen=True)
class TemplateAligner:
    """A dialog in the text that a template made of it."""

    render_fn: RenderFn
    messages: list[Message]
    text: str
    end_tokens: tuple[str, ...]
    context_cache: dict[tuple[int, int], tuple[str, str] | None] = field(default_factory=dict)
    """What stands around a turn, by its place and by the end of the dialog: neighbours ask for the same."""

    def find_span(self, index: int) -> Span:
        """Where the answer `at` begins and where its turn ends. Raises BadRecord where that cannot be told."""
        opening = self._generation_prompt(index)
        span = self._find_by_prefix(index, opening) or self._find_by_sentinel(index, opening)
        if span is None or span[0] >= span[1]:
            raise BadRecord(
                f"the tokenizer's chat template does not show where turn {index + 1} of the dialog stands; put "
                "{% generation %} marks into the template, or set options.assistant_only_loss to false"
            )
        return span

    def _generation_prompt(self, index: int) -> str:
        """What the model sees before it answers; empty where the template writes no such dialog."""
        try:
            return self.render_fn(self.messages[:index], add_generation_prompt=True)
        except BadRecord:  # no turn at all, say
            return ""

    def _find_by_prefix(self, index: int, generation_prompt: str) -> Span | None:
        """From there to where the dialog would end with the answer, if the text begins so."""
        if not generation_prompt or not self.text.startswith(generation_prompt):
            return None
        closing = self.text if index + 1 == len(self.messages) else self.render_fn(self.messages[: index + 1])
        return (len(generation_prompt), len(closing)) if self.text.startswith(closing) else None

    def _find_by_sentinel(self, index: int, generation_prompt: str) -> Span | None:
        """For templates that write a turn otherwise where others follow, such as without its thoughts.

        A mark in the answer's place shows what stands around it.
        """
        around, alone = self._get_context(index, len(self.messages)), self._get_context(index, index + 1)
        if around is None or alone is None or not self.text.endswith(around[1]):
            return None
        start = self._find_start(index, around[0], generation_prompt)
        return (
            None
            if start is None
            else (start, len(self.text) - len(around[1]) + self._turn_end_length(around[1], alone[1]))
        )

    def _find_start(self, index: int, head: str, generation_prompt: str) -> int | None:
        """Behind the opening, or where the text parts from it or from the head; never before the last turn's end."""
        if generation_prompt and self.text.startswith(generation_prompt) and head.startswith(generation_prompt):
            return len(generation_prompt)
        before = self._get_context(index - 1, len(self.messages)) if index else ("", self.text)
        known = before is not None and self.text.endswith(before[1])
        least = len(self.text) - len(before[1]) if before and known else len(head)
        starts = (_find_divergence([self.text, head, other]) for other in (generation_prompt or head, head))
        return next((start for start in starts if start >= least), None)

    def _turn_end_length(self, tail: str, final_tail: str) -> int:
        """How many letters behind an answer end its turn; `alone` is what stands there where no other turn follows."""
        found = next((end for end in (final_tail, final_tail.rstrip()) if tail.startswith(end)), None)
        if found is None and final_tail.startswith(self.end_tokens):  # each place has its own token for the end
            found = max((end for end in self.end_tokens if tail.startswith(end)), key=len, default="")
        return len(found or "")

    def _get_context(self, index: int, end: int) -> tuple[str, str] | None:
        """The text before and after what a turn says, up to the turn `end`; None where it does not stand there once."""
        if (index, end) not in self.context_cache:
            self.context_cache[index, end] = self._render_context(index, end)
        return self.context_cache[index, end]

    def _render_context(self, index: int, end: int) -> tuple[str, str] | None:
        said = with_sentinel(self.messages[index])
        parts = self.render_fn([*self.messages[:index], said, *self.messages[index + 1 : end]]).split(ANSWER_SENTINEL)
        return (parts[0], parts[1]) if len(parts) == 2 else None


def _find_divergence(texts: Sequence[str]) -> int:
    """Where the texts part: not inside a word or a tag, of which they may share the first letters."""
    at = common_prefix_length(texts)
    while at and all(at < len(text) for text in texts) and re.match(r"[\w</]", texts[0][at - 1]):
        at -= 1
    return at


def with_sentinel(message: Message) -> Message:
    """The message saying the mark; one that only calls a function calls one of this name."""
    calls = get_message_field(message, "tool_calls")
    if not calls or message["content"].strip():
        return {**message, "content": ANSWER_SENTINEL}
    last = {**calls[-1], "function": {**calls[-1]["function"], "name": ANSWER_SENTINEL}}
    return cast("Message", {**message, "tool_calls": [*calls[:-1], last]})
