"""Which language models of the installed transformers see the tokens that they have to predict, tried on small copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dstrain.models.folder import BIDIRECTIONAL_TYPES, NON_CAUSAL_TYPES

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim_model": 32, "embedding_size": 32,
    "intermediate_size": 64, "d_inner": 64, "n_inner": 64, "dim_ff": 64, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4,
    "n_heads": 4, "num_heads": 4, "num_key_value_heads": 4, "decoder_attention_heads": 4, "d_head": 8, "head_dim": 8,
    "dim_head": 8, "max_position_embeddings": 64, "n_positions": 64,
}  # fmt: skip
"""Sizes of a small copy, under the names of different families."""
MAX_PARAMETERS = 20_000_000
"""Families whose copy is larger have sizes of other names; building one would take seconds."""


def sees_later_tokens(model_type: str) -> bool | None:
    """Return whether the logits of a token depend on later tokens; None where no small copy can be run."""
    config_type: Any = CONFIG_MAPPING[model_type]
    attributes = {**{value: name for name, value in config_type.attribute_map.items()}, **config_type.attribute_map}
    try:
        known = config_type().to_dict()
        sizes = {name: size for name, size in SIZES.items() if name in known or name in attributes}
        config = config_type(**sizes)
        make = MODEL_FOR_CAUSAL_LM_MAPPING[config_type]
        with torch.device("meta"):
            if sum(one.numel() for one in make(config).parameters()) > MAX_PARAMETERS:
                return None
        torch.manual_seed(0)
        model = make(config).float().eval()
        ids = torch.arange(32).view(2, 16) % 32 + 8
        ids[1, :8] = ids[0, :8]
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :8].float()
    except Exception:  # a family with other needs, such as images
        return None
    return bool((logits[0] - logits[1]).abs().max() > 1e-4 * logits.abs().max())


@pytest.mark.slow  # about 150 families; it is for new versions of transformers
def test_every_family_that_sees_later_tokens_is_listed() -> None:
    seeing = {name: sees_later_tokens(name) for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    assert sum(found is False for found in seeing.values()) > 50, "most families can be tried"
    found = {name for name, sees in seeing.items() if sees}
    assert found - BIDIRECTIONAL_TYPES <= NON_CAUSAL_TYPES
    assert {*NON_CAUSAL_TYPES} & {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES} <= found, "and none that does not"
