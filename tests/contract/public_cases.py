"""Templates, a tokenizer whose ids can be counted by hand, and situations of public reports on encoding.

All records are made up; docs/measurements/public-cases.md lists the reports.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.config.schema import RunConfig
from dstrain.tasks import make_task
from tests.vocabulary import message, write_jsonl

SPECIAL = (
    "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|bos|>", "<|head|>", "<|/head|>", "<|eot|>", "<|end|>",
    "<turn>", "</turn>", "<|user|>", "<|assistant|>", "<|system|>", "<sop>",
)  # fmt: skip
"""Their ids follow those of the 256 bytes."""
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (  # BOS in the template, contents trimmed, <|eot|> after each turn
    "{{ bos_token }}{% for m in messages %}<|head|>{{ m.role }}<|/head|>\n\n{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}"
)
GEMMA = (  # BOS in the template, the assistant is called model, no system turn
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "<turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}</turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<turn>model\n{% endif %}"
)
GLM = (  # nothing ends an answer but the marker of the next turn
    "<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
SPACED = (  # the space before an answer stands at the end of its question
    "{% for m in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{% if m.role == 'user' %} [INST] {{ m.content | trim }} [/INST] {% else %}{{ m.content | trim }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # thoughts of turns before the last question are left out, as in Qwen3's template
    "{% set last = namespace(at=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set last.at = loop.index0 %}{% endif %}"
    "{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 < last.at %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokenizer(
    template: str | None = None, adds_bos: bool = False, adds_eos: bool = False, **special: str | None
) -> Any:
    """Return a tokenizer with a token for each byte and for each of SPECIAL; `special`: bos_token, eos_token, pad_token."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocab = {letter: byte for byte, letter in bytes_to_unicode().items()}
    bare = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    roles = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | special
    if adds_bos or adds_eos:
        first, last = roles["bos_token"] if adds_bos else None, roles["eos_token"] if adds_eos else None
        ends = [(token, 256 + SPECIAL.index(token)) for token in (first, last) if token]
        single = " ".join(part for part in (first, "$A", last) if part)
        bare.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single=single, special_tokens=ends),
            ]
        )
    made = PreTrainedTokenizerFast(
        tokenizer_object=bare, **{name: token for name, token in roles.items() if token is not None}
    )
    made.chat_template = template
    return made


def read_marked(text: str) -> tuple[list[int], list[int]]:
    """Return the ids of a text, one for each byte and special token, and 1 where it stands between ⟦ and ⟧."""
    ids: list[int] = []
    mask: list[int] = []
    is_learnt = 0
    for part in re.split("(" + "|".join(map(re.escape, (*SPECIAL, "⟦", "⟧"))) + ")", text):
        if part in ("⟦", "⟧"):
            is_learnt = int(part == "⟦")
            continue
        tokens = [256 + SPECIAL.index(part)] if part in SPECIAL else [*part.encode()]
        ids, mask = ids + tokens, mask + [is_learnt] * len(tokens)
    return ids, mask


TINY: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 256 + len(SPECIAL), "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip


def make(folder: Path, task: str, records: list[dict[str, Any]], tokenizer: Any, **sections: Any) -> Any:
    """Return a task on the records, as a recipe makes it; `sections` are merged into its own."""
    tokenizer.save_pretrained(str(folder / "tokenizer"))
    recipe: dict[str, Any] = {
        "task": task,
        "model": {"config": TINY, "tokenizer": str(folder / "tokenizer")},
        "data": {"train": str(write_jsonl(folder / "train.jsonl", records)), "max_length": 400},
        "batch": {"total": 4, "micro": 4},
        "steps": 1,
    }
    for name, value in sections.items():
        recipe[name] = {**recipe.get(name, {}), **value} if isinstance(value, dict) else value
    return make_task(RunConfig.model_validate(recipe))


@dataclass(frozen=True)
class Case:
    """A record, and what a report says that it should become."""

    record: dict[str, Any]
    wanted: tuple[str, ...] = ()
    """The learnt text between ⟦ and ⟧; for a pair that of `chosen` and of `rejected`. Empty: the record is refused."""
    template: str | None = CHATML
    task: str = "sft"
    tokenizer: dict[str, Any] = field(default_factory=dict)
    sections: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Words of the reason why the record is refused."""
    said: str = ""
    """Words of what is said at the start about the records."""


HI = [message("user", "hi"), message("assistant", "yes")]
TWO = [*HI, message("user", "why"), message("assistant", "so")]
END = {"eos_token": "<|im_end|>", "bos_token": None}
BASE = {"eos_token": "<|end|>", "pad_token": "<|end|>", "bos_token": None}
PAIR = {
    "prompt": [message("user", "hi")],
    "chosen": [message("assistant", "yes")],
    "rejected": [message("assistant", "no")],
}
TEXT_PAIR = {"prompt": "hi ", "chosen": "yes", "rejected": "no"}
U, A = "<|im_start|>user\n", "<|im_start|>assistant\n"
CASES: dict[str, Case] = {
    "Megatron-Bridge#3359: a template without generation marks": Case(
        {"messages": TWO}, (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧\n{U}why<|im_end|>\n{A}⟦so<|im_end|>⟧",)
    ),
    "liquid-finetune#37: an answer of one token": Case(
        {"messages": [message("user", "hi"), message("assistant", "7")]}, (f"{U}hi<|im_end|>\n{A}⟦7<|im_end|>⟧",)
    ),
    "trl#4147: a prompt and a completion of messages": Case(
        {"prompt": HI[:1], "completion": HI[1:]}, (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",)
    ),
    "trl#4201: the opening of the answer is prompt": Case(
        {"prompt": TWO[:3], "completion": TWO[3:]},
        (f"{U}hi<|im_end|>\n{A}yes<|im_end|>\n{U}why<|im_end|>\n{A}⟦so<|im_end|>⟧",),
    ),
    "trl#5988: an answer ends with the marker of the next turn": Case(
        {"messages": TWO}, ("<sop><|user|>\nhi<|assistant|>\n⟦yes<|user|>⟧\nwhy<|assistant|>\n⟦so<|user|>⟧",), GLM
    ),
    "axolotl#1616: one BOS, none before the answers": Case(
        PAIR, ("<s><|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n⟦yes<|eot|>⟧",
               "<s><|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n⟦no<|eot|>⟧"),
        LLAMA, "dpo", {"adds_bos": True},
    ),
    "trl#1073: a tokenizer without BOS, a pair of texts": Case(
        TEXT_PAIR, ("hi ⟦yes<|end|>⟧", "hi ⟦no<|end|>⟧"), None, "dpo", BASE
    ),
    "trl#1885: a tokenizer without BOS, a pair of messages": Case(
        PAIR, (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧", f"{U}hi<|im_end|>\n{A}⟦no<|im_end|>⟧"), CHATML, "dpo", END
    ),
    "trl#1401: KTO's answer after the BOS of its prompt": Case(
        {"prompt": "hi ", "completion": "yes", "label": False}, ("<s>hi ⟦yes</s>⟧",), None, "kto", {"adds_bos": True}
    ),
    "trl#1591: Gemma writes BOS in the template and the tokenizer adds it": Case(
        {"messages": HI}, ("<s><turn>user\nhi</turn>\n<turn>model\n⟦yes</turn>⟧",), GEMMA, "sft", {"adds_bos": True}
    ),
    "OpenRLHF#393: Llama 3 writes BOS in the template and the tokenizer adds it": Case(
        {"messages": HI}, ("<s><|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n⟦yes<|eot|>⟧",),
        LLAMA, "sft", {"adds_bos": True},
    ),
    "mlx-examples#1095: BOS of the template and of the tokenizer, which adds EOS too": Case(
        {"messages": HI}, ("<s>[INST] hi [/INST]⟦ yes</s>⟧",), MISTRAL, "sft", {"adds_bos": True, "adds_eos": True}
    ),
    "llm-foundry#1003: the tokenizer adds BOS to each text, and the answer gets none": Case(
        {"prompt": "hi ", "completion": "yes"}, ("<s>hi ⟦yes</s>⟧",), None, "sft", {"adds_bos": True}
    ),
    "unsloth#3228: one end of the answers of a pair": Case(
        {"prompt": "hi ", "chosen": "yes</s>", "rejected": "no"}, ("<s>hi ⟦yes</s>⟧", "<s>hi ⟦no</s>⟧"), None, "dpo",
        {"adds_bos": True, "adds_eos": True},
    ),
    "llm-course#33: EOS is learnt where it pads too": Case(
        {"prompt": "hi ", "completion": "yes"}, ("hi ⟦yes<|end|>⟧",), None, "sft", BASE
    ),
    "unsloth#416: Llama 3 ends a turn with <|eot|>, EOS is another token": Case(
        {"messages": TWO}, ("<s><|head|>user<|/head|>\n\nhi<|eot|><|head|>assistant<|/head|>\n\n⟦yes<|eot|>⟧"
                            "<|head|>user<|/head|>\n\nwhy<|eot|><|head|>assistant<|/head|>\n\n⟦so<|eot|>⟧",),
        LLAMA, "sft", {"eos_token": "<|end|>", "pad_token": "<|end|>", "adds_bos": True},
    ),
    "granite-3.1#2: EOS is pad and the end of a turn": Case(
        {"messages": HI}, ("<|head|>user<|/head|>hi<|end|>\n<|head|>assistant<|/head|>⟦yes<|end|>⟧",),
        "{% for m in messages %}<|head|>{{ m.role }}<|/head|>{{ m.content }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|head|>assistant<|/head|>{% endif %}", "sft", BASE,
    ),
    "textgen#3343: every answer of a conversation": Case(
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"},
                           {"from": "human", "value": "why"}, {"from": "gpt", "value": "so"}]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧\n{U}why<|im_end|>\n{A}⟦so<|im_end|>⟧",),
    ),
    "open-r1#618: the last answer of a long conversation and the first": Case(
        {"messages": [message("system", "be"), *TWO, *HI]},
        (f"<|im_start|>system\nbe<|im_end|>\n{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧\n{U}why<|im_end|>\n{A}⟦so<|im_end|>⟧\n"
         f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",),
    ),
    "alignment-handbook#116: the opening of the answer belongs to neither answer": Case(
        {"chosen": HI, "rejected": [HI[0], message("assistant", "no")]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧", f"{U}hi<|im_end|>\n{A}⟦no<|im_end|>⟧"), CHATML, "dpo",
    ),
    "trl#2054: a space between prompt and answer, at the answer": Case(
        {"prompt": [message("user", "hi")], "chosen": "yes", "rejected": "$no"},
        ("<s> [INST] hi [/INST] ⟦yes</s>⟧", "<s> [INST] hi [/INST] ⟦$no</s>⟧"), SPACED, "dpo", {"adds_bos": True},
    ),
    "LlamaFactory#3555: a rejected answer of null": Case(
        {"prompt": "hi", "chosen": "yes", "rejected": None}, task="dpo", reason="'rejected'"
    ),
    "datasets#3181: null is no text": Case(
        {"messages": [message("user", "hi"), {"role": "assistant", "content": None}]}, reason="content"
    ),
    "trl#6668: the prompt takes all of max_length": Case(
        {"prompt": "x" * 60 + " ", "completion": "yes"}, template=None, sections={"data": {"max_length": 32}},
        reason="leaves none for the answer",
    ),
    "trl#3927: a conversation longer than max_length, answers alone": Case(
        {"messages": [message("user", "x" * 60), message("assistant", "yes")]}, sections={"data": {"max_length": 32}},
        reason="leaves none for the answer",
    ),
    "Megatron-Bridge#4072: tools that the template does not write": Case(
        {"messages": HI, "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",), said="the chat template drops their tools, calls or the results of calls in 1 of 4",
    ),
    "trl#5517: a call of a tool that the template does not write": Case(
        {"messages": [HI[0], {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]}]}, reason="tool"
    ),
    "axolotl#3824: a pair whose context calls a tool that the template does not write": Case(
        {"prompt": [HI[0], {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "add", "arguments": {"a": 3}}}]},
            {"role": "tool", "content": "7"}], "chosen": [message("assistant", "yes")], "rejected": [message("assistant", "no")]},
        tuple(f"{U}hi<|im_end|>\n{A}<|im_end|>\n<|im_start|>tool\n7<|im_end|>\n{A}⟦{answer}<|im_end|>⟧" for answer in ("yes", "no")),
        task="dpo", said="the chat template drops their tools, calls or the results of calls in 1 of 4",
    ),
    "ms-swift#4939: thoughts of an earlier turn, which the template leaves out": Case(
        {"messages": [HI[0], message("assistant", "<think>\na\n</think>\n\nyes"), message("user", "why"),
                      message("assistant", "<think>\nb\n</think>\n\nso")]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧\n{U}why<|im_end|>\n{A}⟦<think>\nb\n</think>\n\nso<|im_end|>⟧",), THINKING,
    ),
    "axolotl#3088: an earlier turn without thoughts, a later one with": Case(
        {"messages": [*HI, message("user", "why"), message("assistant", "<think>b</think>so")]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧\n{U}why<|im_end|>\n{A}⟦<think>b</think>so<|im_end|>⟧",), THINKING,
    ),
    "slime#330: thoughts in a field of their own, which the template does not write": Case(
        {"messages": [HI[0], {"role": "assistant", "content": "yes", "reasoning_content": "r"}]},
        (f"{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",), said="the chat template drops thoughts in 1 of 4",
    ),
    "maxtext#4419: the developer is the system": Case(
        {"messages": [message("developer", "be"), *HI]}, (f"<|im_start|>system\nbe<|im_end|>\n{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",)
    ),
    "unsloth#11053: the turns before an instruction": Case(
        {"instruction": "hi", "input": "", "output": "yes", "system": "be", "history": [["a", "b"]]},
        (f"<|im_start|>system\nbe<|im_end|>\n{U}a<|im_end|>\n{A}⟦b<|im_end|>⟧\n{U}hi<|im_end|>\n{A}⟦yes<|im_end|>⟧",),
    ),
    "mlx-lm-lora#83: no second opening behind the answers of a pair": Case(
        {"chosen": TWO, "rejected": [*TWO[:3], message("assistant", "no")]},
        tuple(f"{U}hi<|im_end|>\n{A}yes<|im_end|>\n{U}why<|im_end|>\n{A}⟦{answer}<|im_end|>⟧" for answer in ("so", "no")), task="dpo",
    ),
    "transformers#33198: a prompt that ends within the answer": Case(
        {"prompt": [HI[0], message("assistant", "ye")], "completion": [message("assistant", "s")]}, reason="the prompt ends with a turn of the assistant"
    ),
}  # fmt: skip
