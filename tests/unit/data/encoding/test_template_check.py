"""A chat template keeps what a record says: answers are learnt, nothing else is, and what it drops is told."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.encoding.conversations import (
    EncodingConfig,
    describe_missing_end,
    encode_conversations,
    encode_prompts,
)
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.template_check import LOST_COLUMNS
from dstrain.data.formats.conversations import ParsedPrompt, read_conversation
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.prepare import describe_template_counts
from dstrain.errors import BadRecord
from tests.chat_templates import tokenizer_of
from tests.vocabulary import message

CALLS = "{% for call in message.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>{% endfor %}"
PLAIN = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}" + CALLS + "</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_CALLS = PLAIN.replace(CALLS, "")
RESULT_IN_TURN = (  # as Gemma 4: the result of a call stands in the turn that makes it, in front of its text
    "{% for message in messages %}{% if message.role == 'user' %}<user>{{ message.content }}</s>{% endif %}"
    "{% if message.role == 'assistant' %}{% if loop.previtem.role != 'tool' %}<assistant>{% endif %}"
    + CALLS
    + "{{ message.content }}"
    "{% if not message.tool_calls %}</s>{% endif %}{% endif %}"
    "{% if message.role == 'tool' %}<result>value:{{ message.content }}</result>{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}<assistant>{% endif %}"
)
NAME_AT_THE_END = (
    PLAIN.replace(  # as Command A: what is written of a call ends with its arguments, and then the turn ends
        "<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>",
        '<call>[{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}]</call>',
    )
)
SYSTEM_BEFORE_LAST_USER = (  # as Mistral: lost where an answer is the last message
    "{% if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set turns = messages[1:] %}"
    "{% else %}{% set turns = messages %}{% endif %}<s>{% for message in turns %}{% if message.role == 'user' %}[INST] "
    "{% if loop.last and system is defined %}{{ system + '\n\n' }}{% endif %}{{ message.content }}[/INST]"
    "{% else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
TEXT_ARGUMENTS = PLAIN.replace("call.function.arguments | tojson", "'' + call.function.arguments")
NO_SYSTEM = PLAIN.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
NO_END = PLAIN.replace("</s>{% endfor %}", "{% endfor %}")
TEXT_WITHOUT_CALL = PLAIN.replace(
    "{{ message.content }}", "{% if not message.tool_calls %}{{ message.content }}{% endif %}"
)

TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Defweather", "parameters": {}}}]
SYSTEM, USER, OTHER = message("system", "Sysrule"), message("user", "Useone"), message("user", "Usetwo")
ONE, TWO, RESULT = message("assistant", "Answone"), message("assistant", "Answtwo"), message("tool", "Tooltext")


def call(*cities: str, content: str = "") -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "weather", "arguments": {"city": city}}} for city in cities]
    return {**message("assistant", content), "tool_calls": calls}


CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER, ONE]},
    "two turns": {"messages": [USER, ONE, OTHER, TWO]},
    "system": {"messages": [SYSTEM, USER, ONE]},
    "system, two turns": {"messages": [SYSTEM, USER, ONE, OTHER, TWO]},
    "two system turns": {"messages": [SYSTEM, USER, ONE, message("system", "Systwo"), OTHER, TWO]},
    "a turn that is not learnt": {"messages": [USER, message("assistant", "Skipone") | {"weight": 0}, OTHER, TWO]},
    "a call": {"messages": [USER, call("Argone"), RESULT, ONE], "tools": TOOLS},
    "a call without tools": {"messages": [USER, call("Argone"), RESULT, ONE]},
    "a call with text": {"messages": [USER, call("Argone", content="Answone"), RESULT, TWO], "tools": TOOLS},
    "two calls": {"messages": [USER, call("Argone", "Argtwo"), RESULT, message("tool", "Toolmore"), ONE], "tools": TOOLS},
    "a chain": {"messages": [USER, call("Argone"), RESULT, call("Argtwo"), message("tool", "Toolmore"), ONE], "tools": TOOLS},
    "a call at the end": {"messages": [USER, call("Argone")], "tools": TOOLS},
    "a thought": {"messages": [USER, ONE | {"reasoning_content": "Thoughtone"}]},
    "thoughts": {"messages": [USER, ONE | {"reasoning_content": "Thoughtone"}, OTHER, TWO | {"reasoning_content": "Thoughttwo"}]},
    "a thought and a call": {"messages": [USER, call("Argone") | {"reasoning_content": "Thoughtone"}, RESULT, ONE], "tools": TOOLS},
    "system and tools": {"messages": [SYSTEM, USER, ONE], "tools": TOOLS},
}  # fmt: skip
CONTEXT = re.compile(r"Use|Tool[tm]|Sys|Def|Skip")
"""Beginnings of the words of users, tools, system texts and turns that are not learnt."""


def with_template(template: str) -> Any:
    made = copy.deepcopy(tokenizer_of("byte-level"))
    made.chat_template = template
    return made


def encode(template: str, record: dict[str, Any]) -> tuple[str, str, dict[str, Any]] | str:
    """(learnt text, whole text, example) of a conversation; the reason why it is refused."""
    tokenizer = with_template(template)
    (row,) = encode_conversations(
        tokenizer, [read_conversation(copy.deepcopy(record))], EncodingConfig(max_length=20_000)
    )
    if isinstance(row, BadRecord):
        return row.reason
    learnt = [token for token, target in zip(row["input_ids"], row["loss_mask"], strict=True) if target]
    return tokenizer.decode(learnt), tokenizer.decode(row["input_ids"]), row


def answers(record: dict[str, Any]) -> list[str]:
    """The texts and arguments that must be learnt."""
    learnt = [one for one in record["messages"] if one["role"] == "assistant" and one.get("weight") != 0]
    texts = [one["content"] for one in learnt if one["content"]]
    return texts + [made["function"]["arguments"]["city"] for one in learnt for made in one.get("tool_calls", ())]


def faults(template: str) -> Iterator[str]:
    """Every way in which a template's conversations, single answers and pairs are not kept, without a refusal or a note."""
    tokenizer = with_template(template)
    for name, record in CONVERSATIONS.items():
        found = encode(template, record)
        if isinstance(found, str):
            continue
        learnt, text, row = found
        yield from (f"{name}: {word} is not learnt" for word in answers(record) if word not in learnt)
        yield from (f"{name}: {word} is learnt" for word in CONTEXT.findall(learnt))
        lost = [word for word in re.findall(r"Sys\w+|Use\w+|Tool\w+", str(record["messages"])) if word not in text]
        if lost and not any(row[column] for column in LOST_COLUMNS):
            yield f"{name}: {lost} are lost without a note"
        last = record["messages"][-1]
        if last["content"] and "tool_calls" not in str(record["messages"][-2:]):
            single = {**copy.deepcopy(record), "label": True}
            (unpaired,) = read_unpaired(single)
            (kept,) = encode_conversations(
                tokenizer, [unpaired.build_sample(unpaired)], EncodingConfig(max_length=20_000)
            )
            if not isinstance(kept, BadRecord):
                learnt = tokenizer.decode(
                    [one for one, target in zip(kept["input_ids"], kept["loss_mask"], strict=True) if target]
                )
                yield from (f"kto, {name}: {word} is learnt" for word in CONTEXT.findall(learnt) if word != "Skip")
            pair = {
                **copy.deepcopy(record),
                "prompt": record["messages"][:-1],
                "chosen": [last],
                "rejected": [last | {"content": "Rejone"}],
            }
            del pair["messages"]
            (both,) = encode_preferences(tokenizer, [read_preference(pair)], 20_000)
            if isinstance(both, BadRecord):
                continue
            start = int(both["prompt_length"])
            prompt, chosen = tokenizer.decode(both["chosen"][:start]), tokenizer.decode(both["chosen"][start:])
            yield from (f"pair, {name}: {word} is in the answer" for word in CONTEXT.findall(chosen))
            yield from (
                f"pair, {name}: {word} is not in the answer" for word in [last["content"]] if word not in chosen
            )
            if "Sysrule" in str(record) and "Sysrule" not in prompt and not both["system_lost"]:
                yield f"pair, {name}: the system text is lost without a note"


OWN = {
    "plain": PLAIN, "no calls": NO_CALLS, "results in the turn": RESULT_IN_TURN, "name at the end": NAME_AT_THE_END,
    "system before the last user": SYSTEM_BEFORE_LAST_USER, "arguments as text": TEXT_ARGUMENTS, "no system": NO_SYSTEM,
    "no end": NO_END, "text without call": TEXT_WITHOUT_CALL,
}  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_template_keeps_a_record_or_says_so(name: str) -> None:
    assert not [*faults(OWN[name])]


def test_every_answer_and_call_is_learnt_and_nothing_else() -> None:
    for record in CONVERSATIONS.values():
        found = encode(PLAIN, record)
        assert not isinstance(found, str)
        assert not any(found[2][name] for name in LOST_COLUMNS if name != "thoughts_lost")


def test_a_template_without_calls_gives_no_empty_answer() -> None:
    """formats.md A4, training.md 4: the end of an empty turn was learnt in place of the call."""
    reason = encode(NO_CALLS, CONVERSATIONS["a call"])
    assert reason == (
        "the chat template does not write the tool calls of an assistant's turn (turn 2); "
        "name another template with model.chat_template"
    )


def test_the_result_of_a_tool_is_not_learnt() -> None:
    """formats.md A5, training.md 1: Gemma 4 writes it inside of the model's turn."""
    for name in ("a call", "a call with text", "two calls", "a chain"):
        found = encode(RESULT_IN_TURN, CONVERSATIONS[name])
        assert not isinstance(found, str), found
        assert "Tool" not in found[0]
        assert "Tooltext" in found[1]
        assert "value:" not in found[0]


def test_the_arguments_of_a_call_are_learnt_to_its_end() -> None:
    """formats.md A6: the span ended inside of the call."""
    found = encode(NAME_AT_THE_END, CONVERSATIONS["a call"])
    assert found[0].endswith("Answone</s>")  # type: ignore[union-attr]
    assert '{"city": "Argone"}}]</call></s>' in found[0]


def test_a_system_text_stays_in_the_turn_where_the_prompt_has_it() -> None:
    """formats.md A3: Mistral's templates lose it where an answer follows, and a pair's question became its answer."""
    tokenizer = with_template(SYSTEM_BEFORE_LAST_USER)
    _, text, row = encode(SYSTEM_BEFORE_LAST_USER, CONVERSATIONS["system, two turns"])  # type: ignore[misc]
    assert text == "<s>[INST] Useone[/INST] Answone</s>[INST] Sysrule\n\nUsetwo[/INST] Answtwo</s>"
    assert row["system_lost"] == 0
    (prompt,) = encode_prompts(tokenizer, [ParsedPrompt([SYSTEM, USER])])
    pair = read_preference({"prompt": [SYSTEM, USER], "chosen": "Answone", "rejected": "Rejone"})
    (both,) = encode_preferences(tokenizer, [pair], 200)
    assert tokenizer.decode(both["chosen"][: both["prompt_length"]]) == "<s>[INST] Sysrule\n\nUseone[/INST]"  # type: ignore[index]
    assert prompt.text == "<s>[INST] Sysrule\n\nUseone[/INST]"  # type: ignore[union-attr]


def test_a_template_that_joins_texts_gets_arguments_as_text() -> None:
    """formats.md B5, training.md 8: DeepSeek's templates raised for an object."""
    found = encode(TEXT_ARGUMENTS, CONVERSATIONS["a call"])
    assert '<call>weather{"city": "Argone"}</call>' in found[0]


def test_what_a_template_drops_is_counted() -> None:
    row = encode(NO_SYSTEM, CONVERSATIONS["system"])[2]  # type: ignore[index]
    assert [name for name in LOST_COLUMNS if row[name]] == ["system_lost"]
    told = describe_template_counts({"kept": 20, "cuts": {"system_lost": 3, "tools_lost": 0}})
    assert told == [
        "the chat template drops their system text in 3 of 20 samples (name another template with model.chat_template)"
    ]


def test_calls_of_the_context_that_a_template_drops_are_counted() -> None:
    asked = [USER, call("Argone") | {"weight": 0}, RESULT, ONE]
    row = encode(NO_CALLS, {"messages": asked, "tools": TOOLS})[2]  # type: ignore[index]
    assert [name for name in LOST_COLUMNS if row[name]] == ["tools_lost"]
    without_arguments = {"type": "function", "function": {"name": "weather", "arguments": {}}}
    for calls in (call("Argone"), message("assistant", "") | {"tool_calls": [without_arguments]}):
        pair = {"prompt": [USER, calls, RESULT], "chosen": [ONE], "rejected": [TWO]}
        for template, count in ((NO_CALLS, 1), (PLAIN, 0)):
            (both,) = encode_preferences(with_template(template), [read_preference(pair)], 20_000)
            assert not isinstance(both, BadRecord)
            assert both["tools_lost"] == count


def test_what_a_template_drops_of_a_prompt_is_counted() -> None:
    for template, names in ((NO_SYSTEM, ["system_lost"]), (NO_CALLS, ["tools_lost"]), (PLAIN, [])):
        asked = ParsedPrompt([SYSTEM, USER, call("Argone"), RESULT], tuple(TOOLS))
        (prompt,) = encode_prompts(with_template(template), [asked])
        assert not isinstance(prompt, BadRecord)
        assert [name for name in LOST_COLUMNS if prompt.lost[name]] == names


def test_a_text_beside_a_call_that_is_dropped_makes_a_bad_record() -> None:
    reason = encode(TEXT_WITHOUT_CALL, CONVERSATIONS["a call with text"])
    assert str(reason).startswith("the chat template drops the answer of turn 2; name another")


def test_answers_without_an_end_are_told() -> None:
    """training.md 6: GLM's templates end an answer with the next turn."""
    assert "learns answers without an end" in describe_missing_end(with_template(NO_END))[0]
    assert describe_missing_end(with_template(PLAIN)) == []
    assert describe_missing_end(tokenizer_of("byte-level")) == []


def public_templates() -> list[Path]:
    folders = os.environ.get("DSTRAIN_CHAT_TEMPLATES", "").split(os.pathsep)
    return sorted(path for folder in folders if folder for path in Path(folder).rglob("*.jinja"))


@pytest.mark.slow
def test_public_templates_keep_a_record_or_say_so() -> None:
    """`pip download --no-deps trl axolotl`, unpack, and name the folders in DSTRAIN_CHAT_TEMPLATES."""
    templates = public_templates()
    if not templates:
        pytest.skip("DSTRAIN_CHAT_TEMPLATES names no folder with .jinja files")
    found = {str(path): wrong for path in templates if (wrong := [*faults(path.read_text(encoding="utf-8"))])}
    assert not found
    refused = {
        name: sum(isinstance(encode(path.read_text(encoding="utf-8"), record), str) for path in templates)
        for name, record in CONVERSATIONS.items()
    }
    print(f"{len(templates)} templates; refused: {refused}")


PROMPT_AT_THE_END = (  # as Command R+: whether or not it is asked for, the text of the next answer's prompt is written
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}</s>{% endfor %}"
    "<system>Write your plan.</s><assistant>"
)


def test_a_prompt_that_a_template_always_writes_is_not_learnt() -> None:
    turns = {"messages": [message("user", "2+2?"), message("assistant", "4 or so"), message("user", "Sure?")]}
    turns["messages"].append(message("assistant", "Yes."))
    found = encode(PROMPT_AT_THE_END, turns)
    assert isinstance(found, tuple)
    assert found[0].endswith("Yes.</s>")
    assert "Write your plan" not in found[0]
    tokenizer = with_template(PROMPT_AT_THE_END)
    pair = read_preference({"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    (row,) = encode_preferences(tokenizer, [pair], 20_000)
    assert not isinstance(row, BadRecord)
    for side, answer in (("chosen", "4"), ("rejected", "5")):
        assert tokenizer.decode(row[side]).endswith(f"{answer}</s>")
