"""Gradient checkpointing recomputes no layer below the first trained one."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing, require_input_grads
from dstrain.models.params import freeze

CONFIG = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 3,
    "vocab_size": 50,
}


@pytest.mark.parametrize(
    ("frozen", "calls"),
    [
        (["embed_tokens", "model.layers.0", "model.layers.1"], [1, 1, 2]),
        (["embed_tokens", "model.layers.0"], [1, 2, 2]),
        (["embed_tokens"], [2, 2, 2]),
        (["model"], [1, 1, 1]),
        ([], [2, 2, 2]),
    ],
)
def test_frozen_lower_layers_are_computed_once_and_gradients_stay(frozen: list[str], calls: list[int]) -> None:
    ids = torch.randint(0, 50, (2, 8))
    models = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG)).train()
        if is_checkpointed:
            enable_gradient_checkpointing(model)
        freeze(model, frozen)
        require_input_grads(model)
        counts = [0] * 3
        for index, layer in enumerate(model.model.layers):
            layer.self_attn.register_forward_hook(
                lambda *_, index=index, counts=counts: counts.__setitem__(index, counts[index] + 1)
            )
        model(input_ids=ids, labels=ids).loss.backward()
        assert counts == (calls if is_checkpointed else [1, 1, 1])
        models.append(model)
    for plain, checkpointed in zip(*(model.parameters() for model in models), strict=True):
        assert (plain.grad is None) == (checkpointed.grad is None)
        assert plain.grad is None or torch.equal(plain.grad, checkpointed.grad)
