"""Probe whether a model's family predicts each token from the tokens before it alone."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from dstrain.models.attention.model_types import NO_MASK_MODEL_TYPES

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SMALL = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim_model": 32, "embedding_size": 32,
    "intermediate_size": 64, "d_inner": 64, "n_inner": 64, "dim_ff": 64, "ffn_dim": 64, "num_hidden_layers": 2,
    "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4,
    "num_heads": 4, "num_key_value_heads": 4, "decoder_attention_heads": 4, "d_head": 8, "head_dim": 8, "dim_head": 8,
    "max_position_embeddings": 64, "n_positions": 64,
}  # fmt: skip
"""Sizes of the copy that is probed, under the names of different families."""
_TOLERANCE = 1e-4
_LENGTH = 16


def sees_later_tokens(model: PreTrainedModel) -> bool:
    """Return True where the logits of a token depend on later tokens, as those of XLNet and CPM-Ant do.

    A small copy of the family is run on two rows that differ in their second halves. Families whose logits are compared
    by tests are not probed, nor are those of which no small copy can be made, or which take images.
    """
    config: Any = model.config
    if config.model_type in NO_MASK_MODEL_TYPES or hasattr(config, "vision_config"):
        return False
    if not type(model).__module__.startswith("transformers."):  # code that came with the weights
        return False
    settings = tuple((name, value) for name in _SWITCHES if (value := getattr(config, name, None)) is not None)
    model_type: Any = type(model)
    config_type: Any = type(config)
    return bool(_probe(model_type, config_type, settings))


_SWITCHES = ("is_decoder", "use_bidirectional_attention", "attn_type", "bi_data")
"""Settings that decide whether a family is causal."""


@cache
def _probe(model_type: Any, config_type: Any, settings: tuple[tuple[str, Any], ...]) -> bool:
    import torch

    known = config_type().to_dict()
    attributes = {**{value: name for name, value in config_type.attribute_map.items()}, **config_type.attribute_map}
    sizes = {name: size for name, size in _SMALL.items() if name in known or name in attributes}
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            model = model_type(config_type(**sizes, **dict(settings))).float().eval()
            ids = torch.arange(2 * _LENGTH).view(2, _LENGTH) % 32 + 8
            ids[1, : _LENGTH // 2] = ids[0, : _LENGTH // 2]
            logits = model(input_ids=ids).logits[:, : _LENGTH // 2].float()
    except Exception:  # a family with other needs: it is tried by its own training
        return False
    return bool((logits[0] - logits[1]).abs().max() > _TOLERANCE * logits.abs().max())
