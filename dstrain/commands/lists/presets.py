"""dstrain presets: the packaged presets with the memory of a known model, or one in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dstrain.commands.lists.table import format_table, terminal_width, wrap_note
from dstrain.config import RunConfig
from dstrain.errors import DstrainError, PresetError
from dstrain.planner.cluster import Cluster
from dstrain.planner.memory import plan_memory
from dstrain.planner.read_shape import named_config, read_shape
from dstrain.planner.workload import read_properties
from dstrain.preset import convert_preset, describe_preset, preset_names, read_preset, summarize_presets
from dstrain.tasks import fill_learning_rate
from dstrain.units import format_bytes

SHAPE = "qwen3-8b"
EXAMPLES: tuple[tuple[str, dict[str, Any] | None, int], ...] = (
    ("8B LoRA, 1 GPU", {"rank": 16, "alpha": 32}, 1),
    ("8B full, 1 GPU", None, 1),
    ("8B full, 8 GPUs", None, 8),
)
"""Heading, adapters and GPUs of each column of memory: sft of SHAPE, one sample of 1024 tokens in a pass."""
_PRESETS_NOTE = (
    "Memory of a GPU as `dstrain plan` predicts it: sft of Qwen3-8B, a sample of 1024 tokens in a pass. Your own recipe: "
    "`dstrain plan RECIPE --gpu-memory 24GiB --gpus 8`.\n"
    "Run: `dstrain train RECIPE --ds-config NAME`; --ds-config auto takes the fastest preset that fits.\n"
    "`dstrain presets NAME` prints one with every key explained"
)


def list_presets(name: str | None) -> str:
    """Return a table of the packaged presets, or one in full. Raises PresetError."""
    if name is not None:
        return describe_preset(name)
    summaries = summarize_presets()
    columns = [list(_memory(lora, gpus)) for _, lora, gpus in EXAMPLES]
    rows = [
        (preset, *(column[index] for column in columns), summary)
        for index, (preset, summary) in enumerate(summaries.items())
    ]
    header = ("preset", *(title for title, _, _ in EXAMPLES), "divides")
    width = terminal_width()
    return f"{format_table(header, rows, width)}\n\n{wrap_note(_PRESETS_NOTE, width)}"


def _memory(lora: dict[str, Any] | None, gpus: int) -> Iterator[str]:
    """Yield the memory of one GPU with each preset; - where the preset does not take such a run."""
    values = {
        "task": "sft",
        "model": {"config": named_config(SHAPE), "lora": lora},
        "data": {"train": [], "max_length": 1024},
        "batch": {"micro": 1, "accumulate": 1},
    }
    config = fill_learning_rate(RunConfig.model_validate(values))
    properties = read_properties(config)
    shape, cluster = read_shape(config, properties), Cluster(gpus_per_node=gpus)
    for preset in preset_names():
        try:
            yield format_bytes(plan_memory(config, read_preset(preset), cluster, shape, properties).gpu_bytes)
        except DstrainError:
            yield "-"


def convert_preset_file(path: Path) -> tuple[str, list[str]]:
    """Convert a public DeepSpeed JSON. Returns (preset, messages). Raises PresetError for keys a person must decide on."""
    adopted = convert_preset(path)
    if adopted.faults:
        raise PresetError(adopted.faults)
    return adopted.json_text, adopted.messages
