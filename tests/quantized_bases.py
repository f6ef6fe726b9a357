"""Small models in the formats of published quantized ones, and the weights that their files stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from tests.model_families import family

FP8 = torch.float8_e4m3fn
MXFP4_SETTINGS = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
BLOCK = (16, 24)
"""Of FP8: does not divide the matrices of `family`, so the last blocks are smaller."""
FP8_SETTINGS: dict[str, dict[str, Any]] = {
    "blocks": {"quant_method": "fp8", "weight_block_size": [*BLOCK], "modules_to_not_convert": ["lm_head"]},
    "matrices": {"quant_method": "fp8", "activation_scheme": "static"},
    "rows": {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {}},
}


def save_mxfp4(folder: Path, files: int = 1, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a tiny gpt-oss as published: experts in MXFP4, the rest in bf16. Returns the weights in fp32."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = family("gpt_oss") | {"hidden_size": 64, "intermediate_size": 32} | changes
    stored, wanted = _tiny_weights(config)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, rows, columns // 32), dtype=torch.uint8)
        wanted[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    save(folder, config, stored, MXFP4_SETTINGS, files)
    return wanted


def save_fp8(
    folder: Path, model_type: str = "qwen3", kind: str = "blocks", files: int = 1, **changes: Any
) -> dict[str, torch.Tensor]:
    """Save a tiny model whose linear layers, without the head, are in FP8. Returns the weights in fp32, as in the files."""
    config = family(model_type) | changes
    stored, wanted = _tiny_weights(config, as_in_files=True)
    for name, values in [*stored.items()]:
        if "proj" not in name or not name.endswith("weight"):
            continue
        rows, columns = values.shape
        height, width = {"blocks": BLOCK, "matrices": (rows, columns), "rows": (1, columns)}[kind]
        grid = ceil(rows / height), ceil(columns / width)
        codes, scales = torch.randn(rows, columns).mul(50).to(FP8), torch.rand(grid) / 1000
        wanted[name] = torch.stack([
            torch.stack([codes[row, column].float() * scales[row // height, column // width] for column in range(columns)])
            for row in range(rows)
        ])  # fmt: skip
        stored[name] = codes
        stored[name + ("_scale" if kind == "rows" else "_scale_inv")] = (
            scales[0, 0].clone() if kind == "matrices" else scales
        )
        if kind == "matrices":
            stored[name.removesuffix("weight") + "activation_scale"] = torch.tensor(0.5)
    save(folder, config, stored, FP8_SETTINGS[kind], files)
    return wanted


def _tiny_weights(
    config: Mapping[str, Any], as_in_files: bool = False
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the weights of a model in bf16, and the same in fp32. `as_in_files`: each expert of its own."""
    torch.manual_seed(3)
    values = dict(config)
    made = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values.pop("model_type"), **values), dtype=torch.bfloat16
    )
    state = made.state_dict()
    if as_in_files:
        from transformers.core_model_loading import revert_weight_conversion

        state = revert_weight_conversion(made, state)
    if made.config.tie_word_embeddings:
        state.pop("lm_head.weight", None)
    return {name: one.clone() for name, one in state.items()}, {name: one.float() for name, one in state.items()}


def save(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any] | None,
    files: int = 1,
) -> None:
    """Save tensors in turn to `files` files, so that a weight and its scales are in different ones."""
    folder.mkdir(parents=True, exist_ok=True)
    values = dict(config)
    whole = AutoConfig.for_model(values.pop("model_type"), **values).to_dict()
    quantized = {} if settings is None else {"quantization_config": dict(settings)}
    (folder / "config.json").write_text(json.dumps(whole | quantized | {"dtype": "bfloat16"}))
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names: Sequence[str] = sorted(tensors)
    index = {name: f"model-{at % files}.safetensors" for at, name in enumerate(names)}
    for file in {*index.values()}:
        inside = {name: tensors[name] for name in names if index[name] == file}
        save_file(inside, folder / file, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
