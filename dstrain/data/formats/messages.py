"""Messages as records hold them, under OpenAI's names and sharegpt's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dstrain.data.formats.transcripts import Message
from dstrain.data.records import BadRecord

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
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "ipython": "tool",
}


def read_messages(value: Any, key: str) -> list[Message]:
    """Messages with role and content, or from and value, under the roles' common names. Raises BadRecord."""
    if not isinstance(value, list):
        raise BadRecord(
            f'\'{key}\' is {json_type_name(value)}, not a list of messages; write [{{"role", "content"}}, …]'
        )
    return [read_message(item, f"{key}[{index}]") for index, item in enumerate(value)]


def read_message(value: Any, key: str) -> Message:
    """One message with role and content, or from and value. Raises BadRecord."""
    if not isinstance(value, Mapping):
        raise BadRecord(f'\'{key}\' is {json_type_name(value)}, not a message; write {{"role": …, "content": …}}')
    names = ("from", "value") if "from" in value else ("role", "content")
    for name in names:
        if name not in value:
            raise BadRecord(f"'{key}' has no '{name}'; write {{\"{names[0]}\": …, \"{names[1]}\": …}}")
    role, content = value[names[0]], value[names[1]]
    if not isinstance(role, str) or role.lower() not in ROLE_ALIASES:
        raise BadRecord(f"'{key}.{names[0]}' is {role!r}, no known role; known here: {', '.join(sorted(ROLE_ALIASES))}")
    return {"role": ROLE_ALIASES[role.lower()], "content": read_text(content, f"{key}.{names[1]}")}


def read_text(content: Any, key: str) -> str:
    """A string, or typed parts of which all are text. Raises BadRecord."""
    if (
        isinstance(content, list)
        and content
        and all(
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
            for part in content
        )
    ):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise BadRecord(f"'{key}' is {json_type_name(content)}, not text; write a string")
    return content


def read_system(record: Mapping[str, Any]) -> list[Message]:
    """The system text that sharegpt and alpaca keep beside the dialog. Raises BadRecord."""
    text = record.get("system")
    return [{"role": "system", "content": read_text(text, "system")}] if text else []


def read_instruction(record: Mapping[str, Any]) -> list[Message]:
    """Alpaca's dialog up to the answer: a history of pairs, then the instruction with the input below it.

    Raises BadRecord.
    """
    history = record.get("history") or []
    if not isinstance(history, list) or any(not isinstance(pair, list) or len(pair) != 2 for pair in history):
        raise BadRecord("'history' is no list of pairs; write [[question, answer], …] or remove it")
    messages: list[Message] = []
    for turn, (question, answer) in enumerate(history):
        messages.append({"role": "user", "content": read_text(question, f"history[{turn}][0]")})
        messages.append({"role": "assistant", "content": read_text(answer, f"history[{turn}][1]")})
    asked = "\n".join(read_text(record[key], key) for key in ("instruction", "input") if record.get(key))
    if not asked.strip():
        raise BadRecord("'instruction' is empty; write one")
    return [*messages, {"role": "user", "content": asked}]


def read_tools(record: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The functions under `tools`, as a list or as JSON in a string. Raises BadRecord."""
    tools = maybe_parse_json(record.get("tools") or [])
    if tools is not None and not isinstance(tools, list):
        raise BadRecord('\'tools\' is no list of functions; write [{"name": …, "description": …, "parameters": …}]')
    return tuple(read_tool_function(tool, "tools", "parameters") for tool in tools or [])


def read_tool_function(value: Any, key: str, arguments_key: str) -> dict[str, Any]:
    """{"type": "function", "function": {"name", …}} of a function or a call; what is JSON in a string is read."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise BadRecord(f'\'{key}\' names no function; write {{"name": …, "{arguments_key}": {{…}}}}')
    outside = value if "function" in value else {}
    return {
        **outside,
        "type": "function",
        "function": {**function, arguments_key: maybe_parse_json(function.get(arguments_key, {}))},
    }


def maybe_parse_json(value: Any) -> Any:
    """JSON in a string as what it says; anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


def json_type_name(value: Any) -> str:
    """What JSON calls the value, with its article."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)
