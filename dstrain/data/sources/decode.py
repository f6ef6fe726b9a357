"""Bytes to records: what a line of JSON must be."""

from __future__ import annotations

import json
import re
from typing import Any

from dstrain.errors import describe_decode_error

BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_UTF16_PREFIXES = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0[")
"""How a file begins that is UTF-16, with a byte order mark or without."""


def is_blank(line: bytes) -> bool:
    return not line.removeprefix(BOM).strip()


def has_surrogate_escape(text: str) -> bool:
    """True where an escape writes half a character; most often the other half follows."""
    return bool(_SURROGATE_ESCAPE.search(text))


def is_utf16(head: bytes) -> bool:
    """Whether a file that begins so writes each letter in two bytes or more."""
    return head.startswith(_UTF16_PREFIXES)


def decode_text(content: bytes) -> str:
    """The text of a file. Raises ValueError with what is said of another encoding."""
    if is_utf16(content[:2]):
        raise ValueError("is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ValueError(f"is {describe_decode_error(content, fault)}") from fault


def decode_record(line: bytes) -> dict[str, Any]:
    """One line as a JSON object. Raises ValueError with the reason."""
    try:
        text = line.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not valid UTF-8 (byte {fault.start + 1} of the line); re-save the file as UTF-8") from fault
    try:
        value = parse_json(text)
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"not valid JSON: {fault}; fix the line or remove it") from fault
    return check_record(value, has_surrogate_escape(text))


class DuplicateKeyDict(dict[str, Any]):
    """An object in which a key is written twice: which of the two values is meant, nobody knows."""

    duplicate_key: str


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    inner = next((value for value in made.values() if isinstance(value, DuplicateKeyDict)), None)
    if len(made) == len(pairs) and inner is None:
        return made
    found = DuplicateKeyDict(made)
    names = [name for name, _ in pairs]
    found.duplicate_key = next(
        (name for name in names if names.count(name) > 1), inner.duplicate_key if inner is not None else ""
    )
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_build_object).decode
"""A text's JSON value, its objects `Ambiguous` where they, or those right inside of them, have a key twice."""


def check_record(value: Any, check_surrogates: bool) -> dict[str, Any]:
    """The value if it is an object whose text can be written down. Raises ValueError with the reason.

    `suspect`: its text may hold half a character, which no tokenizer takes.
    """
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        raise ValueError(f'{kinds.get(type(value), "a number")}, not an object; write {{"key": value, …}}')
    if twice := _find_duplicate_key(value):
        raise ValueError(f"the key '{twice}' is written twice in it; keep one of them")
    if check_surrogates:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise ValueError("unpaired surrogate (\\ud8…); write the whole character") from fault
    return value


def _find_duplicate_key(value: dict[str, Any]) -> str:
    """The key that is written twice, in the record or in a message of one of its lists; empty where none is."""
    if isinstance(value, DuplicateKeyDict):
        return value.duplicate_key
    inside = (item for held in value.values() if isinstance(held, list) for item in held)
    return next((item.duplicate_key for item in inside if isinstance(item, DuplicateKeyDict)), "")
