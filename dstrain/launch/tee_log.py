"""Copies what is appended to a file to standard output: `tee_log.py FILE OFFSET`, run as a process of its own.

It ends when its standard input is closed or its parent is gone, after a last look at the file.
Only the standard library: it starts with every rank 0.
"""

from __future__ import annotations

import os
import select
import signal
import sys


def follow_file(path: str, offset: int) -> None:
    parent = os.getppid()
    with open(path, "rb", buffering=0) as log:
        log.seek(offset)
        while True:
            # Asked before the file is read, so that what was written last is still copied.
            ended = bool(select.select([0], [], [], 0.1)[0]) or os.getppid() != parent
            while part := log.read(1 << 16):
                _write_stdout(part)
            if ended:
                return


def _write_stdout(data: bytes) -> None:
    while data:
        try:
            data = data[os.write(1, data) :]
        except BlockingIOError:  # full, and what shares the stream with us made it one that does not wait
            select.select([], [1], [])


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    try:
        follow_file(sys.argv[1], int(sys.argv[2]))
    except OSError:  # the terminal is gone; the file goes on without us
        sys.exit(0)
