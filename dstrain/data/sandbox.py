"""Whether a chat template ends: it is somebody's program, kept from files by jinja's sandbox, but not from time and memory.

A process of its own renders it first, under the kernel's limits: nothing inside of Python stops `9 ** (9 ** 9)` or
`'a' * 10 ** 10`, and no thread can be ended. What a template does only with some dialogs shows with those that are asked first.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from dstrain.errors import Fault, RecipeError

SECONDS = 10
"""Of processor time, for all dialogs together; each takes about a thousandth of a second."""
PATIENCE = 60.0
"""Seconds after which a process that does not compute either is given up, and nothing is known."""
MEMORY = 2 << 30
"""Bytes beside what the process has."""
TOO_LARGE = 3
"""How the process ends where memory ran out."""

_ANSWER = {"role": "assistant", "content": "answer"}
_DIALOGS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "question"}],
    [{"role": "user", "content": "question"}, _ANSWER],
    [{"role": "system", "content": "be brief"}, *[{"role": "user", "content": "question"}, _ANSWER] * 4],
    [{"role": "user", "content": [{"type": "text", "text": "question"}]}],
)
_ENDS: set[str] = set()


def require_end(tokenizer: Any, messages: Sequence[Any]) -> None:
    """Raise RecipeError where the tokenizer's chat template does not end, or takes all memory. Once for each template.

    `messages`: a dialog to try it with, beside some of every kind.
    """
    template = str(tokenizer.chat_template)
    if template in _ENDS or sys.platform != "linux":
        return
    if problem := _fault(tokenizer, [list(messages), *_DIALOGS]):
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        mend = "set model.chat_template to another one, or to the word turns"
        raise RecipeError(Fault("model.chat_template", f"the chat template of {name} {problem}", mend))
    _ENDS.add(template)


def _fault(tokenizer: Any, dialogs: Sequence[Any]) -> str:
    with warnings.catch_warnings():
        # Python 3.12 warns of a fork beside threads; the child renders text, and takes no lock that a thread may hold.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _render(tokenizer, dialogs)
    began = time.monotonic()
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() - began > PATIENCE:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return ""  # it waits for something: the time that it computed would have been told below
        time.sleep(0.001)
    code = os.waitstatus_to_exitcode(ended[1])
    if code == -signal.SIGXCPU:
        return f"does not end: it was stopped after {SECONDS} seconds"
    if code == TOO_LARGE:
        return f"takes more than {MEMORY >> 30} GiB of memory for a short dialog"
    return ""


def _render(tokenizer: Any, dialogs: Sequence[Any]) -> NoReturn:
    """The life of the process that tries; what a template refuses is told where it is used."""
    import resource

    code = 0
    try:
        for number in (signal.SIGXCPU, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY
        with suppress(ValueError, OSError):  # a lower one is set already
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
        for dialog in dialogs:
            for opened in (False, True):
                with suppress(Exception):
                    _try(tokenizer, dialog, opened)
    except MemoryError:
        code = TOO_LARGE
    finally:
        os._exit(code)


def _try(tokenizer: Any, dialog: Any, opened: bool) -> None:
    """Raises what the template raises; ends the process where memory ran out."""
    try:
        tokenizer.apply_chat_template(dialog, add_generation_prompt=opened, tokenize=False)
    except MemoryError:
        os._exit(TOO_LARGE)
