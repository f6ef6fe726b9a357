from __future__ import annotations

import copy
from typing import Any

import pytest

from dstrain.data.encoding.chat_template import render_conversation
from dstrain.data.encoding.conversations import EncodedPrompt, encode_conversations, encode_prompts
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.rendering import EncodingConfig, get_special_tokens, render_prompt
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.data.formats.conversations import read_conversation, read_prompt
from dstrain.data.formats.preferences import Preference, read_preference
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord, DataError
from tests.chat_templates import KINDS, PAIRS, TEMPLATES, TEXTS, chat, tokenizer_of
from tests.unit.data.encoding.cases import Slow, encode_preference, with_frame
from tests.vocabulary import message

TEMPLATE = (
    "{% for m in messages %}{% if loop.first and start %}<s>{% endif %}"
    "<|{{ m.role }}|>{{ m.content | trim }}</s>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
HELLO = [{"role": "user", "content": "the fox"}]
PREFERENCE = Preference(HELLO, "the dog", "the river")
EARLIER = [{"role": "user", "content": "the quick brown fox"}, {"role": "assistant", "content": "jumps"}]
LATER = Preference([*EARLIER, *HELLO], "the dog", "the river")


def with_template(tokenizer, template: str):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def bert():
    """A WordPiece tokenizer with [CLS] and [SEP], as BERT has them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "fox", "dog", "river", "human", "assistant", ":"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]", unk_token="[UNK]"
    )


def texts(tokenizer, example) -> tuple[str, str, str]:
    at = example["prompt_length"]
    assert example["chosen"][:at] == example["rejected"][:at]
    ids = example["chosen"][:at], example["chosen"][at:], example["rejected"][at:]
    return tuple(tokenizer.decode(part) for part in ids)  # type: ignore[return-value]


def test_tools_are_written_by_the_template_or_refused(tokenizer):
    preference = read_preference(
        {"prompt": "the fox", "chosen": "dog", "rejected": "river", "tools": [{"name": "add"}]}
    )
    templated = with_template(tokenizer, "{% for tool in tools %}<{{ tool.function.name }}>{% endfor %}" + TEMPLATE)
    prompt, *_ = texts(templated, encode_preference(templated, preference, 200))
    assert prompt == "<add><|user|>the fox</s><|assistant|>"
    with pytest.raises(BadRecord, match="'tools' need a chat template, and the tokenizer has none; give it one"):
        encode_preference(tokenizer, preference, 200)


def test_without_a_template_messages_read_as_hh_dialogs_and_end_with_eos(tokenizer):
    prompt = [{"role": "system", "content": "Be kind."}, *HELLO]
    example = encode_preference(tokenizer, Preference(prompt, "the dog", "the river"), 200)
    assert texts(tokenizer, example) == ("Be kind.\n\nHuman: the fox\n\nAssistant:", " the dog</s>", " the river</s>")
    assert (example["prompt_cut"], example["response_cut"]) == (0, 0)


def test_plain_texts_are_joined_as_they_stand(tokenizer):
    example = encode_preference(tokenizer, Preference("Q: fox ", "dog</s>", "river"), 200)
    assert texts(tokenizer, example) == ("Q: fox", " dog</s>", " river</s>"), "a token on the border is the answers'"


def test_an_answer_of_several_turns_is_written_out(tokenizer):
    answer = [
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    rendered = render_prompt(tokenizer, HELLO, (answer, "  two spaces"))
    assert rendered.answers == (" a\n\nHuman: b\n\nAssistant: c", "   two spaces")


def test_a_template_writes_everything_and_nothing_is_appended(tokenizer):
    tokenizer = with_template(tokenizer, TEMPLATE)
    for prompt, space in ((HELLO, ""), ("the fox", " ")):
        example = encode_preference(tokenizer, Preference(prompt, space + "the dog", space + "the river"), 200)
        assert texts(tokenizer, example) == ("<|user|>the fox</s><|assistant|>", "the dog</s>", "the river</s>")


def test_a_template_that_opens_answers_with_more_is_split_where_they_begin_alike(tokenizer):
    tokenizer = with_template(tokenizer, TEMPLATE.replace("<|assistant|>{% endif", "<|assistant|><think>{% endif"))
    example = encode_preference(tokenizer, PREFERENCE, 200)
    assert texts(tokenizer, example) == ("<|user|>the fox</s><|assistant|>", "the dog</s>", "the river</s>")
    assert render_prompt(tokenizer, HELLO).prompt.endswith("<|assistant|><think>")


def test_a_dialog_that_the_template_refuses_is_a_bad_record_among_good_ones(tokenizer):
    tokenizer = with_template(
        tokenizer, "{% if messages|length > 2 %}{{ raise_exception('too long') }}{% endif %}" + TEMPLATE
    )
    long = Preference([*HELLO, {"role": "assistant", "content": "x"}, *HELLO], "a", "b")
    first, second, third = encode_preferences(tokenizer, [PREFERENCE, long, PREFERENCE], 200)
    assert isinstance(second, BadRecord)
    assert "refuses the dialog (too long)" in second.reason
    assert first == third


def test_a_text_has_the_tokenizers_bos_and_a_templates_text_the_templates(tokenizer):
    framed = with_frame(tokenizer, "<s>")
    bos = framed.bos_token_id
    written = with_template(framed, TEMPLATE.replace("start", "true"))
    unwritten = with_template(framed, TEMPLATE.replace("start", "false"))
    for each in (framed, written):
        ids = encode_preference(each, PREFERENCE, 200)["chosen"]
        assert ids[0] == bos
        assert ids.count(bos) == 1
    with_bos, without = (encode_preference(each, PREFERENCE, 200) for each in (written, unwritten))
    assert without["chosen"] == with_bos["chosen"][1:]
    assert without["prompt_length"] == with_bos["prompt_length"] - 1


def test_bos_survives_the_cut_even_where_only_the_template_writes_it(tokenizer):
    for start in ("<s>", ""):
        each = with_frame(tokenizer, "<s>") if start else copy.deepcopy(tokenizer)
        each.add_special_tokens({"bos_token": "<s>"})
        each = with_template(each, TEMPLATE.replace("start", "true"))
        whole = encode_preference(each, LATER, 200)
        cut = encode_preference(each, LATER, len(whole["rejected"]) - 2)
        assert (cut["prompt_cut"], cut["last_turn_cut"]) == (1, 0)
        assert cut["rejected"] == whole["rejected"][:1] + whole["rejected"][3:]


def test_a_tokenizer_that_adds_eos_itself_does_not_get_two(tokenizer):
    framed = with_frame(tokenizer, "<s>", "</s>")
    ids = encode_preference(framed, PREFERENCE, 200)["chosen"]
    assert ids.count(framed.eos_token_id) == 1
    assert ids[-1] == framed.eos_token_id


def test_bert_gets_cls_and_sep_and_keeps_them_when_cut(bert):
    assert get_special_tokens(bert).has_sep
    pair = Preference("the fox", " dog", " the river dog")
    example = encode_preference(bert, pair, 20)
    assert bert.decode(example["chosen"]) == "[CLS] the fox dog [SEP]"
    assert example["prompt_length"] == 3
    assert bert.decode(encode_preference(bert, pair, 6)["rejected"]) == "[CLS] the fox the river [SEP]"
    short = encode_preference(bert, pair, 5, 2)
    assert bert.decode(short["rejected"]) == "[CLS] fox the river [SEP]"
    assert (short["prompt_cut"], short["response_cut"], short["prompt_length"]) == (1, 1, 2)
    assert bert.decode(short["chosen"]) == "[CLS] fox dog [SEP]", "each answer is cut for itself"


def test_older_turns_are_cut_from_the_left_alike_for_both_answers(tokenizer):
    whole = encode_preference(tokenizer, LATER, 200)
    longer = max(len(whole["chosen"]), len(whole["rejected"]))
    assert encode_preference(tokenizer, LATER, longer) == whole
    cut = encode_preference(tokenizer, LATER, longer - 3)
    assert cut["prompt_length"] == whole["prompt_length"] - 3
    assert (cut["chosen"], cut["rejected"]) == (whole["chosen"][3:], whole["rejected"][3:])
    assert (cut["prompt_cut"], cut["response_cut"], cut["last_turn_cut"]) == (1, 0, 0)


def test_max_prompt_length_cuts_the_prompt_alone(tokenizer):
    whole = encode_preference(tokenizer, PREFERENCE, 200)
    cut = encode_preference(tokenizer, PREFERENCE, 200, 4)
    assert cut["prompt_length"] == 4
    assert cut["chosen"] == whole["chosen"][whole["prompt_length"] - 4 :]
    assert (cut["prompt_cut"], cut["last_turn_cut"]) == (1, 1), "of the last turn too, and that is told"


def test_a_length_without_room_is_refused(bert):
    with pytest.raises(DataError, match="max_length 2 leaves no room"):
        encode_preference(bert, PREFERENCE, 2)


def test_many_at_once_are_the_same_as_one_by_one(tokenizer, real_data):
    source = open_source(real_data / "hh" / "harmless-test.jsonl")
    preferences = [read_preference(source[index]) for index in range(30)]
    together = encode_preferences(tokenizer, preferences, 128)
    assert str(together) == str([encode_preferences(tokenizer, [preference], 128)[0] for preference in preferences])
    good = [example for example in together if not isinstance(example, BadRecord)]
    assert len(good) > 15
    assert all(len(example[key]) <= 128 for example in good for key in ("chosen", "rejected"))


def test_a_trained_tokenizer_is_the_same_each_time_and_gives_texts_back():
    words = ["the quick brown fox", "jumps over the lazy dog"] * 3
    one, other = train_tokenizer(words, 300), train_tokenizer(iter(words), 300)
    assert one.backend_tokenizer.to_str() == other.backend_tokenizer.to_str()
    assert (one.pad_token, one.eos_token, one.bos_token) == ("<pad>", "</s>", None)
    assert one.pad_token_id != one.eos_token_id
    assert one.decode(one("Ünïcode 你好 \n\n x")["input_ids"]) == "Ünïcode 你好 \n\n x"
    assert len(one) <= 300


def test_a_template_with_an_error_is_no_fault_of_the_dialog(tokenizer):
    broken = copy.deepcopy(tokenizer)
    broken.chat_template = "{% for m in messages %}\n{{ m.content }"
    with pytest.raises(
        DataError, match=r"chat template has an error in line 2 \(.*\); fix it, or name another with model"
    ):
        render_conversation(broken, [{"role": "user", "content": "q"}])


# Prompt and answer are one text's tokens: what is trained on is what the template and generation make.


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
        ["Sure", ",", "Ġhere", ".", "<|im_end|>"],
        ["the", "Ġriver", "<|im_end|>"],
    ],
    ("qwen", "legacy metaspace"): [
        ["<|im_end|>", "▁\n", "<|im_start|>", "▁assistant\n"],
        ["Su", "r", "e", ",", "▁her", "e", ".", "<|im_end|>"],
        ["t", "h", "e", "▁", "r", "i", "v", "er", "<|im_end|>"],
    ],
    ("qwen", "metaspace"): [
        ["ss", "istan", "t", "\n"],
        ["Su", "re,", "▁here", ".", "<|im_end|>"],
        ["the", "▁river", "<|im_end|>"],
    ],
    ("zephyr", "byte-level"): [
        ["t", "|", ">", "Ċ"],
        ["Sure", ",", "Ġhere", ".", "</s>"],
        ["the", "Ġriver", "</s>"],
    ],
    ("zephyr", "legacy metaspace"): [
        ["t", "<0x7C>", "<0x3E>", "\n"],
        ["Su", "r", "e", ",", "▁her", "e", ".", "</s>"],
        ["t", "h", "e", "▁", "r", "i", "v", "er", "</s>"],
    ],
    ("zephyr", "metaspace"): [
        ["t", "<0x7C>", "<0x3E>", "\n"],
        ["Su", "re,", "▁here", ".", "</s>"],
        ["the", "▁river", "</s>"],
    ],
}
"""Tokens of pair "one turn": the end of the prompt, and both answers up to their end token, of `apply_chat_template`."""
END_TOKENS = {"llama3": "<|eot_id|>", "qwen": "<|im_end|>", "zephyr": "</s>"}
BOTH = [(family, kind) for family in TEMPLATES for kind in KINDS]


def answers(tokenizer: Any, example: dict[str, Any]) -> list[list[str]]:
    at = example["prompt_length"]
    return [tokenizer.convert_ids_to_tokens(example[side][at:]) for side in ("chosen", "rejected")]


@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_pairs_encode_to_the_golden_tokens(family: str, kind: str) -> None:
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
        end = tokenizer.convert_tokens_to_ids(END_TOKENS[family])
        until_end = whole[: len(whole) - whole[::-1].index(end)]
        assert example[side] == until_end, "BOS as the template writes it, and no line break behind the end token"


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
    assert taught["loss_mask"].index(1) == example["prompt_length"]
    assert taught["input_ids"] == example["chosen"], "an answer ends at the same token for all tasks"


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
