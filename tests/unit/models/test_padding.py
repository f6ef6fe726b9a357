"""Rows are filled up with a token that no text becomes, where the tokenizer has one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from dstrain.errors import RecipeError
from dstrain.models.load import clear_padding_idx, set_pad_token

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level(special: Sequence[str], **named: str) -> Any:
    """As Llama 3's and GPT-2's: every text is written with bytes."""
    tokenizer = Tokenizer(models.BPE(vocab={text: at for at, text in enumerate(BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([*special])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def falling_back(fall_back: bool) -> Any:
    """As Llama 2's, with bytes for what has no piece, or without."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256) if fall_back), *"abc"]
    vocab = {text: at for at, text in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=fall_back))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


LLAMA3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_2|>")
CASES: dict[str, tuple[Any, str]] = {
    "Llama 3": (byte_level(LLAMA3, bos_token=LLAMA3[0], eos_token=LLAMA3[1]), "<|reserved_special_token_0|>"),
    "Llama 3.1": (
        byte_level((*LLAMA3, "<|finetune_right_pad_id|>"), bos_token=LLAMA3[0], eos_token=LLAMA3[1]),
        "<|finetune_right_pad_id|>",
    ),
    "GPT-NeoX": (byte_level(("<|endoftext|>", "<|padding|>"), eos_token="<|endoftext|>"), "<|padding|>"),
    "GPT-2": (byte_level(("<|endoftext|>",), unk_token="<|endoftext|>", eos_token="<|endoftext|>"), "<|endoftext|>"),
    "images": (byte_level(("<s>", "<image>", "<|vision_pad|>"), eos_token="<s>"), "<s>"),
    "Llama 2": (falling_back(True), "<unk>"),
    "an unknown token that texts become": (falling_back(False), "</s>"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_token_that_no_text_becomes_is_taken_first(case: str) -> None:
    tokenizer, wanted = CASES[case]
    tokenizer.pad_token = None
    before = tokenizer("a c\U0001f40d")["input_ids"]
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == wanted
    assert tokenizer.pad_token_id not in before
    assert tokenizer("a c\U0001f40d")["input_ids"] == before
    assert len(tokenizer) == tokenizer.backend_tokenizer.get_vocab_size(), "nothing was added"


def test_what_the_template_or_the_processor_writes_is_used() -> None:
    tokenizer = byte_level(LLAMA3, bos_token=LLAMA3[0], eos_token=LLAMA3[1])
    tokenizer.chat_template = "{{ messages[0].content }}<|reserved_special_token_0|>"
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == "<|reserved_special_token_2|>"
    tokenizer.pad_token = None
    set_pad_token(tokenizer, "model.path", {"<|reserved_special_token_2|>"})
    assert tokenizer.pad_token == "<|end_of_text|>"


def test_a_pad_token_that_is_named_stays() -> None:
    tokenizer = byte_level(LLAMA3, pad_token=LLAMA3[1], eos_token=LLAMA3[1])
    set_pad_token(tokenizer, "model.path")
    assert tokenizer.pad_token == LLAMA3[1]


def test_without_an_end_it_is_refused() -> None:
    with pytest.raises(RecipeError, match="neither a pad nor an EOS token"):
        set_pad_token(byte_level(()), "model.path")


def test_every_row_of_the_embedding_learns() -> None:
    config = AutoConfig.for_model(
        "llama", vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, pad_token_id=2, eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    assert model.get_input_embeddings().padding_idx == 2
    clear_padding_idx(model)
    torch.manual_seed(0)
    model(input_ids=torch.tensor([[3, 2, 5, 2]])).logits.sum().backward()
    assert model.get_input_embeddings().weight.grad[2].any()
