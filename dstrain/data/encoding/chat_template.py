"""Chat templates that a recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.errors import Fault, RecipeError

KEY = "model.chat_template"
TURNS = "turns"
_WAY = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}{{- '\n\nAssistant: ' -}}
{%- elif message.role != 'system' -%}{{- '\n\nHuman: ' if message.role == 'user' else '\n\nTool: ' -}}{%- endif -%}
{%- if message.content is string -%}{{- message.content -}}
{%- else -%}{%- for part in message.content -%}
{{- 'IMAGE' if part.type == 'image' else part.text -}}
{%- endfor -%}{%- endif -%}
{%- if message.role == 'assistant' -%}{{- eos_token -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '\n\nAssistant:' -}}{%- endif -%}"""
"""hh-rlhf's way of writing dialogs, each answer ended by EOS."""


def read_template(wanted: str, tokenizer: Any, image: str = "") -> str:
    """The Jinja template that model.chat_template means; `image`: what stands for an image. Raises RecipeError."""
    if wanted == TURNS:
        if tokenizer.eos_token is None:
            raise RecipeError(Fault(KEY, "ends answers with EOS, and the tokenizer has none", "write a template"))
        return _WAY.replace("IMAGE", image)
    if "{" in wanted:
        return wanted
    file = Path(wanted).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        mend = f"write {TURNS}, a Jinja template, or the path of a file with one"
        raise RecipeError(Fault(KEY, f"'{wanted}' cannot be read ({fault})", mend)) from fault
