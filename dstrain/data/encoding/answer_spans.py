"""Where the answers of a dialog stand in its text."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from dstrain.data.encoding.rendering import as_template_takes, count_alike, write_dialog
from dstrain.data.formats.conversations import Conversation, Passage, Sample, beside
from dstrain.data.formats.messages import BadRecord
from dstrain.data.formats.transcripts import Message

Span = tuple[int, int]
"""Where a part of a text begins and where it ends, in letters."""
Write = Callable[..., str]
"""write(messages, opened=False): a dialog's text, as `write_dialog` gives it."""

MARK = "\ue000answer\ue001"
"""Stands in for an answer, to see where a template puts it; letters for private use, which no data has."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Written:
    """A sample as text."""

    text: str
    spans: tuple[Span, ...]
    """The parts that are learnt, in order."""
    templated: bool
    """True where the tokenizer's chat template wrote it: nothing is to be put at its end."""


def write(tokenizer: Any, sample: Sample, enders: Sequence[str] = (), assistant_only: bool = True) -> Written:
    """The text of a sample and what of it is learnt; `enders` are tokens that may end a turn.

    Raises BadRecord where the chat template refuses the dialog or does not show where an answer stands.
    """
    templated = bool(getattr(tokenizer, "chat_template", None))
    if isinstance(sample, Passage):
        if not (templated and sample.prompt):
            text = sample.prompt + sample.answer
            return Written(text, ((len(sample.prompt) if assistant_only else 0, len(text)),), False)
        sample = sample.as_conversation()
    if not templated and (sample.tools or any(beside(message, "tool_calls") for message in sample.messages)):
        raise BadRecord("tools and calls of them need a chat template, and the tokenizer has none; give it one")
    writes = partial(write_dialog, tokenizer, tools=list(sample.tools) or None)
    if not assistant_only:
        text = writes(sample.messages)
        return Written(text, ((0, len(text)),), templated)
    # What stands behind the last learnt turn teaches nothing, and some templates write a turn otherwise before others.
    messages = sample.messages[: sample.learnt[-1] + 1]
    text = writes(messages)
    spans = _marked_by_template(tokenizer, Conversation(messages, sample.learnt, sample.tools)) if templated else None
    if spans is None:
        layout = Layout(writes, messages, text, tuple(enders))
        spans = [layout.find(at) for at in sample.learnt]
    return Written(text, tuple(_without_rest(text, span, tuple(enders)) for span in spans), templated)


def _without_rest(text: str, span: Span, enders: tuple[str, ...]) -> Span:
    """The line break that some templates write behind the token that ends a turn is never generated, nor learnt."""
    end = span[0] + len(text[slice(*span)].rstrip())
    return (span[0], end) if text.endswith(enders, span[0], end) else span


def _marked_by_template(tokenizer: Any, sample: Conversation) -> list[Span] | None:
    """What the template itself says is the assistant's, between {% generation %} and {% endgeneration %}."""
    tools = list(sample.tools) or None
    template = tokenizer.get_chat_template(None, tools)
    if not _GENERATION.search(template):
        return None
    from transformers.utils.chat_template_utils import render_jinja_template

    _, found = render_jinja_template(
        conversations=[as_template_takes(tokenizer, sample.messages)],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    spoken = [at for at, message in enumerate(sample.messages) if message["role"] == "assistant"]
    if len(found[0]) != len(spoken):
        return None
    return [tuple(found[0][spoken.index(at)]) for at in sample.learnt]


@dataclass(frozen=True)
class Layout:
    """A dialog in the text that a template made of it."""

    writes: Write
    messages: list[Message]
    text: str
    enders: tuple[str, ...]
    written: dict[tuple[int, int], tuple[str, str] | None] = field(default_factory=dict)
    """What stands around a turn, by its place and by the end of the dialog: neighbours ask for the same."""

    def find(self, at: int) -> Span:
        """Where the answer `at` begins and where its turn ends. Raises BadRecord where that cannot be told."""
        opening = self._opening(at)
        span = self._by_beginnings(at, opening) or self._by_mark(at, opening)
        if span is None or span[0] >= span[1]:
            raise BadRecord(
                f"the tokenizer's chat template does not show where turn {at + 1} of the dialog stands; put "
                "{% generation %} marks into the template, or set options.assistant_only_loss to false"
            )
        return span

    def _opening(self, at: int) -> str:
        """What the model sees before it answers; empty where the template writes no such dialog."""
        try:
            return self.writes(self.messages[:at], opened=True)
        except BadRecord:  # no turn at all, say
            return ""

    def _by_beginnings(self, at: int, opening: str) -> Span | None:
        """From there to where the dialog would end with the answer, if the text begins so."""
        if not opening or not self.text.startswith(opening):
            return None
        closing = self.text if at + 1 == len(self.messages) else self.writes(self.messages[: at + 1])
        return (len(opening), len(closing)) if self.text.startswith(closing) else None

    def _by_mark(self, at: int, opening: str) -> Span | None:
        """For templates that write a turn otherwise where others follow, such as without its thoughts.

        A mark in the answer's place shows what stands around it.
        """
        around, alone = self._around(at, len(self.messages)), self._around(at, at + 1)
        if around is None or alone is None or not self.text.endswith(around[1]):
            return None
        start = self._start(at, around[0], opening)
        return None if start is None else (start, len(self.text) - len(around[1]) + self._ending(around[1], alone[1]))

    def _start(self, at: int, head: str, opening: str) -> int | None:
        """Behind the opening, or where the text parts from it or from the head; never before the last turn's end."""
        if opening and self.text.startswith(opening) and head.startswith(opening):
            return len(opening)
        before = self._around(at - 1, len(self.messages)) if at else ("", self.text)
        known = before is not None and self.text.endswith(before[1])
        least = len(self.text) - len(before[1]) if before and known else len(head)
        starts = (_parting([self.text, head, other]) for other in (opening or head, head))
        return next((start for start in starts if start >= least), None)

    def _ending(self, tail: str, alone: str) -> int:
        """How many letters behind an answer end its turn; `alone` is what stands there where no other turn follows."""
        found = next((end for end in (alone, alone.rstrip()) if tail.startswith(end)), None)
        if found is None and alone.startswith(self.enders):  # each place has its own token for the end
            found = max((end for end in self.enders if tail.startswith(end)), key=len, default="")
        return len(found or "")

    def _around(self, at: int, end: int) -> tuple[str, str] | None:
        """The text before and after what a turn says, up to the turn `end`; None where it does not stand there once."""
        if (at, end) not in self.written:
            self.written[at, end] = self._write_around(at, end)
        return self.written[at, end]

    def _write_around(self, at: int, end: int) -> tuple[str, str] | None:
        said = marked(self.messages[at])
        parts = self.writes([*self.messages[:at], said, *self.messages[at + 1 : end]]).split(MARK)
        return (parts[0], parts[1]) if len(parts) == 2 else None


def _parting(texts: Sequence[str]) -> int:
    """Where the texts part: not inside a word or a tag, of which they may share the first letters."""
    at = count_alike(texts)
    while at and all(at < len(text) for text in texts) and re.match(r"[\w</]", texts[0][at - 1]):
        at -= 1
    return at


def marked(message: Message) -> Message:
    """The message saying the mark; one that only calls a function calls one of this name."""
    calls = beside(message, "tool_calls")
    if not calls or message["content"].strip():
        return {**message, "content": MARK}
    last = {**calls[-1], "function": {**calls[-1]["function"], "name": MARK}}
    return cast("Message", {**message, "tool_calls": [*calls[:-1], last]})
