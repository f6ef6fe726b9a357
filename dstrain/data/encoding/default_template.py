"""Dialogs of a tokenizer that has no chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def describe_missing_template(tokenizer: Any) -> Sequence[str]:
    """How they are written and what ends an answer, in a sentence; nothing where there is a template."""
    if getattr(tokenizer, "chat_template", None):
        return ()
    eos = tokenizer.eos_token
    end = f"each answer ends with {eos}" if eos else "nothing ends an answer, since it has no EOS token either"
    return [
        'the tokenizer has no chat template: dialogs are written as "\\n\\nHuman: ... \\n\\nAssistant: ..." and '
        f"{end} (model.chat_template names another form)"
    ]
