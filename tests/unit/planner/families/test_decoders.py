"""Parameters counted from config.json are those of transformers' models."""

from __future__ import annotations

from typing import Any

import pytest

from dstrain.planner.read_shape import FAMILIES, shape_from_config

_TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 160}  # fmt: skip
_CONFIGS: dict[str, dict[str, Any]] = {
    **{name: {"model_type": name, **_TEXT} for name in FAMILIES if not name.endswith("vl_text")},
    **{f"{name} by default": {"model_type": name} for name in FAMILIES if not name.endswith("vl_text")},
    "tied llama with biases": {"model_type": "llama", **_TEXT, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "qwen3 with wide heads": {"model_type": "qwen3", **_TEXT, "head_dim": 32},
    "llava": {"model_type": "llava", "text_config": {"model_type": "llama", **_TEXT},
              "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                                "num_attention_heads": 2, "image_size": 28, "patch_size": 14}},
    "llava by default": {"model_type": "llava"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "text_config": _TEXT, "vision_config": {"depth": 2, "hidden_size": 32,
                   "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64}},
}  # fmt: skip


@pytest.mark.parametrize("name", _CONFIGS)
def test_the_tensors_of_a_config_are_those_of_the_model(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    values = dict(_CONFIGS[name])
    shape = shape_from_config(values)
    assert shape is not None
    model_type = values.pop("model_type")
    kind = AutoModelForImageTextToText if model_type in ("llava", "qwen2_5_vl") else AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(AutoConfig.for_model(model_type, **values))
    assert {tensor.name: tensor.shape for tensor in shape.tensors} == {
        name: tuple(parameter.shape) for name, parameter in model.named_parameters()
    }
