"""Counts of launches, copies and waits since the process began, as the emulated runtime keeps them."""

from __future__ import annotations

import ctypes

NAMES = (
    "kernels",
    "copies_from_pinned",
    "copies_from_paged",
    "copies_to_host",
    "copies_on_device",
    "memsets",
    "stream_syncs",
    "event_syncs",
    "device_syncs",
    "event_records",
    "stream_waits",
    "allocations",
    "frees",
    "products",
    "collectives",
    "bytes_to_device",
    "bytes_to_host",
    "event_queries",
    "pinned_allocations",
)
"""In the order of the enumeration in libraries/emulator.h."""


def read_counts() -> dict[str, int]:
    """Return the counts of this process. Raises ValueError where the emulator is not loaded."""
    counts = (ctypes.c_uint64 * len(NAMES)).in_dll(ctypes.CDLL(None), "emu_counts")
    return dict(zip(NAMES, counts, strict=True))
