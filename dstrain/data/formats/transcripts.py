r"""Dialogs as text, hh-rlhf's "\n\nHuman: … \n\nAssistant: …", and as lists of messages."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypedDict

_SPEAKER_PATTERN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_TO_ROLE = {"Human": "user", "Assistant": "assistant"}
_ROLE_TO_SPEAKER = {"user": "Human", "assistant": "Assistant", "tool": "Tool"}
HUMAN_PREFIX = "\n\nHuman:"
"""Begins a user's turn of a dialog's text."""
IMAGE_PLACEHOLDER = "\ue002"
"""Stands for an image in a text; a letter for private use, which no data has."""


class Message(TypedDict):
    """One turn; `role` is system, user, assistant or tool."""

    role: str
    content: str


class Turn(NamedTuple):
    """One turn of a dialog's text, nothing left out: `mark + text` is what stands in the file."""

    role: str
    prefix: str
    text: str

    def to_message(self) -> Message:
        """Without the mark and the one space after it."""
        return {"role": self.role, "content": self.text.removeprefix(" ")}


def is_transcript(text: str) -> bool:
    """True where a Human and an Assistant both speak."""
    return {match[1] for match in _SPEAKER_PATTERN.finditer(text)} == set(_SPEAKER_TO_ROLE)


def parse_transcript(text: str) -> list[Turn]:
    """The turns of a dialog; `render_dialog` gives the text back exactly.

    A turn lasts until the speaker changes: a second "Assistant:" after an Assistant belongs to the same turn,
    for chat templates refuse two in a row, and hh-rlhf has them. Text before the first mark is a system turn.
    """
    marks = list(_SPEAKER_PATTERN.finditer(text))
    head = text[: marks[0].start()] if marks else text
    turns = [Turn("system", "", head)] if head else []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=False):
        body = text[mark.end() : end]
        role = _SPEAKER_TO_ROLE[mark[1]]
        if turns and turns[-1].role == role:
            turns[-1] = turns[-1]._replace(text=turns[-1].text + mark[0] + body)
        else:
            turns.append(Turn(role, mark[0], body))
    return turns


def parse_prompt_transcript(text: str) -> list[Message] | None:
    """The messages of a dialog that ends with "Assistant:", where an answer is to follow; None for any other text."""
    turns = parse_transcript(text)
    if not is_transcript(text) or turns[-1].role != "assistant" or turns[-1].text.strip():
        return None
    return turns_to_messages(turns[:-1])


def render_transcript(turns: Iterable[Turn]) -> str:
    """The text that was parsed."""
    return "".join(turn.prefix + turn.text for turn in turns)


def turns_to_messages(turns: Iterable[Turn]) -> list[Message]:
    """The turns as messages; a blank head says nothing and is left out."""
    return [turn.to_message() for turn in turns if turn.role != "system" or turn.text.strip()]


def messages_to_transcript(messages: Iterable[Message]) -> str:
    """Messages as hh-rlhf writes dialogs, system text in front."""
    text = ""
    for message in messages:
        if message["role"] == "system":
            text += f"\n\n{message['content']}" if text else message["content"]
        else:
            text += f"\n\n{_ROLE_TO_SPEAKER[message['role']]}: {message['content']}"
    return text


def to_content_parts(message: Message) -> dict[str, Any]:
    """The message as templates of models that see take it: texts and images apart, without the line break between them."""
    texts = message["content"].split(IMAGE_PLACEHOLDER)
    parts: list[dict[str, str]] = []
    for at, text in enumerate(texts):
        text = text.removeprefix("\n") if at else text
        text = text.removesuffix("\n") if at < len(texts) - 1 else text
        parts += [{"type": "text", "text": text}] if text or len(texts) == 1 else []
        parts += [{"type": "image"}] if at < len(texts) - 1 else []
    return {**message, "content": parts}


def common_proper_prefix_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """How many items the two have in common at the beginning, leaving each at least one of its own."""
    most = max(min(len(left), len(right)) - 1, 0)
    for index in range(most):
        if left[index] != right[index]:
            return index
    return most


def common_word_prefix_length(left: str, right: str) -> int:
    """The length of the common beginning, not ending inside a word and leaving each text something.

    A space before the cut goes with what follows, as byte-level tokenizers write it; a line break stays in front.
    """
    cut = common_proper_prefix_length(left, right)
    while cut and (_is_inside_word(left, cut) or _is_inside_word(right, cut)):
        cut -= 1
    return cut - 1 if cut and left[cut - 1] == " " else cut


def _is_inside_word(text: str, index: int) -> bool:
    return _is_word_char(text[index - 1]) and _is_word_char(text[index])


def _is_word_char(char: str) -> bool:
    """True for the letters of scripts that put spaces between words; 0x2E80 is where the CJK blocks begin."""
    return unicodedata.category(char)[0] in "LNM" and ord(char) < 0x2E80
