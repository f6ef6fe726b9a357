"""Records of every form, read as what is learnt from them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.encoding.conversations import encode_prompts, stop_token_ids
from dstrain.data.formats.conversations import (
    Conversation,
    ParsedPrompt,
    PromptCompletion,
    read_conversation,
    read_prompt,
)
from dstrain.data.formats.preferences import read_preference
from dstrain.errors import BadRecord
from tests.unit.data.encoding.cases import encode_preference

ASKED = {"role": "user", "content": "2+2?"}
SAID = {"role": "assistant", "content": "4"}
KIND = {"role": "system", "content": "Be kind."}
ADD = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": ADD}

SAME = {
    "messages": {"messages": [ASKED, SAID]},
    "typed parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}, SAID]},
    "sharegpt": {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
    "alpaca": {"instruction": "2+2?", "input": "", "output": "4"},
    "prompt and completion as messages": {"prompt": [ASKED], "completion": [SAID]},
    "a prompt answered by messages": {"prompt": "2+2?", "completion": [SAID]},
    "prompt and response as messages": {"prompt": [ASKED], "response": [SAID]},
    "question and answer": {"question": "2+2?", "answer": "4"},
    "a dialog as text": {"text": "\n\nHuman: 2+2?\n\nAssistant: 4"},
    "a dialog as a prompt": {"prompt": "\n\nHuman: 2+2?\n\nAssistant:", "completion": " 4"},
    "whole dialogs of a preference": {
        "chosen": "\n\nHuman: 2+2?\n\nAssistant: 4",
        "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
    },
    "sharegpt's preference": {
        "conversations": [{"from": "human", "value": "2+2?"}],
        "chosen": {"from": "gpt", "value": "4"},
        "rejected": {"from": "gpt", "value": "5"},
    },
    "what people liked": {"messages": [ASKED, SAID], "label": True},
    "columns that a parquet file leaves empty": {
        "messages": [ASKED, SAID],
        "prompt": None,
        "images": None,
        "tools": None,
    },
}


@pytest.mark.parametrize("record", SAME.values(), ids=SAME)
def test_every_form_says_the_same(record: dict[str, Any]) -> None:
    assert read_conversation(record) == Conversation([ASKED, SAID], (1,))


def test_every_turn_of_the_assistant_is_learnt_in_a_dialog() -> None:
    turns = [KIND, ASKED, SAID, ASKED, SAID]
    assert read_conversation({"messages": turns}) == Conversation(turns, (2, 4))
    sharegpt = [{"from": m["role"], "value": m["content"]} for m in turns[1:]]
    assert read_conversation({"conversations": sharegpt, "system": "Be kind."}) == Conversation(turns, (2, 4))
    alpaca = {"instruction": "2+2?", "output": "4", "history": [["2+2?", "4"]], "system": "Be kind."}
    assert read_conversation(alpaca) == Conversation(turns, (2, 4))


def test_an_alpaca_input_stands_below_its_instruction() -> None:
    found = read_conversation({"instruction": "Add.", "input": "2 and 2", "output": "4"})
    assert isinstance(found, Conversation)
    assert found.messages[0]["content"] == "Add.\n2 and 2"


def test_only_the_completion_is_learnt() -> None:
    before = [ASKED, SAID, ASKED]
    assert read_conversation({"prompt": before, "completion": [SAID]}) == Conversation([*before, SAID], (3,))
    whole = "\n\nHuman: a\n\nAssistant: b\n\nHuman: c\n\nAssistant: "
    found = read_conversation({"chosen": whole + "good", "rejected": whole + "bad"})
    assert isinstance(found, Conversation)
    assert found.trained_turns == (3,), "an earlier answer was neither chosen nor rejected"
    system = read_conversation({"system": "Be kind.", "prompt": "2+2?", "completion": "4"})
    assert system == Conversation([KIND, ASKED, SAID], (2,)), "only messages have room for it"


def test_texts_that_follow_one_another_stay_as_they_are() -> None:
    assert read_conversation({"prompt": "2 + 2 =", "completion": " 4"}) == PromptCompletion("2 + 2 =", " 4")
    assert read_conversation({"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}) == PromptCompletion(
        "2 + 2 =", " 4"
    )
    assert read_conversation({"text": "Once upon a time"}) == PromptCompletion("", "Once upon a time")
    assert PromptCompletion("2+2?", " 4").to_conversation() == Conversation([ASKED, SAID], (1,))


def test_a_turn_of_weight_0_is_not_learnt() -> None:
    turns = [ASKED, SAID | {"weight": 0}, ASKED, SAID | {"weight": 1}]
    found = read_conversation({"messages": turns})
    assert isinstance(found, Conversation)
    assert found.trained_turns == (3,)


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD]), [WRAPPED]], ids=["bare", "JSON", "wrapped"])
@pytest.mark.parametrize("form", ["openai", "arguments as JSON", "sharegpt"])
def test_calls_of_functions_are_read_as_templates_take_them(form: str, tools: Any) -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    called: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]}
    if form == "arguments as JSON":
        called["tool_calls"] = [{"function": call | {"arguments": '{"a": 1}'}}]
    if form == "sharegpt":
        called = {"from": "function_call", "value": json.dumps(call)}
    told = {"from": "observation", "value": "2"} if form == "sharegpt" else {"role": "tool", "content": "2"}
    found = read_conversation({"messages": [ASKED, called, told, SAID], "tools": tools})
    assert isinstance(found, Conversation)
    assert found.tools == (WRAPPED,)
    assert found.trained_turns == (1, 3)
    assert [message["role"] for message in found.messages] == ["user", "assistant", "tool", "assistant"]
    message: Any = found.messages[1]
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"] == call
    assert message["tool_calls"][0]["type"] == "function"


def test_thoughts_beside_an_answer_are_kept_for_the_template() -> None:
    found = read_conversation({"messages": [ASKED, SAID | {"reasoning_content": "hm", "unknown": 1}]})
    assert isinstance(found, Conversation)
    assert found.messages[1] == SAID | {"reasoning_content": "hm"}


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no known key": ({"ask": "2+2?"}, "the keys are ask; write 'messages', or rename columns with data.columns"),
    "half a pair": ({"prompt": "2+2?"}, "'prompt' comes without 'completion'"),
    "no list": ({"messages": "2+2?"}, "'messages' is text, not a list"),
    "an unknown role": ({"messages": [{"role": "boss", "content": "x"}]}, "'messages[0].role' is 'boss'"),
    "no answer": ({"messages": [ASKED]}, "'messages' has no turn of the assistant"),
    "no messages": ({"messages": []}, "'messages' has no turn of the assistant"),
    "an empty answer": (
        {"messages": [ASKED, SAID | {"content": " \n"}]},
        "'messages' (turn 2 of the dialog) is an empty",
    ),
    "an empty completion": ({"prompt": "2+2?", "completion": ""}, "'completion' is an empty answer"),
    "an empty prompt": ({"prompt": " ", "completion": "4"}, "'prompt' is empty"),
    "an empty output": ({"instruction": "2+2?", "output": ""}, "'output' (turn 2 of the dialog) is an empty answer"),
    "an empty instruction": ({"instruction": "", "output": "4"}, "'instruction' is empty"),
    "an empty text": ({"text": ""}, "'text' is an empty answer"),
    "an odd weight": (
        {"messages": [ASKED, SAID | {"weight": 0.5}]},
        "weight 0.5; write 0 or false (not trained on), 1 or true",
    ),
    "nothing learnt": ({"messages": [ASKED, SAID | {"weight": 0}]}, "no turn of the assistant to train on"),
    "what people did not want": (
        {"messages": [ASKED, SAID], "label": False},
        "'label' is false: the answer was not wanted",
    ),
    "one side of a preference": ({"prompt": "2+2?", "chosen": "4"}, "no 'rejected'"),
    "an image": ({"messages": [ASKED, SAID], "images": ["a.png"]}, "'images' is not text"),
    "an image of a preference": (
        {"prompt": "2+2?", "chosen": "4", "rejected": "5", "image": "a"},
        "'image' is not text",
    ),
    "a part that is an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}, {"type": "text", "text": "?"}]}, SAID]},
        "'image_url' is not text, and sft trains on text only; train on images with task vlm",
    ),
    "a video": ({"messages": [ASKED, SAID], "video": "a.mp4"}, "'video' is neither text nor an image"),
    "tools that are no list": ({"messages": [ASKED, SAID], "tools": "add"}, "'tools' is not a list of functions"),
    "calls that are no list": (
        {"messages": [ASKED, SAID | {"tool_calls": "add"}]},
        "tool_calls' is not a list of calls",
    ),
    "a call of nothing": ({"messages": [ASKED, {"from": "function_call", "value": "add!"}]}, "names no function"),
}


@pytest.mark.parametrize(("record", "reason"), BAD.values(), ids=BAD)
def test_a_bad_record_says_what_and_how_to_mend_it(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(BadRecord) as caught:
        read_conversation(record)
    assert reason in caught.value.reason
    assert ";" in caught.value.reason, "what to do"


@pytest.mark.parametrize("value", [None, 1, True, "x", [], {}, [1], [{}], {"a": 1}, [[1]]])
@pytest.mark.parametrize("record", SAME.values(), ids=SAME)
def test_no_value_of_any_kind_is_a_crash(record: dict[str, Any], value: Any) -> None:
    for key in (*record, "tools", "system", "history", "label"):
        assert isinstance(attempt(record | {key: value}), Conversation | PromptCompletion | BadRecord)


def test_real_files_are_read(real_data: Path) -> None:
    bad = {}
    for name in ("hh/harmless-train.jsonl", "hh/helpful-train.jsonl", "prefs/llamafactory/dpo_zh_demo.json"):
        text = (real_data / name).read_text(encoding="utf-8")
        rows = json.loads(text) if name.endswith(".json") else [json.loads(line) for line in text.splitlines()]
        bad[name] = sum(isinstance(attempt(row), BadRecord) for row in rows) / len(rows)
    assert max(bad.values()) < 0.01, bad


def test_unwanted_answers_of_a_real_file_are_refused(real_data: Path) -> None:
    rows = json.loads((real_data / "prefs/llamafactory/kto_en_demo.json").read_text(encoding="utf-8"))
    for row in rows:
        assert isinstance(attempt(row), Conversation if row["label"] else BadRecord)


def attempt(record: dict[str, Any]) -> Any:
    try:
        return read_conversation(record)
    except BadRecord as fault:
        return fault


# What a record asks is the same in every form, and is written as it was in training.


FOX = [{"role": "user", "content": "the fox"}]
LATER = [*FOX, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "the dog"}]
END = [{"role": "assistant", "content": "no"}]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HH = "\n\nHuman: the fox\n\nAssistant: yes\n\nHuman: the dog\n\nAssistant:"


@pytest.mark.parametrize(
    ("record", "wanted"),
    [
        ({"prompt": FOX, "chosen": "yes", "rejected": "no"}, FOX),
        ({"chosen": HH + " yes", "rejected": HH + " no"}, LATER),
        ({"prompt": HH}, LATER),
        ({"prompt": HH, "completion": " yes", "label": False}, LATER),
        ({"prompt": "the fox"}, "the fox"),
        ({"prompt": "the fox", "system": "yes"}, [{"role": "system", "content": "yes"}, *FOX]),
        ({"messages": LATER}, LATER),
        ({"messages": LATER + END}, LATER),
        ({"conversations": [{"from": "human", "value": "the fox"}, {"from": "gpt", "value": "no"}]}, FOX),
        ({"conversations": [{"from": "human", "value": "the fox"}]}, FOX),
        ({"instruction": "the fox", "history": [["a", "b"]]}, None),
        ({"instruction": "the", "input": "fox", "output": "no"}, [{"role": "user", "content": "the\nfox"}]),
        ({"question": "the fox"}, FOX),
        ({"text": HH}, LATER),
        ({"text": HH + " yes"}, LATER),
        ({"text": "the fox"}, "the fox"),
        ({"instruction": "the fox", "output": ["yes", "no"]}, FOX),
    ],
)
def test_every_form_asks_the_same(record: dict[str, Any], wanted: Any) -> None:
    found = read_prompt(record)
    if wanted is None:
        assert found.prompt == [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *FOX]
    else:
        assert found.prompt == wanted


def test_tools_come_along() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    assert read_prompt({"messages": FOX, "tools": [tool]}).tools == (tool,)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "  "}, "is empty"),
        ({"messages": END}, "nothing is asked"),
        ({"messages": []}, "nothing is asked"),
        ({"weight": 3}, "no conversation"),
        ({"chosen": "a"}, "no 'rejected'"),
    ],
)
def test_a_record_that_asks_nothing_says_why(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read_prompt(record)


def with_template(tokenizer: Any) -> Any:
    made = copy.deepcopy(tokenizer)
    made.add_special_tokens({"additional_special_tokens": ["<|end|>", "<|user|>", "<|assistant|>"]})
    made.chat_template = TEMPLATE
    return made


@pytest.mark.parametrize("templated", [False, True])
@pytest.mark.parametrize(
    "record", [{"prompt": "the fox", "chosen": " yes", "rejected": " no"}, {"prompt": LATER, "chosen": "yes", "rejected": "no"}]
)  # fmt: skip
def test_a_prompt_has_the_ids_it_had_in_training(templated: bool, record: dict[str, Any], tokenizer: Any) -> None:
    used = with_template(tokenizer) if templated else tokenizer
    trained = encode_preference(used, read_preference(record), 200)
    (coded,) = encode_prompts(used, [read_prompt(record)])
    assert not isinstance(coded, BadRecord)
    assert coded.ids == list(trained["chosen"][: trained["prompt_length"]])


def test_a_long_prompt_loses_its_beginning(tokenizer: Any) -> None:
    whole, cut = (encode_prompts(tokenizer, [ParsedPrompt("the fox " * 50)], limit)[0] for limit in (None, 7))
    assert not isinstance(whole, BadRecord)
    assert not isinstance(cut, BadRecord)
    assert cut.ids == whole.ids[-7:]
    assert cut.text == whole.text


def test_an_answer_ends_with_eos_or_with_what_the_template_puts_behind_it(tokenizer: Any) -> None:
    used = with_template(tokenizer)
    assert stop_token_ids(tokenizer) == {tokenizer.eos_token_id}
    assert stop_token_ids(used) == {used.eos_token_id, used.convert_tokens_to_ids("<|end|>")}
