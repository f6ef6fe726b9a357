"""Answers that were wanted or not, in the forms they are published in, each beside an answer to another prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.data import prepare as prepare_module
from dstrain.data.encoding.preferences import UnpairedEncode, choose_mismatched
from dstrain.data.encoding.rendering import CUT_COLUMNS, EncodingConfig
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.data.formats.conversations import Conversation, PromptCompletion
from dstrain.data.formats.unpaired import UnpairedPreference, read_unpaired
from dstrain.data.prepare import ExampleSettings, PreparePolicy, prepare
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import TokenStore
from dstrain.errors import BadRecord
from tests.vocabulary import message as said

QUESTION, ANSWER = said("user", "2+2?"), said("assistant", "4")
EARLIER = [said("user", "hi"), said("assistant", "Hello.")]
MESSAGES: dict[str, dict[str, Any]] = {
    "trl": {"prompt": [QUESTION], "completion": [ANSWER], "label": True},
    "llamafactory": {"messages": [QUESTION, ANSWER], "label": True},
    "kto_tag": {"messages": [QUESTION, ANSWER], "kto_tag": True},
    "sharegpt": {
        "conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}], "label": True,
    },
    "alpaca": {"instruction": "2+2?", "input": "", "output": "4", "kto_tag": True},
    "numbers": {"messages": [QUESTION, ANSWER], "label": 1},
}  # fmt: skip


@pytest.mark.parametrize("form", MESSAGES)
def test_every_form_says_the_same(form: str) -> None:
    assert read_unpaired(MESSAGES[form]) == [UnpairedPreference([QUESTION], [ANSWER], True)]


def test_texts_stay_as_they_stand() -> None:
    found = read_unpaired({"prompt": "The sky is", "completion": " green.", "label": False})
    assert found == [UnpairedPreference("The sky is", " green.", False)]
    assert found[0].build_sample(found[0]) == PromptCompletion("The sky is", " green.")


def test_the_last_answer_is_the_labelled_one() -> None:
    (found,) = read_unpaired({"messages": [*EARLIER, QUESTION, ANSWER], "label": False})
    assert (found.prompt, found.answer, found.desirable) == ([*EARLIER, QUESTION], [ANSWER], False)
    assert found.build_sample(found) == Conversation([*EARLIER, QUESTION, ANSWER], (3,))


def test_what_an_assistant_does_with_tools_belongs_to_its_answer() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    tools = [{"name": "add", "parameters": {}}]
    (found,) = read_unpaired(
        {"messages": [QUESTION, call, said("tool", "4"), said("assistant", "It is 4.")], "tools": tools, "label": True}
    )
    assert found.prompt == [QUESTION]
    assert [turn["role"] for turn in found.answer] == ["assistant", "tool", "assistant"]  # type: ignore[index]
    sample = found.build_sample(found)
    assert isinstance(sample, Conversation)
    assert sample.trained_turns == (1, 3), "what the tool says is not learnt"
    assert sample.tools[0]["function"]["name"] == "add"


def test_a_preference_is_two_answers() -> None:
    found = read_unpaired({"prompt": "2+2?", "chosen": "4", "rejected": "5"})
    assert [(item.answer, item.desirable) for item in found] == [("4", True), ("5", False)]
    dialog = "\n\nHuman: 2+2?\n\nAssistant:"
    found = read_unpaired({"chosen": f"{dialog} 4", "rejected": f"{dialog} 5", "label": "helpful"})
    assert found == [
        UnpairedPreference([QUESTION], [ANSWER], True),
        UnpairedPreference([QUESTION], [said("assistant", "5")], False),
    ]


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"messages": [QUESTION, ANSWER]}, "no 'label'"),
        ({"messages": [QUESTION, ANSWER], "labels": True}, "label"),
        ({"messages": [QUESTION, ANSWER], "label": "good"}, "'label' is 'good'; write true"),
        ({"messages": [QUESTION, ANSWER], "label": 2}, "'label' is 2; write true"),
        ({"messages": [QUESTION, ANSWER], "label": None}, "'label' is null; write true or false"),
        (
            {"messages": [QUESTION, ANSWER], "label": 1.0, "kto_tag": False},
            "'label' and 'kto_tag' contradict each other",
        ),
        ({"messages": [ANSWER], "label": True}, "no user's turn"),
        ({"messages": [QUESTION], "label": True}, "no turn of the assistant"),
        ({"prompt": "2+2?", "completion": " ", "label": True}, "empty answer"),
        ({"text": "2+2=4", "label": True}, "where the answer begins"),
        ({"prompt": "2+2?", "chosen": "4", "label": True}, "no 'rejected'"),
        ({"prompt": "2+2?", "chosen": "4", "rejected": "5", "images": ["a.png"]}, "'images'"),
    ],
)
def test_what_cannot_be_used_is_named(record: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read_unpaired(record)


def test_an_answer_moves_to_another_prompt() -> None:
    text, dialog = UnpairedPreference("The sky is", " blue.", True), UnpairedPreference([QUESTION], [ANSWER], True)
    assert text.build_sample(dialog) == Conversation([said("user", "The sky is"), ANSWER], (1,))
    assert dialog.build_sample(text) == Conversation([QUESTION, said("assistant", "blue.")], (1,))


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [("abc", [1, 2, 0]), ("aabb", [2, 2, 0, 0]), ("abba", [1, 3, 3, 1]), ("aaa", [1, 2, 0]), ("a", [0]), ("", [])],
)
def test_the_next_other_prompt_comes_round(prompts: str, wanted: list[int]) -> None:
    items = [UnpairedPreference(prompt, str(at), True) for at, prompt in enumerate(prompts)]

    def find_following(prompt: Any) -> UnpairedPreference | None:
        return next((item for item in items if item.prompt != prompt), None)

    assert [int(str(item.answer)) for item in choose_mismatched(items, find_following)] == wanted


WORDS = [f"Question {at}?" for at in range(20)] + [f" Answer number {at}" + " and so on" * 9 + "." for at in range(20)]
TOKENIZER = train_tokenizer(WORDS, 300)


def stored(
    folder: Path, records: list[dict[str, Any]], mismatched: bool = True, max_length: int = 40, processes: int = 1
) -> TokenStore:
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    key = {"mismatched": mismatched, "max_length": max_length, "folder": str(folder)}
    source = open_source(folder / "train.jsonl")
    config = EncodingConfig(max_length=max_length)
    encode = UnpairedEncode(TOKENIZER, config, read_unpaired, source if mismatched else None)
    policy = PreparePolicy(task="kto", on_error="skip", processes=processes)
    return prepare(source, encode, key, policy, ExampleSettings(counted=CUT_COLUMNS))


def numbered(at: int, label: bool = True, more: str = "") -> dict[str, Any]:
    return {"prompt": f"Question {at}?", "completion": f" Answer {at}.{more}", "label": label}


def learnt(example: dict[str, Any], side: str) -> str:
    marked = zip(example[side], example[f"{side}_loss_mask"], strict=True)
    return str(TOKENIZER.decode([token for token, mark in marked if mark]))


def test_an_example_stands_beside_the_answer_to_the_next_prompt(tmp_path: Path) -> None:
    store = stored(tmp_path, [numbered(0), numbered(1, label=False), {"prompt": "bad"}, numbered(2)])
    assert [store[at]["desirable"] for at in range(3)] == [1, 0, 1]
    assert [learnt(store[at], "answer") for at in range(3)] == [f" Answer {n}.</s>" for n in range(3)]
    assert [learnt(store[at], "mismatched") for at in range(3)] == [f" Answer {n}.</s>" for n in (1, 2, 0)]
    assert TOKENIZER.decode(store[1]["mismatched"]) == "Question 1? Answer 2.</s>"
    assert [store[at]["sample"] for at in range(3)] == [0, 1, 3]


def test_the_two_answers_of_a_preference_never_stand_beside_one_another(tmp_path: Path) -> None:
    records = [{"prompt": f"Question {at}?", "chosen": f" Yes {at}.", "rejected": f" No {at}."} for at in range(3)]
    store = stored(tmp_path, records)
    assert len(store) == 6
    assert [store[at]["sample"] for at in range(6)] == [0, 0, 1, 1, 2, 2]
    assert store.count_per_source((1, 2)) == (2, 4)
    assert [learnt(store[at], "mismatched") for at in range(6)] == [f" Yes {n}.</s>" for n in (1, 1, 2, 2, 0, 0)]


def test_a_long_answer_to_another_prompt_cuts_nothing_of_ones_own(tmp_path: Path) -> None:
    store = stored(tmp_path, [numbered(0), numbered(1, more=" and so on" * 30)], max_length=24)
    assert TOKENIZER.decode(store[0]["answer"]) == "Question 0? Answer 0.</s>"
    assert len(store[0]["mismatched"]) == 24
    assert store.report.cuts == {"prompt_cut": 0, "last_turn_cut": 0, "response_cut": 1}, "of the answers themselves"


@pytest.mark.parametrize("processes", [1, 2])
def test_the_next_prompt_is_that_of_the_whole_file_however_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: int
) -> None:
    records = [numbered(at // 4, more=f" {at}") for at in range(18)]
    records[4] = numbered(1, more=" a" * 500) | {"prompt": "Question " * 200}  # does not fit, and answers no one
    wanted = stored(tmp_path, records)
    for folder in ("small", "tiny"):
        (tmp_path / folder).mkdir()
    monkeypatch.setattr("dstrain.data.prepare.MIN_PARALLEL_RECORDS", 1)
    for size, folder in ((5, "small"), (1, "tiny")):
        monkeypatch.setattr(prepare_module, "CHUNK_SIZE", size)
        monkeypatch.setattr(prepare_module, "PARALLEL_CHUNK_SIZE", size)
        store = stored(tmp_path / folder, records, processes=processes)
        assert [learnt(store[at], "mismatched") for at in range(len(store))] == [
            learnt(wanted[at], "mismatched") for at in range(len(wanted))
        ]
    assert learnt(wanted[3], "mismatched").startswith(" Answer 1. 5"), "the record that does not fit is left out"
    assert learnt(wanted[len(wanted) - 1], "mismatched").startswith(" Answer 0. 0"), "the first follows the last"


def test_equal_prompts_take_the_next_answer(tmp_path: Path) -> None:
    store = stored(tmp_path, [numbered(3, more=f" {at}") for at in range(3)])
    assert [learnt(store[at], "mismatched") for at in range(3)] == [f" Answer 3. {at}</s>" for at in (1, 2, 0)]


def test_mismatched_answers_are_made_where_they_are_needed(tmp_path: Path) -> None:
    assert stored(tmp_path, [numbered(0), numbered(1)], mismatched=False).columns[:2] == ["answer", "answer_loss_mask"]


def test_llamafactorys_demo_is_read_unchanged(real_data: Path) -> None:
    file = real_data / "prefs/llamafactory/kto_en_demo.json"
    if not file.is_file():
        pytest.skip(f"no {file}")
    source = open_source(file)
    found = [read_unpaired(source[at]) for at in range(len(source))]
    assert [len(items) for items in found] == [1] * len(source)
    assert 100 < sum(items[0].desirable for items in found) < len(source) - 100
