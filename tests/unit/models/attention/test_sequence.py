"""Each process of a group gets its part of what a text model reads for each token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel

from dstrain.batch import PackedGroup
from dstrain.models.attention.layout import PackedLayout
from dstrain.models.attention.sequence import share_decoder_inputs

TOKENS, PARTS = 8, 2


def part_of(rank: int, **inputs: Any) -> dict[str, Any]:
    size = TOKENS // PARTS
    sequence: Any = SimpleNamespace(part=lambda tokens: (rank * size, (rank + 1) * size))
    layout = PackedLayout((PackedGroup(0, (TOKENS,)),), sequence)
    found = share_decoder_inputs(torch.nn.Identity(), (), {"packed_groups": layout, **inputs})
    assert found is not None
    return found[1]


def test_tokens_and_positions_are_cut() -> None:
    inputs = {"inputs_embeds": torch.randn(1, TOKENS, 3), "position_ids": torch.arange(TOKENS).expand(3, 1, TOKENS)}
    parts = [part_of(rank, **inputs) for rank in range(PARTS)]
    assert torch.equal(torch.cat([part["inputs_embeds"] for part in parts], 1), inputs["inputs_embeds"])
    assert torch.equal(torch.cat([part["position_ids"] for part in parts], 2), inputs["position_ids"])


@pytest.mark.parametrize("rank", range(PARTS))
def test_features_that_qwen3_vl_adds_in_its_layers_are_those_of_the_part(rank: int) -> None:
    """Computed token by token, without attention: each part of the row is that of the whole row."""
    torch.manual_seed(0)
    text = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 1}  # fmt: skip
    model = AutoModel.from_config(AutoConfig.for_model("qwen3_vl_text", **text)).eval()
    for layer in model.layers:
        layer.self_attn.o_proj.weight.data.zero_()
    is_image = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1]], dtype=torch.bool)
    inputs = {
        "inputs_embeds": torch.randn(1, TOKENS, 16), "position_ids": torch.arange(TOKENS).expand(3, 1, TOKENS),
        "visual_pos_masks": is_image, "deepstack_visual_embeds": [torch.randn(5, 16) for _ in range(2)],
    }  # fmt: skip
    part = part_of(rank, **inputs)
    part.pop("packed_groups")
    with torch.no_grad():
        whole = model(**inputs, use_cache=False).last_hidden_state
        found = model(**part, use_cache=False).last_hidden_state
    torch.testing.assert_close(found, whole[:, 4 * rank : 4 * rank + 4])
