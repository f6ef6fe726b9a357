"""Conflicts between DeepSpeed keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstrain.preset.check import Issue
from dstrain.preset.keys import KeyPath, find_key

# Each rule is from reading DeepSpeed 0.19.8, which either raises an error after the process group has started, or
# silently does something else than the JSON says.

ZERO_BLOCK = "zero_optimization"
_STAGE_3_ONLY = (
    "sub_group_size",
    "zero_hpz_partition_size",
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
    "memory_efficient_linear",
    "override_module_apply",
    "leaf_module",
    "log_trace_cache_warnings",
)


def get_nested(block: dict[str, Any], *path: str, default: Any = None) -> Any:
    """Return the value at a path, or the default where it, or a block above it, is missing."""
    value: Any = block
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def get_zero_stage(block: dict[str, Any]) -> int:
    """Return the ZeRO stage, 0 if it is not set."""
    stage = get_nested(block, ZERO_BLOCK, "stage", default=0)
    return int(stage) if isinstance(stage, (int, float)) else 0


def get_offload_device(block: dict[str, Any], name: str) -> str | None:
    """Return the device of `offload_optimizer` or `offload_param`: None, cpu or nvme."""
    device = get_nested(block, ZERO_BLOCK, name, "device", default="none")
    return device if device in ("cpu", "nvme") else None


def check_conflicts(block: dict[str, Any]) -> list[Issue]:
    """Return every conflict between keys."""
    stage = get_nested(block, ZERO_BLOCK, "stage", default=0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return list(check_unused_keys(block))  # all other rules need the stage, which has an issue of its own
    rules = (_check_stage_3_keys, _check_offload, _check_precision, _check_gradients, check_unused_keys)
    return [issue for rule in rules for issue in rule(block)]


def _conflict(path: KeyPath, problem: str, fix: str) -> Issue:
    return Issue(path, "clash", problem, fix)


def _check_stage_3_keys(block: dict[str, Any]) -> Iterator[Issue]:
    zero, stage = get_nested(block, ZERO_BLOCK, default={}), get_zero_stage(block)
    if stage == 3 or not isinstance(zero, dict):
        return
    for name, value in zero.items():
        if not (name.startswith("stage3_") or name in _STAGE_3_ONLY):
            continue
        default = (find_key((ZERO_BLOCK, name)) or {}).get("default")
        is_idle = value is False or (name in _STAGE_3_ONLY[-4:] and value == default)
        if is_idle or (ZERO_BLOCK, name) in UNUSED_KEYS or (name, value) == ("zero_hpz_partition_size", 1):
            continue
        problem = f"the key has no effect at stage {stage}, only at stage 3"
        yield Issue((ZERO_BLOCK, name), "idle", problem, "remove it, or set zero_optimization.stage to 3")


def _check_offload(block: dict[str, Any]) -> Iterator[Issue]:
    optimizer, param = (get_offload_device(block, name) for name in ("offload_optimizer", "offload_param"))
    stage = get_zero_stage(block)
    to_optimizer, to_param = (ZERO_BLOCK, "offload_optimizer"), (ZERO_BLOCK, "offload_param")
    if param and stage < 3:
        problem = f"offload_param needs stage 3, and the stage is {stage}"
        yield _conflict(to_param, problem, "set zero_optimization.stage to 3, or remove offload_param")
    if optimizer and stage < 1:
        problem = f"offload_optimizer needs stage 1, 2 or 3, and the stage is {stage}"
        yield _conflict(to_optimizer, problem, "set zero_optimization.stage, or remove offload_optimizer")
    if optimizer == "nvme" and stage in (1, 2):
        problem = f"at stage {stage} DeepSpeed keeps the optimizer in host memory although device is nvme"
        yield _conflict((*to_optimizer, "device"), problem, 'write "cpu", or set zero_optimization.stage to 3')
    for name, idle in (("ratio", 1.0), ("super_offload", False)):
        value = get_nested(block, *to_optimizer, name, default=idle)
        if value != idle and stage != 3:
            yield _conflict((*to_optimizer, name), f"{name} needs stage 3, and the stage is {stage}", "remove it")
    for where, device in ((to_optimizer, optimizer), (to_param, param)):
        if get_nested(block, *where, "nvme_path") is not None and device != "nvme":
            yield _conflict(
                (*where, "nvme_path"), "a path is given, but device is not nvme", "remove it, or set device"
            )


def _check_precision(block: dict[str, Any]) -> Iterator[Issue]:
    if get_nested(block, "fp16", "enabled") is True and get_nested(block, "bf16", "enabled") is True:
        yield _conflict(("fp16", "enabled"), "fp16 and bf16 are both enabled, and they exclude each other", "keep one")
    half_keys = (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    )
    for path in half_keys:
        if get_nested(block, *path) is True and get_zero_stage(block) == 0:
            yield _conflict(path, f"{path[1]} needs stage 1, 2 or 3", "set zero_optimization.stage, or remove it")
    states, master = half_keys[2], half_keys[1]
    if get_nested(block, *states) is True and get_nested(block, *master) is not True:
        yield _conflict(states, f"{states[1]} needs {master[1]}", f"set {master[1]} to true, or remove it")
    offloaded = get_offload_device(block, "offload_optimizer") is not None
    if get_nested(block, *states) is True and offloaded:
        yield _conflict(states, f"{states[1]} is not supported by the CPU Adam of offload_optimizer", "remove it")
    elif get_nested(block, *master) is True and get_nested(block, *states) is not True and not offloaded:
        problem = f"{master[1]} needs {states[1]}, or the optimizer to be offloaded"
        yield _conflict(master, problem, f"set {states[1]} to true, or remove it")
    if get_nested(block, *half_keys[0]) is True and not offloaded:
        problem = f"{half_keys[0][1]} needs the optimizer to be offloaded"
        yield _conflict(half_keys[0], problem, 'add offload_optimizer with device "cpu", or remove it')


def _check_gradients(block: dict[str, Any]) -> Iterator[Issue]:
    if get_zero_stage(block) == 2 and get_nested(block, ZERO_BLOCK, "reduce_scatter", default=True) is True:
        fix = "remove it, or set zero_optimization.reduce_scatter to false"
        if get_nested(block, "prescale_gradients") is True:
            yield _conflict(("prescale_gradients",), "stage 2 with reduce_scatter cannot scale beforehand", fix)
        if get_nested(block, "gradient_predivide_factor", default=1) != 1:
            yield _conflict(("gradient_predivide_factor",), "stage 2 with reduce_scatter cannot divide beforehand", fix)
    bucket = get_nested(block, ZERO_BLOCK, "allgather_bucket_size", default=0)
    if get_zero_stage(block) in (1, 2) and isinstance(bucket, (int, float)) and bucket % 2:
        path = (ZERO_BLOCK, "allgather_bucket_size")
        yield _conflict(
            path, f"allgather_bucket_size {bucket} is odd, and DeepSpeed raises an error for it", "write an even number"
        )
    quantized = get_nested(block, ZERO_BLOCK, "zero_quantized_gradients") is True
    if quantized and get_zero_stage(block) == 3 and get_nested(block, ZERO_BLOCK, "reduce_scatter") is False:
        path = (ZERO_BLOCK, "zero_quantized_gradients")
        yield _conflict(path, "zero_quantized_gradients needs reduce_scatter", "remove `reduce_scatter: false`")


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
    on_disk = any(get_offload_device(block, name) == "nvme" for name in ("offload_optimizer", "offload_param"))
    for name, why in (("compile", _COMPILE_REASON), *([] if on_disk else [("aio", _AIO_REASON)])):
        inner = block.get(name)
        for key in inner if isinstance(inner, dict) else ():
            if _has_custom_value(block, (name, key)):
                yield Issue((name, key), "idle", f"the key has no effect: {why}", "remove it")


def _has_custom_value(block: dict[str, Any], path: KeyPath) -> bool:
    """Return True where a known key is set to a value other than DeepSpeed's default."""
    key, value = find_key(path), get_nested(block, *path)
    return key is not None and value not in ("auto", None) and value != key.get("default")
