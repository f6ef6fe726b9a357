from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dstrain.data.encoding.chat_template import messages_to_transcript
from dstrain.data.formats.messages import (
    common_word_prefix_length,
    is_transcript,
)
from dstrain.data.formats.preferences import read_preference
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord
from dstrain.tasks.safety.safe_dpo import read_safety_labels
from tests.vocabulary import message as said

PIECES = st.sampled_from(["\n\nHuman:", "\n\nAssistant:", "Human:", "Assistant:", " ", "\n", "\n\n", "hi", "é", "yes."])
QUESTION = {"role": "user", "content": "2+2?"}


@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.lists(PIECES, max_size=6).map("".join),
    st.lists(PIECES, max_size=6).map("".join),
)
def test_any_two_texts_are_split_at_a_common_beginning_or_refused(common, one, other):
    try:
        preference = read_preference({"chosen": common + one, "rejected": common + other})
    except BadRecord:
        return
    if isinstance(preference.prompt, str):
        assert preference.prompt + preference.chosen == common + one
        assert preference.prompt + preference.rejected == common + other
    else:
        assert preference.prompt[-1]["role"] == "user"


def test_an_hh_dialog_splits_before_the_first_turn_that_differs():
    before = "\n\nHuman: hi\n\nAssistant: Hello.\n\nHuman: 2+2?\n\nAssistant:"
    preference = read_preference({"chosen": before + " 4", "rejected": before + " 5"})
    assert preference.prompt == [said("user", "hi"), said("assistant", "Hello."), QUESTION]
    assert (preference.chosen, preference.rejected) == ("4", "5")
    assert messages_to_transcript([*preference.prompt, said("assistant", "4")]) == before + " 4"


def test_the_same_speaker_twice_is_one_turn():
    record = {"chosen": "\n\nHuman: q\n\nAssistant: wait\n\nAssistant: 4", "rejected": "\n\nHuman: q\n\nAssistant: 5"}
    preference = read_preference(record)
    assert preference.prompt == [said("user", "q")]
    assert preference.chosen == "wait\n\nAssistant: 4"


def test_an_answer_that_is_the_beginning_of_the_other_is_kept_whole():
    short = "\n\nHuman: q\n\nAssistant: a"
    preference = read_preference({"chosen": short, "rejected": short + "\n\nHuman: more\n\nAssistant: b"})
    assert preference.chosen == "a"
    assert preference.rejected == [said("assistant", "a"), said("user", "more"), said("assistant", "b")]


def test_text_before_the_first_mark_is_a_system_turn():
    before = "Be kind.\n\nHuman: q\n\nAssistant:"
    preference = read_preference({"chosen": before + "no space", "rejected": before + " b"})
    assert preference.prompt == [said("system", "Be kind."), said("user", "q")]
    assert preference.chosen == "no space"


def test_a_dialog_may_begin_without_line_breaks():
    assert is_transcript("Human: q\n\nAssistant: a")
    assert read_preference({"chosen": "Human: q\n\nAssistant: a", "rejected": "Human: q\n\nAssistant: b"}).chosen == "a"


@pytest.mark.parametrize(
    ("left", "right", "cut"),
    [
        ("What is it? four", "What is it? five", len("What is it?")),
        ("Q\nfour", "Q\nfive", len("Q\n")),
        ("four", "five", 0),
        ("one two", "one two three", len("one")),
        ("你好吗", "你好呢", len("你好")),
        ("one", "two", 0),
    ],
)
def test_plain_texts_split_at_the_last_common_word(left, right, cut):
    assert common_word_prefix_length(left, right) == cut
    preference = read_preference({"chosen": left, "rejected": right})
    assert (preference.prompt, preference.chosen, preference.rejected) == (left[:cut], left[cut:], right[cut:])


def test_strings_with_a_prompt_stay_as_they_are():
    preference = read_preference({"prompt": "2+2? ", "chosen": "4", "rejected": "5", "margin": 2})
    assert (preference.prompt, preference.chosen, preference.margin) == ("2+2? ", "4", 2.0)


def test_a_prompt_that_is_a_dialog_becomes_messages():
    before = "\n\nHuman: 2+2?\n\nAssistant:"
    for space in ("", before):
        preference = read_preference({"prompt": before, "chosen": space + " 4", "rejected": space + " 5"})
        assert (preference.prompt, preference.chosen) == ([QUESTION], "4")


FOUR, FIVE = said("assistant", "4"), said("assistant", "5")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [QUESTION], "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": [QUESTION], "chosen": "4", "rejected": "5"},
        {"prompt": "2+2?", "chosen": [FOUR], "rejected": [FIVE]},
        {"prompt": "2+2?", "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"prompt": [QUESTION], "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"prompt": None, "chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE], "messages": None},
        {"messages": [QUESTION], "chosen": FOUR, "rejected": FIVE},
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"prompt": [said("user", [{"type": "text", "text": "2+2?"}])], "chosen": [FOUR], "rejected": [FIVE]},
        {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5", "system": "", "history": []},
        {"instruction": "2+2?", "input": None, "output": ["4", "5"], "history": None, "tools": "[]"},
        {"instruction": "2+2?", "chosen": {"from": "gpt", "value": "4"}, "rejected": [FIVE], "output": "4"},
        {"input": "2+2?", "chosen": "4", "rejected": "5", "tools": None},
    ],
)
def test_every_published_form_is_the_same_preference(record):
    preference = read_preference(record)
    assert (preference.prompt, preference.chosen, preference.rejected) == ([QUESTION], "4", "5")


def test_a_system_message_before_the_question_stays_in_the_prompt():
    whole = [said("system", "Be kind."), QUESTION]
    record = {"prompt": "2+2?", "chosen": [*whole, FOUR], "rejected": [*whole, FIVE]}
    assert read_preference(record).prompt == whole


def test_alpaca_has_its_input_below_the_instruction_and_earlier_turns_in_pairs():
    record = {
        "instruction": "Add.",
        "input": "2+2",
        "output": ["4", "5"],
        "history": [["hi", "Hello."]],
        "system": "Be kind.",
    }
    preference = read_preference(record)
    before = [said("system", "Be kind."), said("user", "hi"), said("assistant", "Hello.")]
    assert preference.prompt == [*before, said("user", "Add.\n2+2")]
    assert (preference.chosen, preference.rejected) == ("4", "5")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": [QUESTION], "chosen": [FOUR], "rejected": [FIVE]},
        {"messages": [QUESTION], "chosen": FOUR, "rejected": FIVE},
        {"chosen": [QUESTION, FOUR], "rejected": [QUESTION, FIVE]},
        {"instruction": "2+2?", "output": ["4", "5"]},
        {"chosen": "\n\nHuman: 2+2?\n\nAssistant: 4", "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5"},
        {"messages": [said("system", "Be kind."), QUESTION], "chosen": FOUR, "rejected": FIVE},
    ],
)
def test_a_system_text_beside_the_dialog_comes_first_unless_the_dialog_has_its_own(record):
    preference = read_preference({"system": "Be kind."} | record)
    assert preference.prompt == [said("system", "Be kind."), QUESTION]
    assert (preference.chosen, preference.rejected) == ("4", "5")


@pytest.mark.parametrize("write", [lambda tools: tools, json.dumps])
def test_tools_are_functions_however_they_are_written(write):
    function = {"name": "add", "description": "a + b", "parameters": {"type": "object"}}
    for tool in (
        function,
        {"type": "function", "function": function},
        {**function, "parameters": '{"type": "object"}'},
    ):
        preference = read_preference({"prompt": "2+2?", "chosen": "4", "rejected": "5", "tools": write([tool])})
        assert preference.tools == ({"type": "function", "function": function},)


@pytest.mark.parametrize("name", ["dpo_en_demo", "dpo_zh_demo"])
def test_llama_factorys_demos_are_read_as_they_stand(real_data, name):
    path = real_data / "prefs" / "llamafactory" / f"{name}.json"
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    for record in json.loads(path.read_text(encoding="utf-8")):
        preference = read_preference(record)
        assert preference.prompt == [said(roles[turn["from"]], turn["value"]) for turn in record["conversations"]]
        assert preference.chosen == record["chosen"]["value"]
        assert preference.rejected == record["rejected"]["value"]


def test_sharegpt_names_of_tools_are_known():
    names = ["system", "human", "function_call", "observation"]
    record = {
        "conversations": [
            {"from": name, "value": '{"name": "add", "arguments": {}}' if name == "function_call" else name}
            for name in names
        ],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    assert [message["role"] for message in read_preference(record).prompt] == ["system", "user", "assistant", "tool"]


DIALOG = "\n\nHuman: q\n\nAssistant: a"
BAD = [
    ({"prompt": "p", "chosen": "a"}, "no 'rejected'"),
    ({"prompt": "p", "chosn": "a", "rejected": "b"}, r"no 'chosen' \(did you mean 'chosn'\?\)"),
    ({"prompt": "p", "chosen": "a", "rejected": "a"}, "are the same"),
    ({"chosen": DIALOG, "rejected": DIALOG}, "are the same"),
    ({"prompt": "p", "chosen": " ", "rejected": "a"}, "'chosen' is an empty answer"),
    ({"chosen": DIALOG, "rejected": "\n\nHuman: q\n\nAssistant: "}, "'rejected' is an empty answer"),
    ({"prompt": " ", "chosen": "a", "rejected": "b"}, "'prompt' is empty"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "'prompt' is a number"),
    ({"prompt": "p", "chosen": 3, "rejected": "b"}, "'chosen' is a number"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": "2"}, "'margin' is '2'"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": True}, "'margin' is True"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "margin": float("nan")}, "'margin' is nan"),
    ({"prompt": [said("alien", "p")], "chosen": "a", "rejected": "b"}, r"'prompt\[0\]\.role' is 'alien'.*known roles"),
    ({"prompt": [{"role": "user"}], "chosen": "a", "rejected": "b"}, r"'prompt\[0\]' has no 'content'"),
    ({"prompt": [said("user", None)], "chosen": "a", "rejected": "b"}, r"'prompt\[0\]\.content' is null"),
    ({"prompt": ["x"], "chosen": "a", "rejected": "b"}, r"'prompt\[0\]' is text, not a message"),
    ({"prompt": [], "chosen": "a", "rejected": "b"}, "prompt has no messages"),
    ({"prompt": [QUESTION, FOUR], "chosen": "a", "rejected": "b"}, "ends with the turn of the assistant"),
    ({"prompt": [QUESTION], "chosen": [QUESTION], "rejected": [FIVE]}, "'chosen' has no messages after the prompt"),
    ({"prompt": [QUESTION], "chosen": [said("user", "other"), FOUR], "rejected": [FIVE]}, "that are not 'prompt'"),
    ({"chosen": [QUESTION, FOUR], "rejected": [said("user", "3+3?"), FIVE]}, "do not start with the same turn"),
    ({"chosen": [QUESTION, FOUR, QUESTION], "rejected": [QUESTION, FIVE]}, "'chosen' has a turn of the user"),
    ({"chosen": DIALOG, "rejected": "plain"}, "'rejected' is not a dialog"),
    (
        {"chosen": DIALOG + "\n\nHuman: x\n\nAssistant: y", "rejected": DIALOG + "\n\nHuman: z\n\nAssistant: y"},
        r"'chosen' has no assistant's turn where the dialogs diverge \(turn 3\)",
    ),
    ({"chosen": FOUR, "rejected": FIVE}, "there is no 'prompt'"),
    ({"instruction": "q", "output": "a"}, r"'output' is text, not two answers; write \[chosen, rejected\]"),
    ({"instruction": "q", "output": ["a"]}, "'output' is a list, not two answers"),
    ({"instruction": "q", "output": ["a", None]}, "no 'rejected'"),
    ({"instruction": "q", "output": ["a", ""]}, "'rejected' is an empty answer"),
    ({"instruction": " ", "input": "", "output": ["a", "b"]}, "'instruction' is empty; write one"),
    ({"instruction": ["q"], "output": ["a", "b"]}, "'instruction' is a list, not text"),
    ({"instruction": "q", "history": [["a"]], "output": ["a", "b"]}, "'history' is not a list of pairs"),
    ({"instruction": "q", "history": [["a", 5]], "output": ["a", "b"]}, r"'history\[0\]\[1\]' is a number, not text"),
    (
        {"conversations": {"from": "human"}, "chosen": FOUR, "rejected": FIVE},
        "'conversations' is an object, not a list",
    ),
    ({"conversations": [QUESTION], "chosen": QUESTION, "rejected": FIVE}, "'chosen' has a turn of the user"),
    ({"messages": [], "chosen": FOUR, "rejected": FIVE}, "prompt has no messages"),
    ({"messages": [], "chosen": FOUR, "rejected": FIVE, "system": "s"}, "ends with the turn of the system"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "system": ["s"]}, "'system' is a list, not text"),
    (
        {"chosen": "q a", "rejected": "q b", "system": "s"},
        "'system' is given with texts that contain the prompt; write 'prompt'",
    ),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": "add"}, "'tools' is not a list of functions"),
    ({"prompt": "p", "chosen": "a", "rejected": "b", "tools": [{"parameters": {}}]}, "'tools' names no function"),
    ({"\n": 1}, r"no 'chosen' \(its keys are: \\n\)"),
    ({"prompt": None, "chosen": "a", "rejected": "b"}, "'prompt' is null; write it, or leave the key out"),
    ({"prompt": "q", "chosen": None, "rejected": "b"}, "'chosen' is null; write an answer"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "'rejected' is null; write an answer"),
    (
        {"messages": [said("system", "A."), QUESTION], "chosen": FOUR, "rejected": FIVE, "system": "B."},
        "'system' is another text",
    ),
]


@pytest.mark.parametrize(("record", "reason"), BAD)
def test_a_bad_record_is_refused_with_the_key_and_the_mend(record, reason):
    with pytest.raises(BadRecord, match=reason):
        read_preference(record)


@pytest.mark.parametrize(
    ("name", "count", "empty"),
    [
        ("hh/helpful-train.jsonl", 2000, 3),
        ("hh/helpful-test.jsonl", 500, 0),
        ("hh/harmless-train.jsonl", 1311, 4),
        ("hh/harmless-test.jsonl", 500, 0),
        ("prefs/llamafactory/dpo_en_demo.json", 240, 0),
        ("prefs/llamafactory/dpo_zh_demo.json", 240, 0),
        ("prefs/pandalm.jsonl", 636, 0),
        ("prefs/llmbar.jsonl", 299, 0),
        ("mm/mathv/preferences-train.jsonl", 177, 0),
    ],
)
def test_real_files_are_read_but_for_their_empty_answers(real_data, name, count, empty):
    source, reasons = open_source(real_data / name), []
    for index in range(len(source)):
        try:
            preference = read_preference(source[index])
        except BadRecord as fault:
            reasons.append(fault.reason)
            continue
        if name.startswith("hh"):
            told = [*preference.prompt, said("assistant", preference.chosen)]
            assert messages_to_transcript(told) == source[index]["chosen"]
    assert len(source) == count
    assert len(reasons) == empty
    assert all("is an empty answer" in reason for reason in reasons)


# Safety labels are read from pairs and from PKU-SafeRLHF's responses; a faulty one is named with its fix.


PAIR = {"prompt": "How?", "chosen": "So.", "rejected": "No."}
RESPONSES = {
    "prompt": "How?", "response_0": "So.", "response_1": "No.", "is_response_0_safe": False, "is_response_1_safe": True,
    "better_response_id": 0, "safer_response_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("values", "wanted"), [((True, False), (True, False)), ((0, 1), (False, True)), ((1.0, 0.0), (True, False))]
)
def test_labels_are_true_or_false_or_1_or_0(values: tuple[Any, Any], wanted: tuple[bool, bool]) -> None:
    assert read_safety_labels(PAIR | {"chosen_safe": values[0], "rejected_safe": values[1]}, True) == wanted


def test_a_pair_without_labels_has_none() -> None:
    assert read_safety_labels(PAIR, False) == (None, None)


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ({}, r"no 'chosen_safe'; write true or false"),
        ({"chosen_safe": True}, r"no 'rejected_safe'"),
        ({"chosen_safe": True, "rejected_safe": "no"}, r"'rejected_safe' is 'no'; write true for a safe answer"),
        ({"chosen_safe": 2, "rejected_safe": 0}, r"'chosen_safe' is 2"),
        ({"chosen_save": 1, "rejected_safe": 0}, r"no 'chosen_safe' \(did you mean 'chosen_save'\?\)"),
    ],
)
def test_a_faulty_label_is_named_with_its_fix(labels: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRecord, match=words):
        read_safety_labels(PAIR | labels, True)


def test_one_label_without_the_other_is_a_fault_where_none_is_needed() -> None:
    with pytest.raises(BadRecord, match=r"no 'rejected_safe'"):
        read_safety_labels(PAIR | {"chosen_safe": True}, False)


@pytest.mark.parametrize("better", [0, 1])
def test_the_better_response_is_the_chosen_one(better: int) -> None:
    record = RESPONSES | {"better_response_id": better}
    found = read_preference(record)
    assert (found.prompt, found.chosen, found.rejected) == ("How?", *(("So.", "No.") if not better else ("No.", "So.")))
    assert read_safety_labels(record, True) == ((False, True) if not better else (True, False))


@pytest.mark.parametrize("better", [2, True, "0"])
def test_a_better_response_that_is_none_of_the_two_is_refused(better: Any) -> None:
    with pytest.raises(BadRecord, match=r"'better_response_id' is .*; write 0 or 1"):
        read_preference(RESPONSES | {"better_response_id": better})


def test_two_responses_without_the_better_one_are_refused() -> None:
    """The message said that a column which the file lacks is None."""
    with pytest.raises(BadRecord, match="'response_0' and 'response_1' come without 'better_response_id'"):
        read_preference({key: value for key, value in RESPONSES.items() if key != "better_response_id"})


@pytest.mark.parametrize(("preference", "chosen"), [(-3, "4"), (1, "5"), (0.5, "5")])
def test_a_signed_preference_chooses_a_response(preference: float, chosen: str) -> None:
    """HelpSteer 3: below 0 the first is better."""
    record = {"context": [QUESTION], "response1": "4", "response2": "5", "overall_preference": preference}
    found = read_preference(record)
    assert (found.prompt, found.chosen, found.rejected) == ([QUESTION], chosen, {"4": "5", "5": "4"}[chosen])


@pytest.mark.parametrize("preference", [0, None, True, "2"])
def test_a_signed_preference_that_chooses_nothing_is_bad(preference: Any) -> None:
    record = {"prompt": "2+2?", "response1": "4", "response2": "5", "overall_preference": preference}
    with pytest.raises(BadRecord, match=r"'overall_preference' is .*, which does not say which response is better"):
        read_preference(record)
