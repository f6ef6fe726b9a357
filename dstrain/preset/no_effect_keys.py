"""Keys that DeepSpeed accepts and that change nothing here: another value than DeepSpeed's default is refused.

Each was looked for in DeepSpeed 0.19.8: what reads it is never called, or not by dstrain.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstrain.preset.check import Issue
from dstrain.preset.key_schema import KeyPath, find_key

_ACTIVATION_BLOCK = "activation_checkpointing"
_RECOMPUTE_REASON = "transformers recomputes activations, not DeepSpeed"
_CHECKPOINT_REASON = "dstrain writes and reads its checkpoints itself"
_TENSOR_PARALLEL_REASON = "it divides activations over tensor-parallel ranks, which dstrain does not have"

UNUSED_KEYS: dict[KeyPath, tuple[str, str]] = {
    (_ACTIVATION_BLOCK, "partition_activations"): (
        _TENSOR_PARALLEL_REASON,
        "write cpu_checkpointing: true to keep them in host memory",
    ),
    (_ACTIVATION_BLOCK, "contiguous_memory_optimization"): (
        "it packs activations that are divided over ranks",
        "remove it",
    ),
    (_ACTIVATION_BLOCK, "number_checkpoints"): ("it sizes the buffer of contiguous_memory_optimization", "remove it"),
    (_ACTIVATION_BLOCK, "synchronize_checkpoint_boundary"): (
        f"{_RECOMPUTE_REASON}, which never waits between layers",
        "remove it",
    ),
    (_ACTIVATION_BLOCK, "profile"): (_RECOMPUTE_REASON, "remove it, and write `profile` in the recipe"),
    ("disable_allgather",): ("DeepSpeed reads it and does nothing with it", "remove it"),
    ("vocabulary_size",): ("DeepSpeed only compares it with the width of tensor cores", "remove it"),
    ("seq_parallel_communication_data_type",): ("dstrain does not split sequences over processes", "remove it"),
    ("checkpoint", "tag_validation"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "load_from_fp32_weights"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "pipeline_loading_checkpoint"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): (
        "`dstrain export` collects the weights itself",
        "remove it",
    ),
}
"""Keys -> why, and what to do."""
_COMPILE_REASON = "dstrain never asks DeepSpeed to compile the model"
_AIO_REASON = "it says how to read and write an nvme disk, and nothing is offloaded to one"


def check_unused_keys(block: dict[str, Any]) -> Iterator[Issue]:
    """A finding for each key whose value asks for something that will not be."""
    for path, (why, mend) in UNUSED_KEYS.items():
        if _has_custom_value(block, path):
            yield Issue(path, "idle", f"the key has no effect: {why}", mend)
    zero = block.get("zero_optimization")
    offloads = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    on_disk = any(isinstance(one, dict) and one.get("device") == "nvme" for one in offloads)
    for name, why in (("compile", _COMPILE_REASON), *([] if on_disk else [("aio", _AIO_REASON)])):
        inside = block.get(name)
        for key in inside if isinstance(inside, dict) else ():
            if _has_custom_value(block, (name, key)):
                yield Issue((name, key), "idle", f"the key has no effect: {why}", "remove it")


def _has_custom_value(block: dict[str, Any], path: KeyPath) -> bool:
    """Whether the value is there, is another than DeepSpeed's default, and is of a key that DeepSpeed knows."""
    value: Any = block
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    key = find_key(path)
    return key is not None and value != "auto" and value is not None and value != key.get("default")
