"""What a record asks is the same in every form, and is written as it was in training."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dstrain.data.encoding.conversations import encode_prompts, stop_token_ids
from dstrain.data.formats.conversations import ParsedPrompt, read_prompt
from dstrain.data.formats.preferences import read_preference
from dstrain.data.records import BadRecord
from tests.unit.data.encoding.encode_preference import encode_preference

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
