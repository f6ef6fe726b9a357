"""Prompt and answer are one text's tokens: what is trained on is what the template and generation make."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from dstrain.data.encoding.conversations import EncodedPrompt, EncodingConfig, encode_conversations, encode_prompts
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.formats.conversations import read_conversation, read_prompt
from dstrain.data.formats.preferences import Preference, read_preference
from dstrain.data.records import BadRecord
from tests.chat_templates import KINDS, PAIRS, TEMPLATES, TEXTS, chat, tokenizer_of
from tests.unit.data.encoding.encode_preference import encode_preference
from tests.unit.data.encoding.test_conversations import Slow
from tests.unit.data.encoding.test_preferences import with_frame
from tests.vocabulary import message

GOLDEN = {
    ("llama3", "byte-level"): [
        ["t", "<|end_header_id|>", "Ċ", "Ċ"],
        ["Sure", ",", "Ġhere", ".", "<|eot_id|>"],
        ["the", "Ġriver", "<|eot_id|>"],
    ],
    ("llama3", "legacy metaspace"): [
        ["t", "<|end_header_id|>", "▁\n", "\n"],
        ["Su", "r", "e", ",", "▁her", "e", ".", "<|eot_id|>"],
        ["t", "h", "e", "▁", "r", "i", "v", "er", "<|eot_id|>"],
    ],
    ("llama3", "metaspace"): [
        ["t", "<|end_header_id|>", "\n", "\n"],
        ["Su", "re,", "▁here", ".", "<|eot_id|>"],
        ["the", "▁river", "<|eot_id|>"],
    ],
    ("qwen", "byte-level"): [
        ["ss", "istan", "t", "Ċ"],
        ["Sure", ",", "Ġhere", ".", "<|im_end|>", "Ċ"],
        ["the", "Ġriver", "<|im_end|>", "Ċ"],
    ],
    ("qwen", "legacy metaspace"): [
        ["<|im_end|>", "▁\n", "<|im_start|>", "▁assistant\n"],
        ["Su", "r", "e", ",", "▁her", "e", ".", "<|im_end|>", "▁\n"],
        ["t", "h", "e", "▁", "r", "i", "v", "er", "<|im_end|>", "▁\n"],
    ],
    ("qwen", "metaspace"): [
        ["ss", "istan", "t", "\n"],
        ["Su", "re,", "▁here", ".", "<|im_end|>", "\n"],
        ["the", "▁river", "<|im_end|>", "\n"],
    ],
    ("zephyr", "byte-level"): [
        ["t", "|", ">", "Ċ"],
        ["Sure", ",", "Ġhere", ".", "</s>", "Ċ"],
        ["the", "Ġriver", "</s>", "Ċ"],
    ],
    ("zephyr", "legacy metaspace"): [
        ["t", "<0x7C>", "<0x3E>", "\n"],
        ["Su", "r", "e", ",", "▁her", "e", ".", "</s>", "▁\n"],
        ["t", "h", "e", "▁", "r", "i", "v", "er", "</s>", "▁\n"],
    ],
    ("zephyr", "metaspace"): [
        ["t", "<0x7C>", "<0x3E>", "\n"],
        ["Su", "re,", "▁here", ".", "</s>", "\n"],
        ["the", "▁river", "</s>", "\n"],
    ],
}
"""Tokens of pair "one turn": the end of the prompt, and both answers. From `apply_chat_template(tokenize=True)`."""
BOTH = [(family, kind) for family in TEMPLATES for kind in KINDS]


def answers(tokenizer: Any, example: dict[str, Any]) -> list[list[str]]:
    at = example["prompt_length"]
    return [tokenizer.convert_ids_to_tokens(example[side][at:]) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_the_tokens_are_these(family: str, kind: str) -> None:
    tokenizer = chat(family, kind)
    example = encode_preference(tokenizer, read_preference(PAIRS["one turn"]), 300)
    head = tokenizer.convert_ids_to_tokens(example["chosen"][: example["prompt_length"]])
    assert [head[-4:], *answers(tokenizer, example)] == GOLDEN[family, kind]


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_rows_are_the_templates_ids_and_begin_as_generation_does(
    family: str, kind: str, name: str, adds_bos: bool
) -> None:
    tokenizer, record = chat(family, kind, adds_bos), PAIRS[name]
    example = encode_preference(tokenizer, read_preference(record), 1000)
    (asked,) = encode_prompts(tokenizer, [read_prompt(record)])
    assert isinstance(asked, EncodedPrompt)
    assert asked.ids[: example["prompt_length"]] == example["chosen"][: example["prompt_length"]]
    for side in ("chosen", "rejected"):
        whole = tokenizer.apply_chat_template(
            [*record["prompt"], message("assistant", record[side])], return_dict=False
        )
        assert example[side] == whole, "BOS where the template writes it, once, whatever the tokenizer adds by itself"


@pytest.mark.parametrize("name", [name for name in PAIRS if name != "line breaks"])
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_the_boundary_is_the_generation_prompts_end_and_that_of_sft(family: str, kind: str, name: str) -> None:
    tokenizer, record = chat(family, kind), PAIRS[name]
    example = encode_preference(tokenizer, read_preference(record), 1000)
    (asked,) = encode_prompts(tokenizer, [read_prompt(record)])
    assert isinstance(asked, EncodedPrompt)
    assert asked.ids == example["chosen"][: example["prompt_length"]]
    taught = encode_conversations(tokenizer, [read_conversation(record)], EncodingConfig(max_length=1000))[0]
    assert not isinstance(taught, BadRecord)
    assert taught["learnt"].index(1) == example["prompt_length"]
    assert taught["input_ids"] == example["chosen"][: len(taught["input_ids"])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", TEXTS)
def test_plain_texts_are_one_text_too(kind: str, name: str) -> None:
    tokenizer, record = tokenizer_of(kind), TEXTS[name]
    example = encode_preference(tokenizer, read_preference(record), 1000)
    prompt = tokenizer(record["prompt"])["input_ids"]
    at = example["prompt_length"]
    for side in ("chosen", "rejected"):
        whole = tokenizer(record["prompt"] + record[side])["input_ids"]
        assert example[side] == [*whole, tokenizer.eos_token_id]
        assert whole[:at] == prompt[:at]
    assert at >= len(prompt) - 3, "what is on the border is the answers', and no more"


def test_a_token_on_the_border_is_the_answers_in_both_rows() -> None:
    tokenizer = tokenizer_of("byte-level")
    example = encode_preference(tokenizer, Preference("the quick bro", "wn fox", "x"), 1000)
    assert [tokens[0] for tokens in answers(tokenizer, example)] == ["Ġbrown", "Ġbr"]


def test_what_a_template_opens_and_takes_back_is_no_part_of_the_prompt() -> None:
    tokenizer = copy.deepcopy(chat("qwen", "byte-level"))
    tokenizer.chat_template = TEMPLATES["qwen"].replace("assistant\n' }}{% endif", "assistant\n\n\n' }}{% endif")
    example = encode_preference(tokenizer, read_preference(PAIRS["one turn"]), 1000)
    (asked,) = encode_prompts(tokenizer, [read_prompt(PAIRS["one turn"])])
    assert isinstance(asked, EncodedPrompt)
    assert asked.ids[: example["prompt_length"]] == example["chosen"][: example["prompt_length"]]


@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_a_slow_tokenizer_gives_the_same_uncut_and_cut(family: str, kind: str) -> None:
    tokenizer = chat(family, kind)
    for name, record in PAIRS.items():
        pair = read_preference(record)
        for length in (1000, 60, 45):
            one, other = (encode_preferences(each, [pair], length)[0] for each in (tokenizer, Slow(tokenizer)))
            assert str(one) == str(other), name


@pytest.mark.parametrize("side", ["chosen", "rejected"])
def test_an_answer_of_no_token_is_named_wherever_the_other_begins(side: str) -> None:
    tokenizer = tokenizer_of("byte-level")
    said_so = {"chosen": "wn fox", "rejected": "wn dog", side: ""}
    with pytest.raises(BadRecord, match=f"'{side}' becomes no token"):
        encode_preference(tokenizer, Preference("the quick bro", said_so["chosen"], said_so["rejected"]), 99)


def test_equal_answers_are_split_from_the_prompt_as_ever() -> None:
    for tokenizer in (tokenizer_of("metaspace"), chat("zephyr", "metaspace")):
        example = encode_preference(tokenizer, Preference("the quick", " fox", " fox"), 99)
        assert example["chosen"] == example["rejected"]
        assert 0 < example["prompt_length"] < len(example["chosen"])


def test_a_template_that_writes_bos_and_a_tokenizer_that_adds_it_make_one() -> None:
    tokenizer = chat("llama3", "metaspace", adds_bos=True)
    example = encode_preference(tokenizer, read_preference(PAIRS["later turn"]), 1000)
    assert example["chosen"].count(tokenizer.bos_token_id) == 1
    framed = with_frame(tokenizer_of("metaspace"), "<s>", "</s>")
    example = encode_preference(framed, Preference("the quick", " fox</s>", " dog"), 99)
    assert [example[side].count(framed.eos_token_id) for side in ("chosen", "rejected")] == [1, 1]
