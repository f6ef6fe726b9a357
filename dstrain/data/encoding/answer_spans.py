"""Character spans of the trained answers in a conversation's rendered text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from dstrain.data.encoding.chat_template import (
    get_template,
    has_chat_template,
    render_conversation,
    to_template_messages,
)
from dstrain.data.encoding.rendered_text import (
    Rendered,
    TemplateMarks,
    check_control_tokens,
    check_inner_ends,
    end_by_next_turn,
    find_answer_end,
    find_template_marks,
    read_rendered,
)
from dstrain.data.encoding.template_check import (
    RENDERED_COUNTS,
    Span,
    TemplateCheck,
    check_answers,
    check_template,
    remove_turns,
)
from dstrain.data.formats.conversations import (
    Conversation,
    PromptCompletion,
    Sample,
    get_message_field,
)
from dstrain.data.formats.messages import Message, common_prefix_length
from dstrain.data.formats.preferences import Prompt, Response
from dstrain.errors import BadRecord

RenderFn = Callable[..., str]
"""render_fn(messages, add_generation_prompt=False) -> text, as `render_conversation` returns it."""

ANSWER_SENTINEL = "\ue000answer\ue001"
"""Replaces an answer, to find where a template puts it; private-use characters, absent from data."""
_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")


THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""Beginning and end of thoughts: of Qwen, DeepSeek and others, Mistral, gpt-oss."""


def find_thinking(text: str) -> list[Span]:
    """Return the spans of thoughts in a learnt text, tags and the white space behind them included.

    A text that ends a thought which it does not begin was begun by the generation prompt.
    """
    spans: list[Span] = []
    for begin, end in THINKING_TAGS:
        for found in re.finditer(f"{re.escape(begin)}.*?{re.escape(end)}\\s*", text, re.DOTALL):
            spans.append(found.span())
        first, opened = text.find(end), text.find(begin)
        if first >= 0 and not 0 <= opened < first and end != "<|end|>":  # which ends any message of gpt-oss
            rest = text[first + len(end) :]
            spans.append((0, first + len(end) + len(rest) - len(rest.lstrip())))
    return sorted(spans)


def without_thinking(text: str, spans: Sequence[Span]) -> list[Span]:
    """Return the learnt spans of a text without the thoughts in them."""
    kept: list[Span] = []
    for start, end in spans:
        at = start
        for first, last in find_thinking(text[start:end]):
            kept.append((at, start + first))
            at = max(at, start + last)
        kept.append((at, end))
    return [(first, last) for first, last in kept if first < last]


@dataclass(frozen=True)
class RenderedSample:
    """A sample as text."""

    text: str
    trained_spans: tuple[Span, ...]
    """Parts that are trained on, in order."""
    used_chat_template: bool
    """True if the tokenizer's chat template wrote it: then nothing is appended to it."""
    lost: Mapping[str, int] = field(default_factory=lambda: TemplateCheck().counts)
    """TEMPLATE_COLUMNS of the example."""


def render_sample(
    tokenizer: Any,
    sample: Sample,
    assistant_only: bool = True,
    with_thinking: bool = True,
    rendered_texts: Rendered = "auto",
) -> RenderedSample:
    """Return the text of a sample and the spans that are trained on.

    `with_thinking`: thoughts are trained on too. `rendered_texts`: data.rendered. Raises BadRecord if the chat template
    rejects the conversation, does not keep it (`check_template`), an answer cannot be located in its text, or a text
    contains control tokens (`read_rendered`).
    """
    templated = has_chat_template(tokenizer)
    plain = _render_plain(tokenizer, sample, assistant_only, rendered_texts)
    if plain is not None:
        spans = plain.trained_spans if with_thinking else without_thinking(plain.text, plain.trained_spans)
        return replace(plain, trained_spans=tuple(spans))
    if isinstance(sample, PromptCompletion):
        sample = sample.to_conversation()
    if not templated and _uses_tools(sample):
        raise BadRecord("tools and calls of them need a chat template, and the tokenizer has none; give it one")
    if assistant_only:
        # Nothing is trained on in the turns after the last trained one, and some templates render a turn differently if
        # others follow.
        sample = replace(sample, messages=sample.messages[: sample.trained_turns[-1] + 1])
    locate = partial(_locate, tokenizer, assistant_only=assistant_only)
    check = TemplateCheck()
    if templated:
        check = check_template(tokenizer, sample, f"sample {assistant_only}", locate, None if assistant_only else 0)
    if check.reason:
        raise BadRecord(check.reason)
    text, spans = locate(sample)
    if check.removed_turns:
        spans = remove_turns(locate, sample, text, spans, check.removed_turns)
    lost = check_answers(sample, "".join(text[slice(*span)] for span in spans)) if templated else {}
    spans = list(spans) if with_thinking else without_thinking(text, spans)
    return RenderedSample(text, tuple(spans), templated, check.counts | lost)


def _render_plain(
    tokenizer: Any, sample: Sample, assistant_only: bool, rendered_texts: Rendered
) -> RenderedSample | None:
    """Return a sample whose text is taken as it stands; None where the template, or a transcript, writes the turns.

    It is one that went through a chat template already, a text without a prompt, or any two texts without a template.
    Raises BadRecord.
    """
    marks = find_template_marks(tokenizer)
    prompt: Prompt
    answers: list[Response]
    tools: Sequence[Mapping[str, Any]] = ()
    if isinstance(sample, PromptCompletion):
        if not sample.prompt:
            return _render_document(marks, sample.answer, assistant_only, rendered_texts)
        if not has_chat_template(tokenizer):
            check_inner_ends(marks, sample.answer)
            text = sample.prompt + sample.answer
            return RenderedSample(text, ((len(sample.prompt) if assistant_only else 0, len(text)),), False)
        prompt, answers = sample.prompt, [sample.answer]
    elif not has_chat_template(tokenizer):
        return None
    else:
        first_answer = sample.trained_turns[0]
        prompt, answers = sample.messages[:first_answer], [sample.messages[first_answer:]]
        tools = sample.tools
    taken = read_rendered(tokenizer, prompt, answers, rendered_texts, tools)
    if taken is None:
        return None
    text = taken.prompt + taken.answers[0]
    start = len(taken.prompt) if assistant_only else 0
    return RenderedSample(text, ((start, len(text)),), True, RENDERED_COUNTS)


def _render_document(marks: TemplateMarks, text: str, assistant_only: bool, rendered_texts: Rendered) -> RenderedSample:
    """Return a text without a prompt: of a conversation that went through the template the answers are trained on.

    Raises BadRecord for a control token where data.rendered is false.
    """
    if rendered_texts is False:
        check_control_tokens(marks, marks.strip_ends(text))
    is_rendered = rendered_texts is True or (rendered_texts == "auto" and marks.is_rendered_text(text))
    answers = [*marks.iter_answer_spans(text)] if is_rendered else []
    if not answers:
        return RenderedSample(
            text, ((0, len(text)),), False, RENDERED_COUNTS if is_rendered else TemplateCheck().counts
        )
    start, end = answers.pop()
    text, end = end_by_next_turn(marks, text, end)
    answers.append((start, end))
    shift = len(marks.bos) if not text.startswith(marks.bos) else 0
    spans = [(start + shift, end + shift) for start, end in answers]
    text = marks.bos[:shift] + text
    return RenderedSample(text, tuple(spans) if assistant_only else ((0, len(text)),), True, RENDERED_COUNTS)


def _locate(tokenizer: Any, sample: Conversation, assistant_only: bool) -> tuple[str, list[Span]]:
    """Return the text of a conversation and the spans that are trained on. Raises BadRecord."""
    templated, marks = has_chat_template(tokenizer), find_template_marks(tokenizer)
    render_fn = partial(render_conversation, tokenizer, tools=list(sample.tools) or None)
    if not assistant_only:
        text = render_fn(sample.messages)
        return text, [(0, len(text))]
    messages, spans = sample.messages, None
    text = render_fn(messages)
    if templated:
        spans = _find_generation_spans(tokenizer, sample)
    # Without tags, by comparing the text with renderings of parts of the conversation.
    if spans is None:
        aligner = TemplateAligner(render_fn, messages, text, marks.added_tokens)
        # One aligner for all turns, since neighbours share their renderings.
        spans = [aligner.find_span(turn) for turn in sample.trained_turns]
    ended = []
    for turn, (start, end) in zip(sample.trained_turns, spans, strict=True):
        text, last = end_by_next_turn(
            marks, text, find_answer_end(text, start, end, messages[turn], marks.added_tokens)
        )
        ended.append((start, last))
    return text, ended


def _uses_tools(sample: Conversation) -> bool:
    return bool(sample.tools) or any(get_message_field(message, "tool_calls") for message in sample.messages)


def _find_generation_spans(tokenizer: Any, sample: Conversation) -> list[Span] | None:
    """Return the spans that the template puts between {% generation %} and {% endgeneration %}.

    None if the template has no such tags, or not one pair for each turn of the assistant.
    """
    tools = list(sample.tools) or None
    template = get_template(tokenizer, tools)
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
    # The tags enclose every turn of the assistant, trained or not.
    turns = [turn for turn, message in enumerate(sample.messages) if message["role"] == "assistant"]
    # A tag inside a condition may be skipped for some turns.
    if len(found[0]) != len(turns):
        return None
    return [tuple(found[0][turns.index(turn)]) for turn in sample.trained_turns]


@dataclass(frozen=True)
class TemplateAligner:
    """Locates the answers of a conversation in the text that a template made of it."""

    render_fn: RenderFn
    messages: list[Message]
    text: str
    end_tokens: tuple[str, ...]
    context_cache: dict[tuple[int, int], tuple[str, str] | None] = field(default_factory=dict)
    """(turn, end of the conversation) -> text around the turn; adjacent turns need the same ones."""

    def find_span(self, index: int) -> Span:
        """Return the span of the answer at `index`. Raises BadRecord if it cannot be determined."""
        generation_prompt = self._generation_prompt(index)
        span = self._find_by_prefix(index, generation_prompt) or self._find_by_sentinel(index, generation_prompt)
        if span is None or span[0] >= span[1]:
            raise BadRecord(
                f"turn {index + 1} of the dialog cannot be located in the text of the tokenizer's chat template; put "
                "{% generation %} tags into the template, or set options.assistant_only_loss to false"
            )
        return span

    def _generation_prompt(self, index: int) -> str:
        """Return the text that the model sees before this answer; empty if the template rejects it."""
        try:
            return self.render_fn(self.messages[:index], add_generation_prompt=True)
        except BadRecord:  # for example of a conversation without a turn
            return ""

    def _find_by_prefix(self, index: int, generation_prompt: str) -> Span | None:
        """Return the span from the generation prompt to the end of the conversation cut here.

        None if the text does not start with both.
        """
        if not generation_prompt or not self.text.startswith(generation_prompt):
            return None
        is_last = index + 1 == len(self.messages)
        closing = self.text if is_last else self.render_fn(self.messages[: index + 1])
        return (len(generation_prompt), len(closing)) if self.text.startswith(closing) else None

    def _find_by_sentinel(self, index: int, generation_prompt: str) -> Span | None:
        """Return the span from the text around a sentinel in the answer's place.

        For templates that render a turn differently if others follow, such as without its thoughts.
        """
        around, final = self._get_context(index, len(self.messages)), self._get_context(index, index + 1)
        if around is None or final is None or not self.text.endswith(around[1]):
            return None
        start = self._find_start(index, around[0], generation_prompt)
        if start is None:
            return None
        return start, len(self.text) - len(around[1]) + self._turn_end_length(around[1], final[1])

    def _find_start(self, index: int, head: str, generation_prompt: str) -> int | None:
        """Return the end of the generation prompt, or where the text diverges from it or from the head.

        Never before the end of the previous turn; None if no candidate is.
        """
        if generation_prompt and self.text.startswith(generation_prompt) and head.startswith(generation_prompt):
            return len(generation_prompt)
        before = self._get_context(index - 1, len(self.messages)) if index else ("", self.text)
        # Templates repeat text between turns: a start before the end of the previous turn is wrong.
        known = before is not None and self.text.endswith(before[1])
        least = len(self.text) - len(before[1]) if before and known else len(head)
        starts = (_find_divergence([self.text, head, other]) for other in (generation_prompt or head, head))
        return next((start for start in starts if start >= least), None)

    def _turn_end_length(self, tail: str, final_tail: str) -> int:
        """Return how many characters after an answer end its turn.

        `final_tail`: the text after the answer if no other turn follows.
        """
        found = next((end for end in (final_tail, final_tail.rstrip()) if tail.startswith(end)), None)
        if found is None and final_tail.startswith(self.end_tokens):
            # The template ends the last turn with another token than the turns before it.
            found = max((end for end in self.end_tokens if tail.startswith(end)), key=len, default="")
        return len(found or "")

    def _get_context(self, index: int, end: int) -> tuple[str, str] | None:
        """Return the text before and after a turn's content, in the conversation up to turn `end`.

        None if the template does not write the content exactly once.
        """
        if (index, end) not in self.context_cache:
            self.context_cache[index, end] = self._render_context(index, end)
        return self.context_cache[index, end]

    def _render_context(self, index: int, end: int) -> tuple[str, str] | None:
        marked = with_sentinel(self.messages[index])
        rendered = self.render_fn([*self.messages[:index], marked, *self.messages[index + 1 : end]])
        parts = rendered.split(ANSWER_SENTINEL)
        return (parts[0], parts[1]) if len(parts) == 2 else None


def _find_divergence(texts: Sequence[str]) -> int:
    """Return where the texts diverge, moved to the start of a word or tag that they partly share."""
    at = common_prefix_length(texts)
    while at and all(at < len(text) for text in texts) and re.match(r"[\w</]", texts[0][at - 1]):
        at -= 1
    return at


def with_sentinel(message: Message) -> Message:
    """Return the message with the sentinel as content.

    Without a text it stands in the last argument of its last tool call, the end of what templates write of a call, if
    that is a text, else in the call's name.
    """
    calls = get_message_field(message, "tool_calls")
    if not calls or message["content"].strip():
        return {**message, "content": ANSWER_SENTINEL}
    function = calls[-1]["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping) and arguments and isinstance(arguments[[*arguments][-1]], str):
        function = {**function, "arguments": {**arguments, [*arguments][-1]: ANSWER_SENTINEL}}
    else:
        function = {**function, "name": ANSWER_SENTINEL}
    return cast("Message", {**message, "tool_calls": [*calls[:-1], {**calls[-1], "function": function}]})
