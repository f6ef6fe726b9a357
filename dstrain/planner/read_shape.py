"""Shape of a recipe's model: from its config, a shipped shape, headers of weight files, or the meta device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.config import RunConfig, dump_recipe
from dstrain.config.schema import ModelConfig
from dstrain.errors import Fault, RecipeError, UsageError, suggest_name
from dstrain.models.folder.adapter_config import resolve_base_model
from dstrain.models.folder.config_sizes import wrong_size_fault
from dstrain.models.weights.files import find_weight_files
from dstrain.planner.families.decoders import generic_shape, shape_from_config
from dstrain.planner.shape import (
    ModelShape,
    ParamTensor,
    from_tensors,
    part_of,
    with_adapters,
    with_frozen,
    with_score_head,
)
from dstrain.planner.workload import TaskProperties

SHAPES_DIR = Path(__file__).parent / "shapes"
META_MODULE = "dstrain.train.list_parameters"
"""Module that a subprocess runs: it builds the model on the meta device and prints its parameters as JSON."""
META_TIMEOUT_SECONDS = 300
HUB_SUFFIXES = ("-Instruct", "-Chat", "-Base", "-it")
"""Of Hub ids that have the shape of the model without it."""


def shape_names() -> list[str]:
    """Return the names of the shipped shapes."""
    return sorted(path.stem for path in SHAPES_DIR.glob("*.json"))


def named_config(name: str) -> dict[str, Any]:
    """Return the transformers config of a shipped shape. Raises UsageError."""
    if name not in shape_names():
        raise UsageError(f"--model-shape {name}: there is no such shape; {suggest_name(name, shape_names())}")
    config: dict[str, Any] = json.loads((SHAPES_DIR / f"{name}.json").read_text(encoding="utf-8"))["config"]
    return config


def read_shape(config: RunConfig, properties: TaskProperties) -> ModelShape:
    """Return the shape of the model that a recipe trains: with the task's head, its adapters and frozen parameters.

    Imports no torch in this process. Raises RecipeError where the model cannot be read.
    """
    if not properties.is_known:
        return _with_meta_parameters(config, ModelShape(**_UNKNOWN_SIZES))
    shape = read_base_shape(config.model)
    if shape is None:
        return _with_meta_parameters(config, generic_shape(_read_config(config.model) or {}))
    if properties.is_scored:
        shape = with_score_head(shape)
    if config.model.lora is not None:
        shape = with_adapters(shape, config.model.lora, properties.heads)
    return with_frozen(shape, config.model.freeze)


_UNKNOWN_SIZES: dict[str, Any] = {
    "model_type": "", "hidden": 0, "intermediate": 0, "layers": 0, "heads": 1, "kv_heads": 1, "head_dim": 0, "vocab": 1, "tied": True, "tensors": (),
}  # fmt: skip


def read_base_shape(model: ModelConfig) -> ModelShape | None:
    """Return the shape of a model without its task's head and adapters; None where only the meta device can tell.

    Raises RecipeError for a folder whose config or weight files cannot be read.
    """
    values = _read_config(model)
    if values is None:
        return None
    key = "model.config" if model.config is not None else "model.path"
    if fault := wrong_size_fault(values, key):
        raise RecipeError(fault)
    try:
        shape, sizes_of_others = shape_from_config(values), generic_shape(values)
    except (ValueError, TypeError, AttributeError, ZeroDivisionError, OverflowError) as error:
        problem = f"has sizes in its config that make no model ({error})"
        raise RecipeError(Fault(key, problem, "correct them: whole numbers above 0")) from None
    if shape is not None or model.path is None:
        return shape
    sizes = _read_headers(Path(resolve_base_model(model).path or "").expanduser())
    return from_tensors(sizes, sizes_of_others, "safetensors headers") if sizes else None


def _read_config(model: ModelConfig) -> dict[str, Any] | None:
    """Return the config of a model: the recipe's, a folder's, the Hub cache's or a shipped shape's; None without any."""
    if model.config is not None:
        return model.config
    name = resolve_base_model(model).path
    if name is None:
        problem, fix = "is not set, nor is model.config", "set model.path, or pass --model-shape NAME to plan"
        raise RecipeError(Fault("model.path", problem, fix))
    folder = Path(name).expanduser()
    file = folder / "config.json" if folder.is_dir() else _find_cached_config(name)
    if file is None:
        return _find_hub_shape(name)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise RecipeError(Fault("model.path", f"{file} cannot be read ({error})", "download it again")) from None
    return values if isinstance(values, dict) else None


def _find_cached_config(name: str) -> Path | None:
    """Return the newest config.json of a Hub id in the Hub's cache."""
    import os

    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    found = [*hub.glob(f"models--{name.replace('/', '--')}/snapshots/*/config.json")] if name.count("/") == 1 else []
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def hub_name(shape_name: str) -> str:
    """Return the Hub id of a shipped shape."""
    return str(json.loads((SHAPES_DIR / f"{shape_name}.json").read_text(encoding="utf-8"))["hub"][0])


@cache
def _hub_names() -> dict[str, str]:
    """Return Hub id in lower case -> name of the shipped shape."""
    read = {name: json.loads((SHAPES_DIR / f"{name}.json").read_text(encoding="utf-8")) for name in shape_names()}
    return {hub.lower(): name for name, values in read.items() for hub in values["hub"]}


def _find_hub_shape(name: str) -> dict[str, Any] | None:
    """Return the shipped config of a Hub id such as meta-llama/Llama-3.1-8B-Instruct."""
    plain = next((name.removesuffix(suffix) for suffix in HUB_SUFFIXES if name.endswith(suffix)), name)
    known = _hub_names().get(plain.lower())
    return named_config(known) if known is not None else None


def _read_headers(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> size of every tensor in a folder's safetensors files, by their headers; empty without such files."""
    sizes: dict[str, tuple[int, ...]] = {}
    for file in find_weight_files(folder, "model.path") if folder.is_dir() else []:
        if file.suffix != ".safetensors":
            return {}
        try:
            with file.open("rb") as opened:
                length = int.from_bytes(opened.read(8), "little")
                header = json.loads(opened.read(length))
            sizes |= {name: tuple(one["shape"]) for name, one in header.items() if name != "__metadata__"}
        except (OSError, ValueError, MemoryError, OverflowError, AttributeError, TypeError, KeyError) as error:
            raise RecipeError(Fault("model.path", f"{file} cannot be read ({error})", "download it again")) from None
    return sizes


def _with_meta_parameters(config: RunConfig, shape: ModelShape) -> ModelShape:
    """Return the shape with the parameters that a subprocess counts on the meta device. Raises RecipeError."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", META_MODULE], input=dump_recipe(config), capture_output=True, text=True,
            timeout=META_TIMEOUT_SECONDS, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        problem = f"building the model on the meta device takes over {META_TIMEOUT_SECONDS} s"
        raise RecipeError(Fault("model", problem, "name a preset in ds_config")) from None
    try:
        rows = json.loads(done.stdout.splitlines()[-1])
        tensors = tuple(ParamTensor(name, tuple(size), part_of(name), trained) for name, size, trained in rows)
    except (LookupError, ValueError, TypeError):  # it failed, or a library ended the process with code 0
        reason = (done.stderr.strip().splitlines() or [f"no output, exit code {done.returncode}"])[-1]
        fix = "correct the recipe, or pass --model-shape NAME to plan"
        problem = f"its parameters cannot be counted ({reason.removeprefix('error: ')})"
        raise RecipeError(Fault("model", problem, fix)) from None
    return replace(shape, tensors=tensors, param_source="meta device")


def reference_shape(config: RunConfig, properties: TaskProperties, policy: ModelShape) -> ModelShape | None:
    """Return the shape of a reference that is a model in memory, all frozen; None without one."""
    if properties.reference != "model":
        return None
    base = read_base_shape(properties.reference_model) if properties.reference_model is not None else None
    chosen = base or policy
    kept = (tensor for tensor in chosen.tensors if tensor.part != "lora")
    return replace(chosen, tensors=tuple(replace(tensor, is_trainable=False) for tensor in kept))


def describe_counts(shape: ModelShape) -> Mapping[str, int]:
    """Return part -> parameters, and `trained`."""
    parts = dict.fromkeys(tensor.part for tensor in shape.tensors)
    return {**{part: shape.count(part) for part in parts}, "trained": shape.count(trainable=True)}
