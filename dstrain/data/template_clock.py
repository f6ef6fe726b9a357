"""The time that a chat template writes: one for a run, so that its texts are the same on every day."""

from __future__ import annotations

import json
import re
from datetime import datetime
from typing import Any

CLOCK_FUNCTION = "strftime_now"
"""Function of transformers' templates that formats the present time."""
_TIME_ATTRIBUTE = "template_time"
_CALL = re.compile(rf"{CLOCK_FUNCTION}\s*\(\s*(?:format\s*=\s*)?(\"[^\"]*\"|'[^']*')\s*\)")
"""A call with the format written out, as published templates have it."""


def reads_clock(tokenizer: Any) -> bool:
    """Return whether the tokenizer's chat template writes the time."""
    return bool(_CALL.search(_get_text(tokenizer)))


def set_template_time(tokenizer: Any, time: datetime) -> None:
    """Let the tokenizer's chat template write this time in the place of the present one, in `write_time`."""
    setattr(tokenizer, _TIME_ATTRIBUTE, time)


def write_time(tokenizer: Any, template: str) -> str:
    """Return a template of the tokenizer with the time of `set_template_time` as text; unchanged where none was set."""
    time = getattr(tokenizer, _TIME_ATTRIBUTE, None)
    if time is None:
        return template
    return _CALL.sub(lambda call: json.dumps(time.strftime(call[1][1:-1])), template)


def get_written_times(tokenizer: Any) -> list[str]:
    """Return what the template writes of its time, such as the day; empty where none was set."""
    time = getattr(tokenizer, _TIME_ATTRIBUTE, None)
    if time is None:
        return []
    return sorted({time.strftime(call[1][1:-1]) for call in _CALL.finditer(_get_text(tokenizer))})


def describe_written_times(tokenizer: Any) -> list[str]:
    """Return a sentence on the time that the template writes into every sample; none where it writes none."""
    times = get_written_times(tokenizer)
    if not times:
        return []
    return [
        f"the chat template writes the time: {', '.join(times)} in all samples, also where the run is resumed, evaluated or "
        "generates (model.chat_template_time)"
    ]


def _get_text(tokenizer: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or ""
    return template if isinstance(template, str) else "\n".join(template.values())
