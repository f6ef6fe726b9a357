"""Conversations as ids: what the assistant says is learnt, whatever the template, and nothing else."""

from __future__ import annotations

import copy
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dstrain.data.encoding.answer_spans import render_sample, without_thinking
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.data.formats.conversations import Conversation, PromptCompletion, read_conversation
from dstrain.data.sources.open import open_source
from dstrain.errors import BadRecord, DataError
from dstrain.tasks.temporal.series import PatchConfig, read_series_record
from dstrain.tasks.temporal.task import CaptionEncoder
from tests.chat_templates import tokenizer_of
from tests.unit.data.encoding.cases import Slow, with_frame

LONG = EncodingConfig(max_length=1000)
LAST = "{% set n = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}{% set n.last = loop.index0 * 2 %}{% endfor %}"
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "headers": (  # Llama 3's shape, which trims
        "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|end_head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|end_head|>\n\n{% endif %}"
    ),
    "brackets": (  # Mistral's shape: no system role, no mark before an answer
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
        "{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}"
        "{% else %}{{ raise_exception('no role ' + m.role) }}{% endif %}{% endfor %}"
    ),
    "no thoughts before": (  # Qwen 3's shape: thoughts stay in the last turn alone, which gets empty ones
        LAST + "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        "{% set parts = m.content.split('</think>') %}{% if loop.index0 > n.last %}<think>\n"
        "{{ parts[0].split('<think>')[-1].strip() if parts | length > 1 else '' }}\n</think>\n\n{% endif %}"
        "{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "an opened thought": (  # DeepSeek R1's shape: a thought is opened for the model and never kept
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% else %}<|Assistant|>"
        "{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
    ),
    "another end at the end": (  # gpt-oss's shape
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
    "the next turn ends it": (  # GLM's shape
        "[gMASK]{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    ),
    "generation marks": (
        "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{%- generation -%}{{ m.content }}<|e|>"
        "{%- endgeneration -%}{% else %}<|u|>{{ m.content }}<|e|>{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}<|a|>{% endif %}"
    ),
}
ENDS = {"chatml": "<|im_end|>", "headers": "<|eot|>", "no thoughts before": "<|im_end|>", "generation marks": "<|e|>"}
TOKENS = [
    "<|im_start|>", "<|im_end|>", "<|head|>", "<|end_head|>", "<|eot|>", "[INST]", "[/INST]", "<|User|>", "<|Assistant|>",
    "<|start|>", "<|message|>", "<|return|>", "<|end|>", "<|a|>", "<|u|>", "<|e|>", "[gMASK]", "<|user|>", "<|assistant|>",
]  # fmt: skip


@pytest.fixture(scope="session")
def chat(tokenizer: Any) -> Any:
    """chat(name): a tokenizer with this template and the tokens of all."""
    made = {}
    for name, template in TEMPLATES.items():
        made[name] = copy.deepcopy(tokenizer)
        made[name].add_special_tokens({"bos_token": "<s>", "additional_special_tokens": TOKENS})
        made[name].chat_template = template
    return made.__getitem__


def dialog(*contents: str) -> Conversation:
    roles = ("user", "assistant")
    turns = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    found = read_conversation({"messages": turns})
    assert isinstance(found, Conversation)
    return found


def encode(tokenizer: Any, sample: Any, settings: EncodingConfig = LONG) -> dict[str, Any]:
    (found,) = encode_conversations(tokenizer, [sample], settings)
    if isinstance(found, BadRecord):
        raise found
    assert len(found["input_ids"]) == len(found["loss_mask"])
    assert set(found["loss_mask"]) <= {0, 1}
    return found


def runs(tokenizer: Any, example: dict[str, Any]) -> list[str]:
    """The texts that are learnt, each as far as it goes without a break."""
    found: list[list[int]] = []
    for at, (token, learnt) in enumerate(zip(example["input_ids"], example["loss_mask"], strict=True)):
        if learnt and not example["loss_mask"][at - 1]:
            found.append([])
        if learnt:
            found[-1].append(token)
    return [tokenizer.decode(ids) for ids in found]


TWO = ("the fox?", "a fox", "and the dog?", "no dog\n\nat all")
WANTED = {
    "chatml": ["a fox<|im_end|>", "no dog\n\nat all<|im_end|>"],
    "headers": ["a fox<|eot|>", "no dog\n\nat all<|eot|>"],
    "brackets": [" a fox</s>", " no dog\n\nat all</s>"],
    "no thoughts before": ["a fox<|im_end|>", "<think>\n\n</think>\n\nno dog\n\nat all<|im_end|>"],
    "an opened thought": ["a fox</s>", "no dog\n\nat all</s>"],
    "another end at the end": ["<|message|>a fox<|end|>", "<|message|>no dog\n\nat all<|return|>"],
    "the next turn ends it": ["a fox<|user|>", "no dog\n\nat all<|user|>"],
    "generation marks": ["a fox<|e|>", "no dog\n\nat all<|e|>"],
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learnt_with_the_token_that_ends_them(name: str, chat: Any) -> None:
    assert runs(chat(name), encode(chat(name), dialog(*TWO))) == WANTED[name]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_single_answer_is_what_the_model_would_write(name: str, chat: Any) -> None:
    tokenizer, sample = chat(name), dialog(*TWO[:2])
    example = encode(tokenizer, sample)
    opening = tokenizer.apply_chat_template(sample.messages[:1], add_generation_prompt=True, return_dict=False)
    first = example["loss_mask"].index(1)
    assert example["input_ids"][:first] == opening[:first]
    assert all(example["loss_mask"][first:])
    assert len(opening) - first <= len(tokenizer("<think>\n")["input_ids"]), "at most a thought that the template opens"


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_are_the_templates_own(name: str, chat: Any) -> None:
    example = encode(chat(name), dialog(*TWO))
    whole = chat(name).apply_chat_template(dialog(*TWO).messages, return_dict=False)
    if name == "the next turn ends it":
        whole.append(chat(name).convert_tokens_to_ids("<|user|>"))
    length = len(example["input_ids"])
    assert example["input_ids"] == whole[:length]
    assert not chat(name).decode(whole[length:]).strip(), "but for the line break behind the last turn"


def test_thoughts_that_a_template_leaves_out_are_not_learnt_and_those_it_keeps_are(chat: Any) -> None:
    thinking = dialog("the fox?", "<think>\nhm\n</think>\n\na fox", "the dog?", "<think>\nha\n</think>\n\nno dog")
    kept = encode(chat("no thoughts before"), thinking)
    assert runs(chat("no thoughts before"), kept) == ["a fox<|im_end|>", "<think>\nha\n</think>\n\nno dog<|im_end|>"]
    left = encode(chat("an opened thought"), thinking)
    assert runs(chat("an opened thought"), left) == ["\n\na fox</s>", "\n\nno dog</s>"]


def test_a_system_text_is_never_learnt(chat: Any) -> None:
    turns = [{"role": "system", "content": "Be kind."}, *dialog(*TWO).messages]
    for name in ("chatml", "headers", "generation marks"):
        assert runs(chat(name), encode(chat(name), read_conversation({"messages": turns}))) == WANTED[name]
    with pytest.raises(BadRecord, match=r"refuses the dialog \(no role system\)"):
        encode(chat("brackets"), read_conversation({"messages": turns}))


def test_a_system_text_that_moves_to_the_last_question_harms_nothing(chat: Any) -> None:
    """As Mistral's templates have it, which write it before a question and never before an answer."""
    tokenizer = copy.deepcopy(chat("brackets"))
    tokenizer.chat_template = "{% set system = messages[0].content %}{% set messages = messages[1:] %}" + TEMPLATES[
        "brackets"
    ].replace("[INST] ", "[INST] {% if loop.last %}{{ system }}\n\n{% endif %}")
    turns = [{"role": "system", "content": "Be kind."}, *dialog(*TWO).messages]
    found = runs(tokenizer, encode(tokenizer, read_conversation({"messages": turns})))
    assert [text.strip() for text in found] == ["a fox</s>", "no dog\n\nat all</s>"]


@pytest.mark.parametrize("name", ["chatml", "no thoughts before", "generation marks"])
def test_only_the_chosen_answer_of_a_preference_is_learnt(name: str, chat: Any) -> None:
    before = "\n\nHuman: the fox?\n\nAssistant: a fox\n\nHuman: and the dog?\n\nAssistant:"
    sample = read_conversation({"chosen": before + " no dog", "rejected": before + " a dog"})
    found = runs(chat(name), encode(chat(name), sample))
    assert len(found) == 1
    assert found[0].endswith("no dog" + ENDS[name])


def test_what_follows_the_last_learnt_answer_is_left_out(chat: Any) -> None:
    sample = dialog(*TWO, "thanks")
    for name in ("chatml", "no thoughts before"):
        assert encode(chat(name), sample) == encode(chat(name), dialog(*TWO))
    everything = encode(chat("chatml"), sample, EncodingConfig(max_length=1000, assistant_only=False))
    assert "thanks<|im_end|>" in chat("chatml").decode(everything["input_ids"])


def test_without_a_template_dialogs_read_as_hh_writes_them_and_end_with_eos(tokenizer: Any) -> None:
    example = encode(tokenizer, dialog(*TWO))
    whole = "\n\nHuman: the fox?\n\nAssistant: a fox\n\nHuman: and the dog?\n\nAssistant: no dog\n\nat all</s>"
    assert tokenizer.decode(example["input_ids"]) == whole
    assert runs(tokenizer, example) == [" a fox", " no dog\n\nat all</s>"]


def test_texts_stand_as_they_are_and_end_with_eos_once(tokenizer: Any, chat: Any) -> None:
    assert runs(tokenizer, encode(tokenizer, PromptCompletion("the fox is", " quick"))) == [" quick</s>"]
    assert runs(tokenizer, encode(tokenizer, PromptCompletion("the fox is", " quick</s>"))) == [" quick</s>"]
    for each in (tokenizer, chat("chatml")):
        assert each.decode(encode(each, PromptCompletion("", "the fox"))["input_ids"]) == "the fox</s>"
    assert runs(chat("chatml"), encode(chat("chatml"), PromptCompletion("the fox?", " a fox"))) == ["a fox<|im_end|>"]


def test_everything_is_learnt_but_the_first_token_where_that_is_asked(tokenizer: Any, chat: Any) -> None:
    settings = EncodingConfig(max_length=1000, assistant_only=False)
    for each in (tokenizer, chat("headers"), with_frame(tokenizer, "<s>")):
        example = encode(each, dialog(*TWO), settings)
        assert example["loss_mask"] == [0] + [1] * (len(example["input_ids"]) - 1)


def test_bos_comes_once_and_is_not_learnt(tokenizer: Any, chat: Any) -> None:
    framed = with_frame(tokenizer, "<s>")
    written = copy.deepcopy(chat("headers"))
    written.backend_tokenizer.post_processor = framed.backend_tokenizer.post_processor
    for each in (framed, written, chat("headers")):
        for sample in (dialog(*TWO), PromptCompletion("", "the fox")):
            if each is chat("headers") and isinstance(sample, PromptCompletion):
                continue  # which neither the tokenizer nor the template begins
            example = encode(each, sample)
            assert each.decode(example["input_ids"][0]) == "<s>"
            assert example["input_ids"].count(example["input_ids"][0]) == 1
            assert example["loss_mask"][0] == 0


def test_a_template_that_hides_an_answer_is_told(chat: Any) -> None:
    tokenizer = copy.deepcopy(chat("chatml"))
    tokenizer.chat_template = "{% for m in messages | reverse %}{{ m.content }}|{% endfor %}"
    with pytest.raises(BadRecord, match=r"turn 2 of the dialog cannot be located in .*; put .*assistant_only_loss"):
        encode(tokenizer, dialog("the fox?", "a fox"))
    assert encode(tokenizer, dialog("the fox?", "a fox"), EncodingConfig(max_length=99, assistant_only=False))


def test_one_bad_dialog_leaves_the_others_as_they_are(chat: Any) -> None:
    good, bad = (
        dialog(*TWO),
        read_conversation({"messages": [{"role": "system", "content": "x"}, *dialog(*TWO).messages]}),
    )
    first, second, third = encode_conversations(chat("brackets"), [good, bad, good], LONG)
    assert isinstance(second, BadRecord)
    assert first == third == encode(chat("brackets"), good)
    assert encode_conversations(chat("brackets"), [], LONG) == []


CALLS = (
    "{% for t in tools or [] %}<|u|>{{ t | tojson }}{% endfor %}{% for m in messages %}{% if m.tool_calls %}<|a|>"
    "{% if m.content %}{{ m.content }}\n\n{% endif %}{% for c in m.tool_calls %}<call>{{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|e|>{% elif m.role == 'assistant' %}<|a|>"
    "{% if loop.last %}<think>{% endif %}{{ m.content }}<|e|>{% else %}<|u|>{{ m.content }}<|e|>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<|a|><think>{% endif %}"
)


@pytest.mark.parametrize("opened", [False, True], ids=["plain", "with a thought opened"])
def test_calls_of_functions_are_learnt_and_what_they_give_is_not(opened: bool, chat: Any, tokenizer: Any) -> None:
    each = copy.deepcopy(chat("chatml"))
    each.chat_template = CALLS if opened else CALLS.replace("<think>", "")
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "two"},
    ]
    sample = read_conversation({"conversations": turns, "tools": [call]})
    example = encode(each, sample)
    assert runs(each, example) == ['<call>add{"a": 1}<|e|>', "two<|e|>"]
    assert '"name": "add"' in each.decode(example["input_ids"]).split("1+1?")[0], "the template was told of the tools"
    with pytest.raises(BadRecord, match="need a chat template"):
        encode(tokenizer, sample)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_slow_tokenizer_gives_the_same(name: str, chat: Any, tokenizer: Any) -> None:
    for each, sample in (
        (chat(name), dialog(*TWO)),
        (tokenizer, dialog(*TWO)),
        (tokenizer, PromptCompletion("the fox", " ran")),
    ):
        assert encode(Slow(each), sample) == encode(each, sample)


LETTERS = [
    " ",
    "\n",
    "\n\n",
    "  ",
    *["a", "Fox", "é", "狐", "🦊", "<", ">", "/", "|", "{{", "%}", ":", "Human", "</", "0", "_"],
]


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("name", ["chatml", "headers", "brackets", "another end at the end", "generation marks", ""])
def test_any_text_is_learnt_as_the_answer_it_is(name: str, seed: int, chat: Any, tokenizer: Any) -> None:
    draw = random.Random(seed)
    contents = [
        "x" + "".join(draw.choices(LETTERS, k=draw.randint(0, 12))) + "y" for _ in range(2 * draw.randint(1, 4))
    ]
    each = chat(name) if name else tokenizer
    found = runs(each, encode(each, dialog(*contents)))
    assert len(found) == len(contents) // 2
    for text, answer in zip(found, contents[1::2], strict=True):
        body = text.removeprefix("<|message|>").strip()
        assert body.startswith(answer)
        assert body[len(answer) :] in ("", "</s>", "<|im_end|>", "<|eot|>", "<|e|>", "<|end|>", "<|return|>")


def test_older_turns_are_cut_from_the_left_until_the_first_answer_fits(tokenizer: Any) -> None:
    framed = with_frame(tokenizer, "<s>")
    before = "\n\nHuman: the quick brown fox\n\nAssistant: jumps\n\nHuman: over the dog?\n\nAssistant:"
    sample = read_conversation({"chosen": before + " yes", "rejected": before + " no"})
    whole = encode(framed, sample)
    length = len(whole["input_ids"])
    cut = encode(framed, sample, EncodingConfig(max_length=length - 5))
    assert cut["input_ids"] == whole["input_ids"][:1] + whole["input_ids"][6:]
    assert (cut["prompt_cut"], cut["response_cut"], cut["last_turn_cut"]) == (1, 0, 0)
    assert (whole["prompt_cut"], whole["response_cut"], whole["last_turn_cut"]) == (0, 0, 0)
    asked = encode(
        framed, sample, EncodingConfig(max_length=1000, max_prompt_length=length - 5 - sum(whole["loss_mask"]))
    )
    assert asked == cut
    shorter = encode(framed, sample, EncodingConfig(max_length=1000, max_prompt_length=4))
    assert shorter["loss_mask"] == [0] * 4 + [1] * sum(whole["loss_mask"])
    assert (shorter["prompt_cut"], shorter["response_cut"], shorter["last_turn_cut"]) == (1, 0, 1)


def test_later_turns_are_cut_before_what_the_first_answer_follows(tokenizer: Any) -> None:
    sample = dialog("the quick brown fox?", "yes", "and the lazy dog?", "no, the dog jumps over the fox")
    whole = encode(tokenizer, sample)
    length = len(whole["input_ids"])
    shorter = encode(tokenizer, sample, EncodingConfig(max_length=length - 3))
    assert shorter["input_ids"] == whole["input_ids"][:-3]
    assert (shorter["prompt_cut"], shorter["response_cut"]) == (0, 1)
    last = "".join(map(str, whole["loss_mask"])).rindex("01") + 1
    first_only = encode(tokenizer, sample, EncodingConfig(max_length=last))
    assert runs(tokenizer, first_only) == [" yes"], "a question without its answer is left out"
    assert first_only["loss_mask"][-1] == 1


def test_an_answer_that_does_not_fit_behind_its_question_is_cut_at_its_end(tokenizer: Any) -> None:
    sample = dialog("the fox?", "the quick brown fox jumps over the lazy dog")
    whole = encode(tokenizer, sample)
    prompt = whole["loss_mask"].index(1)
    for left in (1, 3):
        cut = encode(tokenizer, sample, EncodingConfig(max_length=prompt + left))
        assert cut["input_ids"] == whole["input_ids"][: prompt + left]
        assert cut["loss_mask"] == [0] * prompt + [1] * left
        assert (cut["prompt_cut"], cut["response_cut"], cut["last_turn_cut"]) == (0, 1, 0)
    with pytest.raises(
        BadRecord, match=rf"take {prompt} tokens, and data.max_length {prompt} leaves none .* {prompt + 1} or"
    ):
        encode(tokenizer, sample, EncodingConfig(max_length=prompt))


@pytest.mark.parametrize("seed", range(30))
def test_no_cut_is_longer_than_asked_or_without_a_learnt_token(seed: int, chat: Any, tokenizer: Any) -> None:
    draw = random.Random(seed)
    each = draw.choice([chat("chatml"), chat("headers"), tokenizer, with_frame(tokenizer, "<s>")])
    sample = dialog(*(" ".join(["fox"] * draw.randint(1, 9)) for _ in range(2 * draw.randint(1, 3))))
    settings = EncodingConfig(max_length=draw.randint(4, 60), max_prompt_length=draw.choice([None, 3, 12]))
    (example,) = encode_conversations(each, [sample], settings)
    if isinstance(example, BadRecord):
        needed = int(example.reason.split("data.max_length to ")[1].split()[0])
        assert settings.max_length < needed
        example = encode(each, sample, replace(settings, max_length=needed))
        assert len(example["input_ids"]) == needed
        return
    assert len(example["input_ids"]) <= settings.max_length
    assert example["loss_mask"][0] == 0
    assert example["loss_mask"][-1] == 1
    if settings.max_prompt_length:
        assert example["loss_mask"].index(1) <= max(settings.max_prompt_length, 1)


def test_a_length_without_room_and_a_text_of_one_token_are_told(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="max_length 1 leaves no room"):
        encode_conversations(tokenizer, [PromptCompletion("", "fox")], EncodingConfig(max_length=1))
    with pytest.raises(BadRecord, match="the text is a single token"):
        encode(tokenizer, PromptCompletion("", "</s>"))


@pytest.mark.parametrize("name", ["chatml", "no thoughts before", ""])
def test_real_dialogs_teach_their_answers(name: str, chat: Any, tokenizer: Any, real_data: Path) -> None:
    source = open_source(real_data / "prefs/llamafactory/dpo_en_demo.json", {})
    each = chat(name) if name else tokenizer
    for index in range(0, len(source), 20):
        sample = read_conversation(source[index])
        assert isinstance(sample, Conversation)
        example = encode(each, sample, EncodingConfig(max_length=100_000))
        (learnt,) = runs(each, example)
        assert sample.messages[-1]["content"].strip() in learnt
        text = render_sample(each, sample).text
        assert each.decode(example["input_ids"]).startswith(text.rstrip())


@pytest.mark.parametrize("name", ["chatml", "brackets", ""])
def test_spaces_written_as_letters_and_letters_written_as_bytes_move_nothing(name: str) -> None:
    """Llama 2's way, where the normalized text is longer than what was given."""
    from tokenizers import Tokenizer, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    bare = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    bare.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = "the quick fox and a dog, no : | ? [ ] / I N S T H A m n"
    bare.train_from_iterator(
        words.split(), trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    )
    each = PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    each.add_special_tokens({"additional_special_tokens": TOKENS})
    each.chat_template = TEMPLATES[name] if name else None
    example = encode(each, dialog("the 狐?", "🦊 fox", "and a dog?", "no dog"))
    tokens = each.convert_ids_to_tokens(
        [i for i, on in zip(example["input_ids"], example["loss_mask"], strict=True) if on]
    )
    written = "".join(tokens).replace("▁", " ").replace("<0xF0><0x9F><0xA6><0x8A>", "🦊")
    assert written.replace("<|im_end|>", " ").replace("</s>", " ").split() == ["🦊", "fox", "no", "dog"]


# Captioned series as token ids.


@pytest.mark.parametrize("assistant_only", [True, False])
def test_the_prompt_of_a_caption_is_whole(assistant_only: bool) -> None:
    """training.md 7: without assistant_only_loss captions were generated from the first token of the prompt."""
    tokenizer = tokenizer_of("byte-level")
    config = EncodingConfig(max_length=200, assistant_only=assistant_only)
    sample = read_series_record({"series": [1.0, 2.0, 4.0, 3.0], "caption": "rises"})
    encoder = CaptionEncoder(tokenizer, config, PatchConfig(length=2, per_token=1), "Curve?")
    ((example,),) = encoder.encode([sample])
    prompt = [*example["input_ids"]][: int(example["prompt_length"])]  # type: ignore[index, call-overload]
    prompt = [token for token in prompt if token >= 0]  # without soft tokens
    assert tokenizer.decode(prompt).endswith("\n\nHuman: Curve?\n\nAssistant:")


THOUGHTS = {
    "think": ("<think>\nTwo and two.\n</think>\n\nFour.", "Four."),
    "opened by the generation prompt": ("Two and two.\n</think>\n\nFour.", "Four."),
    "brackets": ("[THINK]Two.[/THINK]Four.", "Four."),
    "channels": (
        "<|channel|>analysis<|message|>Two.<|end|><|channel|>final<|message|>Four.",
        "<|channel|>final<|message|>Four.",
    ),
    "two": ("<think>a</think>One <think>b</think>two", "One two"),
    "none": ("Four.", "Four."),
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_thoughts_are_read_and_not_learnt_where_the_recipe_says_so(name: str) -> None:
    answer, learnt = THOUGHTS[name]
    text = f"Sum? {answer}"
    spans = without_thinking(text, [(5, len(text))])
    assert "".join(text[start:end] for start, end in spans) == learnt


def test_the_loss_mask_leaves_thoughts_out() -> None:
    tokenizer = train_tokenizer(["some text"], 300, "bytes")
    tokenizer.chat_template = TEMPLATES["chatml"]
    answers = ["<think>\ntwo\n</think>\n\nFour.", "<think>b</think>Five."]
    turns = [("user", "Sum?"), ("assistant", answers[0]), ("user", "And?"), ("assistant", answers[1])]
    sample = read_conversation({"messages": [{"role": role, "content": content} for role, content in turns]})
    learnt = {}
    for with_thinking in (True, False):
        (example,) = encode_conversations(tokenizer, [sample], replace(LONG, with_thinking=with_thinking))
        assert not isinstance(example, BadRecord)
        assert answers[0] in tokenizer.decode(example["input_ids"])
        pairs = zip(example["input_ids"], example["loss_mask"], strict=True)
        learnt[with_thinking] = tokenizer.decode([token for token, mask in pairs if mask]).replace("<|im_end|>\n", "")
    assert learnt[True].replace("<|im_end|>", "").startswith("".join(answers))
    assert learnt[False].replace("<|im_end|>", "").startswith("Four.Five.")
