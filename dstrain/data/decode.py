"""Bytes to records: what a line of JSON must be."""

from __future__ import annotations

import json
import re
from typing import Any

_BOM = b"\xef\xbb\xbf"
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def is_blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def may_hold_halves(text: str) -> bool:
    """True where an escape writes half a character; most often the other half follows."""
    return bool(_SURROGATE.search(text))


def decode_record(line: bytes) -> dict[str, Any]:
    """One line as a JSON object. Raises ValueError with the reason."""
    try:
        text = line.removeprefix(_BOM).decode("utf-8")
    except UnicodeDecodeError as fault:
        raise ValueError(f"not UTF-8 (byte {fault.start + 1} of the line); save it as UTF-8") from fault
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise ValueError(f"no JSON: {fault}; mend the line or remove it") from fault
    return check_record(value, may_hold_halves(text))


def check_record(value: Any, suspect: bool) -> dict[str, Any]:
    """The value if it is an object whose text can be written down. Raises ValueError with the reason.

    `suspect`: its text may hold half a character, which no tokenizer takes.
    """
    if not isinstance(value, dict):
        raise ValueError(f'a JSON {type(value).__name__}, not an object; write {{"key": value, …}}')
    if suspect:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as fault:
            raise ValueError("half a character (a lone \\ud8… escape); write the whole character") from fault
    return value
