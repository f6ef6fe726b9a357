"""Child process that copies new log output to the terminal: `tee_log.py FILE OFFSET`."""

# It imports only the standard library, since it starts with every rank 0.

from __future__ import annotations

import os
import select
import signal
import sys

CLEAR_LINE = b"\r\x1b[K"
END_OF_COPY = b"--- the rest is in this log only ---\n"
"""Line of the log after which nothing is copied."""


def follow_file(path: str, offset: int) -> None:
    """Copy the file to stdout from `offset` on, until END_OF_COPY, stdin is closed, or the parent has ended."""
    parent = os.getppid()
    clears, at_line_start = os.isatty(1) and os.environ.get("TERM", "").lower() not in ("dumb", "unknown"), True
    with open(path, "rb", buffering=0) as log:
        log.seek(offset)
        while True:
            # Checked before the file is read, so that the last output is still copied.
            ended = bool(select.select([0], [], [], 0.1)[0]) or os.getppid() != parent
            while True:
                part = log.read(1 << 16)
                if not part:
                    break
                # The training process draws a progress line on the same terminal, and draws it again afterwards.
                part, end, _ = part.partition(END_OF_COPY)
                _write_stdout(CLEAR_LINE + part if clears and at_line_start else part)
                at_line_start = part.endswith(b"\n")
                if end:
                    return
            if ended:
                return


def _write_stdout(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:  # the pipe is full, and another process that shares it has made it non-blocking
            select.select([], [1], [])


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow_file(sys.argv[1], int(sys.argv[2]))
    except OSError:  # the terminal is closed; the worker still writes to the file
        sys.exit(0)
