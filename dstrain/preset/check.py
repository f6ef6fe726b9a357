"""Read a preset's JSON, and check its keys and values, and for conflicts between them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dstrain.errors import Fault, PresetError, SourceMap, lookup, suggest_name
from dstrain.files import is_deep_json, not_file_reason
from dstrain.preset import keys
from dstrain.preset.keys import (
    KeyPath,
    KeySpec,
    find_key,
    find_parent_blocks,
    find_value_problem,
    format_json,
    load_key_schema,
)

IssueKind = Literal["unknown", "auto", "learning", "refused", "renamed", "type", "idle", "clash"]


@dataclass(frozen=True)
class Issue:
    """A problem of a key, with its fix."""

    path: KeyPath
    kind: IssueKind
    problem: str
    fix: str


REJECTED_KEYS = {
    "csv_monitor": ("DeepSpeed would log its own metrics; every run has metrics.jsonl", "remove it"),
    "comet": ("logging is configured in the recipe (log)", "remove it"),
    "datastates_ckpt": ("dstrain writes and verifies its checkpoints itself", "remove it; see the recipe's `save`"),
    "tensor_parallel": ("dstrain shards with ZeRO, not by tensor", "remove it; zero3 shards the weights"),
    "expert_parallel": ("dstrain shards with ZeRO, not by expert", "remove it; zero3 shards the weights"),
    "use_data_before_expert_parallelism": ("dstrain shards with ZeRO, not by expert", "remove it"),
    "sequence_parallel_size": ("dstrain does not split sequences over processes", "remove it"),
    "pipeline": ("dstrain shards with ZeRO, not by layer", "remove it; zero3 shards the weights"),
    "hybrid_engine": ("the hybrid engine is for generation in RLHF, which dstrain does not support", "remove it"),
    "autotuning": ("presets are chosen by hand: see docs/presets.md", "remove it"),
    "weight_quantization": ("this block quantizes for inference", "remove it and use the recipe's model.quantize"),
}
"""Keys that DeepSpeed supports and dstrain rejects -> (reason, fix)."""

REQUIRED_VALUES: dict[KeyPath, tuple[Any, str]] = {
    ("zero_allow_untested_optimizer",): (True, "dstrain passes its own optimizers to DeepSpeed"),
    ("zero_force_ds_cpu_optimizer",): (False, "dstrain chooses the optimizer for offloading itself"),
    ("managed_gradient_accumulation",): (True, "dstrain lets DeepSpeed count the micro-batches"),
    ("gradient_allreduce_op",): ("mean", "dstrain scales its sums for a mean over the processes"),
    ("dataloader_drop_last",): (False, "dstrain loads the data itself and drops nothing"),
    ("checkpoint", "load_universal"): (False, "dstrain restores checkpoints itself"),
    ("checkpoint", "use_node_local_storage"): (
        False,
        "checkpoints are written to the run folder, which all hosts share",
    ),
    ("checkpoint", "checkpoint_serialization"): (True, "dstrain verifies the checkpoints it writes"),
    ("checkpoint", "writer"): (None, "another writer can lose a checkpoint without an error"),
    ("bf16", "check_grad_overflow"): (True, "at stage 2 a step with inf or nan would be applied"),
    ("torch_autocast", "enabled"): (False, "dstrain trains in fp32, bf16 or fp16, without autocast"),
    ("data_types", "param_dtype"): (None, "the precision of the weights is `fp16`, `bf16` or the recipe's `precision`"),
    ("zero_optimization", "compute_grad_norm"): (True, "dstrain logs and checks the gradient norm"),
    ("zero_optimization", "zenflow"): (None, "ZenFlow applies gradients late, so a step would not be one step"),
    ("zero_optimization", "elastic_checkpoint"): (False, "dstrain restores checkpoints itself"),
    ("zero_optimization", "legacy_stage1"): (False, "DeepSpeed raises an error for it"),
}
"""Keys that dstrain supports with one value only -> (that value, reason). Other values are rejected."""

_REMOVED_KEY_FIXES = {
    "elasticity": "remove it; the recipe's batch.total stays the same with any number of processes, also on resume",
    "amp": "use `fp16` or `bf16`",
    "quantize_training": "remove it; the recipe has model.quantize",
    "zero_optimization.mics_shard_size": "use zero_hpz_partition_size",
}
_AUTO_REPLACEMENTS = {
    "fp16.enabled": "the recipe's `precision` sets it",
    "bf16.enabled": "the recipe's `precision` sets it",
    "train_micro_batch_size_per_gpu": "the recipe's batch.micro sets it",
    "gradient_accumulation_steps": "the recipe's batch.accumulate sets it",
}


def find_issues(block: dict[str, Any]) -> list[Issue]:
    """Return every issue: key by key, and then the conflicts between keys.

    DeepSpeed ignores unknown keys at the top level, so `zero_optimisation` would train with ZeRO stage 0. Here every
    key that is not in the schema is an issue.
    """
    issues = list(_iter_issues(block, load_key_schema()["keys"], ()))
    stage = lookup(block, (ZERO_BLOCK, "stage"), 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        return issues + list(_check_unused_keys(block))  # all other rules need the stage, which has an issue of its own
    for rule in (_check_stage_3_keys, _check_offload, _check_precision, _check_gradients, _check_unused_keys):
        issues += rule(block)
    return issues


def describe_auto_default(path: KeyPath, spec: KeySpec) -> str:
    """Return the value that applies once an "auto" is removed."""
    replacement = _AUTO_REPLACEMENTS.get(".".join(path))
    default = "" if spec.get("default") is None else " " + format_json(spec["default"])
    return replacement or f"DeepSpeed's default{default} applies"


def _iter_issues(block: dict[str, Any], specs: dict[str, KeySpec], parent: KeyPath) -> Iterator[Issue]:
    for name, value in block.items():
        path = (*parent, name)
        issue = _check_rejected(path, value)
        if issue is None:
            issue = _check_value(path, specs[name], value) if name in specs else _describe_unknown(path, specs)
        if issue is not None:
            yield issue
        elif isinstance(value, dict) and "keys" in specs[name]:
            yield from _iter_issues(value, specs[name]["keys"], path)


def _check_rejected(path: KeyPath, value: Any) -> Issue | None:
    """Return the issue of a training key, or of a key that DeepSpeed or dstrain does not support."""
    dotted, idle = ".".join(path), isinstance(value, dict) and value.get("enabled") is False
    removed = dotted in load_key_schema()["removed"]
    # Before the schema: DeepSpeed accepts most of these keys, and would train by them.
    if dotted in keys.LEARNING_KEYS and (removed or not idle):
        return Issue(path, "learning", keys.LEARNING_KEYS[dotted], keys.suggest_fix(dotted, value))
    if removed:
        problem = f"DeepSpeed {load_key_schema()['deepspeed']} has removed this key and raises an error for it"
        return Issue(path, "refused", problem, _REMOVED_KEY_FIXES.get(dotted, "remove it"))
    if dotted in REJECTED_KEYS and not idle:
        return Issue(path, "refused", *REJECTED_KEYS[dotted])
    if path in REQUIRED_VALUES and value != REQUIRED_VALUES[path][0] and value != "auto":
        needed, why = REQUIRED_VALUES[path]
        fix = "remove it" if needed is None else f"remove it; dstrain sets {format_json(needed)}"
        return Issue(path, "refused", f"the value is {format_json(value)}, but {why}", fix)
    return None


def _describe_unknown(path: KeyPath, specs: dict[str, KeySpec]) -> Issue:
    version, parents = load_key_schema()["deepspeed"], find_parent_blocks(path[-1])
    problem = f"DeepSpeed {version} knows no such key here"
    if parents:
        return Issue(path, "unknown", problem, f"move it into {' or '.join(f'`{parent}`' for parent in parents)}")
    current = [name for name, key in specs.items() if "deprecated" not in key]
    return Issue(path, "unknown", problem, suggest_name(path[-1], current))


def _check_value(path: KeyPath, spec: KeySpec, value: Any) -> Issue | None:
    # In front of the type check, which would only say that it is a text.
    if value == "auto" or (isinstance(value, list) and "auto" in value):
        problem = '"auto" is filled in by the Hugging Face Trainer, not by DeepSpeed'
        return Issue(path, "auto", problem, f"leave the key out: {describe_auto_default(path, spec)}")
    if "deprecated" in spec:
        problem = "this is an alias or an old name of a key"
        return Issue(path, "renamed", problem, f"write `{spec['deprecated']}`")
    problem_and_fix = find_value_problem(spec, value)
    return Issue(path, "type", *problem_and_fix) if problem_and_fix else None


_TOKEN = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}\[\],]')


def read_json(path: Path) -> SourceMap:
    """Read the JSON object in a file. Raises PresetError, with line and column, for anything else."""
    try:
        if reason := not_file_reason(path):
            raise PresetError(f"{path}: {reason}; save the JSON as a file")
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PresetError(Fault(str(path), f"the file cannot be read ({error})", "name a readable JSON file")) from None
    try:
        values = json.loads(text, parse_constant=_reject_constant, parse_float=_parse_finite)  # noqa: TID251  its hooks
        is_deep = is_deep_json(values, text)
    except json.JSONDecodeError as error:
        place = f"{path.name}:{error.lineno}:{error.colno}"
        fix = "JSON allows no comments and no trailing commas, and strings need double quotation marks"
        raise PresetError(Fault(place, f"not valid JSON: {error.msg}", fix)) from None
    except ValueError as error:
        raise PresetError(Fault(path.name, str(error), "write a finite number")) from None
    except RecursionError:
        is_deep = True
    if is_deep:
        raise PresetError(Fault(path.name, "the JSON is nested too deeply", "a preset has few levels"))
    if not isinstance(values, dict):
        raise PresetError(Fault(path.name, "a preset is a JSON object", 'begin it with { "zero_optimization": ...'))
    lines, repeated = _find_key_lines(text)
    if repeated:
        raise PresetError(Fault(f"{path.name}:{line} {name}", why, "keep one of them") for line, name, why in repeated)
    return SourceMap(path.name, values, {key: f"{path.name}:{line}" for key, line in lines.items()})


def _parse_finite(word: str) -> float:
    number = float(word)
    return _reject_constant(word) if math.isinf(number) else number  # 1e999 is JSON, but inf as a float


def _reject_constant(word: str) -> Any:
    raise ValueError(f"{word} is not a JSON number")


def _find_key_lines(text: str) -> tuple[dict[tuple[str, ...], int], list[tuple[int, str, str]]]:
    """Return the line of every key of a valid JSON text, and (line, key, problem) of keys repeated in one object."""
    lines: dict[tuple[str, ...], int] = {}
    repeated: list[tuple[int, str, str]] = []
    open_blocks: list[tuple[str, ...]] = []  # path of each container around the token, innermost last
    child: tuple[str, ...] = ()  # path of the value that comes next
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token in ("{", "["):
            open_blocks.append(child)
            child = (*child, "0") if token == "[" else child
        elif token in ("}", "]"):
            child = open_blocks.pop()
        elif token == ",":
            if child[:-1] == open_blocks[-1] and child[-1].isdecimal():  # the next element of a list
                child = (*child[:-1], str(int(child[-1]) + 1))
        elif match[2]:
            child = (*open_blocks[-1], json.loads(match[1]))  # noqa: TID251  of a text that was parsed
            # The json module has no positions of keys, so the text is scanned a second time.
            line = text.count("\n", 0, match.start()) + 1
            if child in lines:
                why = f"the key is repeated, here and on line {lines[child]}, and only the last would count"
                repeated.append((line, ".".join(child), why))
            lines[child] = line
    return lines, repeated


# Each rule below is from reading DeepSpeed 0.19.8, which either raises an error after the process group has started, or
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


def get_zero_stage(block: dict[str, Any]) -> int:
    """Return the ZeRO stage, 0 if it is not set."""
    stage = lookup(block, (ZERO_BLOCK, "stage"), 0)
    return int(stage) if isinstance(stage, (int, float)) else 0


def get_offload_device(block: dict[str, Any], name: str) -> str | None:
    """Return the device of `offload_optimizer` or `offload_param`: None, cpu or nvme."""
    device = lookup(block, (ZERO_BLOCK, name, "device"), "none")
    return device if device in ("cpu", "nvme") else None


def _conflict(path: KeyPath, problem: str, fix: str) -> Issue:
    return Issue(path, "clash", problem, fix)


def _check_stage_3_keys(block: dict[str, Any]) -> Iterator[Issue]:
    zero, stage = lookup(block, (ZERO_BLOCK,), {}), get_zero_stage(block)
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
        value = lookup(block, (*to_optimizer, name), idle)
        if value != idle and stage != 3:
            yield _conflict((*to_optimizer, name), f"{name} needs stage 3, and the stage is {stage}", "remove it")
    for where, device in ((to_optimizer, optimizer), (to_param, param)):
        if lookup(block, (*where, "nvme_path")) is not None and device != "nvme":
            yield _conflict(
                (*where, "nvme_path"), "a path is given, but device is not nvme", "remove it, or set device"
            )


def _check_precision(block: dict[str, Any]) -> Iterator[Issue]:
    if lookup(block, ("fp16", "enabled")) is True and lookup(block, ("bf16", "enabled")) is True:
        yield _conflict(("fp16", "enabled"), "fp16 and bf16 are both enabled, and they exclude each other", "keep one")
    half_keys = (
        ("fp16", "fp16_master_weights_and_grads"),
        ("bf16", "bf16_master_weights_and_grads"),
        ("bf16", "bf16_optimizer_states"),
    )
    for path in half_keys:
        if lookup(block, path) is True and get_zero_stage(block) == 0:
            yield _conflict(path, f"{path[1]} needs stage 1, 2 or 3", "set zero_optimization.stage, or remove it")
    states, master = half_keys[2], half_keys[1]
    if lookup(block, states) is True and lookup(block, master) is not True:
        yield _conflict(states, f"{states[1]} needs {master[1]}", f"set {master[1]} to true, or remove it")
    offloaded = get_offload_device(block, "offload_optimizer") is not None
    if lookup(block, states) is True and offloaded:
        yield _conflict(states, f"{states[1]} is not supported by the CPU Adam of offload_optimizer", "remove it")
    elif lookup(block, master) is True and lookup(block, states) is not True and not offloaded:
        problem = f"{master[1]} needs {states[1]}, or the optimizer to be offloaded"
        yield _conflict(master, problem, f"set {states[1]} to true, or remove it")
    if lookup(block, half_keys[0]) is True and not offloaded:
        problem = f"{half_keys[0][1]} needs the optimizer to be offloaded"
        yield _conflict(half_keys[0], problem, 'add offload_optimizer with device "cpu", or remove it')


def _check_gradients(block: dict[str, Any]) -> Iterator[Issue]:
    if get_zero_stage(block) == 2 and lookup(block, (ZERO_BLOCK, "reduce_scatter"), True) is True:
        fix = "remove it, or set zero_optimization.reduce_scatter to false"
        if lookup(block, ("prescale_gradients",)) is True:
            yield _conflict(("prescale_gradients",), "stage 2 with reduce_scatter cannot scale beforehand", fix)
        if lookup(block, ("gradient_predivide_factor",), 1) != 1:
            yield _conflict(("gradient_predivide_factor",), "stage 2 with reduce_scatter cannot divide beforehand", fix)
    bucket = lookup(block, (ZERO_BLOCK, "allgather_bucket_size"), 0)
    if get_zero_stage(block) in (1, 2) and isinstance(bucket, (int, float)) and bucket % 2:
        path = (ZERO_BLOCK, "allgather_bucket_size")
        yield _conflict(
            path, f"allgather_bucket_size {bucket} is odd, and DeepSpeed raises an error for it", "write an even number"
        )
    quantized = lookup(block, (ZERO_BLOCK, "zero_quantized_gradients")) is True
    if quantized and get_zero_stage(block) == 3 and lookup(block, (ZERO_BLOCK, "reduce_scatter")) is False:
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


def _check_unused_keys(block: dict[str, Any]) -> Iterator[Issue]:
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
    key, value = find_key(path), lookup(block, path)
    return key is not None and value not in ("auto", None) and value != key.get("default")
