"""Check that a chat template keeps what a record says: answers in the learnt text, all other text outside of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from dstrain.data.formats.conversations import Conversation, get_message_field
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER, Message, common_prefix_length
from dstrain.data.records import iter_strings
from dstrain.errors import BadRecord

Span = tuple[int, int]
"""Start and end of a part of a text, in characters."""
Locate = Callable[[Conversation], tuple[str, Sequence[Span]]]
"""Conversation -> its text and the spans that are learnt, as a task renders it. Raises BadRecord."""
LOST_COLUMNS = ("system_lost", "tools_lost", "turns_lost", "thoughts_lost")
"""Columns that are 1 where the chat template drops a text of the record: the system text, tools, calls of turns that are
not learnt or results of calls, other turns, thoughts."""
RENDERED = "rendered"
"""Column that is 1 where a record's texts went through the chat template before: they are taken as they stand."""
TEMPLATE_COLUMNS = (*LOST_COLUMNS, RENDERED)
"""Columns of an example that say what the chat template did with its record. They are counted, and not stored."""
NOTHING_LOST = dict.fromkeys(TEMPLATE_COLUMNS, 0)
"""TEMPLATE_COLUMNS of a record that no template has changed."""
RENDERED_COUNTS = {name: int(name == RENDERED) for name in TEMPLATE_COLUMNS}
"""TEMPLATE_COLUMNS of a record whose texts are taken as they stand."""
TEMPLATE_FIX = "name another template with model.chat_template"
_THOUGHT_KEYS = ("reasoning_content", "thinking")
_MAX_CACHED_CHECKS = 10_000
_MARK = re.compile("\ue010[^\ue011]*\ue011")
"""What `_mark` returns."""


@dataclass(frozen=True)
class TemplateCheck:
    """What a template does with conversations of one shape: the same roles, kinds of content and calls."""

    reason: str = ""
    """Why records of this shape cannot be used; empty: they can."""
    lost: frozenset[str] = frozenset()
    """The LOST_COLUMNS that are 1."""
    removed_turns: tuple[int, ...] = ()
    """Turns of tools whose rendering lies inside of a learnt span, and is cut out of it."""

    @property
    def counts(self) -> dict[str, int]:
        """The TEMPLATE_COLUMNS of an example."""
        return {name: int(name in self.lost) for name in TEMPLATE_COLUMNS}


_checks_by_shape: dict[Any, TemplateCheck] = {}


def check_template(
    tokenizer: Any, sample: Conversation, kind: str, locate: Locate, num_context: int | None = None
) -> TemplateCheck:
    """Return what the tokenizer's template does with conversations of this shape.

    Every text of the conversation is replaced by a mark of its own, which is then looked for in the rendered text and
    in its learnt spans; so a text that occurs twice is not taken for another one. One rendering serves all records of
    a shape. `kind`: name of `locate`, for the cache. `num_context`: turns at the start whose text must not be
    learnt; None: all turns that are not trained on.
    """
    key = (str(tokenizer.chat_template), kind, num_context, _shape(sample))
    if key not in _checks_by_shape:
        if len(_checks_by_shape) >= _MAX_CACHED_CHECKS:
            _checks_by_shape.clear()
        context = set(range(len(sample.messages))) - set(sample.trained_turns)
        if num_context is not None:
            context = set(range(num_context))
        _checks_by_shape[key] = _check_shape(sample, locate, context)
    return _checks_by_shape[key]


def _check_shape(sample: Conversation, locate: Locate, context: Collection[int]) -> TemplateCheck:
    marked = replace(sample, messages=[_mark_message(turn, one) for turn, one in enumerate(sample.messages)])
    marks = [sorted({*_MARK.findall("\n".join(iter_strings(message)))}) for message in marked.messages]
    try:
        text, spans = locate(marked)
    except BadRecord:
        return TemplateCheck()  # the record itself then has the same error, or was accepted for its content
    lost = frozenset(_find_dropped(marked, marks, text))
    removed: tuple[int, ...] = ()
    if leaked := _find_leaked_turns(marks, context, text, spans):
        removed = tuple(turn for turn in leaked if sample.messages[turn]["role"] == "tool")
        try:
            spans = remove_turns(locate, marked, text, spans, removed)
        except BadRecord as fault:
            return TemplateCheck(fault.reason)
        if leaked := _find_leaked_turns(marks, context, text, spans):
            role = sample.messages[leaked[0]]["role"]
            return TemplateCheck(
                f"the chat template writes text of the {role} (turn {leaked[0] + 1}) into the learnt text; {TEMPLATE_FIX}"
            )
    learnt = "".join(text[slice(*span)] for span in spans)
    for turn in sample.trained_turns:
        message = sample.messages[turn]
        needed = [mark for mark in marks[turn] if _part(mark) != "thought"]
        if missing := next((mark for mark in needed if mark not in learnt), None):
            what = "the answer" if _part(missing) == "content" else "the arguments of a tool call"
            if missing not in text and _part(missing) == "call":
                problem = f"does not write the tool calls of an assistant's turn (turn {turn + 1})"
            else:
                how = "drops" if missing not in text else "writes outside of the learnt text"
                problem = f"{how} {what} of turn {turn + 1}"
            return TemplateCheck(f"the chat template {problem}; {TEMPLATE_FIX}")
        if absent := next((name for name in _call_names(message) if name not in learnt), None):
            return TemplateCheck(
                f"the chat template does not write the tool calls of an assistant's turn (turn {turn + 1}: "
                f"'{absent}'); {TEMPLATE_FIX}"
            )
    return TemplateCheck(lost=lost, removed_turns=removed)


def _shape(sample: Conversation) -> Any:
    """Return what a template can tell of a conversation besides its texts."""
    return (
        tuple(
            (
                message["role"],
                bool(message["content"].strip()),
                message["content"].count(IMAGE_PLACEHOLDER),
                tuple(bool(get_message_field(message, key)) for key in _THOUGHT_KEYS),
                tuple(
                    (call["function"]["name"], _structure(call["function"].get("arguments")))
                    for call in get_message_field(message, "tool_calls") or ()
                ),
            )
            for message in sample.messages
        ),
        sample.trained_turns,
        tuple(tool["function"]["name"] for tool in sample.tools),
    )


def _call_names(message: Message) -> list[str]:
    return [call["function"]["name"] for call in get_message_field(message, "tool_calls") or ()]


def _structure(value: Any) -> Any:
    if isinstance(value, Mapping):
        return tuple((name, _structure(item)) for name, item in value.items())
    return tuple(map(_structure, value)) if isinstance(value, list) else type(value).__name__


def _mark(turn: int, part: str, number: int = 0) -> str:
    # Private-use characters, absent from data; no mark is a part of another.
    return f"\ue010{turn}{part}{number}\ue011"


def _part(mark: str) -> str:
    return re.sub(r"[^a-z]", "", mark)


def _mark_message(turn: int, message: Message) -> Message:
    marked: dict[str, Any] = dict(message)
    if message["content"].strip():
        marked["content"] = IMAGE_PLACEHOLDER * message["content"].count(IMAGE_PLACEHOLDER) + _mark(turn, "content")
    for key in _THOUGHT_KEYS:
        if isinstance(marked.get(key), str) and marked[key].strip():
            marked[key] = _mark(turn, "thought")
    numbers = iter(range(1_000_000))
    calls = [
        {**call, "function": {**call["function"], "arguments": _mark_leaves(call["function"].get("arguments"), turn, numbers)}}
        for call in marked.get("tool_calls") or ()
    ]  # fmt: skip
    return cast("Message", {**marked, **({"tool_calls": calls} if calls else {})})


def _mark_leaves(value: Any, turn: int, numbers: Iterator[int]) -> Any:
    if isinstance(value, Mapping):
        return {name: _mark_leaves(item, turn, numbers) for name, item in value.items()}
    if isinstance(value, list):
        return [_mark_leaves(item, turn, numbers) for item in value]
    return _mark(turn, "call", next(numbers))


def _find_dropped(marked: Conversation, marks: Sequence[Sequence[str]], text: str) -> Iterator[str]:
    """Yield the LOST_COLUMNS of texts that are not in the rendered text."""
    roles = {"system": "system_lost", "tool": "tools_lost"}
    columns = {"thought": "thoughts_lost", "call": "tools_lost"}
    for turn, (message, own) in enumerate(zip(marked.messages, marks, strict=True)):
        for mark in own:
            # A learnt call that is missing makes the record bad.
            if mark not in text and not (_part(mark) == "call" and turn in marked.trained_turns):
                yield columns.get(_part(mark)) or roles.get(message["role"], "turns_lost")
        if turn not in marked.trained_turns and any(name not in text for name in _call_names(message)):
            yield "tools_lost"
    if any(tool["function"]["name"] not in text for tool in marked.tools):
        yield "tools_lost"


def _find_leaked_turns(
    marks: Sequence[Sequence[str]], context: Collection[int], text: str, spans: Sequence[Span]
) -> list[int]:
    """Return the turns of the context whose text lies in a learnt span."""
    learnt = "".join(text[slice(*span)] for span in spans)
    return [turn for turn in sorted(context) if any(mark in learnt for mark in marks[turn])]


def remove_turns(
    locate: Locate, sample: Conversation, text: str, spans: Sequence[Span], turns: Sequence[int]
) -> list[Span]:
    """Return the spans without what the template writes for some turns, found by writing each of them twice.

    Raises BadRecord if that cannot be told from the rest.
    """
    remaining = list(spans)
    for turn in turns:
        # Written twice, its rendering stands twice in a row; without it, some templates write other text around it.
        repeated = [*sample.messages[: turn + 1], *sample.messages[turn:]]
        trained = tuple(at + (at > turn) for at in sample.trained_turns)
        start, end = _find_block(text, locate(replace(sample, messages=repeated, trained_turns=trained))[0])
        if sample.messages[turn]["content"].strip() not in text[start:end]:
            raise BadRecord(
                f"the chat template writes the result of a tool (turn {turn + 1}) inside of the learnt text, and it cannot "
                f"be told from the answer; {TEMPLATE_FIX}"
            )
        parts: list[Span] = []
        for first, last in remaining:
            parts += [(first, min(last, start)), (max(first, end), last)]
        remaining = [(first, last) for first, last in parts if first < last]
    return remaining


def _find_block(text: str, repeated: str) -> Span:
    """Return the block of `text` that `repeated` has twice in a row, from a tag or a line on; an empty one if none is."""
    size, start = len(repeated) - len(text), common_prefix_length([text, repeated])
    if size <= 0 or repeated[start + size :] != text[start:]:
        return 0, 0
    # The copies are equal, so the inserted part may begin at any character of the first one, and where equal characters
    # stand in front of it, before that.
    first = start
    while first and repeated[first - 1] == repeated[first - 1 + size]:
        first -= 1
    block = next((at for at in range(first, start + 1) if repeated[at] in "<[{\n"), first)
    return (block, block + size) if text[block : block + size] == repeated[block + size : block + 2 * size] else (0, 0)


def check_answers(sample: Conversation, learnt: str) -> dict[str, int]:
    """Return the LOST_COLUMNS of thoughts that are written inside of an answer and dropped by the template.

    Raises BadRecord for an answer that the learnt text does not hold, but for white space.
    """
    lost: dict[str, int] = {}
    for turn in sample.trained_turns:
        answer = sample.messages[turn]["content"].strip()
        if answer in learnt or _squeeze(answer) in _squeeze(learnt):
            continue
        if "</think>" not in answer or _squeeze(answer.rpartition("</think>")[2]) not in _squeeze(learnt):
            raise BadRecord(f"the chat template drops or changes the answer of turn {turn + 1}; {TEMPLATE_FIX}")
        if _squeeze(answer.partition("</think>")[0].rpartition("<think>")[2]) not in _squeeze(learnt):
            lost = {"thoughts_lost": 1}
    return lost


def _squeeze(text: str) -> str:
    return "".join(text.split())
