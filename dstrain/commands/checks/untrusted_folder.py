"""Checks of untrusted folders: links, special files, and configs that import code."""

from __future__ import annotations

import json
import os
import re
import shlex
import stat
import string
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrain.data.limited_process import ResourceLimits, run_limited
from dstrain.errors import PresetError, RecipeError, UsageError
from dstrain.files import MAX_JSON_BYTES, read_limited
from dstrain.models.folder.config_sizes import wrong_size_fault
from dstrain.models.folder.hub_code import find_hub_code
from dstrain.preset import Preset, check_ds_config

FORWARD_KEYS = ("zero_optimization", "aio", "bf16", "fp16", "data_types", "communication_data_type")
"""Keys of a run's DeepSpeed JSON that apply to forward passes; others are ignored."""
WEIGHT_SUFFIXES = (".safetensors",)
NO_CODE_REASON = "code that only the folder names is not run"
TOKENIZER_LIMITS = ResourceLimits(1 << 30, 10, 60.0)
"""Limits for encoding a text of 600 characters; it usually takes a millisecond and some kilobytes."""
PATTERN_TIMEOUT_SECONDS = 5
"""Limit of CPU seconds for matching a regular expression with three names; a usual one takes a
microsecond."""


def read_forward_preset(folder: Path) -> Preset:
    """Return the preset in a run's ds_config.json, with the keys for forward passes only and no
    paths. Raises UsageError.
    """
    file = folder / "ds_config.json"
    # An allow list: other keys may make DeepSpeed write files.
    block = {key: value for key, value in read_json_object(file).items() if key in FORWARD_KEYS}
    zero = block.get("zero_optimization")
    if isinstance(zero, dict):
        parts = {name: dict(value) for name, value in zero.items() if isinstance(value, dict)}
        for part in parts.values():
            # DeepSpeed empties that folder.
            part.pop("nvme_path", None)
        block["zero_optimization"] = {**zero, **parts}
    try:
        return Preset("ds_config", file, check_ds_config(file, block))
    except PresetError as error:
        raise PresetError(f"{error}\ngive another preset with --ds-config NAME") from None


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of an untrusted folder. Raises UsageError."""
    try:
        if (problem := _find_file_fault(file)) is not None:
            raise UsageError(f"{file}: {problem}; copy the folder again")
        value = json.loads(read_limited(file, MAX_JSON_BYTES))
    except OSError as error:
        raise UsageError(f"{file}: cannot be read ({error.strerror}); copy the folder again") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{file}: not valid JSON ({error}); copy the folder again") from None
    if not isinstance(value, dict):
        raise UsageError(f"{file}: is not a JSON object; copy the folder again")
    return value


def is_precision_enabled(folder: Path, precision: str) -> bool:
    """Return True if the run's precision is the given one, bf16 or fp16. Raises UsageError."""
    block = read_json_object(folder / "ds_config.json").get(precision)
    return isinstance(block, dict) and block.get("enabled") is True


def check_folder(folder: Path, trust_remote_code: bool = False, run_dir: Path | None = None) -> None:
    """Raise UsageError for a model or tokenizer folder with unsafe files.

    These are special files, links to files outside of the folder other than weights, and configs
    that import modules. `run_dir`: the run folder that contains the folder, if any.
    """
    root = Path(os.path.realpath(run_dir or folder))
    # The Hub's cache links snapshots/REVISION/FILE to blobs/HASH.
    home = root.parent.parent if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        if path.is_dir() and not path.is_symlink():
            continue
        if (problem := _find_file_fault(path)) is not None:
            raise UsageError(f"{path}: {problem}; remove it, or copy the folder again")
        outside = not Path(os.path.realpath(path)).is_relative_to(home)
        if outside and path.suffix not in WEIGHT_SUFFIXES:
            raise UsageError(
                f"{path}: is a link to {os.path.realpath(path)}, outside of the folder; "
                f"if you trust it, copy the folder with `cp -rL {shlex.quote(str(folder))} COPY` and use the copy"
            )
    if not trust_remote_code:
        check_configs(folder)


def check_configs(folder: Path) -> None:
    """Raise UsageError for JSON files that make a library import or fetch a module, and for sizes that no model has."""
    for name, check in _CONFIG_CHECKS.items():
        if (folder / name).is_file() and (fault := check(read_json_object(folder / name))):
            raise UsageError(f"{folder / name}: {fault}; remove the key")
    file = folder / "config.json"
    if file.is_file() and (wrong := wrong_size_fault(read_json_object(file), str(file))) is not None:
        raise UsageError(wrong)


def check_no_pickles(folder: Path, recipe_name: str) -> None:
    """Raise UsageError for pickles in a folder that dstrain wrote (it has `recipe_name`), and for
    pickled weights in others.
    """
    from dstrain.models.weights.files import open_tensors
    from dstrain.train.state import hashed_file

    if (folder / recipe_name).is_file():
        hashed_file.check_no_pickles(folder)
    if any(folder.glob("*.safetensors")):
        return
    try:
        open_tensors(sorted([*folder.glob("pytorch_model*.bin"), *folder.glob("adapter_model.bin")]))
    except RecipeError as error:
        raise UsageError("\n".join(f"{fault.problem}; {fault.fix}" for fault in error.faults)) from error


def check_tokenizer_terminates(tokenizer: Any, folder: Path) -> None:
    """Raise UsageError if the tokenizer of a folder does not encode a short text within limits.

    A normalizer may replace a character by many, again and again. It is tried with one text; a fault that occurs only
    with other texts is not found.
    """
    tried = run_limited(lambda: _encode_probe(tokenizer), TOKENIZER_LIMITS, attempts=2)
    if tried.status in ("lost", "time", "memory"):
        limits = f"{TOKENIZER_LIMITS.memory_bytes >> 20} MiB and {TOKENIZER_LIMITS.cpu_seconds} seconds"
        problem = f"its tokenizer does not encode a text of {len(_PROBE_TEXT)} characters within {limits}"
        raise UsageError(f"{folder}: {problem}; name a tokenizer that you trust: --set model.tokenizer=FOLDER")


_PROBE_TEXT = string.printable * 6


def _encode_probe(tokenizer: Any) -> None:
    if sys.platform == "linux":  # in a process of its own: a failed allocation in Rust prints a backtrace
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    tokenizer(_PROBE_TEXT)


def _find_file_fault(path: Path) -> str | None:
    """Return why a path is not a regular file; None if it is one, or a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be read ({error.strerror})" if os.path.islink(path) else f"does not exist ({error.strerror})"
    return None if stat.S_ISREG(mode) or stat.S_ISDIR(mode) else "is not a regular file"


def _adapter_fault(config: Mapping[str, Any]) -> str:
    """Return why an adapter config is unsafe, else ''.

    peft imports the module in megatron_core (peft/tuners/lora/tp_layer.py,
    importlib.import_module(config.megatron_core)).
    """
    if str(config.get("peft_type", "LORA")).upper() != "LORA":
        return f"peft_type is {config['peft_type']!r}, but dstrain supports only LORA"
    if config.get("megatron_config"):
        return "megatron_config names a module to import"
    return next(filter(None, (pattern_fault(key, config.get(key)) for key in _PATTERN_KEYS)), "")


_PATTERN_KEYS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern")
"""Keys whose texts peft uses as regular expressions for module names; for an object, its keys."""
_SAMPLE_MODULE_NAMES = (
    "model.layers.0.self_attn.q_proj",
    "transformer.h.11.mlp.c_fc",
    "model.language_model.layers.31.mlp.up_proj",
)


def pattern_fault(key: str, value: Any) -> str:
    """Return why a regular expression cannot be used, else ''.

    Matching is tried in a process with a time limit.
    """
    if not isinstance(value, (str, list, dict, type(None))):
        return f"{key} is {value!r}, but must be names of modules"
    texts = [value] if isinstance(value, str) else [text for text in value or () if isinstance(text, str)]
    patterns = [text for text in texts if not re.fullmatch(r"[\w.-]*", text)]
    if not patterns:
        return ""
    # In a process of its own: re cannot be interrupted from Python.
    result = run_limited(
        lambda: [_matches(text, name) for text in patterns for name in _SAMPLE_MODULE_NAMES],
        ResourceLimits(1 << 30, PATTERN_TIMEOUT_SECONDS, 60.0),
    )
    if result.status == "raised":
        return f"{key} is a regular expression that cannot be used ({result.value[1]})"
    if result.status == "lost":
        return f"{key} is a regular expression that could not be tried within 60 seconds"
    return f"{key} is a regular expression that does not end" if result.status in ("time", "memory") else ""


def _matches(pattern: str, name: str) -> bool:
    try:
        return bool(re.fullmatch(pattern, name) or re.match(rf"(.*\.)?({pattern})$", name))
    except re.error:  # reported where it is used
        return False


def config_fault(config: Mapping[str, Any]) -> str:
    """Return a fault if a model's config names code on the Hub, else ''."""
    found = find_hub_code(config)
    return f"{found}, and {NO_CODE_REASON}" if found else ""


_CONFIG_CHECKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "adapter_config.json": _adapter_fault,
    "config.json": config_fault,
}
