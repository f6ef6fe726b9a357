"""Read a preset's JSON and check its keys and values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dstrain.errors import Fault, PresetError, suggest_name
from dstrain.files import is_deep_json, not_file_reason
from dstrain.preset import keys
from dstrain.preset.keys import (
    KeyPath,
    KeySpec,
    find_parent_blocks,
    find_value_problem,
    format_json,
    load_key_schema,
)
from dstrain.source_map import SourceMap

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


def check_schema(block: dict[str, Any]) -> list[Issue]:
    """Return every issue, key by key.

    DeepSpeed ignores unknown keys at the top level, so `zero_optimisation` would train with ZeRO stage 0. Here every
    key that is not in the schema is an issue.
    """
    return list(_iter_issues(block, load_key_schema()["keys"], ()))


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
