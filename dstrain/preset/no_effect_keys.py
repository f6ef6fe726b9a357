"""DeepSpeed keys that have no effect in dstrain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstrain.preset.check import Issue
from dstrain.preset.key_schema import KeyPath, find_key

_ACTIVATION_BLOCK = "activation_checkpointing"
_RECOMPUTE_REASON = "transformers recomputes activations, not DeepSpeed"
_CHECKPOINT_REASON = "dstrain writes and reads its checkpoints itself"
_TENSOR_PARALLEL_REASON = "it partitions activations over tensor-parallel ranks, which dstrain does not have"

UNUSED_KEYS: dict[KeyPath, tuple[str, str]] = {
    (_ACTIVATION_BLOCK, "partition_activations"): (
        _TENSOR_PARALLEL_REASON,
        "write cpu_checkpointing: true to keep them in host memory",
    ),
    (_ACTIVATION_BLOCK, "contiguous_memory_optimization"): (
        "it packs activations that are partitioned over ranks",
        "remove it",
    ),
    (_ACTIVATION_BLOCK, "number_checkpoints"): ("it sizes the buffer of contiguous_memory_optimization", "remove it"),
    (_ACTIVATION_BLOCK, "synchronize_checkpoint_boundary"): (
        f"{_RECOMPUTE_REASON}, and it does not synchronize between layers",
        "remove it",
    ),
    (_ACTIVATION_BLOCK, "profile"): (_RECOMPUTE_REASON, "remove it, and write `profile` in the recipe"),
    ("disable_allgather",): ("DeepSpeed reads it but does not use it", "remove it"),
    ("vocabulary_size",): ("DeepSpeed only compares it with the width of tensor cores", "remove it"),
    ("seq_parallel_communication_data_type",): ("dstrain does not split sequences over processes", "remove it"),
    ("checkpoint", "tag_validation"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "load_from_fp32_weights"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "pipeline_loading_checkpoint"): (_CHECKPOINT_REASON, "remove it"),
    ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"): (
        "`dstrain export` gathers the weights itself",
        "remove it",
    ),
}
"""Key -> (reason, fix). From reading DeepSpeed 0.19.8: the code that uses each is never called, or not by dstrain."""
_COMPILE_REASON = "dstrain does not compile the model with DeepSpeed"
_AIO_REASON = "it configures NVMe access, but nothing is offloaded to NVMe"


def check_unused_keys(block: dict[str, Any]) -> Iterator[Issue]:
    """Yield an issue for each such key with a value other than DeepSpeed's default."""
    for path, (why, fix) in UNUSED_KEYS.items():
        if _has_custom_value(block, path):
            yield Issue(path, "idle", f"the key has no effect: {why}", fix)
    zero = block.get("zero_optimization")
    offloads = [zero.get(name) for name in ("offload_optimizer", "offload_param")] if isinstance(zero, dict) else []
    on_disk = any(isinstance(one, dict) and one.get("device") == "nvme" for one in offloads)
    for name, why in (("compile", _COMPILE_REASON), *([] if on_disk else [("aio", _AIO_REASON)])):
        inner = block.get(name)
        for key in inner if isinstance(inner, dict) else ():
            if _has_custom_value(block, (name, key)):
                yield Issue((name, key), "idle", f"the key has no effect: {why}", "remove it")


def _has_custom_value(block: dict[str, Any], path: KeyPath) -> bool:
    """Return True where a known key is set to a value other than DeepSpeed's default."""
    value: Any = block
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return False
        value = value[name]
    key = find_key(path)
    return key is not None and value != "auto" and value is not None and value != key.get("default")
