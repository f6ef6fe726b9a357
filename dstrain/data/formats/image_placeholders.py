"""Where the images of a record stand in its text: pure functions.

Inside, every image is one letter of its own, IMAGE, in the text of its message. Records write `<image>`, or `<image1>` where
they number them, or typed parts of a message's content; where they write nothing, the images come first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from dstrain.data.formats.conversations import Conversation, Passage
from dstrain.data.formats.messages import BadRecord, kind
from dstrain.data.formats.preferences import Preference, Response
from dstrain.data.formats.prompts import Asked
from dstrain.data.formats.transcripts import IMAGE, Message

_NUMBERED = 0xE100
"""The letter of image 0 among those that stand for one image of a record; image k has the k-th behind it."""
_MOST = 255
_MARK = re.compile(r"<image(\d{0,3})>")
_LETTER = re.compile(f"[{IMAGE}{chr(_NUMBERED)}-{chr(_NUMBERED + _MOST)}]")
KEYS = ("image", "images")
_IMAGE_PARTS = ("image", "image_url")

Read = TypeVar("Read", Conversation, Passage, Preference, Asked, Conversation | Passage)


@dataclass(frozen=True)
class Seen(Generic[Read]):
    """What a record says, and its images in the order in which their letters stand in the text."""

    said: Read
    """Its texts hold IMAGE where an image stands."""
    images: tuple[Any, ...] = ()
    """As the record has them: paths, or bytes in a mapping."""


def read_seen(record: Mapping[str, Any], read: Callable[[Mapping[str, Any]], Read]) -> Seen[Read]:
    """What `read` makes of the record's text, with its images. Raises BadRecord where images and marks do not fit."""
    images = _images(record)
    inline: list[Any] = []
    texts = {key: _marked(value, inline) for key, value in record.items() if key not in KEYS}
    if images and inline:
        raise BadRecord("images stand both in parts of messages and under 'images'; keep one of them")
    said = read(_captioned(texts))
    found = [letter for text in _asked(said) for letter in _LETTER.findall(text)]
    if any(_LETTER.search(text) for text in _answers(said)):
        raise BadRecord("an image is marked in an answer, and only what is asked can hold images; move the mark")
    images = images or inline
    if images and not found:
        said, found = _in_front(said, len(images)), [IMAGE] * len(images)
    order = _order(found, len(images))
    return Seen(_with_texts(said, lambda text: _LETTER.sub(IMAGE, text)), tuple(images[at] for at in order))


def has_images(record: Mapping[str, Any]) -> bool:
    """Whether the record names images, beside its text or within it."""
    turns = [
        turn for value in record.values() if isinstance(value, list) for turn in value if isinstance(turn, Mapping)
    ]
    contents = [content for turn in turns if isinstance(content := turn.get("content", turn.get("value")), list)]
    parts = [part for content in contents for part in content if isinstance(part, Mapping)]
    return bool(_images(record)) or any(part.get("type") in _IMAGE_PARTS for part in parts)


def null_image(record: Mapping[str, Any], key: str) -> bool:
    """Whether the record has null in the place of an image."""
    return key in record and record[key] is None


def _images(record: Mapping[str, Any]) -> list[Any]:
    if empty := [key for key in KEYS if record.get(key) == ""]:
        raise BadRecord(
            f"'{empty[0]}' is an empty path; write the path, or remove the key from a record without an image"
        )
    if all(record.get(key) not in (None, []) for key in KEYS):
        raise BadRecord("both 'image' and 'images' hold something; keep one of them")
    value: Any = next((record[key] for key in KEYS if record.get(key) not in (None, [])), [])
    return value if isinstance(value, list) else [value]


def _marked(value: Any, inline: list[Any]) -> Any:
    """The same with letters in the place of marks and of image parts; what these parts hold goes to `inline`."""
    if isinstance(value, str):
        return _MARK.sub(lambda found: _letter(int(found[1])) if found[1] else IMAGE, value)
    if isinstance(value, list):
        return [_marked(item, inline) for item in value]
    if isinstance(value, Mapping) and ("role" in value or "from" in value):
        return {key: _content(item, inline) if key in ("content", "value") else item for key, item in value.items()}
    return value


def _content(value: Any, inline: list[Any]) -> Any:
    """A message's content as one text, where it holds parts of text and images alone."""
    if not isinstance(value, list):
        return _marked(value, inline)
    return [
        {"type": "text", "text": _inline(part, inline)}
        if isinstance(part, Mapping) and part.get("type") in _IMAGE_PARTS
        else {**part, "text": _marked(part["text"], inline)}
        if isinstance(part, Mapping) and isinstance(part.get("text"), str)
        else part
        for part in value
    ]


def _inline(part: Mapping[str, Any], inline: list[Any]) -> str:
    held = next((part[key] for key in ("image", "image_url", "path", "url") if part.get(key) is not None), None)
    if isinstance(held, Mapping) and "url" in held:
        held = held["url"]
    if held is None:
        return IMAGE
    if held not in inline:
        inline.append(held)
    return _letter(inline.index(held) + 1)


def _letter(number: int) -> str:
    """Of image `number`, counted from 1."""
    return chr(_NUMBERED + min(number, _MOST))


def _captioned(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """An image with its caption as a question and its answer: nothing is asked but the image."""
    if record.get("caption") is None or record.get("messages") is not None or record.get("conversations") is not None:
        return record
    if not isinstance(record["caption"], str):
        raise BadRecord(f"'caption' is {kind(record['caption'])}, not text; write a string")
    asked = record.get("question") or record.get("prompt") or ""
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": record["caption"]}]
    return {"messages": turns} | ({"system": record["system"]} if record.get("system") else {})


def _order(found: list[str], count: int) -> list[int]:
    """Which image each letter stands for, by its place. Raises BadRecord where there are more or fewer."""
    numbers = [ord(letter) - _NUMBERED - 1 for letter in found if letter != IMAGE]
    if numbers and len(numbers) < len(found):
        raise BadRecord("some marks of images are numbered (<image1>) and some are not; write them alike")
    there = f"{count} image{'s' * (count != 1)}"
    if numbers:
        if wrong := [number + 1 for number in numbers if not 0 <= number < count]:
            raise BadRecord(f"<image{wrong[0]}> is marked, and there are {there}; name the image, or correct the mark")
        if missing := sorted(set(range(count)) - set(numbers)):
            raise BadRecord(
                f"image {missing[0] + 1} of {count} has no mark; write <image{missing[0] + 1}>, or remove it"
            )
        return numbers
    if len(found) != count:
        few = "more" if len(found) > count else "fewer"
        raise BadRecord(
            f"{len(found)} mark{'s' * (len(found) != 1)} (<image>) and {there}: {few} marks than images; "
            "write one mark for each image"
        )
    return [*range(count)]


def _asked(said: Any) -> list[str]:
    """The texts that may hold images."""
    if isinstance(said, Passage):
        return [said.prompt]
    if isinstance(said, Conversation):
        return [turn["content"] for turn in said.messages if turn["role"] != "assistant"]
    return [said.prompt] if isinstance(said.prompt, str) else [turn["content"] for turn in said.prompt]


def _answers(said: Any) -> list[str]:
    if isinstance(said, Passage):
        return [said.answer]
    if isinstance(said, Conversation):
        return [turn["content"] for turn in said.messages if turn["role"] == "assistant"]
    answers: list[Response] = [said.chosen, said.rejected] if isinstance(said, Preference) else []
    return [text for one in answers for text in ([one] if isinstance(one, str) else [turn["content"] for turn in one])]


def _in_front(said: Any, count: int) -> Any:
    """So many images before the first thing that a user says. Raises BadRecord where none says anything."""
    done = False

    def put(text: str) -> str:
        nonlocal done
        before, done = "" if done else IMAGE * count, True
        return before + ("\n" if before and text and not text.startswith("\n") else "") + text

    if isinstance(said, Passage) or isinstance(getattr(said, "prompt", None), str):
        return replace(said, prompt=put(said.prompt))
    changed = _with_messages(
        said, lambda turn: {**turn, "content": put(turn["content"])} if turn["role"] == "user" else turn
    )
    if not done:
        raise BadRecord("no user's turn is there for the images to stand in; write one")
    return changed


def _with_texts(said: Any, change: Callable[[str], str]) -> Any:
    """The same with every text that may hold images changed."""
    if isinstance(said, Passage) or isinstance(getattr(said, "prompt", None), str):
        return replace(said, prompt=change(said.prompt))
    return _with_messages(said, lambda turn: {**turn, "content": change(turn["content"])})


def _with_messages(said: Any, change: Callable[[Message], Any]) -> Any:
    name = "messages" if isinstance(said, Conversation) else "prompt"
    return replace(said, **{name: [change(turn) for turn in getattr(said, name)]})
