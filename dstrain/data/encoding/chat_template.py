"""The chat template that the recipe names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.errors import Fault, RecipeError

RECIPE_KEY = "model.chat_template"
BUILTIN_TEMPLATE = "human_assistant"
_TRANSCRIPT_TEMPLATE = """\
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
"""Conversations in the form of hh-rlhf, with EOS after each answer."""


def resolve_chat_template(value: str, tokenizer: Any, image_token: str = "") -> str:
    """Return the Jinja template that the value of model.chat_template stands for.

    `image_token`: the text of an image placeholder. Raises RecipeError.
    """
    if value == BUILTIN_TEMPLATE:
        if tokenizer.eos_token is None:
            problem = "ends answers with EOS, and the tokenizer has none"
            raise RecipeError(Fault(RECIPE_KEY, problem, "write a template"))
        return _TRANSCRIPT_TEMPLATE.replace("IMAGE", image_token)
    if "{" in value:
        return value
    file = Path(value).expanduser()
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        fix = f"write {BUILTIN_TEMPLATE}, a Jinja template, or the path of a file with one"
        raise RecipeError(Fault(RECIPE_KEY, f"'{value}' cannot be read ({fault})", fix)) from fault
