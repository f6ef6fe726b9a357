"""Keys of a DeepSpeed JSON that only make sense together.

Each rule was read in DeepSpeed 0.19.8: it either stops there after the process group has started, or does something else
than asked without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dstrain.preset.check import Finding
from dstrain.preset.key_schema import find
from dstrain.preset.no_effect_keys import IDLE, check_idle
from dstrain.preset.source_map import KeyPath

ZERO = "zero_optimization"
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


def peek(block: dict[str, Any], *path: str, default: Any = None) -> Any:
    """The value at a path, or the default where it, or a block above it, is missing."""
    value: Any = block
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return default
        value = value[name]
    return value


def stage_of(block: dict[str, Any]) -> int:
    """The ZeRO stage, 0 where the JSON does not say."""
    stage = peek(block, ZERO, "stage", default=0)
    return int(stage) if isinstance(stage, (int, float)) else 0


def device_of(block: dict[str, Any], name: str) -> str | None:
    """Where `offload_optimizer` or `offload_param` puts things: None, cpu or nvme."""
    device = peek(block, ZERO, name, "device", default="none")
    return device if device in ("cpu", "nvme") else None


def check_rules(block: dict[str, Any]) -> list[Finding]:
    """Every clash between keys."""
    stage = peek(block, ZERO, "stage", default=0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return list(check_idle(block))  # every other rule asks for the stage, which has a finding of its own
    rules = (_stage_3_keys, _offloading, _precision, _gradients, check_idle)
    return [finding for rule in rules for finding in rule(block)]


def _clash(path: KeyPath, problem: str, mend: str) -> Finding:
    return Finding(path, "clash", problem, mend)


def _stage_3_keys(block: dict[str, Any]) -> Iterator[Finding]:
    zero, stage = peek(block, ZERO, default={}), stage_of(block)
    if stage == 3 or not isinstance(zero, dict):
        return
    for name, value in zero.items():
        if not (name.startswith("stage3_") or name in _STAGE_3_ONLY):
            continue
        if value is False or (ZERO, name) in IDLE or (name in _STAGE_3_ONLY[-4:] and value == _default(name)):
            continue
        if name == "zero_hpz_partition_size" and value == 1:
            continue
        problem = f"the key has no effect at stage {stage}, only at stage 3"
        yield Finding((ZERO, name), "idle", problem, "remove it, or set zero_optimization.stage to 3")


def _default(name: str) -> Any:
    return (find((ZERO, name)) or {}).get("default")


def _offloading(block: dict[str, Any]) -> Iterator[Finding]:
    stage, optimizer, param = stage_of(block), device_of(block, "offload_optimizer"), device_of(block, "offload_param")
    to_optimizer, to_param = (ZERO, "offload_optimizer"), (ZERO, "offload_param")
    if param and stage < 3:
        problem = f"offload_param needs stage 3, and the stage is {stage}"
        yield _clash(to_param, problem, "set zero_optimization.stage to 3, or remove offload_param")
    if optimizer and stage < 1:
        problem = f"offload_optimizer needs stage 1, 2 or 3, and the stage is {stage}"
        yield _clash(to_optimizer, problem, "set zero_optimization.stage, or remove offload_optimizer")
    if optimizer == "nvme" and stage in (1, 2):
        problem = f"at stage {stage} DeepSpeed keeps the optimizer in host memory although device is nvme"
        yield _clash((*to_optimizer, "device"), problem, 'write "cpu", or set zero_optimization.stage to 3')
    for name, idle in (("ratio", 1.0), ("super_offload", False)):
        value = peek(block, *to_optimizer, name, default=idle)
        if value != idle and stage != 3:
            yield _clash((*to_optimizer, name), f"{name} needs stage 3, and the stage is {stage}", "remove it")
    for where, device in ((to_optimizer, optimizer), (to_param, param)):
        if peek(block, *where, "nvme_path") is not None and device != "nvme":
            yield _clash((*where, "nvme_path"), "a path is given, but device is not nvme", "remove it, or set device")


def _precision(block: dict[str, Any]) -> Iterator[Finding]:
    if peek(block, "fp16", "enabled") is True and peek(block, "bf16", "enabled") is True:
        yield _clash(("fp16", "enabled"), "fp16 and bf16 are both enabled, and they exclude each other", "keep one")
    half_keys = (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    )
    for path in half_keys:
        if peek(block, *path) is True and stage_of(block) == 0:
            yield _clash(path, f"{path[1]} needs stage 1, 2 or 3", "set zero_optimization.stage, or remove it")
    states, master = half_keys[2], half_keys[1]
    if peek(block, *states) is True and peek(block, *master) is not True:
        yield _clash(states, f"{states[1]} needs {master[1]}", f"set {master[1]} to true, or remove it")
    offloaded = device_of(block, "offload_optimizer") is not None
    if peek(block, *states) is True and offloaded:
        yield _clash(states, f"{states[1]} with offload_optimizer needs a CPU Adam of another kind", "remove it")
    elif peek(block, *master) is True and peek(block, *states) is not True and not offloaded:
        problem = f"{master[1]} needs {states[1]}, or the optimizer to be offloaded"
        yield _clash(master, problem, f"set {states[1]} to true, or remove it")
    if peek(block, *half_keys[0]) is True and not offloaded:
        problem = f"{half_keys[0][1]} needs the optimizer to be offloaded"
        yield _clash(half_keys[0], problem, 'add offload_optimizer with device "cpu", or remove it')


def _gradients(block: dict[str, Any]) -> Iterator[Finding]:
    if stage_of(block) == 2 and peek(block, ZERO, "reduce_scatter", default=True) is True:
        mend = "remove it, or set zero_optimization.reduce_scatter to false"
        if peek(block, "prescale_gradients") is True:
            yield _clash(("prescale_gradients",), "stage 2 with reduce_scatter cannot scale beforehand", mend)
        if peek(block, "gradient_predivide_factor", default=1) != 1:
            yield _clash(("gradient_predivide_factor",), "stage 2 with reduce_scatter cannot divide beforehand", mend)
    bucket = peek(block, ZERO, "allgather_bucket_size", default=0)
    if stage_of(block) in (1, 2) and isinstance(bucket, (int, float)) and bucket % 2:
        path = (ZERO, "allgather_bucket_size")
        yield _clash(
            path, f"allgather_bucket_size {bucket} is odd, and DeepSpeed stops on that", "write an even number"
        )
    quantized = peek(block, ZERO, "zero_quantized_gradients") is True
    if quantized and stage_of(block) == 3 and peek(block, ZERO, "reduce_scatter") is False:
        path = (ZERO, "zero_quantized_gradients")
        yield _clash(path, "zero_quantized_gradients needs reduce_scatter", "remove `reduce_scatter: false`")
