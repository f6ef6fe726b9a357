"""What a chat template trips over is a bad record with its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from dstrain.commands.export import export_model
from dstrain.commands.trained_model import find_saved_model
from dstrain.data.encoding.chat_template import render_conversation, set_template_kwargs
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.errors import BadRecord, RecipeError
from tests.contract.export_cases import make_run

ASKED: Any = [{"role": "user", "content": "hi"}]


def tokenizer_with(template: str) -> Any:
    tokenizer = train_tokenizer(["some text"], 270, "bytes")
    tokenizer.chat_template = template
    return tokenizer


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
        ("{{ range(10 ** 9) }}", "Range too big"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", ""),
        ("{{ raise_exception('only users') }}", "only users"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ [][1].x.y }}", "no element 1"),
    ],
)
def test_what_a_template_trips_over_is_a_bad_record(template: str, why: str) -> None:
    with pytest.raises(BadRecord, match=f"chat template refuses the dialog .*{why}"):
        render_conversation(tokenizer_with(template), ASKED)


# Variables of a template: model.chat_template_kwargs.


THINKING = (  # Qwen 3's shape: without thinking, the generation prompt has an empty block of thoughts
    "{%- for m in messages -%}<|{{ m.role }}|>{{ m.content }}</s>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- if enable_thinking is defined and enable_thinking is false -%}"
    "<think>\n\n</think>\n\n{% endif -%}{%- endif -%}{{ style if style is defined else '' }}"
)


@pytest.mark.parametrize(
    "values",
    [
        {"enable_thinking": False},
        {"enable_thinking": True, "style": 'say "hi"\n\\ {{ done }}'},
        {"style": [1, 2.5, None, True, {"a": "ü"}]},
    ],
    ids=str,
)
def test_variables_give_the_text_of_apply_chat_template(values: dict[str, Any]) -> None:
    tokenizer, plain = tokenizer_with(THINKING), tokenizer_with(THINKING)
    set_template_kwargs(tokenizer, values)
    for prompt in (True, False):
        wanted = plain.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=prompt, **values)
        assert render_conversation(tokenizer, ASKED, prompt) == wanted
    again = tokenizer.chat_template
    set_template_kwargs(tokenizer, values)
    assert tokenizer.chat_template == again, "a saved tokenizer has them already"


def test_a_caller_of_the_exported_template_has_the_last_word() -> None:
    tokenizer, plain = tokenizer_with(THINKING), tokenizer_with(THINKING)
    set_template_kwargs(tokenizer, {"enable_thinking": False})
    said = {"tokenize": False, "add_generation_prompt": True}
    assert "<think>" in tokenizer.apply_chat_template(ASKED, **said)
    wanted = plain.apply_chat_template(ASKED, **said)
    assert tokenizer.apply_chat_template(ASKED, enable_thinking=True, **said) == wanted
    set_template_kwargs(tokenizer, {"enable_thinking": True})
    assert tokenizer.apply_chat_template(ASKED, **said) == wanted, "so has a later setting"


@pytest.mark.parametrize(
    ("template", "values", "wanted"),
    [
        (THINKING, {"enable_thinkin": False}, r"enable_thinkin: is not read by .*asks for: enable_thinking, style"),
        (THINKING, {"messages": []}, "messages: is set from the conversation"),
        (None, {"enable_thinking": False}, "has no chat template"),
    ],
)
def test_a_variable_that_no_template_reads_is_refused(template: Any, values: dict[str, Any], wanted: str) -> None:
    with pytest.raises(RecipeError, match=rf"^model\.chat_template_kwargs.*{wanted}"):
        set_template_kwargs(tokenizer_with(template), values)


def test_a_run_and_its_export_keep_the_variables(tmp_path: Path) -> None:
    run = make_run(
        tmp_path, "sft", {"model": {"chat_template": THINKING, "chat_template_kwargs": {"enable_thinking": False}}}
    )
    prompt = "<|assistant|><think>\n\n</think>\n\n"
    for folder in (run, tmp_path / "out"):
        saved = find_saved_model(folder, "last")
        saved.check_loadable()
        tokenizer = saved.task.tokenizer  # type: ignore[attr-defined]
        assert render_conversation(tokenizer, ASKED, True).endswith(prompt)
        if folder == run:
            digest = saved.task.model_source.tokenizer_digest
            export_model(run, "last", tmp_path / "out")
        assert saved.task.model_source.tokenizer_digest == digest
    other = find_saved_model(run, "last", ["model.chat_template_kwargs={enable_thinking: true}"])
    other.check_loadable()
    assert "<think>" not in render_conversation(other.task.tokenizer, ASKED, True)  # type: ignore[attr-defined]
    stranger = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert stranger.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True).endswith(prompt)
