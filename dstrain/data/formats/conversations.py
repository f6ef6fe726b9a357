"""From a record, in any form it is published in, to a conversation and what of it is learnt: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dstrain.data.formats.messages import (
    BadRecord,
    decode_json,
    read_function,
    read_instruction,
    read_messages,
    read_system,
    read_text,
    read_tools,
)
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.transcripts import Message, as_messages, is_dialog, open_dialog, parse_dialog

BESIDE = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "weight")
"""Keys of a message that chat templates know beside role and content; a weight of 0: the turn is not learnt."""
OTHER_MEDIA = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Conversation:
    """A dialog, some turns of which are learnt."""

    messages: list[Message]
    learnt: tuple[int, ...]
    """Places of the assistant's messages that are learnt, in order; at least one."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, for the chat template."""


@dataclass(frozen=True)
class Passage:
    """A text that is learnt as it stands, behind another that is not."""

    prompt: str
    """Empty: all is learnt."""
    answer: str

    def as_conversation(self) -> Conversation:
        """The same as a question and its answer; the space between them belongs to neither."""
        answer = self.answer.removeprefix(" ")
        return Conversation([_turn("user", self.prompt), _turn("assistant", answer)], (1,))


Sample = Conversation | Passage


def beside(message: Message, name: str) -> Any:
    """What a message says beside its role and content; None where it says nothing."""
    return cast("dict[str, Any]", message).get(name)


def read_conversation(record: Mapping[str, Any]) -> Sample:
    """What a record of any known form teaches. Raises BadRecord."""
    _refuse_other_media(record)
    if unwanted := next((key for key in ("label", "kto_tag") if record.get(key) is False), None):
        raise BadRecord(
            f"'{unwanted}' is false: nobody wanted this answer; remove the record, or learn both with task kto"
        )
    pair = record.get("chosen") is not None or record.get("rejected") is not None
    if pair or isinstance(record.get("output"), list):
        return _of_preference(record)
    for keys, read in FORMS.items():
        if all(record.get(key) is not None for key in keys):
            return read(record)
    nulls = [key for first, *rest in FORMS for key in (first, *rest) if key in record and record[key] is None]
    if nulls and not any(record.get(first) is not None for first, *_ in FORMS):
        raise BadRecord(f"'{nulls[0]}' is null; write it, or remove the record")
    halves = [(first, second) for first, *rest in FORMS for second in rest if record.get(first) is not None]
    lacks = f"'{halves[0][0]}' has no '{halves[0][1]}' beside it" if halves else f"the keys are {', '.join(record)}"
    raise BadRecord(f"no conversation: {lacks}; write 'messages', or rename columns with data.columns")


def _of_preference(record: Mapping[str, Any]) -> Sample:
    """The chosen answer is learnt; turns of the assistant in its prompt are not."""
    found = read_preference(record)
    if isinstance(found.prompt, str):
        assert isinstance(found.chosen, str), "messages answer messages"
        return Passage(found.prompt, found.chosen)
    answer = [_turn("assistant", found.chosen)] if isinstance(found.chosen, str) else found.chosen
    return _conversation([*found.prompt, *answer], "chosen", len(found.prompt), found.tools)


def _of_messages(key: str) -> Callable[[Mapping[str, Any]], Sample]:
    def read(record: Mapping[str, Any]) -> Conversation:
        return _conversation(read_system(record) + _read_turns(record[key], key), key, tools=read_tools(record))

    return read


def _of_completion(key: str) -> Callable[[Mapping[str, Any]], Sample]:
    """Two texts, the second going on where the first ends, or two lists of messages; the second is learnt."""

    def read(record: Mapping[str, Any]) -> Sample:
        prompt, answer = record["prompt"], record[key]
        if isinstance(prompt, str) and not prompt.strip():
            raise BadRecord("'prompt' is empty; write one, or call the answer 'text' to learn it alone")
        beside_them = record.get("system") or record.get("tools")  # which only messages have room for
        if isinstance(prompt, str) and isinstance(answer, str) and not beside_them:
            _check_said(answer, f"'{key}'")
            dialog = open_dialog(prompt)
            if dialog is None:
                return Passage(prompt, answer)
            return _conversation([*dialog, _turn("assistant", answer.removeprefix(" "))], key, len(dialog))
        asked = [_turn("user", prompt)] if isinstance(prompt, str) else _read_turns(prompt, "prompt")
        said = [_turn("assistant", answer)] if isinstance(answer, str) else _read_turns(answer, key)
        before = read_system(record) + asked
        return _conversation(before + said, key, len(before), read_tools(record))

    return read


def _of_instruction(record: Mapping[str, Any]) -> Sample:
    answer = _turn("assistant", read_text(record["output"], "output"))
    return _conversation([*read_system(record), *read_instruction(record), answer], "output", tools=read_tools(record))


def _of_question(record: Mapping[str, Any]) -> Sample:
    turns = [
        _turn("user", read_text(record["question"], "question")),
        _turn("assistant", read_text(record["answer"], "answer")),
    ]
    return _conversation(read_system(record) + turns, "answer", tools=read_tools(record))


def _of_text(record: Mapping[str, Any]) -> Sample:
    """A dialog's text, of which the assistant's turns are learnt, or any other, of which all is."""
    text = read_text(record["text"], "text")
    _check_said(text, "'text'")
    return _conversation(as_messages(parse_dialog(text)), "text") if is_dialog(text) else Passage("", text)


FORMS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Sample]] = {
    ("messages",): _of_messages("messages"),
    ("conversations",): _of_messages("conversations"),
    ("prompt", "completion"): _of_completion("completion"),
    ("prompt", "response"): _of_completion("response"),
    ("instruction", "output"): _of_instruction,
    ("question", "answer"): _of_question,
    ("text",): _of_text,
}
"""The keys a form is known by -> how it is read; the first that fits is taken."""


def _conversation(
    messages: list[Message], key: str, first: int = 0, tools: tuple[dict[str, Any], ...] = ()
) -> Conversation:
    """Learnt are the assistant's turns from `first` on. Raises BadRecord where there is none, or one says nothing."""
    spoken = [at for at, message in enumerate(messages) if at >= first and message["role"] == "assistant"]
    learnt = tuple(at for at in spoken if _weight(messages[at], key))
    if not learnt:
        raise BadRecord(f"'{key}' has no turn of the assistant to learn from; write one or remove the record")
    for at in learnt:
        if not beside(messages[at], "tool_calls"):
            _check_said(messages[at]["content"], f"'{key}' (turn {at + 1} of the dialog)")
    return Conversation(messages, learnt, tools)


def _weight(message: Message, key: str) -> bool:
    weight = beside(message, "weight")
    if weight not in (None, 0, 1):
        raise BadRecord(f"'{key}' has a turn with weight {weight!r}; write 0 (not learnt) or 1 (learnt)")
    return weight != 0


def _check_said(text: str, where: str) -> None:
    if not text.strip():
        raise BadRecord(f"{where} is an empty answer; write one or remove the record")


def _turn(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read_turns(value: Any, key: str) -> list[Message]:
    """Messages, with their calls of functions and what else stands beside. Raises BadRecord."""
    raw = [_with_calls(item, f"{key}[{at}]") for at, item in enumerate(value)] if isinstance(value, list) else value
    messages = read_messages(raw, key)
    return [
        cast("Message", {**message, **{name: item[name] for name in BESIDE if item.get(name) is not None}})
        for message, item in zip(messages, raw, strict=True)
    ]


def _with_calls(item: Any, key: str) -> Any:
    """A message whose calls stand in `tool_calls` as templates take them, its content empty where there is no other."""
    if not isinstance(item, Mapping):
        return item
    if item.get("from") == "function_call":
        calls = decode_json(item.get("value"))
        item = {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if item.get("tool_calls") is None:
        return item
    if not isinstance(item["tool_calls"], list):
        raise BadRecord(f"'{key}.tool_calls' is no list of calls; write [{{\"function\": {{…}}}}]")
    calls = [read_function(call, key, "arguments") for call in item["tool_calls"]]
    return {**item, "content": item.get("content") or "", "tool_calls": calls}


def _refuse_other_media(record: Mapping[str, Any]) -> None:
    turns = [turn for key in ("messages", "conversations", "prompt") if isinstance(turn := record.get(key), list)]
    parts = [message.get("content") for turn in turns for message in turn if isinstance(message, Mapping)]
    typed = [part for content in parts if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    found = [key for key in OTHER_MEDIA if record.get(key)]
    found += [str(part["type"]) for part in typed if part.get("type") not in (None, "text")]
    if found and found[0].startswith("image"):
        raise BadRecord(
            f"'{found[0]}' is no text, and text is all that sft learns from; learn from images with task vlm"
        )
    if found:
        raise BadRecord(
            f"'{found[0]}' is neither text nor an image, and nothing else is learnt from; remove the record"
        )
