"""The table of chat templates says what each keeps of a record."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chat_templates import make_table, read_variables, try_template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if enable_thinking and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
    "{{ m.content + '<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"


def test_a_template_is_tried_with_each_record() -> None:
    found = try_template(CHATML)
    assert found["answers"] == found["system"] == found["pairs"] == found["thought in the text"] == "yes"
    assert found["thought, last answer"] == "by variables"
    assert found["tools"].startswith("refused: the chat template does not write the tool calls")


def test_variables_are_those_that_transformers_does_not_set() -> None:
    assert read_variables(CHATML + "{% generation %}{{ bos_token }}{{ tools }}{% endgeneration %}") == {
        "enable_thinking"
    }


def test_the_table_counts_equal_files_once_and_lists_reasons(tmp_path: Path) -> None:
    for name, text in {"one": CHATML, "two": CHATML, "three": NO_SYSTEM + CHATML}.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    table = make_table([tmp_path])
    assert "- 2 templates of different content." in table
    assert "- system: 1 refused, 1 yes." in table or "- system: 1 yes, 1 refused." in table
    assert "(System role not supported)" in table
