"""Whether a chat template ends: it is somebody's program, kept from files by jinja's sandbox, but not from time and memory.

What a template does only with some dialogs shows with those that are asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dstrain.data.limited_process import ResourceLimits, run_limited
from dstrain.errors import Fault, RecipeError

MAX_CPU_SECONDS = 10
"""Of processor time, for all dialogs together; each takes about a thousandth of a second."""
MAX_WALL_SECONDS = 60.0
"""Seconds after which a process that does not compute either is given up, and nothing is known."""
MAX_ATTEMPTS = 2
"""A process of which nothing is known is started again: what it waited for may have been a lock of the one that was forked."""
MAX_MEMORY_BYTES = 2 << 30
"""Bytes beside what the process has."""

_ANSWER_MESSAGE = {"role": "assistant", "content": "answer"}
_PROBE_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "question"}],
    [{"role": "user", "content": "question"}, _ANSWER_MESSAGE],
    [{"role": "system", "content": "be brief"}, *[{"role": "user", "content": "question"}, _ANSWER_MESSAGE] * 4],
    [{"role": "user", "content": [{"type": "text", "text": "question"}]}],
)
_CHECKED_TEMPLATES: set[str] = set()


def check_template_terminates(tokenizer: Any, messages: Sequence[Any]) -> None:
    """Raise RecipeError where the tokenizer's chat template does not end, or takes all memory. Once for each template.

    `messages`: a dialog to try it with, beside some of every kind.
    """
    template = str(tokenizer.chat_template)
    if template in _CHECKED_TEMPLATES:
        return
    limits = ResourceLimits(MAX_MEMORY_BYTES, MAX_CPU_SECONDS, MAX_WALL_SECONDS)
    for _ in range(MAX_ATTEMPTS):
        tried = run_limited(lambda: _render_all(tokenizer, [list(messages), *_PROBE_CONVERSATIONS]), limits)
        if tried.status != "lost":
            break
    problem = {
        "lost": f"could not be tried: the process that rendered it was ended from outside, or did not end in {MAX_WALL_SECONDS:.0f} seconds",
        "time": f"does not end: it was stopped after {MAX_CPU_SECONDS} seconds",
        "memory": f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory for a short dialog",
    }.get(tried.status)
    if problem is not None:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        mend = "set model.chat_template to another one, or to human_assistant"
        raise RecipeError(Fault("model.chat_template", f"the chat template of {name} {problem}", mend))
    _CHECKED_TEMPLATES.add(template)


def _render_all(tokenizer: Any, conversations: Sequence[Any]) -> None:
    """Raises MemoryError; what else a template trips over is told where it is used."""
    for dialog in conversations:
        for opened in (False, True):
            try:
                tokenizer.apply_chat_template(dialog, add_generation_prompt=opened, tokenize=False)
            except MemoryError:
                raise
            except Exception:
                continue
