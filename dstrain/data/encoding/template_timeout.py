"""Termination and memory check of chat templates, which are other people's programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dstrain.data.encoding.chat_template import BUILTIN_TEMPLATE, RECIPE_KEY
from dstrain.data.limited_process import ResourceLimits, run_limited
from dstrain.errors import Fault, RecipeError

MAX_CPU_SECONDS = 10
"""Processor time for all conversations together; one usually takes about a millisecond."""
MAX_WALL_SECONDS = 60.0
"""Time after which a process that uses no processor time is killed; the result is then unknown."""
MAX_ATTEMPTS = 2
"""Attempts while the result is unknown: the fork may have copied a lock that another thread held."""
MAX_MEMORY_BYTES = 2 << 30
"""Memory in addition to that of this process."""

_ANSWER_MESSAGE = {"role": "assistant", "content": "answer"}
_PROBE_CONVERSATIONS: tuple[list[dict[str, Any]], ...] = (
    [{"role": "user", "content": "question"}],
    [{"role": "user", "content": "question"}, _ANSWER_MESSAGE],
    [{"role": "system", "content": "be brief"}, *[{"role": "user", "content": "question"}, _ANSWER_MESSAGE] * 4],
    [{"role": "user", "content": [{"type": "text", "text": "question"}]}],
)
_CHECKED_TEMPLATES: set[str] = set()


def check_template_terminates(tokenizer: Any, messages: Sequence[Any]) -> None:
    """Raise RecipeError if the chat template does not terminate or exhausts memory.

    jinja's sandbox keeps a template from files, but not from using time and memory. Each template
    is tried once, with `messages` and one conversation of every kind; a fault that occurs only with
    other conversations is not found.
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
        "lost": "could not be tried: the process that rendered it was ended from outside, or did not "
        f"end in {MAX_WALL_SECONDS:.0f} seconds",
        "time": f"does not end: it was stopped after {MAX_CPU_SECONDS} seconds",
        "memory": f"takes more than {MAX_MEMORY_BYTES >> 30} GiB of memory for a short dialog",
    }.get(tried.status)
    if problem is not None:
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        fix = f"set {RECIPE_KEY} to another one, or to the word {BUILTIN_TEMPLATE}"
        raise RecipeError(Fault(RECIPE_KEY, f"the chat template of {name} {problem}", fix))
    _CHECKED_TEMPLATES.add(template)


def _render_all(tokenizer: Any, conversations: Sequence[Any]) -> None:
    """Render all conversations. Raises MemoryError; other errors are reported at the template's use."""
    for conversation in conversations:
        for add_generation_prompt in (False, True):
            try:
                tokenizer.apply_chat_template(conversation, add_generation_prompt=add_generation_prompt, tokenize=False)
            except MemoryError:
                raise
            except Exception:
                continue
