"""Strict JSON decoding: bytes of a file or line to records, with a reason for each refusal."""

from __future__ import annotations

import json
import re
from typing import Any

from dstrain.errors import describe_decode_error

BOM = b"\xef\xbb\xbf"
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")
_UTF16_PREFIXES = (b"\xff\xfe", b"\xfe\xff", b"{\0", b"\0{", b"[\0", b"\0[")
"""First bytes of a JSON file in UTF-16, with a byte order mark or without."""


def is_blank(line: bytes) -> bool:
    """Return whether a line has no content besides whitespace and a byte order mark."""
    return not line.removeprefix(BOM).strip()


def has_surrogate_escape(text: str) -> bool:
    """Return whether the text has an escape of a surrogate, one half of a character.

    Usually the other half follows it; `check_record` finds out.
    """
    return bool(_SURROGATE_ESCAPE.search(text))


def is_utf16(head: bytes) -> bool:
    """Return whether a file with these first bytes is UTF-16."""
    return head.startswith(_UTF16_PREFIXES)


def decode_text(content: bytes) -> str:
    """Return the text of a file. Raises ValueError with the reason if it is not UTF-8."""
    if is_utf16(content[:2]):
        raise ValueError("is UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as fault:
        raise ValueError(f"is {describe_decode_error(content, fault)}") from fault


def decode_record(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line. Raises ValueError with the reason."""
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
    """A JSON object with a duplicate key: there is no way to know which value is meant."""

    duplicate_key: str


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json builds inner objects first, so a mark inside of nested objects reaches the record.
    plain = dict(pairs)
    inner = next((value for value in plain.values() if isinstance(value, DuplicateKeyDict)), None)
    if len(plain) == len(pairs) and inner is None:
        return plain
    found = DuplicateKeyDict(plain)
    names = [name for name, _ in pairs]
    found.duplicate_key = next(
        (name for name in names if names.count(name) > 1), inner.duplicate_key if inner is not None else ""
    )
    return found


parse_json = json.JSONDecoder(object_pairs_hook=_build_object).decode
"""parse_json(text) -> JSON value.

Objects are DuplicateKeyDicts if they, or objects nested in them, have a duplicate key.
"""


def check_record(value: Any, check_surrogates: bool) -> dict[str, Any]:
    """Return the value if it is a JSON object that tokenizers can read. Raises ValueError with the reason.

    `check_surrogates`: its text may contain an unpaired surrogate, which no tokenizer accepts.
    """
    if not isinstance(value, dict):
        kinds = {list: "an array", str: "a string", bool: "true or false", type(None): "null"}
        raise ValueError(f'{kinds.get(type(value), "a number")}, not an object; write {{"key": value, …}}')
    if duplicate := _find_duplicate_key(value):
        raise ValueError(f"the key '{duplicate}' is written twice in it; keep one of them")
    if check_surrogates:
        try:
            # json.loads accepts an unpaired escape; encoding to UTF-8 is what finds it.
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise ValueError("unpaired surrogate (\\ud8…); write the whole character") from fault
    return value


def _find_duplicate_key(value: dict[str, Any]) -> str:
    """Return a duplicate key of the record or of an object in one of its lists; empty if there is none."""
    if isinstance(value, DuplicateKeyDict):
        return value.duplicate_key
    # parse_json marks nested objects but does not look into lists, such as a list of messages.
    inside = (item for inner in value.values() if isinstance(inner, list) for item in inner)
    return next((item.duplicate_key for item in inside if isinstance(item, DuplicateKeyDict)), "")
