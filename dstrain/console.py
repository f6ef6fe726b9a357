"""Messages for the terminal."""

from __future__ import annotations

import sys


def log_stderr(message: str) -> None:
    """Print a message to stderr and flush it; stdout is reserved for a command's result."""
    print(message, file=sys.stderr, flush=True)
