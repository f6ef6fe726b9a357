"""Forks of a process that has imported everything: one import for many runs."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


def fork(function: Callable[[], None], log: Path) -> int:
    """Return the process ID of a fork that calls the function, with its output in `log`, and ends.

    Its exit code is that of a SystemExit, 1 after another exception, else 0. The fork runs no clean-up of the process
    that it came from. A real GPU must not have been used before; an emulated one may have been.
    """
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(file, 1)
        os.dup2(file, 2)
        function()
        code = 0
    except SystemExit as end:
        code = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _exit_code(end: SystemExit) -> int:
    """Return the exit code that Python gives this exception."""
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1
