"""Formatting of bytes, counts and durations."""

from __future__ import annotations


def format_bytes(num_bytes: float) -> str:
    """Return 1536 as `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """Return 1234567 as `1.23 M`."""
    for limit, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g}{unit}"
    return f"{count:g}"


def format_duration(seconds: float) -> str:
    """Return 3725 as `1 h 02 m 05 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} m {rest:02d} s" if hours else f"{minutes} m {rest:02d} s"
