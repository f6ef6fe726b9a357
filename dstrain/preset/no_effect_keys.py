"""Keys that DeepSpeed accepts and that change nothing here: another value than DeepSpeed's default is refused.

Each was looked for in DeepSpeed 0.19.8: what reads it is never called, or not by dstrain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstrain.preset.check import Finding
from dstrain.preset.key_schema import find
from dstrain.preset.source_map import KeyPath

_ACTIVATIONS = "activation_checkpointing"
_OURS = "transformers recomputes activations, not DeepSpeed"
_CHECKPOINTS = "dstrain writes and reads its checkpoints itself"
_PARTITIONED = "it divides activations over tensor-parallel ranks, which dstrain does not have"

IDLE: dict[KeyPath, tuple[str, str]] = {
    (_ACTIVATIONS, "partition_activations"): (
        _PARTITIONED,
        "write cpu_checkpointing: true to keep them in host memory",
    ),
    (_ACTIVATIONS, "contiguous_memory_optimization"): ("it packs activations that are divided over ranks", "remove it"),
    (_ACTIVATIONS, "number_checkpoints"): ("it sizes the buffer of contiguous_memory_optimization", "remove it"),
    (_ACTIVATIONS, "synchronize_checkpoint_boundary"): (f"{_OURS}, which never waits between layers", "remove it"),
    (_ACTIVATIONS, "profile"): (_OURS, "remove it, and write `profile` in the recipe"),
    ("disable_allgather",): ("DeepSpeed reads it and does nothing with it", "remove it"),
    ("vocabulary_size",): ("DeepSpeed only compares it with the width of tensor cores", "remove it"),
    ("seq_parallel_communication_data_type",): ("dstrain does not split sequences over processes", "remove it"),
    ("checkpoint", "tag_validation"): (_CHECKPOINTS, "remove it"),
    ("zero_optimization", "load_from_fp32_weights"): (_CHECKPOINTS, "remove it"),
    ("zero_optimization", "pipeline_loading_checkpoint"): (_CHECKPOINTS, "remove it"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): (
        "`dstrain export` collects the weights itself",
        "remove it",
    ),
}
"""Keys -> why, and what to do."""
_COMPILE = "dstrain never asks DeepSpeed to compile the model"
_AIO = "it says how to read and write an nvme disk, and nothing is offloaded to one"


def check_idle(block: dict[str, Any]) -> Iterator[Finding]:
    """A finding for each key whose value asks for something that will not be."""
    for path, (why, mend) in IDLE.items():
        if _asks(block, path):
            yield Finding(path, "idle", f"the key has no effect: {why}", mend)
    zero = block.get("zero_optimization")
    offloads = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    on_disk = any(isinstance(one, dict) and one.get("device") == "nvme" for one in offloads)
    for name, why in (("compile", _COMPILE), *([] if on_disk else [("aio", _AIO)])):
        inside = block.get(name)
        for key in inside if isinstance(inside, dict) else ():
            if _asks(block, (name, key)):
                yield Finding((name, key), "idle", f"the key has no effect: {why}", "remove it")


def _asks(block: dict[str, Any], path: KeyPath) -> bool:
    """Whether the value is there, is another than DeepSpeed's default, and is of a key that DeepSpeed knows."""
    value: Any = block
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    key = find(path)
    return key is not None and value != "auto" and value is not None and value != key.get("default")
