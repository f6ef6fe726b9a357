"""Count the launches of a decoder layer, eager, with Liger's kernels and compiled, on an emulated CUDA device.

    EMU_VALUES=0 python -m tools.cuda_emulator python -m benchmarks.compiled_launches --to docs/measurements/kernels-compile.md

Each row is a small Llama in bf16 with torch's attention. Its launches are those of a pass over 128 tokens, after passes
over rows of other lengths, of which the first is named. A layer has half of what two further layers add.
"""

from __future__ import annotations

import argparse
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common import format_certificate, table, write_table
from tools.cuda_emulator.counts import read_counts

LENGTHS = {"short row first": (128, 193, 8192, 128), "long row first": (8192, 193, 128, 128)}
DEPTHS = (1, 3)
LAUNCHES = ("kernels", "copies_on_device", "memsets")


def count_passes(model: Any, length: int) -> tuple[int, int]:
    """Return the launches of a forward and of a backward pass over one row."""
    import torch

    ids = torch.zeros(1, length, dtype=torch.long, device="cuda")
    positions = torch.arange(length, device="cuda")[None]
    counts = [_count()]
    output = model(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
    counts.append(_count())
    output.sum().backward()
    counts.append(_count())
    model.zero_grad(set_to_none=True)
    return counts[1] - counts[0], counts[2] - counts[1]


def _count() -> int:
    counts = read_counts()
    return sum(counts[name] for name in LAUNCHES)


def make_model(depth: int, attention: str = "sdpa") -> Any:
    """Return a decoder without a head on the device."""
    import torch
    from transformers import AutoConfig, AutoModel

    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": depth}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads, attn_implementation=attention)
    with torch.device("cuda"):
        return AutoModel.from_config(config, dtype=torch.bfloat16).train()


def eager(depth: int) -> Any:
    return make_model(depth)


def liger(depth: int) -> Any:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    model = make_model(depth)
    apply_liger_kernel_to_llama(fused_linear_cross_entropy=False, model=model)
    return model


def layers(depth: int) -> Any:
    model = make_model(depth)
    for layer in model.layers:
        layer.compile(dynamic=True)
    return model


def layers_without_attention(depth: int) -> Any:
    import torch
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register("outside", torch.compiler.disable(ALL_ATTENTION_FUNCTIONS["sdpa"]))
    model = make_model(depth, "outside")
    for layer in model.layers:
        layer.compile(dynamic=True)
    return model


def norms_and_mlps(depth: int) -> Any:
    import torch

    model = make_model(depth)
    for layer in model.layers:
        for module in (layer.input_layernorm, layer.post_attention_layernorm, layer.mlp):
            module.forward = torch.compile(module.forward, dynamic=True)
    return model


VARIANTS: dict[str, Callable[[int], Any]] = {
    "eager": eager,
    "layers compiled": layers,
    "layers compiled, attention outside": layers_without_attention,
    "norms and MLPs compiled": norms_and_mlps,
    "Liger": liger,  # last: it replaces functions of transformers
}


def row_of(name: str, order: str) -> dict[str, Any]:
    """Return a variant's launches of a layer, with the graphs and graph breaks of torch's compiler."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    passes = []
    for depth in DEPTHS:
        model = VARIANTS[name](depth)
        passes.append([count_passes(model, length) for length in LENGTHS[order]][-1])
    forward, backward = ((deep - shallow) / (DEPTHS[1] - DEPTHS[0]) for shallow, deep in zip(*passes, strict=True))
    breaks = sum(counters["graph_break"].values())
    graphs = counters["stats"].get("unique_graphs", 0)
    return {"layers": name, "order": order, "forward": forward, "backward": backward, "both": forward + backward,
            "backward of one layer and the rest": passes[0][1], "graphs": graphs, "graph breaks": breaks}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=None, help="a page with the marks of this table")
    options = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # code made for another order of lengths
    warnings.filterwarnings("ignore")
    rows = [row_of("eager", "short row first")]
    rows += [row_of(name, order) for name in VARIANTS if "compiled" in name for order in LENGTHS]
    rows.append(row_of("Liger", "short row first"))
    record = format_certificate()
    write_table(f"{record}\n\n{table(rows)}", "benchmarks.compiled_launches", options.to)


if __name__ == "__main__":
    main()
