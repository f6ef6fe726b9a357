"""Messages, tools and images of a record, from its keys (OpenAI, ShareGPT, Alpaca) or an hh-rlhf transcript."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

from dstrain.errors import BadRecord
from dstrain.files import parse_json

ROLE_ALIASES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}
IMAGE_KEYS = ("image", "images")
SYSTEM_KEYS = ("system", "system_prompt", "system_message")
IMAGE_PART_TYPES = ("image", "image_url")
"""Types of the parts of a message's content that are images."""
MEDIA_PART_KEYS = ("image", "image_url", "video", "video_url", "audio", "audio_url", "input_audio")
"""Keys of a part that hold an image, a video or a sound; null in a text part of a table."""
MESSAGES_KEYS = ("messages", "conversations", "conversation", "texts")
"""Keys of a whole conversation: OpenAI's, ShareGPT's, ms-swift's, and that of The Cauldron and FineVision."""
TURN_PAIRS = (("human", "assistant"), ("user", "assistant"), ("input", "output"))
"""Keys of objects that hold a question and its answer: of ms-swift, The Cauldron and Capybara."""
_SPEAKER_PATTERN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_SPEAKER_TO_ROLE = {"Human": "user", "Assistant": "assistant"}
HUMAN_PREFIX = "\n\nHuman:"
"""Starts a user's turn in a transcript."""
IMAGE_PLACEHOLDER = "\ue002"
"""Represents an image in a text; a private-use character, absent from data."""


EXTRA_MESSAGE_KEYS = ("tool_calls", "tool_call_id", "name", "reasoning_content", "thinking")
"""Keys of a message besides role and content that chat templates know."""
TRAIN_FLAGS = ("weight", "loss", "loss_scale", "loss_weight", "train", "training", "trainable")
"""Keys that say whether a turn is trained on: of OpenAI, ms-swift, LLaMA-Factory and axolotl."""
TRAIN_DETAILS = ("train_detail", "training_detail")
"""Keys of axolotl for parts of a turn."""
TEXT_KEYS = ("text", "value")
"""Keys of a text part's text: OpenAI's and LLaMA-Factory's."""


class Message(TypedDict):
    """A turn of a conversation; `role` is system, user, assistant or tool."""

    role: str
    content: str
    weight: NotRequired[int]
    """0: the turn is not trained on."""


def read_messages(value: Any, key: str) -> list[Message]:
    """Return a list of messages in OpenAI's or ShareGPT's keys, with normalized roles, tool calls and other extras.

    An object of a question and its answer is two messages; texts alone are turns of user and assistant (LIMA). `key`:
    where the value is, for error messages. Raises BadRecord.
    """
    if not isinstance(value, list):
        raise BadRecord(
            f'\'{key}\' is {json_type_name(value)}, not a list of messages; write [{{"role", "content"}}, …]'
        )
    if key == "conversations" and all(isinstance(item, str) for item in value):
        return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(value)]
    messages: list[Message] = []
    for index, item in enumerate(value):
        if pair := get_turn_pair(item):
            messages += [
                {"role": role, "content": read_text(item[name], f"{key}[{index}].{name}")}
                for name, role in zip(pair, ("user", "assistant"), strict=True)
            ]
        else:
            messages.append(read_message(item, f"{key}[{index}]"))
    return messages


def get_turn_pair(value: Any) -> tuple[str, str] | None:
    """Return the two keys of an object that holds a question and its answer, and perhaps their `source`."""
    keys = value.keys() - {"source"} if isinstance(value, Mapping) else ()
    return next((pair for pair in TURN_PAIRS if keys == {*pair}), None)


def read_message(value: Any, key: str) -> Message:
    """Return a message of `role` and `content`, or of `from` and `value`, with the extras that it has.

    Raises BadRecord.
    """
    if not isinstance(value, Mapping):
        raise BadRecord(f'\'{key}\' is {json_type_name(value)}, not a message; write {{"role": …, "content": …}}')
    value = _normalize_calls(value, key)
    names = "from" if "from" in value and "role" not in value else "role", "value" if "value" in value else "content"
    for name in names:
        if name not in value:
            raise BadRecord(f"'{key}' has no '{name}'; write {{\"{names[0]}\": …, \"{names[1]}\": …}}")
    role, content = value[names[0]], value[names[1]]
    if not isinstance(role, str) or role.lower() not in ROLE_ALIASES:
        known = ", ".join(sorted(ROLE_ALIASES))
        raise BadRecord(f"'{key}.{names[0]}' is {role!r}, an unknown role; known roles: {known}")
    extras = {name: value[name] for name in EXTRA_MESSAGE_KEYS if value.get(name) is not None}
    if value.get("reasoning") is not None and "reasoning_content" not in extras:
        extras["reasoning_content"] = read_text(value["reasoning"], f"{key}.reasoning")
    if isinstance(content, list):
        thoughts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "reasoning"]
        if thoughts and len(thoughts) < len(content):
            content = [part for part in content if part not in thoughts]
            extras["reasoning_content"] = "".join(_part_text(part, f"{key}.{names[1]}") for part in thoughts)
    read = {"role": ROLE_ALIASES[role.lower()], "content": read_text(content, f"{key}.{names[1]}"), **extras}
    weight = _read_train_flag(value, read["role"], key)
    return cast("Message", read if weight is None else read | {"weight": weight})


def _normalize_calls(item: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return a message with its calls under `tool_calls`, in the form that templates read.

    Its content is empty if it has no other. Raises BadRecord.
    """
    # ShareGPT's and ms-swift's form: the calls are JSON in the turn's text.
    if item.get("from", item.get("role")) in ("function_call", "tool_call"):
        calls = maybe_parse_json(item.get("value", item.get("content")))
        others = {name: one for name, one in item.items() if name not in ("from", "value", "role", "content")}
        calls = calls if isinstance(calls, list) else [calls]
        item = {**others, "role": "assistant", "content": "", "tool_calls": calls}
    # OpenAI's older form: one call, beside a null content.
    if item.get("function_call") is not None:
        if item.get("tool_calls") is not None:
            raise BadRecord(f"'{key}' has both 'function_call' and 'tool_calls'; keep one of them")
        item = {**item, "tool_calls": [item["function_call"]], "function_call": None}
    if item.get("tool_calls") is None:
        return item
    if not isinstance(item["tool_calls"], list):
        raise BadRecord(f"'{key}.tool_calls' is not a list of calls; write [{{\"function\": {{…}}}}]")
    calls = [read_tool_function(call, key, "arguments") for call in item["tool_calls"]]
    name = "value" if "value" in item else "content"
    # An empty list, as libraries write it for a turn without calls, is none.
    return {**item, name: item.get(name) or "", "tool_calls": calls or None}


def _read_train_flag(message: Mapping[str, Any], role: str, key: str) -> int | None:
    """Return 1 or 0 where the message says whether it is trained on, else None. Raises BadRecord."""
    if detail := next((name for name in TRAIN_DETAILS if message.get(name)), None):
        raise BadRecord(f"'{key}.{detail}' trains on parts of a turn, which is not supported; split the turn")
    flags = {name: message[name] for name in TRAIN_FLAGS if message.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRecord(
                f"'{key}' has a turn with {name} {value!r:.40}; write 0 or false (not trained on), 1 or true (trained on)"
            )
        if value and role != "assistant" and not (name == "weight" or name.startswith("loss")):
            raise BadRecord(
                f"'{key}.{name}' asks to train on a turn of the {role}; only the assistant's are; remove it"
            )
    if len({bool(value) for value in flags.values()}) > 1:
        raise BadRecord(f"'{key}' has {' and '.join(flags)}, which contradict each other; keep one of them")
    return None if role != "assistant" or not flags else int(next(iter(flags.values())))


def read_text(content: Any, key: str) -> str:
    """Return a string, or the joined texts of a list of text parts. Raises BadRecord."""
    if isinstance(content, list) and content and all(isinstance(part, Mapping) and "type" in part for part in content):
        return "".join(_part_text(part, key) for part in content)
    if not isinstance(content, str):
        raise BadRecord(f"'{key}' is {json_type_name(content)}, not text; write a string")
    return content


def _part_text(part: Mapping[str, Any], key: str) -> str:
    """Return the text of a part. Raises BadRecord for other types, and for a flag that the whole turn needs."""
    if flag := next((name for name in (*TRAIN_FLAGS, *TRAIN_DETAILS) if part.get(name) not in (None, 1)), None):
        raise BadRecord(
            f"'{key}' has a part with {flag} {part[flag]!r:.40}, and a turn is trained on as a whole; split it"
        )
    text = next((part[name] for name in TEXT_KEYS if part.get(name) is not None), None)
    if isinstance(text, str) and (held := next((name for name in MEDIA_PART_KEYS if part.get(name)), None)):
        raise BadRecord(f"'{key}' has a part of type {part['type']!r:.40} with '{held}' too; write two parts")
    if part["type"] not in ("text", "reasoning") or not isinstance(text, str):
        what = f"of type {part['type']!r:.40}" if isinstance(text, str) or part["type"] != "text" else "without a text"
        raise BadRecord(f'\'{key}\' has a part {what}; write {{"type": "text", "text": …}}')
    return text


def _peek(record: Mapping[str, Any], key: str) -> Any:
    """Return a value, or None, of which a `dstrain.data.records.Record` does not note that it was read."""
    return dict.get(record, key) if isinstance(record, dict) else record.get(key)


def is_given(record: Mapping[str, Any], key: str) -> bool:
    """Return whether the record has a value other than null under a key."""
    return _peek(record, key) is not None


def read_system(record: Mapping[str, Any]) -> list[Message]:
    """Return the system text that ShareGPT and Alpaca store outside of the conversation.

    Raises BadRecord.
    """
    given = [key for key in SYSTEM_KEYS if is_given(record, key)]
    if not given:
        return []
    texts = {key: read_text(record[key], key) for key in given}
    if len({*texts.values()} - {""}) > 1:
        raise BadRecord(f"both '{given[0]}' and '{given[1]}' are set; keep one of them")
    text = next(filter(None, texts.values()), "")
    return [{"role": "system", "content": text}] if text else []


def prepend_system(messages: list[Message], record: Mapping[str, Any]) -> list[Message]:
    """Return the messages after the record's system text, which is not repeated where they begin with it."""
    system = read_system(record)
    first = messages[0] if messages and messages[0]["role"] == "system" else None
    repeats = system and first and first["content"].strip() == system[0]["content"].strip()
    return messages if repeats else system + messages


def read_history(record: Mapping[str, Any]) -> list[Message]:
    """Return the turns of `history`, a list of pairs of a question and its answer. Raises BadRecord."""
    history = record.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadRecord("'history' is not a list of pairs; write [[question, answer], …] or remove it")
    messages: list[Message] = []
    for turn, (question, answer) in enumerate(history):
        messages.append({"role": "user", "content": read_text(question, f"history[{turn}][0]")})
        messages.append({"role": "assistant", "content": read_text(answer, f"history[{turn}][1]")})
    return messages


def read_instruction(record: Mapping[str, Any]) -> list[Message]:
    """Return Alpaca's conversation without the answer: history, then instruction and input.

    Dolly's name of the input is `context`. Raises BadRecord.
    """
    given = {name: record.get(name) for name in ("instruction", "input")}
    if not given["input"] and isinstance(_peek(record, "context"), str):
        given = {"instruction": given["instruction"], "context": record["context"]}
    asked = "\n".join(read_text(value, name) for name, value in given.items() if value)
    if not asked.strip():
        raise BadRecord("'instruction' is empty; write one")
    return [*read_history(record), {"role": "user", "content": asked}]


def read_tools(record: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """Return the functions under `tools`, a list or a string of JSON. Raises BadRecord."""
    key = "tools"
    if is_given(record, "functions") and not is_given(record, "tools"):
        key = "functions"  # OpenAI's older name
    tools = maybe_parse_json(record[key] or []) if key in record else []
    if tools is not None and not isinstance(tools, list):
        raise BadRecord(
            f'\'{key}\' is not a list of functions; write [{{"name": …, "description": …, "parameters": …}}]'
        )
    return tuple(read_tool_function(tool, key, "parameters") for tool in tools or [])


CALL_KEYS = {"name", "id", "type", "index", "description", "strict"}
"""Keys of a call besides its arguments."""


def read_tool_function(value: Any, key: str, arguments_key: str) -> dict[str, Any]:
    """Return a function or a call as {"type": "function", "function": {"name", …}}.

    `arguments_key`: "parameters" or "arguments"; JSON in a string there is parsed. Raises BadRecord.
    """
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRecord(f'\'{key}\' names no function; write {{"name": …, "{arguments_key}": {{…}}}}')
    if arguments_key == "arguments" and function.get(arguments_key) is None:
        unknown = {name for name, value in function.items() if value is not None} - CALL_KEYS - {"parameters"}
        if unknown:
            raise BadRecord(
                f"'{key}' calls {function['name']!r:.60} with {min(unknown)!r}; write its values under 'arguments'"
            )
        # Llama 3.1 writes its calls so.
        function = {**function, arguments_key: function.get("parameters") or {}}
        function.pop("parameters", None)
    # Keep fields next to the function, such as the id of a call.
    outside = value if "function" in value else {}
    return {
        **outside,
        "type": "function",
        "function": {**function, arguments_key: maybe_parse_json(function.get(arguments_key, {}))},
    }


def read_images(record: Mapping[str, Any]) -> list[Any]:
    """Return the images under a key of the record: paths, or mappings with bytes. Raises BadRecord."""
    if not any(is_given(record, key) for key in IMAGE_KEYS):
        return []
    values = {key: record[key] for key in IMAGE_KEYS if key in record}
    for key, value in values.items():
        if value == "":
            raise BadRecord(
                f"'{key}' is an empty path; write the path, or remove the key from a record without an image"
            )
    given = [value for value in values.values() if not is_null_image(value)]
    if len(given) > 1:
        raise BadRecord("both 'image' and 'images' are set; keep one of them")
    if not given:
        return []
    return given[0] if isinstance(given[0], list) else given


def is_null_image(value: Any) -> bool:
    """Return whether a value is no image: null, pandas' NaN, a list of nulls, or an object of nulls as tables have it."""
    if isinstance(value, list | tuple):
        return all(is_null_image(item) for item in value)
    if isinstance(value, Mapping):
        return all(item is None for item in value.values())
    return value is None or (isinstance(value, float) and value != value)


def has_images(record: Mapping[str, Any]) -> bool:
    """Return whether the record names images, under a key or in parts of its messages."""
    values = [item for value in record.values() for item in (value if isinstance(value, list) else [value])]
    objects = [value for value in values if isinstance(value, Mapping)]
    # OpenAI's preferences have the prompt under input.messages.
    held = [turn for one in objects if isinstance(turns := one.get("messages"), list) for turn in turns]
    turns = [*objects, *(turn for turn in held if isinstance(turn, Mapping))]
    contents = [content for turn in turns if isinstance(content := turn.get("content", turn.get("value")), list)]
    parts = [part for content in contents for part in content if isinstance(part, Mapping)]
    return bool(read_images(record)) or any(part.get("type") in IMAGE_PART_TYPES for part in parts)


def maybe_parse_json(value: Any) -> Any:
    """Return the value of JSON in a string; anything else unchanged."""
    try:
        return parse_json(value) if isinstance(value, str) else value
    except ValueError:
        return value


def json_type_name(value: Any) -> str:
    """Return JSON's name of the value's type, with its article."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def iter_parts(*parts: str | Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the texts of parts of a record, each of which is a text or a list of messages."""
    for part in parts:
        if isinstance(part, str):
            yield part
        else:
            yield from (message["content"] for message in part)


class Turn(NamedTuple):
    """A turn of a transcript without loss: `prefix + text` is its exact source."""

    role: str
    prefix: str
    text: str

    def to_message(self) -> Message:
        """Return the turn without its prefix and the space after it."""
        return {"role": self.role, "content": self.text.removeprefix(" ")}


def is_transcript(text: str) -> bool:
    """Return whether both a Human and an Assistant speak in the text."""
    return {match[1] for match in _SPEAKER_PATTERN.finditer(text)} == set(_SPEAKER_TO_ROLE)


def parse_transcript(text: str) -> list[Turn]:
    """Return the turns of a transcript; joined, `prefix + text` of all turns is the text.

    A turn lasts until the speaker changes: a second "Assistant:" in a row belongs to the same turn,
    because chat templates reject two turns of one role, and hh-rlhf has them. Text before the first
    speaker is a system turn.
    """
    marks = list(_SPEAKER_PATTERN.finditer(text))
    head = text[: marks[0].start()] if marks else text
    turns = [Turn("system", "", head)] if head else []
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    for mark, end in zip(marks, ends, strict=False):
        body = text[mark.end() : end]
        role = _SPEAKER_TO_ROLE[mark[1]]
        if turns and turns[-1].role == role:
            # Keep the repeated speaker mark, so that the joined text stays the same.
            turns[-1] = turns[-1]._replace(text=turns[-1].text + mark[0] + body)
        else:
            turns.append(Turn(role, mark[0], body))
    return turns


def parse_prompt_transcript(text: str) -> list[Message] | None:
    """Return the messages of a transcript that ends with an empty "Assistant:"; None for other texts."""
    turns = parse_transcript(text)
    if not is_transcript(text) or turns[-1].role != "assistant" or turns[-1].text.strip():
        return None
    return turns_to_messages(turns[:-1])


def turns_to_messages(turns: Iterable[Turn]) -> list[Message]:
    """Return the turns as messages, without a blank system turn."""
    return [turn.to_message() for turn in turns if turn.role != "system" or turn.text.strip()]


def common_prefix_length(sequences: Sequence[Any]) -> int:
    """Return how many characters, or ids, all sequences have in common at the start."""
    # All sequences share a prefix where the smallest and the largest in sort order do.
    low, high = min(sequences), max(sequences)
    return next((at for at, one in enumerate(low) if high[at] != one), len(low))


def common_proper_prefix_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return how many items both have in common at the start, at least one less than either has."""
    most = max(min(len(left), len(right)) - 1, 0)
    for index in range(most):
        if left[index] != right[index]:
            return index
    return most


def common_word_prefix_length(left: str, right: str) -> int:
    """Return the length of the common start that does not end inside a word; neither text is used up.

    A space before the cut belongs to the text after it, as byte-level tokenizers write it; a line
    break belongs to the text before it.
    """
    cut = common_proper_prefix_length(left, right)
    while cut and (_is_inside_word(left, cut) or _is_inside_word(right, cut)):
        cut -= 1
    return cut - 1 if cut and left[cut - 1] == " " else cut


def _is_inside_word(text: str, index: int) -> bool:
    return _is_word_char(text[index - 1]) and _is_word_char(text[index])


def _is_word_char(char: str) -> bool:
    """Return whether it is a letter, mark or digit of a script that separates words by spaces."""
    return unicodedata.category(char)[0] in "LNM" and ord(char) < 0x2E80  # the CJK blocks start there
