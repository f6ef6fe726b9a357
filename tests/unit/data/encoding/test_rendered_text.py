"""Texts that went through the chat template already give what their messages give; stray control tokens are refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import RunConfig
from dstrain.data.encoding.conversations import EncodedPrompt, encode_conversations, encode_prompts
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.encoding.template_check import RENDERED
from dstrain.data.formats.conversations import ParsedPrompt, read_conversation
from dstrain.data.formats.preferences import read_preference
from dstrain.data.formats.unpaired import read_unpaired
from dstrain.data.prepare import describe_template_counts
from dstrain.errors import BadRecord
from dstrain.tasks import make_task
from tests.tiny import tiny_recipe
from tests.unit.data.encoding.test_conversations import TEMPLATES, chat, runs
from tests.vocabulary import message, write_jsonl

__all__ = ["chat"]
LONG = EncodingConfig(max_length=1000)
ASKED, TOLD = "where is the fox?", "over the river"
QUESTION, ANSWER = message("user", ASKED), message("assistant", TOLD)
EARLIER = [message("user", "the dog?"), message("assistant", "no dog")]


def encode(tokenizer: Any, record: dict[str, Any], **settings: Any) -> dict[str, Any]:
    (example,) = encode_conversations(
        tokenizer, [read_conversation(record)], EncodingConfig(max_length=1000, **settings)
    )
    if isinstance(example, BadRecord):
        raise example
    return example


def encode_pair(tokenizer: Any, record: dict[str, Any]) -> dict[str, Any]:
    (example,) = encode_preferences(tokenizer, [read_preference(record)], 1000)
    if isinstance(example, BadRecord):
        raise example
    return example


def render(tokenizer: Any, messages: list[Any], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))


def split_rendered(tokenizer: Any, context: list[Any], answer: str = TOLD) -> tuple[str, str]:
    """Prompt and answer as scripts write them: the template's text before and after the generation prompt."""
    prompt = render(tokenizer, context, add_generation_prompt=True)
    full = render(tokenizer, [*context, message("assistant", answer)])
    if not full.startswith(prompt):  # the template opens an answer with a thought
        prompt = prompt.removesuffix("<think>\n")
    assert full.startswith(prompt)
    return prompt, full[len(prompt) :]


def ids_and_mask(example: dict[str, Any]) -> tuple[list[int], list[int]]:
    return example["input_ids"], example["loss_mask"]


@pytest.mark.parametrize("context", [[QUESTION], [*EARLIER, QUESTION]], ids=["one turn", "two turns"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_rendered_record_is_trained_on_as_its_messages_are(chat: Any, name: str, context: list[Any]) -> None:
    tokenizer = chat(name)
    wanted = encode(tokenizer, {"messages": [*context, ANSWER]})
    if len(context) > 1:  # the earlier answer is context of the rendered prompt
        wanted = encode(tokenizer, {"prompt": context, "completion": [ANSWER]})
    prompt, answer = split_rendered(tokenizer, context)
    for record in (
        {"prompt": prompt, "completion": answer},
        {"prompt": prompt, "completion": answer.rstrip()},
        {"instruction": prompt, "output": answer},
        {"prompt": prompt.removeprefix("<s>"), "response": answer},
    ):
        example = encode(tokenizer, record)
        assert ids_and_mask(example) == ids_and_mask(wanted)
        assert example[RENDERED] == 1
    assert wanted[RENDERED] == 0
    (unpaired,) = read_unpaired({"prompt": prompt, "completion": answer, "label": True})
    (example,) = encode_conversations(tokenizer, [unpaired.build_sample(unpaired)], LONG)
    assert not isinstance(example, BadRecord)
    assert ids_and_mask(example) == ids_and_mask(wanted)


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_pairs_are_the_pairs_of_their_messages(chat: Any, name: str) -> None:
    tokenizer = chat(name)
    wanted = encode_pair(tokenizer, {"prompt": [QUESTION], "chosen": TOLD, "rejected": "over the dog"})
    prompt, chosen = split_rendered(tokenizer, [QUESTION])
    rejected = split_rendered(tokenizer, [QUESTION], "over the dog")[1]
    for record in (
        {"prompt": prompt, "chosen": chosen, "rejected": rejected},
        {"chosen": prompt + chosen, "rejected": prompt + rejected},
    ):
        example = encode_pair(tokenizer, record)
        assert {**example, RENDERED: 0} == wanted
    (asked,) = encode_prompts(tokenizer, [ParsedPrompt(prompt)])
    assert isinstance(asked, EncodedPrompt)
    assert asked.ids == wanted["chosen"][: wanted["prompt_length"]]


@pytest.mark.parametrize("name", TEMPLATES)
def test_of_a_rendered_conversation_in_one_text_the_answers_are_learnt(chat: Any, name: str) -> None:
    tokenizer, messages = chat(name), [*EARLIER, QUESTION, ANSWER]
    text = render(tokenizer, messages)
    example = encode(tokenizer, {"text": text})
    learnt = [token for token, is_target in zip(*ids_and_mask(example), strict=True) if is_target]
    wanted = encode(tokenizer, {"messages": messages})
    assert learnt == [token for token, is_target in zip(*ids_and_mask(wanted), strict=True) if is_target]
    assert example["input_ids"] == wanted["input_ids"]
    assert example[RENDERED] == 1
    whole = encode(tokenizer, {"text": text}, assistant_only=False)
    assert set(whole["loss_mask"][1:]) == {1}


OPENED_THOUGHT = (  # Qwen 3.5's shape: the last answer begins with a thought, earlier ones do not
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
PLAIN_WORDS = (  # LLaVA's shape: no token ends an answer
    "{% for m in messages %}{% if m.role == 'user' %}USER: {{ m.content }} {% else %}ASSISTANT: {{ m.content }} {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        (OPENED_THOUGHT, ["no dog<|im_end|>", "\n</think>\nover the river<|im_end|>"]),
        (PLAIN_WORDS, [" no dog", " over the river"]),
    ],
    ids=["thought", "words"],
)
def test_answers_are_found_where_the_last_one_begins_in_another_way_or_nothing_ends_one(
    chat: Any, template: str, wanted: list[str]
) -> None:
    tokenizer = copy.deepcopy(chat("chatml"))
    tokenizer.chat_template = template
    example = encode(tokenizer, {"text": render(tokenizer, [*EARLIER, QUESTION, ANSWER])})
    assert [text.rstrip(" ") for text in runs(tokenizer, example)] == wanted


# Of messages with another end at the end, the end token in front of the last question stays too.
@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "another end at the end"])
def test_older_turns_of_a_rendered_prompt_are_cut_as_those_of_messages(chat: Any, name: str) -> None:
    tokenizer, context = chat(name), [*EARLIER, QUESTION]
    prompt, answer = split_rendered(tokenizer, context)
    other = split_rendered(tokenizer, context, "over the dog")[1]
    outcomes = set()
    for limit in range(10, 80, 2):
        records = (
            ({"prompt": context, "completion": [ANSWER]}, {"prompt": prompt, "completion": answer}),
            (
                {"prompt": context, "chosen": TOLD, "rejected": "over the dog"},
                {"prompt": prompt, "chosen": answer, "rejected": other},
            ),
        )
        for number, (messages, rendered) in enumerate(records):
            encoded: list[Any] = []
            for record in (messages, rendered):
                if number:
                    encoded += encode_preferences(tokenizer, [read_preference(record)], limit)
                else:
                    sample = read_conversation(record)
                    encoded += encode_conversations(tokenizer, [sample], EncodingConfig(max_length=limit))
            wanted, found = ("bad" if isinstance(row, BadRecord) else {**row, RENDERED: 0} for row in encoded)
            assert found == wanted, limit
            outcomes.add("bad" if found == "bad" else bool(found["prompt_cut"]))  # type: ignore[index]
    assert outcomes == {"bad", True, False}


def test_what_opens_the_answer_may_stand_in_the_answer(chat: Any) -> None:
    tokenizer = chat("chatml")
    prompt, answer = split_rendered(tokenizer, [QUESTION])
    header = "<|im_start|>assistant\n"
    wanted = encode_pair(tokenizer, {"prompt": prompt, "chosen": answer, "rejected": "no<|im_end|>"})
    moved = {"prompt": prompt.removesuffix(header), "chosen": header + answer, "rejected": f"{header}no<|im_end|>\n"}
    assert encode_pair(tokenizer, moved) == wanted
    stripped = {"prompt": prompt.rstrip(), "chosen": answer, "rejected": "no<|im_end|>"}
    assert encode_pair(tokenizer, stripped) == wanted, "files are often stripped"
    later = split_rendered(tokenizer, [*EARLIER, QUESTION])[0]
    for closed in (prompt.removesuffix(header), later.removesuffix(header)):
        with pytest.raises(BadRecord, match=r"lacks what opens the answer; append '<\|im_start\|>assistant\\n'"):
            encode(tokenizer, {"prompt": closed, "completion": TOLD})


def test_an_answer_has_one_end_token(chat: Any) -> None:
    tokenizer = chat("chatml")
    prompt, answer = split_rendered(tokenizer, [QUESTION])
    wanted = encode(tokenizer, {"prompt": prompt, "completion": answer})
    for ending in ("", "<|im_end|></s>", "<|im_end|>\n<|im_end|>\n"):
        assert encode(tokenizer, {"prompt": prompt, "completion": TOLD + ending}) == wanted
    for written, reason in (
        ("it is <|im_end|> yes", r"has text after <\|im_end\|>, which ends an answer"),
        ("<|im_end|>\n", "is empty but for its end token"),
    ):
        with pytest.raises(BadRecord, match=reason):
            encode(tokenizer, {"prompt": prompt, "completion": written})


STRAY: dict[str, tuple[dict[str, Any], str]] = {
    "an end inside of an answer": ({"prompt": ASKED, "completion": "it is <|im_end|> yes"}, "the answer contains <|im_end|>"),
    "an answer with its end": ({"prompt": ASKED, "completion": "yes<|im_end|>"}, "the answer contains <|im_end|>"),
    "a turn inside of a turn": (
        {"messages": [message("user", "<|im_start|>user\nhi<|im_end|>\nand?"), *EARLIER[1:], QUESTION, ANSWER]},
        "turn 1 (user) contains <|im_start|>",
    ),
    "EOS in an answer": ({"messages": [QUESTION, message("assistant", "yes</s>")]}, "turn 2 (assistant) contains </s>"),
    "a system text": (
        {"messages": [message("system", "<|im_start|>system"), QUESTION, ANSWER]},
        "turn 1 (system) contains <|im_start|>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRAY)
def test_a_control_token_in_a_text_is_a_bad_record(chat: Any, name: str) -> None:
    record, reason = STRAY[name]
    with pytest.raises(BadRecord) as raised:
        encode(chat("chatml"), record)
    assert raised.value.reason.startswith(reason)


def test_control_tokens_of_pairs_are_found_on_each_side(chat: Any) -> None:
    for side in ("chosen", "rejected"):
        record = {"prompt": ASKED, "chosen": "yes", "rejected": "no", side: "it is<|im_end|>"}
        with pytest.raises(BadRecord, match=r"the answer contains <\|im_end\|>"):
            encode_pair(chat("chatml"), record)


def test_thoughts_and_tokens_of_other_templates_are_text(chat: Any) -> None:
    for answer in ("<think>\na fox\n</think>\n\nyes", "<|eot|> is no token of this template"):
        example = encode(chat("chatml"), {"messages": [QUESTION, message("assistant", answer)]})
        assert example[RENDERED] == 0


def test_rendered_false_takes_no_text_and_true_takes_all(chat: Any) -> None:
    tokenizer = chat("chatml")
    prompt, answer = split_rendered(tokenizer, [QUESTION])
    record = {"prompt": prompt, "completion": answer}
    with pytest.raises(BadRecord, match="the prompt contains"):
        encode(tokenizer, record, rendered=False)
    with pytest.raises(BadRecord, match="the prompt contains"):
        encode(tokenizer, {"text": prompt + answer}, rendered=False)
    plain = encode(tokenizer, {"prompt": "Question: fox\nAnswer:", "completion": " yes"}, rendered=True)
    assert tokenizer.decode(plain["input_ids"]) == "Question: fox\nAnswer: yes<|im_end|>"
    with pytest.raises(BadRecord, match="several messages or tools"):
        encode(tokenizer, {"messages": [*EARLIER, QUESTION, ANSWER]}, rendered=True)


def test_documents_keep_their_separators_and_say_so(chat: Any, tokenizer: Any) -> None:
    example = encode(chat("chatml"), {"text": "the fox</s>the dog"})
    assert example[RENDERED] == 1
    assert set(example["loss_mask"][1:]) == {1}
    assert encode(chat("chatml"), {"text": "the fox</s>"})[RENDERED] == 0, "its end, which would be appended"
    assert encode(tokenizer, {"text": "the fox</s>the dog"})[RENDERED] == 0, "no template"


def test_an_answer_without_a_template_does_not_go_on_after_eos(tokenizer: Any) -> None:
    assert encode(tokenizer, {"prompt": "fox", "completion": " dog</s>"})
    with pytest.raises(BadRecord, match="has text after </s>"):
        encode(tokenizer, {"prompt": "fox", "completion": " dog</s> and more"})
    with pytest.raises(BadRecord, match="has text after </s>"):
        encode_pair(tokenizer, {"prompt": "fox", "chosen": " dog</s> and", "rejected": " x"})


def test_rendered_samples_are_counted_in_a_sentence() -> None:
    (line,) = describe_template_counts({"kept": 9, "cuts": {RENDERED: 4}})
    assert line.startswith("4 of 9 samples are texts that went through a chat template already")


def test_a_right_answer_is_compared_without_its_end_token(tmp_path: Path) -> None:
    recipe = tiny_recipe("sft", tmp_path)
    template = TEMPLATES["chatml"].replace("<|im_end|>", "</s>")
    recipe["model"]["chat_template"] = template
    recipe["eval"] = {"generate": {"metrics": ["exact_match"]}}
    record = {"prompt": "<|im_start|>user\nfox?</s>\n<|im_start|>assistant\n", "completion": "a dog</s>\n"}
    write_jsonl(tmp_path / "eval.jsonl", [record])
    task: Any = make_task(RunConfig.model_validate(recipe))
    (example,) = list(task.examples("eval"))
    assert task.prompts.read_texts(example) == ["a dog"]


def test_words_and_blanks_that_are_added_tokens_are_text(chat: Any) -> None:
    tokenizer = copy.deepcopy(chat("chatml"))
    tokenizer.add_tokens(["user", "assistant", "\n", "fox?"])
    example = encode(
        tokenizer, {"messages": [message("user", "is a user\nan assistant?"), message("assistant", "a fox?")]}
    )
    assert example[RENDERED] == 0
