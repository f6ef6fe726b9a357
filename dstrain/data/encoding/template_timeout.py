"""Whether a chat template ends: it is somebody's program, kept from files by jinja's sandbox, but not from time and memory.

What a template does only with some dialogs shows with those that are asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dstrain.data.limited_process import Limits, attempt
from dstrain.errors import Fault, RecipeError

SECONDS = 10
"""Of processor time, for all dialogs together; each takes about a thousandth of a second."""
PATIENCE = 60.0
"""Seconds after which a process that does not compute either is given up, and nothing is known."""
TRIES = 2
"""A process of which nothing is known is started again: what it waited for may have been a lock of the one that was forked."""
MEMORY = 2 << 30
"""Bytes beside what the process has."""

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
    if template in _ENDS:
        return
    limits = Limits(MEMORY, SECONDS, PATIENCE)
    for _ in range(TRIES):
        tried = attempt(lambda: _render(tokenizer, [list(messages), *_DIALOGS]), limits)
        if tried.how != "lost":
            break
    problem = {
        "lost": f"could not be tried: the process that rendered it was ended from outside, or did not end in {PATIENCE:.0f} seconds",
        "time": f"does not end: it was stopped after {SECONDS} seconds",
        "memory": f"takes more than {MEMORY >> 30} GiB of memory for a short dialog",
    }.get(tried.how)
    if problem is not None:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        mend = "set model.chat_template to another one, or to the word turns"
        raise RecipeError(Fault("model.chat_template", f"the chat template of {name} {problem}", mend))
    _ENDS.add(template)


def _render(tokenizer: Any, dialogs: Sequence[Any]) -> None:
    """Raises MemoryError; what else a template trips over is told where it is used."""
    for dialog in dialogs:
        for opened in (False, True):
            try:
                tokenizer.apply_chat_template(dialog, add_generation_prompt=opened, tokenize=False)
            except MemoryError:
                raise
            except Exception:
                continue
