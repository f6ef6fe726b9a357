"""Bytes, counts and durations: parse them and print them."""

from __future__ import annotations

import re

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """`24GiB`, `512 MB`, `1e9` -> bytes. Raises ValueError for anything else."""
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([kmgtKMGT]?i?)[bB]?\s*", text)
    if match is None or match[2].lower() not in _BYTES:
        raise ValueError(f"'{text}' is no amount of memory; write it like 24GiB or 512MB")
    return round(float(match[1]) * _BYTES[match[2].lower()])


def show_bytes(count: float) -> str:
    """1536 -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def show_count(count: float) -> str:
    """1234567 -> `1.23 M`."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:g}"


def show_duration(seconds: float) -> str:
    """3725 -> `1 h 02 m 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m {rest:02d} s" if hours else f"{minutes} m {rest:02d} s"
