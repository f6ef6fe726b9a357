"""Count the launches of a decoder layer, eager and with fused kernels, on an emulated CUDA device.

    python -m tools.cuda_emulator python -m benchmarks.kernel_launches --to docs/measurements/kernels.md

A layer's launches are those of a model with three layers less those with two, in bf16, for a row of 24 tokens. Triton's
kernels are compiled and launched, but compute nothing here: which modules take them is not decided by values.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.common import format_certificate, table, write_table
from tools.cuda_emulator.counts import read_counts

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
MODELS = {
    "Llama": "llama",
    "Qwen3": "qwen3",
    "Gemma 3": "gemma3_text",
    "Qwen2.5-VL text": "qwen2_5_vl",
    "Qwen2.5-VL vision": "qwen2_5_vl",
}
COUNTED = ("kernels", "products", "copies_on_device", "memsets")
TOKENS = 24
LAYERS = (2, 3)
WAYS = ("eager", "fused", "liger")
"""transformers' own operations, dstrain's model.kernels: liger, and the patch that other trainers apply."""


def build(name: str, layers: int) -> tuple[Any, dict[str, Any]]:
    """Return a model on the device, in bf16, and its inputs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    ids = torch.randint(0, 300, (1, TOKENS), device="cuda")
    inputs = {"input_ids": ids, "position_ids": torch.arange(TOKENS, device="cuda")[None], "use_cache": False}
    if MODELS[name] == "qwen2_5_vl":
        return build_qwen(layers, is_vision=name.endswith("vision"))
    config = AutoConfig.for_model(MODELS[name], **{**TEXT, "num_hidden_layers": layers})
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).cuda(), inputs


def build_qwen(layers: int, is_vision: bool) -> tuple[Any, dict[str, Any]]:
    """Return the text part or the vision tower of a Qwen2.5-VL with its inputs."""
    import torch
    from transformers import AutoConfig, AutoModel

    tower = {
        "depth": layers,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 4,
        "patch_size": 4,
        "out_hidden_size": 64,
    }
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    values = {**TEXT, "num_hidden_layers": layers, "rope_parameters": rope}
    config = AutoConfig.for_model("qwen2_5_vl", text_config=values, vision_config=tower)
    model = AutoModel.from_config(config, dtype=torch.bfloat16).cuda()
    if not is_vision:
        ids = torch.randint(0, 300, (1, TOKENS), device="cuda")
        positions = torch.arange(TOKENS, device="cuda").expand(3, 1, TOKENS)
        return model.language_model, {"input_ids": ids, "position_ids": positions, "use_cache": False}
    grid = torch.tensor([[1, 4, 8]])
    pixels = torch.randn(32, 3 * 2 * 4 * 4, device="cuda", dtype=torch.bfloat16)
    return model.visual, {"hidden_states": pixels, "grid_thw": grid.cuda()}


def count(name: str, layers: int, way: str) -> dict[str, int]:
    """Return the launches of a forward and of a backward pass of a model. `way`: one of WAYS."""
    import torch

    from dstrain.models import fused_kernels

    model, inputs = build(name, layers)
    model.train()
    if way == "fused":
        fused_kernels._relative_error = lambda wanted, computed: 0.0 if wanted.shape == computed.shape else float("inf")
        print(name, fused_kernels.fuse_kernels(model), flush=True)
    elif way == "liger":
        from liger_kernel.transformers import _apply_liger_kernel_to_instance

        _apply_liger_kernel_to_instance(model=model)
    for _ in range(2):  # the first pass compiles
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        counts = [launches()]
        output = model(**inputs)
        hidden = output.logits if hasattr(output, "logits") else output[0]
        counts.append(launches())
        # In this thread: autograd's own one may release Python objects while the process ends, which aborts it.
        with torch.autograd.set_multithreading_enabled(False):
            torch.autograd.backward(hidden, torch.zeros_like(hidden))
        counts.append(launches())
    return {"forward": counts[1] - counts[0], "backward": counts[2] - counts[1]}


def launches() -> int:
    """Return the launches since the process began."""
    found = read_counts()
    return sum(found[kind] for kind in COUNTED)


def count_layers(models: Sequence[str], ways: Sequence[str] = WAYS) -> list[dict[str, Any]]:
    """Return the rows of the table. liger's own patch comes last: it changes the functions of transformers' modules."""
    rows: dict[str, dict[str, Any]] = {name: {"layer of": name} for name in models}
    totals: dict[tuple[str, str], int] = {}
    for way, name in product(ways, models):
        try:
            fewer, more = (count(name, layers, way) for layers in LAYERS)
        except ImportError:  # liger 0.8.5 looks for a class that transformers 5.24 no longer has
            rows[name] |= dict.fromkeys((f"{way}, forward", f"{way}, backward"), "does not import")
            continue
        rows[name] |= {f"{way}, {part}": more[part] - fewer[part] for part in more}
        totals[way, name] = sum(more.values()) - sum(fewer.values())
    return [
        {**row, "fused / eager": f"{totals['fused', name] / totals['eager', name]:.2f}"} for name, row in rows.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    parser.add_argument("--models", default=",".join(MODELS), help="only these, separated by commas")
    options = parser.parse_args()
    rows = count_layers(options.models.split(","))
    record = format_certificate()
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.kernel_launches", options.to)


if __name__ == "__main__":
    main()
