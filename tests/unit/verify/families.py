"""Folders of models of several families, as a user has them before a training: a config, some with weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.config.schema import ModelConfig
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.verify.model import ShrunkModel, make_shrunk_model
from tests.tiny import LLAVA
from tests.vision_recipes import GEMMA3, IDEFICS3

WIDE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
HYBRID: dict[str, Any] = {
    "full_attention_interval": 2, "linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
    "linear_value_head_dim": 32, "head_dim": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **WIDE},
    "qwen3_moe": {"model_type": "qwen3_moe", **WIDE, "num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 64},
    "qwen3_5_text": {"model_type": "qwen3_5_text", **WIDE, **HYBRID},
    "gemma3_text": {"model_type": "gemma3_text", **WIDE, "num_hidden_layers": 6, "head_dim": 32, "sliding_window_pattern": 3},
    "gpt_oss": {"model_type": "gpt_oss", **WIDE, "num_local_experts": 8, "head_dim": 32},
    "mamba2": {"model_type": "mamba2", "vocab_size": 512, "hidden_size": 128, "num_hidden_layers": 4, "num_heads": 4,
               "head_dim": 64, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None},
    "lfm2": {"model_type": "lfm2", **WIDE, "layer_types": ["conv", "full_attention"] * 2},
    "llava": LLAVA,
    "gemma3": GEMMA3,
    "idefics3": IDEFICS3,
}  # fmt: skip


def write_config(name: str, folder: Path) -> Path:
    """Write the config of a family into the folder, which then is a model without weights."""
    values = dict(CONFIGS[name])
    AutoConfig.for_model(values.pop("model_type"), **values).save_pretrained(str(folder))
    return folder


def write_model(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16, **more: Any) -> Path:
    """Write a model with weights and its own tokenizer into the folder."""
    values = {**CONFIGS[name], **more}
    tokenizer = train_tokenizer(["How do I mend the pump? Gladly: oil it, then open it."] * 4, 400)
    tokenizer.save_pretrained(str(folder))
    config = AutoConfig.for_model(values.pop("model_type"), **values, dtype=dtype)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(str(folder))
    return folder


def shrunk(folder: Path, work: Path) -> ShrunkModel:
    """Return the small model of a folder's."""
    return make_shrunk_model(ModelConfig(path=str(folder)), work)
