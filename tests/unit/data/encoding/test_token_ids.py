"""What is cut of a sample that is too long: older turns, then the answer; never its question."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import DatasetConfig
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.preferences import encode_preferences, encode_unpaired
from dstrain.data.encoding.rendering import EncodingConfig, TokenBudget
from dstrain.data.encoding.trained_tokenizer import load_or_train_tokenizer, train_tokenizer
from dstrain.data.formats.conversations import PromptCompletion, read_conversation
from dstrain.data.formats.preferences import Preference, read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.prepare import describe_cuts
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord, DataError
from tests.chat_templates import EARLIER, KINDS, QUESTION, SYSTEM, TEMPLATES, chat, tokenizer_of
from tests.unit.data.encoding.test_conversations import TEMPLATES as SHAPES
from tests.unit.data.encoding.test_preferences import bert  # noqa: F401  a fixture
from tests.vocabulary import message

ANSWERS = ("over the river and a fox jumps over it", "no fox, a river, a river, a river, a river, a river, a river")
RECORD = {"prompt": [SYSTEM, *EARLIER, QUESTION], "chosen": ANSWERS[0], "rejected": ANSWERS[1]}
LAST = {
    "zephyr": "<|user|>\nwhere is the dog?</s>\n<|assistant|>\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nwhere is the dog?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "qwen": "<|im_start|>user\nwhere is the dog?<|im_end|>\n<|im_start|>assistant\n",
}
"""The last user turn and the start of the answer."""
BOTH = [(family, kind) for family in TEMPLATES for kind in KINDS]


def plain(tokenizer: Any, ids: list[int]) -> str:
    """The text of the ids, letter by letter, whatever the kind of tokenizer."""
    tokens = "".join(tokenizer.convert_ids_to_tokens(ids))
    for byte in range(128):
        tokens = tokens.replace(f"<0x{byte:02X}>", chr(byte))
    return tokens.replace("▁", " ").replace("Ġ", " ").replace("Ċ", "\n")


def pair(tokenizer: Any, record: Any, *limits: int) -> Any:
    item = record if isinstance(record, Preference) else read_preference(record)
    return encode_preferences(tokenizer, [item], *limits)[0]


def squeezed(text: str) -> str:
    """Without the spaces, of which a legacy tokenizer writes more."""
    return text.replace(" ", "")


@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_the_last_turn_and_the_header_stay_whole_at_any_length(family: str, kind: str) -> None:
    tokenizer = chat(family, kind)
    whole = pair(tokenizer, RECORD, 1000)
    answers = [whole[side][whole["prompt_length"] :] for side in ("chosen", "rejected")]
    bos = 1 if family == "llama3" else 0
    seen = set()
    for length in range(8, len(whole["rejected"]) + 1):
        cut = pair(tokenizer, RECORD, length)
        if isinstance(cut, BadRecord):
            seen.add("bad")
            continue
        at = cut["prompt_length"]
        head = cut["chosen"][:at]
        assert cut["rejected"][:at] == head
        assert (
            head == whole["chosen"][:bos] + whole["chosen"][whole["prompt_length"] - at + bos : whole["prompt_length"]]
        )
        assert squeezed(plain(tokenizer, head)).endswith(squeezed(LAST[family])), "last turn and header are whole"
        for side, answer in zip(("chosen", "rejected"), answers, strict=True):
            assert cut[side][at:] == answer[: length - at], "each answer is cut for itself, at its end"
            assert len(cut[side]) > at
        cuts = int(at < whole["prompt_length"]), int(len(answers[1]) > length - at), 0
        assert (cut["prompt_cut"], cut["response_cut"], cut["last_turn_cut"]) == cuts
        if cut["response_cut"]:
            assert squeezed(plain(tokenizer, head[bos:])) == squeezed(LAST[family]), "older turns went first"
        seen.add(cuts)
    assert seen == {"bad", (0, 0, 0), (1, 0, 0), (1, 1, 0)}


@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_a_record_without_room_for_an_answer_says_how_much_it_needs(family: str, kind: str) -> None:
    tokenizer = chat(family, kind)
    fault = pair(tokenizer, RECORD, 12)
    assert isinstance(fault, BadRecord)
    needed = int(fault.reason.split("data.max_length to ")[1].split()[0])
    assert f"take {needed - 1} tokens, and data.max_length 12 leaves none for the answer" in fault.reason
    assert isinstance(pair(tokenizer, RECORD, needed - 1), BadRecord)
    least = pair(tokenizer, RECORD, needed)
    assert [len(least[side]) for side in ("chosen", "rejected")] == [needed, needed]
    assert least["prompt_length"] == needed - 1


@pytest.mark.parametrize("how", ["sft", "kto"])
@pytest.mark.parametrize(("family", "kind"), BOTH)
def test_conversations_and_single_answers_keep_the_question_before_the_first_answer(
    family: str, kind: str, how: str
) -> None:
    tokenizer = chat(family, kind)
    record = {"prompt": RECORD["prompt"], "completion": [message("assistant", ANSWERS[1]), *EARLIER]}
    single = {"messages": [*RECORD["prompt"], message("assistant", ANSWERS[1])], "label": True}
    seen = set()
    for length in range(8, 90, 3):
        settings = EncodingConfig(max_length=length)
        if how == "sft":
            cut: Any = encode_conversations(tokenizer, [read_conversation(record)], settings)[0]
        else:
            ((cut,),) = encode_unpaired(tokenizer, settings, lambda prompt: None, [read_unpaired(single)])
        if isinstance(cut, BadRecord):
            seen.add("bad")
            continue
        ids, loss_mask = (
            cut[name] for name in (("input_ids", "loss_mask") if how == "sft" else ("answer", "answer_loss_mask"))
        )
        head = plain(tokenizer, ids[: loss_mask.index(1)])
        assert squeezed(head).endswith(squeezed(LAST[family]))
        assert len(ids) <= length
        assert cut["last_turn_cut"] == 0
        seen.add((cut["prompt_cut"], cut["response_cut"]))
    assert {"bad", (1, 1)} <= seen


THINKING = [QUESTION, message("assistant", "<think>\nhm\n</think>\n\njumps"), message("user", "and the fox?")]
TURNED = "{% set system = messages[0].content %}{% set messages = messages[1:] %}" + SHAPES["brackets"].replace(
    "[INST] ", "[INST] {% if loop.last %}{{ system }}\n\n{% endif %}"
)
SHAPED = {
    "thoughts left out": (SHAPES["no thoughts before"], THINKING, "<|im_start|>user\nand the fox?<|im_end|>\n"),
    "an opened thought": (SHAPES["an opened thought"], THINKING, "<|User|>and the fox?"),
    "another end at the end": (
        SHAPES["another end at the end"],
        THINKING,
        "<|start|>user<|message|>and the fox?<|end|>",
    ),
    "brackets": (SHAPES["brackets"], [*EARLIER, QUESTION], "[INST] where is the dog? [/INST]"),
    "a system text moves": (TURNED, [SYSTEM, *EARLIER, QUESTION], "[INST] where is the dog? [/INST]"),
    "no template": ("", [SYSTEM, *EARLIER, QUESTION], "\n\nHuman: where is the dog?\n\nAssistant:"),
}


@pytest.mark.parametrize("name", SHAPED)
def test_families_that_write_beginnings_otherwise_keep_their_last_turn_too(name: str) -> None:
    template, prompt, last = SHAPED[name]
    tokenizer = copy.deepcopy(tokenizer_of("byte-level"))
    tokenizer.chat_template = template or None
    record = Preference(prompt, "a fox " * 30, "a dog " * 30)
    taught = read_conversation({"prompt": prompt, "completion": [message("assistant", "a fox " * 30)]})
    kinds: dict[str, Any] = {
        "pair": lambda length: pair(tokenizer, record, length),
        "sft": lambda length: encode_conversations(tokenizer, [taught], EncodingConfig(max_length=length))[0],
    }
    if template == TURNED:  # it writes the system text in front of a question alone, so that a pair parts before it
        del kinds["pair"]
    for made in kinds.values():
        fits = [cut for length in (*range(10, 120), 1000) if not isinstance(cut := made(length), BadRecord)]
        heads = [cut["chosen"][: cut["prompt_length"]] if "chosen" in cut else cut["input_ids"] for cut in fits]
        assert all(last in plain(tokenizer, ids) for ids in heads)
        assert [cut["last_turn_cut"] for cut in fits] == [0] * len(fits)
        assert fits[0]["prompt_cut"], "older turns were cut"


def test_a_system_text_inside_of_the_first_turn_stays_with_it() -> None:
    tokenizer = copy.deepcopy(tokenizer_of("byte-level"))
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}[INST] {% if loop.first %}{{ s }} {% endif %}{{ m.content }} [/INST]"
        "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    record = Preference([SYSTEM, QUESTION], "a fox " * 30, "a dog " * 30)
    cut = next(cut for n in range(5, 99) if not isinstance(cut := pair(tokenizer, record, n), BadRecord))
    assert plain(tokenizer, cut["chosen"]).startswith("[INST] You are a fox. where is the dog? [/INST]")


def test_a_plain_prompt_is_one_turn_and_a_transcript_begins_its_last_at_human() -> None:
    tokenizer = tokenizer_of("byte-level")
    text = Preference("where is the dog and the fox?", " over the river", " no fox")
    assert isinstance(pair(tokenizer, text, 8), BadRecord)
    whole = pair(tokenizer, text, 1000)
    assert pair(tokenizer, text, whole["prompt_length"] + 1)["prompt_cut"] == 0
    last = "\n\nHuman: where is the dog?\n\nAssistant: Sure,"
    transcript = "\n\nHuman: the quick brown fox\n\nAssistant: jumps" + last
    for found in (
        pair(tokenizer, Preference(transcript, " over the river", " no fox"), 40)["chosen"],
        encode_conversations(
            tokenizer, [PromptCompletion(transcript, " over the river")], EncodingConfig(max_length=40)
        )[0],
    ):
        ids = found if isinstance(found, list) else found["input_ids"]  # type: ignore[index]
        assert len(ids) <= 40
        assert last in plain(tokenizer, ids)
        assert not plain(tokenizer, ids).startswith("\n\nHuman: the quick")


def test_a_prompt_length_that_is_asked_for_cuts_the_last_turn_and_is_counted() -> None:
    tokenizer = chat("qwen", "byte-level")
    whole = pair(tokenizer, RECORD, 1000)
    sizes = {most: pair(tokenizer, RECORD, 1000, most) for most in (4, 30, whole["prompt_length"])}
    assert [cut["prompt_length"] for cut in sizes.values()] == [4, 30, whole["prompt_length"]]
    assert [(cut["prompt_cut"], cut["last_turn_cut"]) for cut in sizes.values()] == [(1, 1), (1, 0), (0, 0)]
    fault = pair(tokenizer, RECORD, 10, 12)
    assert isinstance(fault, BadRecord)
    assert "its prompt, cut, takes 12 tokens" in fault.reason
    assert "data.max_length to 13 or more, data.max_prompt_length to 9 or less" in fault.reason


def test_the_end_of_a_bert_survives_every_cut(bert: Any) -> None:  # noqa: F811
    record = Preference("the fox the dog", " river river", " dog dog dog dog")
    for length in (7, 8, 9):
        cut = pair(bert, record, length)
        for side in ("chosen", "rejected"):
            assert bert.decode(cut[side]).startswith("[CLS] the fox the dog ")
            assert bert.decode(cut[side]).endswith(" [SEP]")
            assert len(cut[side]) <= length
    fault = pair(bert, record, 6)
    assert isinstance(fault, BadRecord)
    assert "take 6 tokens" in fault.reason


def test_the_last_turn_is_looked_for_only_where_something_is_cut() -> None:
    def never() -> int:
        raise AssertionError

    assert TokenBudget(10, None, 1).truncate(4, 5, never).prompt_tokens == 4  # type: ignore[union-attr]
    assert TokenBudget(10, 5, 1, 1).truncate(4, 4, never).prompt_tokens == 4  # type: ignore[union-attr]
    assert TokenBudget(5, None, 1).truncate(0, 9, never).remaining_tokens == 4  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("cuts", "said_so"),
    [
        ((0, 0, 0), "of 500 samples none was cut to fit data.max_length"),
        ((3, 12, 0), "of 500 samples, 3 had an answer cut and 12 their prompt, none its last user turn"),
        ((0, 12, 2), "of 500 samples, 0 had an answer cut and 12 their prompt, 2 of them inside of the last user turn"),
    ],
)
def test_cuts_are_a_sentence(cuts: tuple[int, int, int], said_so: str) -> None:
    counts = dict(zip(("response_cut", "prompt_cut", "last_turn_cut"), cuts, strict=True))
    assert describe_cuts({"kept": 500, "cuts": counts}).startswith(said_so)
    assert describe_cuts({"kept": 500, "cuts": {}}) == describe_cuts({}) == ""


# Trained tokenizers: which letters they know, and which of them are the same.


def test_a_tokenizer_of_the_datas_letters_knows_no_others() -> None:
    sums = ["3 + 4 = 7", "12 + 9 = 21"]
    small = train_tokenizer(sums, 24, "data")
    assert len(small) <= 24
    assert train_tokenizer(iter(sums), 24, "data").get_vocab() == small.get_vocab()
    for text in (*sums, "9 = 1"):
        assert small.decode(small(text)["input_ids"]) == text
    unknown = small.unk_token_id
    assert small("abc 7x")["input_ids"].count(unknown) == 2
    assert small.decode(small("abc 7x")["input_ids"]) == "<unk> 7<unk>"
    assert unknown not in small("".join(sums))["input_ids"]
    with pytest.raises(DataError, match=r"take \d+ entries, and vocab_size is 8; raise it"):
        train_tokenizer(sums, 8, "data")


def test_tokenizers_of_two_alphabets_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"text": "3 + 4 = 7"}\n{"text": "12 + 9 = 21"}\n')
    source = ConcatSource([open_source(DatasetConfig(path=str(path)), {})])

    def texts(record: dict[str, Any]) -> list[str]:
        return [record["text"]]

    whole = load_or_train_tokenizer(source, texts, "texts", 270)
    small = load_or_train_tokenizer(source, texts, "texts", 270, "data")
    assert len(whole) > 256 > len(small)
    assert load_or_train_tokenizer(source, texts, "texts", 270, "data").get_vocab() == small.get_vocab()
    for size, alphabet, wanted in ((257, "bytes", "at least 258"), (15, "data", "a trained tokenizer has at least 16")):
        with pytest.raises(DataError, match=wanted):
            load_or_train_tokenizer(source, texts, "texts", size, alphabet)


def one_record(tmp_path: Path) -> ConcatSource:
    (tmp_path / "x.jsonl").write_text('{"text": "3 + 4 = 7"}\n')
    return ConcatSource([open_source(DatasetConfig(path=str(tmp_path / "x.jsonl")), {})])


def texts(record: dict[str, Any]) -> list[str]:
    return [record["text"]]


def test_a_full_cache_is_named_and_nothing_is_left_there(
    fresh_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizers library raises a bare Exception."""

    def full(tokenizer: Any, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(DataError, match=r"cannot be written into the cache: .*No space left.*set DSTRAIN_CACHE"):
        load_or_train_tokenizer(one_record(tmp_path), texts, "texts", 270)
    assert not [*(fresh_cache / "tokenizers").iterdir()]
