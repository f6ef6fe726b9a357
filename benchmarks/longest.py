"""The longest sequence by card, planned: `python -m benchmarks.longest`, the tables of docs/long-context.md.

One row of a length that fills the cards, with the preset that takes most and the inputs of the layers in host memory:
a row of each GPU, or one that all of them share (parallel.sequence).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dstrain.config.schema import RunConfig
from dstrain.planner.memory import MemoryPlan, plan_memory
from dstrain.planner.shapes import ModelShape, named_config, read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import Preset, read_preset

GIB = 2**30
CARDS = (8, 12, 16, 24, 40, 80)
MODELS = ("llama-3.1-8b", "llama-3.1-70b")
LORA = {"rank": 32, "alpha": 32}
TRAININGS: dict[str, dict[str, Any]] = {
    "QLoRA": {"lora": LORA, "quantize": "nf4"}, "LoRA": {"lora": LORA}, "full": {},
}  # fmt: skip
PRESETS = {
    "QLoRA": ("zero2", "zero3"),
    "LoRA": ("zero2", "zero3", "zero3_offload"),
    "full": ("zero2_offload", "zero3", "zero3_offload"),
}
TILE_TOKENS = 2048
MOST = 2**24
"""Tokens at which the search ends."""


def make_config(model: str, training: str, tiles: Any, length: int, sequence: int = 1) -> RunConfig:
    """Return the recipe of one row of `length` tokens, which `sequence` GPUs share."""
    values = {
        "task": "sft",
        "precision": "bf16",
        "model": {"config": named_config(model), "tiled_mlp": tiles, **TRAININGS[training]},
        "data": {"train": "train.jsonl", "max_length": length},
        "batch": {"micro": 1, "accumulate": 1},
        "optim": {"lr": 1e-5, "name": "paged_adamw_8bit" if training == "QLoRA" else "adamw"},
        "parallel": {"sequence": sequence},
    }
    return RunConfig.model_validate(values)


def with_inputs_on_host(name: str) -> Preset:
    """Return a shipped preset with the inputs of recomputed layers in host memory."""
    preset = read_preset(name)
    block = copy.deepcopy(dict(preset.block)) | {"activation_checkpointing": {"cpu_checkpointing": True}}
    return replace(preset, block=block)


def find_longest(
    model: str, training: str, card_bytes: int, gpus: int, sequence: int, preset: Preset, tiles: Any, shape: ModelShape
) -> tuple[int, MemoryPlan] | None:
    """Return the longest row that fits and its plan; None if none does."""
    cluster, low, high = Cluster(gpus_per_node=gpus), 256, MOST

    def plan(length: int) -> MemoryPlan:
        return plan_memory(make_config(model, training, tiles, length, sequence), preset, cluster, shape)

    best, most = plan(low), plan(high)
    if best.gpu_bytes > card_bytes:
        return None
    while high - low > low // 200 + 1:
        # Where memory is a straight line in the length, the next point is the answer.
        share = (card_bytes - best.gpu_bytes) / (most.gpu_bytes - best.gpu_bytes)
        middle = min(
            max(low + int(share * (high - low)), low + (high - low) // 200 + 1), high - (high - low) // 200 - 1
        )
        found = plan(middle)
        if found.gpu_bytes <= card_bytes:
            low, best = middle, found
            step = low + low // 200 + 1  # the line is often exact: one look ahead ends the search
            if (ahead := plan(step)).gpu_bytes > card_bytes:
                high, most = step, ahead
        else:
            high, most = middle, found
    return low, best


def rows() -> Iterator[str]:
    """Yield the lines of the tables."""
    for model in MODELS:
        yield f"| {model} | GPUs | {' | '.join(f'{card} GiB' for card in CARDS)} |"
        yield f"|---|---|{'---|' * len(CARDS)}"
        for training in TRAININGS:
            config = make_config(model, training, "auto", 1024)
            shape = read_shape(config)
            for gpus, sequence in ((1, 1), (8, 1), (8, 8)):
                cells = [_cell(model, training, card * GIB, gpus, sequence, shape) for card in CARDS]
                yield f"| {training} | {gpus}{', shared' * (sequence > 1)} | {' | '.join(cells)} |"
        yield ""


def _cell(model: str, training: str, card_bytes: int, gpus: int, sequence: int, shape: ModelShape) -> str:
    found = []
    for name in PRESETS[training]:
        one = find_longest(model, training, card_bytes, gpus, sequence, with_inputs_on_host(name), TILE_TOKENS, shape)
        found += [] if one is None else [(*one, name)]
    if not found:
        return "-"
    # Of presets that take nearly the same, the one with less in host memory.
    most = max(length for length, *_ in found)
    length, plan, name = min(
        (one for one in found if one[0] >= 0.98 * most), key=lambda one: one[1].total("host") / one[0]
    )
    return f"{length:,} `{name}` ({plan.host_bytes_per_node / GIB:,.0f})"


if __name__ == "__main__":
    for line in rows():
        print(line, flush=True)
