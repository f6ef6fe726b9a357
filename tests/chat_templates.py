"""Chat templates of three model families, small tokenizers of three kinds, and preference pairs to tokenize."""

from __future__ import annotations

import copy
import json
from functools import cache
from typing import Any

from tests.vocabulary import message

ZEPHYR = (  # HuggingFaceH4/zephyr-7b-beta: no BOS in the template; the tokenizer adds it
    "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'system' %}\n{{ '<|system|>\n' + message['content'] + eos_token }}\n"
    "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + eos_token }}\n{% endif %}\n"
    "{% if loop.last and add_generation_prompt %}\n{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
)
LLAMA3 = (  # meta-llama/Meta-Llama-3-8B-Instruct: BOS in the template, contents trimmed
    "{% for message in messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
    "{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
QWEN = (  # Qwen/Qwen2.5: the template has a default system message
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {"zephyr": ZEPHYR, "llama3": LLAMA3, "qwen": QWEN}
KINDS = ("byte-level", "metaspace", "legacy metaspace")
SPECIAL = [
    "<unk>",
    "<s>",
    "</s>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|im_start|>",
    "<|im_end|>",
]
WORDS = "Sure, here is a fox. the quick brown fox jumps over the lazy dog; user assistant system You are Qwen. river "


SYSTEM, QUESTION = message("system", "You are a fox."), message("user", "where is the dog?")
EARLIER = [message("user", "the quick brown fox"), message("assistant", "jumps over the lazy dog")]
LONG = "Sure, here is a fox" + " and a river" * 12 + "."
PAIRS: dict[str, dict[str, Any]] = {
    "one turn": {"prompt": [QUESTION], "chosen": "Sure, here.", "rejected": "the river"},
    "alike at first": {"prompt": [QUESTION], "chosen": "Sure, here is a fox", "rejected": "Sure, here is a dog"},
    "later turn": {"prompt": [*EARLIER, QUESTION], "chosen": "over the river", "rejected": "no fox"},
    "system": {"prompt": [SYSTEM, *EARLIER, QUESTION], "chosen": "a fox", "rejected": "Fox: 狐 🦊"},
    "line breaks": {"prompt": [QUESTION], "chosen": "\n\nthe fox\n", "rejected": "\nthe dog"},
    "spaces": {"prompt": [QUESTION], "chosen": " the fox ", "rejected": "  the dog"},
    "a long answer": {"prompt": [*EARLIER, QUESTION], "chosen": "Sure.", "rejected": LONG},
    "two long answers": {"prompt": [QUESTION], "chosen": LONG, "rejected": LONG + " the dog"},
}
"""Name -> a preference pair whose answers are strings."""
TEXTS: dict[str, dict[str, str]] = {
    "plain": {"prompt": "the quick brown", "chosen": " fox jumps", "rejected": " dog"},
    "inside of a word": {"prompt": "the quick bro", "chosen": "wn fox", "rejected": "om"},
    "a space between": {"prompt": "where is the ", "chosen": "fox", "rejected": "dog"},
    "a line break between": {"prompt": "where?\n", "chosen": "\nhere", "rejected": "the river"},
}


@cache
def tokenizer_of(kind: str, adds_bos: bool = False) -> Any:
    """Return a tokenizer without a template; `adds_bos`: it prepends <s> itself, like Llama's."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bytes_too = kind != "byte-level"
    bare = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True) if bytes_too else models.BPE())
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)] if bytes_too else []
    trainer = trainers.BpeTrainer(
        vocab_size=360 + len(alphabet),
        special_tokens=[*SPECIAL, *alphabet],
        show_progress=False,
        initial_alphabet=[] if bytes_too else sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    if kind == "byte-level":
        bare.pre_tokenizer, bare.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    elif kind == "metaspace":  # Llama 2 with legacy: false, as in Zephyr and Mistral
        bare.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        bare.decoder = decoders.Metaspace()
    else:  # as in their older files
        bare.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    words = [WORDS] * 4 if kind != "legacy metaspace" else WORDS.split(" ") * 4
    bare.train_from_iterator([word + "\n" for word in words], trainer)
    if alphabet:  # byte tokens of the model, which a text cannot name
        state = json.loads(bare.to_str())
        state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in alphabet]
        bare = Tokenizer.from_str(json.dumps(state))
    if adds_bos:
        bare.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    bare.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=bare, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def chat(family: str, kind: str, adds_bos: bool = False) -> Any:
    """Return the tokenizer of this kind with a family's template."""
    made = copy.deepcopy(tokenizer_of(kind, adds_bos))
    made.chat_template = TEMPLATES[family]
    return made
