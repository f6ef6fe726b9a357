"""Prompts of axolotl's data sets as chat templates, for `dstrain init --from`."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

_OPENING = "Below is an instruction that describes a task"
_REQUEST = "Write a response that appropriately completes the request."
_ALPACA_SYSTEM = (
    f"{_OPENING}, paired with an input that provides further context. {_REQUEST}",
    f"{_OPENING}. {_REQUEST}",
)
"""Stanford Alpaca's first sentences: of a record with an input, and of one without."""
_ALPACA_STYLES = {
    "alpaca": (
        "{system}\n\n",
        "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "alpaca:chat": (
        "SYSTEM: {system}\n",
        "USER: {instruction}\n{input}\nASSISTANT:",
        "USER: {instruction}\nASSISTANT:",
    ),
    "alpaca:chatml": (
        "<|im_start|>system\n{system}<|im_end|>\n",
        "<|im_start|>user\n{instruction}\n{input}<|im_end|>\n<|im_start|>assistant\n",
        "<|im_start|>user\n{instruction}<|im_end|>\n<|im_start|>assistant\n",
    ),
}
"""Type of a data set -> form of the system text, of a question with an input, and of one without."""
_USER_DEFINED = {"system_format": "{system}", "format": "{instruction} {input} ", "no_input_format": "{instruction} "}
"""What axolotl takes where a form of one's own leaves them out."""
CHATML = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)
_CHATML_PAIRS = (
    "{%- for message in messages -%}{{- '\\n' * (not loop.first) + '<|im_start|>' + message['role'] + '\\n'"
    " + message['content'] + '<|im_end|>' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '\\n<|im_start|>assistant\\n' -}}{%- endif -%}"
)
"""ChatML without a line break after an answer: axolotl writes none there."""
_PAIR_COLUMNS = {
    "chatml": {"chosen_response": "chosen", "rejected_response": "rejected"},
    "chatml.argilla": {"instruction": "prompt", "chosen_response": "chosen", "rejected_response": "rejected"},
    "chatml.icr": {"input": "prompt"},
    "chatml.intel": {"question": "prompt"},
    "chatml.prompt_pairs": {},
    "chatml.ultra": {},
}
"""Type of a data set of pairs -> columns that have another name here."""


@dataclass(frozen=True)
class PromptFormat:
    """How a data set's records become texts."""

    template: str = ""
    """Chat template; empty: the tokenizer's own."""
    columns: Mapping[str, str | None] = field(default_factory=dict)
    """Column of the file -> name of the record format; None leaves it out."""
    remark: str = ""
    """What still differs, or may."""


def read_prompt_format(block: Mapping[str, Any], keys: Collection[str] | None, bos: str | None) -> PromptFormat | None:
    """Return the format of a data set of axolotl by its `type`; None where no recipe can write it.

    `keys`: those of its records, None where the file is not here. `bos`: the BOS that the tokenizer puts in front of a
    text, None where that is not known.
    """
    kind = block.get("type")
    columns: dict[str, str | None]
    if isinstance(kind, Mapping):
        return _read_custom_form(kind, keys, bos)
    if kind in _ALPACA_STYLES:
        system, with_input, without = _ALPACA_STYLES[kind]
        openings = [system.replace("{system}", text) for text in _ALPACA_SYSTEM]
        return _make_format((openings[0] + with_input, openings[1] + without), (with_input, without), keys, bos)
    if kind in _PAIR_COLUMNS:
        renamed = {theirs: ours for theirs, ours in _PAIR_COLUMNS[kind].items() if keys is None or theirs in keys}
        remark = "TRL adds EOS after <|im_end|> there"
        return PromptFormat(_CHATML_PAIRS, {} if kind == "chatml" and keys is None else renamed, remark)
    if kind == "completion":
        name = str(block.get("field") or "text")
        columns = {name: "text"} if name != "text" else {}
        columns |= dict.fromkeys([key for key in keys or () if key != name])
        remark = "a text above sequence_len is cut into several there"
        if keys is None:
            remark += ", and keys of the records besides the text, such as instruction, need null in `columns`"
        return PromptFormat("", columns, remark)
    return None


def _read_custom_form(kind: Mapping[str, Any], keys: Collection[str] | None, bos: str | None) -> PromptFormat | None:
    """Return the format of a data set whose configuration has the prompt's form; None where no recipe can write it."""
    forms = {name: str(kind.get(name) or usual) for name, usual in _USER_DEFINED.items()}
    constant = str(kind.get("system_prompt") or "")
    system_key = str(kind.get("field_system") or "system")
    if keys is not None and system_key in keys and "{input}" in forms["format"]:
        return None  # a record here has one text beside question and answer
    opening = forms["system_format"].replace("{system}", constant) if constant else ""
    turns = forms["format"], forms["no_input_format"]
    names = {ours: str(kind.get(f"field_{ours}") or ours) for ours in ("instruction", "input", "output")}
    made = _make_format((opening + turns[0], opening + turns[1]), turns, keys, bos, names["input"])
    if made is None:
        return None
    renamed = {names[ours]: ours for ours in ("instruction", "output") if names[ours] != ours}
    return PromptFormat(made.template, {**renamed, **made.columns}, made.remark)


def _make_format(
    first: tuple[str, str],
    later: tuple[str, str],
    keys: Collection[str] | None,
    bos: str | None,
    input_name: str = "input",
) -> PromptFormat | None:
    """Return the format of two forms of a question, with an input and without; None where they have other variables.

    The input is the system text of the record here, because a chat template has no other place for it. `first`: forms
    of the first turn; `later`: of those after it.
    """
    parts = [_to_expression(form) for form in (*first, *later)]
    if None in parts:
        return None
    columns: dict[str, str | None] = {}
    if keys is None or input_name in keys:
        columns[input_name] = "system"
    if keys is not None and "system" in keys and input_name != "system":
        columns["system"] = None
    template = (
        ("{{- bos_token -}}" if bos is None or bos else "")
        + "{%- for message in messages -%}{%- if message['role'] == 'user' -%}"
        "{%- if loop.index0 == 1 and messages[0]['role'] == 'system' -%}{{- " + str(parts[0]) + " -}}"
        "{%- elif loop.first -%}{{- " + str(parts[1]) + " -}}{%- else -%}{{- " + str(parts[3]) + " -}}{%- endif -%}"
        "{%- elif message['role'] == 'assistant' -%}{{- message['content'] + eos_token -}}{%- endif -%}{%- endfor -%}"
    )
    remark = "the answer is tokenized with its prompt: of a SentencePiece tokenizer its first token may be another"
    if bos is None:
        remark = f"remove bos_token from model.chat_template if the tokenizer adds none; {remark}"
    if keys is None:
        remark = f"records without `{input_name}` need no `columns`; {remark}"
    return PromptFormat(template, columns, remark)


def _to_expression(form: str) -> str | None:
    """Return a Jinja expression of a form with {instruction} and {input}; None for one with another variable."""
    places = {"{instruction}": "message['content']", "{input}": "messages[0]['content']"}
    parts = [part for part in re.split(r"(\{\w*\})", form.replace("{{", "\0").replace("}}", "\1")) if part]
    if any(part.startswith("{") and part not in places for part in parts):
        return None
    texts = [
        places.get(part) or json.dumps(part.replace("\0", "{").replace("\1", "}"), ensure_ascii=False) for part in parts
    ]
    return " + ".join(texts)
