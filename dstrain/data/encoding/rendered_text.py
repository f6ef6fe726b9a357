"""Texts that went through a chat template before they were written into a data file, and stray control tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal
from weakref import WeakKeyDictionary

from dstrain.data.encoding.chat_template import has_chat_template, render_conversation
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, common_prefix_length
from dstrain.data.formats.preferences import Prompt, Response
from dstrain.data.records import iter_strings
from dstrain.errors import BadRecord

Rendered = bool | Literal["auto"]
"""The values of data.rendered."""
THOUGHT_TOKENS = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})
"""Tokens that answers may contain, though templates write them too."""
_THOUGHT = re.compile("|".join(map(re.escape, sorted(THOUGHT_TOKENS))))
_SYSTEM, _QUESTION, _ANSWER, _MORE, _LAST = (f"\ue020{number}\ue021" for number in range(5))
"""Texts of a conversation with which a template is probed; private-use characters, absent from data."""


@dataclass(frozen=True)
class TemplateMarks:
    """What a chat template writes around the texts of a conversation."""

    added_tokens: tuple[str, ...] = ()
    """All added tokens of the tokenizer: any of them may end a turn."""
    control_tokens: frozenset[str] = frozenset()
    """Added tokens that the template writes itself, with BOS and EOS."""
    end_tokens: tuple[str, ...] = ()
    """Control tokens that end an answer; EOS is one of them."""
    answer_ending: str = ""
    """What the template writes after the last answer and is learnt: one end token of most, and nothing of some."""
    is_ended_by_next_turn: bool = False
    """True where the token that opens the next turn ends an answer (GLM): the last answer is given it too."""
    bos: str = ""
    """BOS, if the template begins with it."""
    head: str = ""
    """Text in front of the first question."""
    answer_header: str = ""
    """Text that opens an answer, such as `<|im_start|>assistant` and a line break."""
    question_header: str = ""
    """Text that opens a later question, such as `<|im_start|>user` and a line break."""
    next_question: str = ""
    """Text between an answer and the next question, where no control token ends the answer."""
    question_end: str = ""
    """Text from the end of a question to its answer, the header included."""

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        longest_first = sorted(self.control_tokens, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    @property
    def opening(self) -> str:
        """Text after which an answer begins in a rendered conversation."""
        return self.answer_header or self.question_end

    def find_control_token(self, text: str) -> str | None:
        """Return the first control token of a text."""
        match = self._control_pattern.search(text) if self._control_pattern else None
        return match and match[0]

    def begins_with_control_token(self, text: str) -> bool:
        match = self._control_pattern.match(text) if self._control_pattern else None
        return match is not None

    @cached_property
    def has_distinct_opening(self) -> bool:
        """False where the template opens an answer with a plain word, or with nothing."""
        return _is_distinct(self.opening)

    def is_rendered_prompt(self, prompt: str) -> bool:
        """Return whether a prompt begins or ends as one that the template wrote."""
        body = prompt.strip().removeprefix(self.bos).lstrip()
        ends_with_opening = self.has_distinct_opening and body.endswith(self.opening.strip())
        return self.begins_with_control_token(body) or ends_with_opening

    def is_rendered_text(self, text: str) -> bool:
        """Return whether a text without a prompt has control tokens besides BOS and EOS around it, or turns."""
        has_turns = bool(self.head.strip()) and text.startswith(self.head) and self.opening in text
        has_control_token = self.find_control_token(self.strip_ends(text)) is not None
        return has_control_token or (has_turns and self.has_distinct_opening)

    def strip_ends(self, text: str) -> str:
        """Return a text without the BOS in front and the end token behind, which a document may have."""
        body = text.removeprefix(self.bos).rstrip()
        for token in self.end_tokens:
            body = body.removesuffix(token)
        return body

    def find_last_question(self, prompt: str) -> int:
        """Return where the last question of a rendered prompt begins; 0 if that is not known."""
        return max(prompt.rfind(self.question_header), 0) if self.question_header.strip() else 0

    def iter_answer_spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yield the span of each answer in a rendered conversation, with what ends it."""
        # Earlier answers may lack the thought with which the template opens the last one.
        opening = _THOUGHT.split(self.opening)[0]
        thought = self.opening.removeprefix(opening)
        start = text.find(opening) if opening.strip() else -1
        while start >= 0:
            start += len(opening)
            if text.startswith(thought, start):
                start += len(thought)
            end = self._find_ending(text, start)
            yield start, end
            start = text.find(opening, end)

    def _find_ending(self, text: str, start: int) -> int:
        """Return where the answer that begins at `start` ends."""
        endings = [self.answer_ending, *self.end_tokens]  # the first may begin with another one
        places = [(text.find(ending, start), ending) for ending in endings if ending.strip()]
        first = min((place for place, _ in places if place >= 0), default=-1)
        next_question = text.find(self.next_question, start) if self.next_question.strip() else -1
        if next_question >= 0 and not 0 <= first < next_question:
            return next_question
        if first < 0:
            return len(text)
        return first + len(next(ending for place, ending in places if place == first))


def _is_distinct(text: str) -> bool:
    """Return whether a text is more than a word, a number or punctuation, as texts of users have them."""
    return len(text.strip()) > 2 and bool(re.search(r"\w", text) and re.search(r"[^\w\s]", text))


_marks_by_tokenizer: WeakKeyDictionary[Any, tuple[Any, TemplateMarks]] = WeakKeyDictionary()


def find_template_marks(tokenizer: Any) -> TemplateMarks:
    """Return what the tokenizer's template writes around texts, found by rendering probes; without one, EOS alone."""
    key = (str(getattr(tokenizer, "chat_template", None)), len(tokenizer))
    known = _marks_by_tokenizer.get(tokenizer)
    if known is None or known[0] != key:
        known = key, _probe_template(tokenizer) if has_chat_template(tokenizer) else _marks_without_template(tokenizer)
        _marks_by_tokenizer[tokenizer] = known
    return known[1]


def _marks_without_template(tokenizer: Any) -> TemplateMarks:
    added, eos = tuple(tokenizer.get_added_vocab()), tokenizer.eos_token
    return TemplateMarks(added, end_tokens=(eos,)) if eos else TemplateMarks(added)


def _probe_template(tokenizer: Any) -> TemplateMarks:
    question: Message = {"role": "user", "content": _QUESTION}
    answer: Message = {"role": "assistant", "content": _ANSWER}
    more: list[Message] = [{"role": "user", "content": _MORE}, {"role": "assistant", "content": _LAST}]

    def render(messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        try:
            return render_conversation(tokenizer, messages, add_generation_prompt)
        except BadRecord:  # a template without a system turn, or that requires more than a question
            return ""

    opened, closed, answered = render([question], True), render([question]), render([question, answer])
    several = render([question, answer, *more])
    with_system = render([{"role": "system", "content": _SYSTEM}, question, answer])
    special = [token for token in (tokenizer.bos_token, tokenizer.eos_token) if token]
    written = "".join((opened, answered, several, with_system))
    added_tokens = tuple(tokenizer.get_added_vocab())
    tokens = {token for token in added_tokens if _is_distinct(token) and token in written}
    control = frozenset(tokens | set(special)) - THOUGHT_TOKENS

    # Some templates open an answer to generate with more than they write in front of a given one.
    shared = common_prefix_length([opened, answered]) if answered else len(opened)
    header = opened[len(closed) : shared] if opened.startswith(closed) else ""
    question_end = opened[:shared].partition(_QUESTION)[2]
    marks = TemplateMarks(control_tokens=control)
    tails = [several.partition(_ANSWER)[2], several.partition(_LAST)[2], answered.partition(_ANSWER)[2]]
    # An answer without an end is followed by the next question.
    ends = [marks.find_control_token(tail) for tail in tails if marks.begins_with_control_token(tail.lstrip())]
    end_tokens = dict.fromkeys(token for token in (*ends, tokenizer.eos_token) if token)
    content_end = answered.find(_ANSWER) + len(_ANSWER)
    ending = answered[content_end : find_answer_end(answered, shared, len(answered), answer, added_tokens)]
    opening_token = marks.find_control_token(tails[0])
    is_ended_by_next_turn = not ending.strip() and opening_token is not None and tails[0].startswith(opening_token)
    next_question = tails[0].partition(_MORE)[0]
    end_token = next((token for token in end_tokens if next_question.startswith(token)), "")
    question_header = next_question if is_ended_by_next_turn else next_question.removeprefix(end_token).lstrip()
    bos = tokenizer.bos_token or ""
    return TemplateMarks(
        added_tokens=added_tokens,
        control_tokens=control,
        end_tokens=tuple(end_tokens),
        answer_ending=opening_token if is_ended_by_next_turn and opening_token else ending,
        is_ended_by_next_turn=is_ended_by_next_turn,
        bos=bos if bos and opened.startswith(bos) else "",
        head=opened.partition(_QUESTION)[0],
        question_header=question_header,
        next_question="" if marks.begins_with_control_token(next_question.lstrip()) else next_question,
        answer_header=header,
        question_end=question_end,
    )


def find_answer_end(text: str, start: int, end: int, message: Message, end_tokens: tuple[str, ...]) -> int:
    """Return where the answer in `text[start:end]` ends: after its end token, or what else the template ends it with.

    Some templates write a line break there, and some, such as Command R+'s, the prompt of the next answer, which the
    model never has to generate. White space that ends the answer by itself is kept.
    """
    without_blanks = start + len(text[start:end].rstrip())
    ends_with_token = text.endswith(end_tokens, start, without_blanks)
    content = message["content"].strip()
    if not content or message.get("tool_calls") or content not in text[start:end]:
        return without_blanks if ends_with_token else end
    content_end = text.rindex(content, start, end) + len(content)
    places = [(text.find(token, content_end, end), token) for token in end_tokens]
    ends = [place + len(token) for place, token in places if place >= 0]
    if ends:
        rest = text[min(ends) : end]
        for token in end_tokens:
            rest = rest.replace(token, "")
        if rest.strip():
            return min(ends)
    has_ending = ends_with_token or content_end < without_blanks
    return without_blanks if has_ending else end


def end_by_next_turn(marks: TemplateMarks, text: str, end: int) -> tuple[str, int]:
    """Return text and end of an answer in it with the token of the next turn, where that ends the template's answers."""
    token = marks.answer_ending
    if not marks.is_ended_by_next_turn:
        return text, end
    if end == len(text):
        text += token
    return text, end + len(token) if text.startswith(token, end) else end


@dataclass(frozen=True)
class RenderedText:
    """A prompt and its answers as they stand in the record, or, without answers, a prompt alone."""

    prompt: str
    answers: tuple[str, ...]


def read_rendered(
    tokenizer: Any,
    prompt: Prompt,
    answers: Sequence[Response],
    rendered: Rendered,
    tools: Sequence[Mapping[str, Any]] = (),
    is_common_prefix: bool = False,
) -> RenderedText | None:
    """Return prompt and answers as they stand if they went through the chat template; None: the template writes them.

    The prompt ends where an answer begins. An answer ends with one end token, which is appended where there is none.
    `is_common_prefix`: the prompt is what the answers have in common, and may hold the beginning of both. Raises
    BadRecord for a control token where the template would write another one, or that ends an answer early.
    """
    marks = find_template_marks(tokenizer)
    asked, replies = _single_text(prompt, "user"), [_single_text(answer, "assistant") for answer in answers]
    texts = [reply for reply in replies if reply is not None]
    if asked is not None and len(texts) == len(replies) and not tools:
        if rendered is True or (rendered == "auto" and marks.is_rendered_prompt(asked)):
            return _split_rendered(marks, asked, texts, is_common_prefix)
    elif rendered is True:
        raise BadRecord(
            "the record has several messages or tools, and data.rendered is true; write its text as 'prompt' and answer, "
            "or set data.rendered to auto"
        )
    check_control_tokens(marks, prompt, answers)
    return None


def _single_text(value: Response, role: str) -> str | None:
    """Return a text, or that of a list of a single message without calls or thoughts; None for anything else."""
    if isinstance(value, str):
        return value
    is_single = len(value) == 1 and value[0]["role"] == role and not {*value[0]} - {"role", "content", "weight"}
    return value[0]["content"] if is_single else None


def _split_rendered(marks: TemplateMarks, prompt: str, answers: Sequence[str], is_common_prefix: bool) -> RenderedText:
    if IMAGE_PLACEHOLDER in prompt:
        raise BadRecord("a text that went through the chat template has an image; write it as messages")
    header = marks.answer_header
    bare_header = header.strip()
    if is_common_prefix and marks.opening.strip() in prompt and marks.opening.strip():
        end = prompt.rindex(marks.opening.strip()) + len(marks.opening.strip())
        prompt, answers = prompt[:end], [prompt[end:] + answer for answer in answers]
    last_turn = prompt[max(prompt.rfind(bare_header), 0) :]
    is_open = bare_header in prompt and not any(token in last_turn for token in marks.end_tokens)
    if not is_open and marks.is_rendered_prompt(prompt):
        # Some files have what opens the answer in the answer.
        if not all(answer.lstrip().startswith(bare_header) for answer in answers):
            raise BadRecord(
                f"the prompt went through the chat template, and lacks what opens the answer; append {header!r}"
            )
        prompt, answers = prompt + bare_header, [answer.lstrip().removeprefix(bare_header) for answer in answers]
    if bare_header and prompt.rstrip().endswith(header.rstrip()):
        blank = header[len(header.rstrip()) :]
        if not prompt.endswith(header):
            prompt, answers = prompt.rstrip() + blank, [answer.removeprefix(blank) for answer in answers]
    if marks.bos and not prompt.startswith(marks.bos):
        prompt = marks.bos + prompt
    return RenderedText(prompt, tuple(end_answer(marks, answer) for answer in answers))


def end_answer(marks: TemplateMarks, answer: str) -> str:
    """Return a rendered answer that ends once, as it stands, or as the template ends it where it has no end.

    Raises BadRecord for an end token that more text follows.
    """
    endings = [ending for ending in (marks.answer_ending, *marks.end_tokens) if ending.strip()]
    body, end = answer, ""
    while True:
        stripped = body.rstrip()
        matching = [ending for ending in endings if stripped.endswith(ending.rstrip())]
        if not matching:
            break
        body, end = stripped.removesuffix(matching[0].rstrip()), matching[0]
    if not body.strip():
        raise BadRecord("the answer is empty but for its end token; write one or remove the record")
    check_inner_ends(marks, body)
    if end:
        return body + end
    return answer if answer.endswith(marks.answer_ending) else answer + marks.answer_ending


def check_inner_ends(marks: TemplateMarks, answer: str) -> None:
    """Raise BadRecord for an end token with more text of the same turn behind it."""
    body = answer.rstrip()
    for token in marks.end_tokens:
        for part in body.split(token)[1:]:
            if part.strip() and not marks.begins_with_control_token(part.lstrip()):
                raise BadRecord(f"the answer has text after {token}, which ends an answer; remove one of the two")


def check_control_tokens(marks: TemplateMarks, prompt: Prompt, answers: Sequence[Response] = ()) -> None:
    """Raise BadRecord for a control token in a text that the template writes into a turn of its own."""
    parts = [("the prompt", prompt)] if isinstance(prompt, str) else _name_turns(prompt, 0)
    for answer in answers:
        count = 1 if isinstance(prompt, str) else len(prompt)
        parts += [("the answer", answer)] if isinstance(answer, str) else _name_turns(answer, count)
    for name, value in parts:
        for text in iter_strings(value):
            token = marks.find_control_token(text)
            if token is not None:
                raise BadRecord(
                    f"{name} contains {token}, a control token that the chat template writes itself; remove it, or write "
                    "the whole rendered text as 'prompt' and answer (data.rendered)"
                )


def _name_turns(messages: Sequence[Message], first: int) -> list[tuple[str, Any]]:
    return [(f"turn {at + 1} ({message['role']})", message) for at, message in enumerate(messages, first)]
