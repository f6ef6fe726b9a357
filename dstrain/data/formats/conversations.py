"""From a record, in any form it is published in, to a conversation and what of it is learnt: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from dstrain.data.formats.messages import (
    maybe_parse_json,
    read_instruction,
    read_messages,
    read_system,
    read_text,
    read_tool_function,
    read_tools,
)
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.transcripts import (
    Message,
    is_transcript,
    parse_prompt_transcript,
    parse_transcript,
    turns_to_messages,
)
from dstrain.data.records import BadRecord

EXTRA_MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking", "weight")
"""Keys of a message that chat templates know beside role and content; a weight of 0: the turn is not learnt."""
MEDIA_KEYS = ("image", "images", "video", "videos", "audio", "audios")


@dataclass(frozen=True)
class Conversation:
    """A dialog, some turns of which are learnt."""

    messages: list[Message]
    trained_turns: tuple[int, ...]
    """Places of the assistant's messages that are learnt, in order; at least one."""
    tools: tuple[dict[str, Any], ...] = ()
    """The functions that the assistant may call, for the chat template."""


@dataclass(frozen=True)
class PromptCompletion:
    """A text that is learnt as it stands, behind another that is not."""

    prompt: str
    """Empty: all is learnt."""
    answer: str

    def to_conversation(self) -> Conversation:
        """The same as a question and its answer; the space between them belongs to neither."""
        answer = self.answer.removeprefix(" ")
        return Conversation([_make_message("user", self.prompt), _make_message("assistant", answer)], (1,))


Sample = Conversation | PromptCompletion


def get_message_field(message: Message, name: str) -> Any:
    """What a message says beside its role and content; None where it says nothing."""
    return cast("dict[str, Any]", message).get(name)


def read_conversation(record: Mapping[str, Any]) -> Sample:
    """What a record of any known form teaches. Raises BadRecord."""
    _reject_media(record)
    if unwanted := next((key for key in ("label", "kto_tag") if record.get(key) is False), None):
        raise BadRecord(
            f"'{unwanted}' is false: nobody wanted this answer; remove the record, or learn both with task kto"
        )
    pair = record.get("chosen") is not None or record.get("rejected") is not None
    if pair or isinstance(record.get("output"), list):
        return _from_preference(record)
    for keys, read in FORMAT_READERS.items():
        if all(record.get(key) is not None for key in keys):
            return read(record)
    nulls = [key for first, *rest in FORMAT_READERS for key in (first, *rest) if key in record and record[key] is None]
    if nulls and not any(record.get(first) is not None for first, *_ in FORMAT_READERS):
        raise BadRecord(f"'{nulls[0]}' is null; write it, or remove the record")
    halves = [(first, second) for first, *rest in FORMAT_READERS for second in rest if record.get(first) is not None]
    lacks = f"'{halves[0][0]}' has no '{halves[0][1]}' beside it" if halves else f"the keys are {', '.join(record)}"
    raise BadRecord(f"no conversation: {lacks}; write 'messages', or rename columns with data.columns")


def _from_preference(record: Mapping[str, Any]) -> Sample:
    """The chosen answer is learnt; turns of the assistant in its prompt are not."""
    found = read_preference(record)
    if isinstance(found.prompt, str):
        assert isinstance(found.chosen, str), "messages answer messages"
        return PromptCompletion(found.prompt, found.chosen)
    answer = [_make_message("assistant", found.chosen)] if isinstance(found.chosen, str) else found.chosen
    return _make_conversation([*found.prompt, *answer], "chosen", len(found.prompt), found.tools)


def _messages_reader(key: str) -> Callable[[Mapping[str, Any]], Sample]:
    def read(record: Mapping[str, Any]) -> Conversation:
        return _make_conversation(
            read_system(record) + _read_messages_with_extras(record[key], key), key, tools=read_tools(record)
        )

    return read


def _completion_reader(key: str) -> Callable[[Mapping[str, Any]], Sample]:
    """Two texts, the second going on where the first ends, or two lists of messages; the second is learnt."""

    def read(record: Mapping[str, Any]) -> Sample:
        prompt, answer = record["prompt"], record[key]
        if isinstance(prompt, str) and not prompt.strip():
            raise BadRecord("'prompt' is empty; write one, or call the answer 'text' to learn it alone")
        beside_them = record.get("system") or record.get("tools")  # which only messages have room for
        if isinstance(prompt, str) and isinstance(answer, str) and not beside_them:
            _check_not_empty(answer, f"'{key}'")
            dialog = parse_prompt_transcript(prompt)
            if dialog is None:
                return PromptCompletion(prompt, answer)
            return _make_conversation([*dialog, _make_message("assistant", answer.removeprefix(" "))], key, len(dialog))
        asked = (
            [_make_message("user", prompt)] if isinstance(prompt, str) else _read_messages_with_extras(prompt, "prompt")
        )
        said = (
            [_make_message("assistant", answer)] if isinstance(answer, str) else _read_messages_with_extras(answer, key)
        )
        before = read_system(record) + asked
        return _make_conversation(before + said, key, len(before), read_tools(record))

    return read


def _from_instruction(record: Mapping[str, Any]) -> Sample:
    answer = _make_message("assistant", read_text(record["output"], "output"))
    return _make_conversation(
        [*read_system(record), *read_instruction(record), answer], "output", tools=read_tools(record)
    )


def _from_question(record: Mapping[str, Any]) -> Sample:
    turns = [
        _make_message("user", read_text(record["question"], "question")),
        _make_message("assistant", read_text(record["answer"], "answer")),
    ]
    return _make_conversation(read_system(record) + turns, "answer", tools=read_tools(record))


def _from_text(record: Mapping[str, Any]) -> Sample:
    """A dialog's text, of which the assistant's turns are learnt, or any other, of which all is."""
    text = read_text(record["text"], "text")
    _check_not_empty(text, "'text'")
    return (
        _make_conversation(turns_to_messages(parse_transcript(text)), "text")
        if is_transcript(text)
        else PromptCompletion("", text)
    )


FORMAT_READERS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], Sample]] = {
    ("messages",): _messages_reader("messages"),
    ("conversations",): _messages_reader("conversations"),
    ("prompt", "completion"): _completion_reader("completion"),
    ("prompt", "response"): _completion_reader("response"),
    ("instruction", "output"): _from_instruction,
    ("question", "answer"): _from_question,
    ("text",): _from_text,
}
"""The keys a form is known by -> how it is read; the first that fits is taken."""


def _make_conversation(
    messages: list[Message], key: str, first_trained: int = 0, tools: tuple[dict[str, Any], ...] = ()
) -> Conversation:
    """Learnt are the assistant's turns from `first` on. Raises BadRecord where there is none, or one says nothing."""
    spoken = [at for at, message in enumerate(messages) if at >= first_trained and message["role"] == "assistant"]
    learnt = tuple(at for at in spoken if _is_trained(messages[at], key))
    if not learnt:
        raise BadRecord(f"'{key}' has no turn of the assistant to learn from; write one or remove the record")
    for at in learnt:
        if not get_message_field(messages[at], "tool_calls"):
            _check_not_empty(messages[at]["content"], f"'{key}' (turn {at + 1} of the dialog)")
    return Conversation(messages, learnt, tools)


def _is_trained(message: Message, key: str) -> bool:
    weight = get_message_field(message, "weight")
    if weight not in (None, 0, 1):
        raise BadRecord(f"'{key}' has a turn with weight {weight!r}; write 0 (not learnt) or 1 (learnt)")
    return weight != 0


def _check_not_empty(text: str, label: str) -> None:
    if not text.strip():
        raise BadRecord(f"{label} is an empty answer; write one or remove the record")


def _make_message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _read_messages_with_extras(value: Any, key: str) -> list[Message]:
    """Messages, with their calls of functions and what else stands beside. Raises BadRecord."""
    raw = (
        [_normalize_tool_calls(item, f"{key}[{at}]") for at, item in enumerate(value)]
        if isinstance(value, list)
        else value
    )
    messages = read_messages(raw, key)
    return [
        cast("Message", {**message, **{name: item[name] for name in EXTRA_MESSAGE_KEYS if item.get(name) is not None}})
        for message, item in zip(messages, raw, strict=True)
    ]


def _normalize_tool_calls(item: Any, key: str) -> Any:
    """A message whose calls stand in `tool_calls` as templates take them, its content empty where there is no other."""
    if not isinstance(item, Mapping):
        return item
    if item.get("from") == "function_call":
        calls = maybe_parse_json(item.get("value"))
        item = {"role": "assistant", "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}
    if item.get("tool_calls") is None:
        return item
    if not isinstance(item["tool_calls"], list):
        raise BadRecord(f"'{key}.tool_calls' is no list of calls; write [{{\"function\": {{…}}}}]")
    calls = [read_tool_function(call, key, "arguments") for call in item["tool_calls"]]
    return {**item, "content": item.get("content") or "", "tool_calls": calls}


def _reject_media(record: Mapping[str, Any]) -> None:
    turns = [turn for key in ("messages", "conversations", "prompt") if isinstance(turn := record.get(key), list)]
    parts = [message.get("content") for turn in turns for message in turn if isinstance(message, Mapping)]
    typed = [part for content in parts if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    found = [key for key in MEDIA_KEYS if record.get(key)]
    found += [str(part["type"]) for part in typed if part.get("type") not in (None, "text")]
    if found and found[0].startswith("image"):
        raise BadRecord(
            f"'{found[0]}' is no text, and text is all that sft learns from; learn from images with task vlm"
        )
    if found:
        raise BadRecord(
            f"'{found[0]}' is neither text nor an image, and nothing else is learnt from; remove the record"
        )
