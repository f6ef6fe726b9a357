"""Tiny models of many families, packed batches, and the same sequences as padded rows."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from dstrain.batch import Batch, PackedGroup
from dstrain.config.schema import ModelConfig
from dstrain.models.attention.packed import packed_model_kwargs
from dstrain.models.load import read_config
from tests.model_families import BASE, FAMILIES, LOCAL_EXPERTS

WINDOW = 16
GROUPS = (
    PackedGroup(20, (9, 30)),
    PackedGroup(0, (33,)),
    PackedGroup(1, (5, 1)),
    PackedGroup(0, (1,)),
    PackedGroup(45, (1, 12, 7)),
    PackedGroup(0, (4,)),
    PackedGroup(15, (2, 17)),
    PackedGroup(0, (6, 3)),
)
"""Prefixes and branches shorter and longer than the window, and of 0 and 1 tokens."""
_WINDOWS = {"sliding_window": WINDOW}
_TWO_TYPES = {**_WINDOWS, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = ["linear_attention", "full_attention"]
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **values} for name, values in FAMILIES.items()},
    **{
        name: {"model_type": name}
        for name in ("arcee", "cohere", "ernie4_5", "olmo", "olmo2", "starcoder2")
    },
    "gemma": {"model_type": "gemma", "head_dim": 8},
    "glm": {"model_type": "glm", "head_dim": 8},
    "seed_oss": {"model_type": "seed_oss", "attention_dropout": 0.0, "residual_dropout": 0.0},
    "olmo3": {"model_type": "olmo3", **_TWO_TYPES},
    "exaone4": {"model_type": "exaone4", **_TWO_TYPES},
    "qwen3_moe": {"model_type": "qwen3_moe", **_EXPERTS},
    "cohere2, two types of layers": {"model_type": "cohere2", **_TWO_TYPES},
    "gemma3_text, two types of layers": {"model_type": "gemma3_text", **FAMILIES["gemma3_text"], **_TWO_TYPES},
    "mixtral with windows": {"model_type": "mixtral", **LOCAL_EXPERTS, **_WINDOWS},
    "qwen2 with windows": {"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1, **_WINDOWS},
    "qwen3 with windows": {"model_type": "qwen3", "head_dim": 8, "use_sliding_window": True, "max_window_layers": 1, **_WINDOWS},
    "smollm3 with windows": {"model_type": "smollm3", "use_sliding_window": True, **_TWO_TYPES},
    "starcoder2 with windows": {"model_type": "starcoder2", **_WINDOWS},
    "qwen3_moe with windows": {"model_type": "qwen3_moe", "use_sliding_window": True, **_EXPERTS, **_WINDOWS},
    "qwen3_5_text": {"model_type": "qwen3_5_text", "head_dim": 8, **_DELTA_NET, "layer_types": _HYBRID},
    "bamba": {
        "model_type": "bamba", "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2,
        "mamba_chunk_size": 16, "attn_layer_indices": [1],
    },
    "jamba": {
        "model_type": "jamba", "num_experts": 1, "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
        "attn_layer_period": 2, "attn_layer_offset": 1,
    },
    "minimax_m2": {"model_type": "minimax_m2", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32, **more: Any) -> PreTrainedModel:
    """Return a tiny causal model of CONFIGS[name], in which no parameter is zero."""
    values = {**BASE, **CONFIGS[name], **more}
    values = {key: value for key, value in values.items() if value is not None or key.endswith("token_id")}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(read_config(ModelConfig(config=values)))
    for parameter in model.parameters():  # some families begin with zeros, through which nothing is seen
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    return model.to(dtype)


def packed(groups: tuple[PackedGroup, ...] = GROUPS) -> Batch:
    """Return a packed batch of random tokens."""
    tokens = sum(group.tokens for group in groups)
    ids = torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(4))
    positions = [
        torch.arange(begin, begin + length)
        for group in groups
        for begin, length in ((0, group.prefix), *((group.prefix, branch) for branch in group.branches))
    ]
    tensors = {"input_ids": ids, "position_ids": torch.cat(positions)[None]}
    return Batch(tensors=tensors, weight=1.0, samples=(), groups=groups)


def rows(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sequences of a packed batch as padded rows.

    Ids (B, L), their attention mask (B, L), and where each token of the packed row is found in the rows, (T,) into
    (B * L,): tokens of a prefix in the row of the first branch.
    """
    sequences, places, start = [], [], 0
    for group in batch.groups:
        begin = start + group.prefix
        for number, branch in enumerate(group.branches):
            sequences.append([*range(start, start + group.prefix), *range(begin, begin + branch)])
            places += [(len(sequences) - 1, at) for at in range(group.prefix if number else 0, len(sequences[-1]))]
            begin += branch
        start = begin
    length = max(map(len, sequences))
    ids, mask = (torch.zeros(len(sequences), length, dtype=torch.long) for _ in range(2))
    for row, tokens in enumerate(sequences):
        ids[row, : len(tokens)] = batch.tensors["input_ids"][0, tokens]
        mask[row, : len(tokens)] = 1
    return ids, mask, torch.tensor([row * length + at for row, at in places])


def packed_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of the packed row, (T, V)."""
    return model(input_ids=batch.tensors["input_ids"], use_cache=False, **packed_model_kwargs(batch)).logits[0]


def padded_logits(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the logits of the packed row's tokens, computed in padded rows; (T, V)."""
    ids, mask, places = rows(batch)
    return model(input_ids=ids, attention_mask=mask, use_cache=False).logits.flatten(0, 1)[places]


def gradient(model: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """Return the gradient of a loss in which each token has its own weight, over all trained parameters."""
    model.zero_grad(set_to_none=True)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(7)).to(logits.dtype)
    (logits * weights).sum().backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
