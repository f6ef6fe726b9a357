"""LoRA adapters written by peft, with non-zero values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1,
}  # fmt: skip


def adapter(
    at: Path, auto: Any = AutoModelForCausalLM, tied: bool = False, family: str = "llama", **settings: Any
) -> Path:
    """Write a base model to `at`/base and an adapter with non-zero values to `at`/adapter; return the adapter."""
    torch.manual_seed(0)
    experts = {} if family == "llama" else {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **SIZES, **experts, tie_word_embeddings=tied)
    config.num_labels = 1
    base = auto.from_config(config)
    base.save_pretrained(str(at / "base"))
    wrapped = get_peft_model(
        auto.from_pretrained(str(at / "base")), LoraConfig(**({"r": 4, "target_modules": "all-linear"} | settings))
    )
    with torch.no_grad():
        for parameter in wrapped.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    wrapped.save_pretrained(str(at / "adapter"))
    return at / "adapter"


def merged_by_peft(at: Path, auto: Any = AutoModelForCausalLM) -> Any:
    """Return the adapter's base model with the adapter merged by peft."""
    base = auto.from_pretrained(str(at.parent / "base"), **({} if auto is AutoModelForCausalLM else {"num_labels": 1}))
    return PeftModel.from_pretrained(base, str(at)).merge_and_unload()
