"""Keys of DeepSpeed's configuration: names, types, conversion of old ones."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.files import parse_json

KeyPath = tuple[str, ...]
KeySpec = dict[str, Any]
"""Properties of one key: type, null, values, min, above, max, below, default, deprecated, keys."""

_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "list": (list,),
    "object": (dict,),
}
_TYPE_NAMES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a string",
    "list": "a list",
    "object": "an object",
}


@functools.cache
def load_key_schema() -> dict[str, Any]:
    """Return `deepspeed` (version), `removed` (paths) and `keys` (name -> KeySpec)."""
    return parse_json((Path(__file__).parents[1] / "ds_keys.json").read_bytes())


def find_key(path: KeyPath) -> KeySpec | None:
    """Return the properties of the key at a path, None for an unknown one."""
    key: KeySpec = {"keys": load_key_schema()["keys"]}
    for name in path:
        if name not in key.get("keys", {}):
            return None
        key = key["keys"][name]
    return key


def find_parent_blocks(name: str) -> list[str]:
    """Return the blocks that have a key of this name."""
    return sorted(
        {".".join(path[:-1]) for path in _iter_paths(load_key_schema()["keys"]) if path[-1] == name and len(path) > 1}
    )


def find_value_problem(spec: KeySpec, value: Any) -> tuple[str, str] | None:
    """Return (problem, fix) of an invalid value, None for a valid one."""
    if (value is None and spec.get("null", False)) or spec["type"] == "any":
        return None
    is_known = any(_has_type(type_name, value) for type_name in spec["type"].split("|"))
    if is_known and "values" in spec:
        given, known = value, spec["values"]
        if spec.get("any_case") and isinstance(value, str):
            given, known = value.lower(), [str(name).lower() for name in known]
        is_known = given in known
    if not is_known:
        return f"the value is {format_json(value)}", f"write {describe_expected(spec)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        too_low = value < spec.get("min", value) or ("above" in spec and value <= spec["above"])
        too_high = value > spec.get("max", value) or ("below" in spec and value >= spec["below"])
        if too_low or too_high:
            return f"the value {value} is out of bounds", f"write {describe_expected(spec)}"
    if "of" in spec and not all(isinstance(item, _TYPES[spec["of"]]) for item in value):
        return "the list contains values that are not strings", "write a list of strings"
    return None


def describe_expected(spec: KeySpec) -> str:
    """Return the values that a key accepts, in words: `a whole number above 0`."""
    if "values" in spec:
        return "one of " + ", ".join(format_json(value) for value in spec["values"])
    words = " or ".join(_TYPE_NAMES.get(kind, "anything") for kind in spec["type"].split("|"))
    bounds = [("min", "from {} on"), ("above", "above {}"), ("max", "up to {}"), ("below", "below {}")]
    words += "".join(" " + phrase.format(spec[bound]) for bound, phrase in bounds if bound in spec)
    return words + (" without quotation marks" if set(spec["type"].split("|")) <= {"bool", "int", "float"} else "")


def format_json(value: Any) -> str:
    """Return a value as JSON, at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def cast_integers(block: dict[str, Any], parent: KeyPath = ()) -> dict[str, Any]:
    """Return a deep copy with 5e8 as 500000000 where DeepSpeed expects an integer: not all its parsers cast."""
    copied: dict[str, Any] = {}
    for name, value in block.items():
        path = (*parent, name)
        if isinstance(value, dict):
            copied[name] = cast_integers(value, path)
        elif isinstance(value, list):
            copied[name] = list(value)
        elif isinstance(value, float) and value.is_integer() and (find_key(path) or {}).get("type") == "int":
            copied[name] = int(value)
        else:
            copied[name] = value
    return copied


def _has_type(type_name: str, value: Any) -> bool:
    if type_name == "any":
        return True
    # In Python a bool is an int too.
    if isinstance(value, bool):
        return type_name == "bool"
    return isinstance(value, _TYPES[type_name]) or (
        type_name == "int" and isinstance(value, float) and value.is_integer()
    )


def _iter_paths(specs: dict[str, KeySpec], parent: KeyPath = ()) -> Iterator[KeyPath]:
    for name, key in specs.items():
        yield (*parent, name)
        yield from _iter_paths(key.get("keys", {}), (*parent, name))


_OPTIMIZERS = {
    "adamw": "adamw",
    "adam": "adamw",  # DeepSpeed's Adam decouples the weight decay unless adam_w_mode is false
    "torch_adam": "adamw",
    "sgd": "sgd",
    "lion": "lion",
    "muon": "muon",
    "adafactor": "adafactor",
}
_OPTIMIZER_PARAMS = {
    "lr": "optim.lr",
    "betas": "optim.betas",
    "eps": "optim.eps",
    "weight_decay": "optim.weight_decay",
    "max_grad_norm": "optim.clip",
}
_SCHEDULES = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
_SCHEDULE_PARAMS = {"warmup_max_lr": "optim.lr", "warmup_num_steps": "optim.warmup", "total_num_steps": "steps"}
_IGNORED_SCHEDULE_PARAMS = {
    "warmup_min_lr": "the recipe's warmup starts near 0",
    "warmup_type": "the recipe's warmup is linear",
}

LEARNING_KEYS = {
    "optimizer": "the optimizer belongs in the recipe (optim)",
    "scheduler": "the learning-rate schedule belongs in the recipe (optim.schedule, optim.warmup)",
    "gradient_clipping": "gradient clipping belongs in the recipe (optim.clip)",
    "train_batch_size": "the batch size belongs in the recipe (batch.total)",
    "data_efficiency": "the order of the data belongs in the recipe (data)",
    "curriculum_learning": "the order of the data belongs in the recipe (data)",
    "progressive_layer_drop": "layer dropping is a training setting, and DeepSpeed has removed it",
    "compression_training": "compression is a training setting, and DeepSpeed has removed it",
    "tensorboard": "logging belongs in the recipe (log.tensorboard)",
    "wandb": "logging belongs in the recipe (log.wandb)",
}
"""Training keys, which belong in the recipe -> the problem to report."""


@dataclass(frozen=True)
class ConvertedKey:
    """A value of the JSON, and the recipe key for it."""

    path: str
    value: Any
    recipe_key: str | None = None
    """The recipe key; None for a dropped value."""
    recipe_value: Any = None
    """The value in the recipe."""
    drop_reason: str = ""
    """Reason for dropping the value."""

    def __str__(self) -> str:
        left = f'"auto" at {self.path}' if self.value == "auto" else f"{self.path} {format_json(self.value)}"
        return f"{left} -> recipe {self.recipe_line}" if self.recipe_key else f"{left} -> dropped, {self.drop_reason}"

    @property
    def recipe_line(self) -> str:
        """Return `optim.lr: 2.0e-05`, as YAML reads it: 2e-05 without a point would be a string."""
        text = format_json(self.recipe_value)
        needs_point = isinstance(self.recipe_value, float) and "e" in text and "." not in text
        return f"{self.recipe_key}: {text.replace('e', '.0e') if needs_point else text}"


def convert_key(name: str, value: Any) -> list[ConvertedKey]:
    """Return every value of a training key, with the recipe key for it."""
    if name == "optimizer" and isinstance(value, dict):
        return list(_convert_optimizer(value))
    if name == "scheduler" and isinstance(value, dict):
        return list(_convert_scheduler(value))
    single = {"gradient_clipping": "optim.clip", "train_batch_size": "batch.total"}
    if name in single:
        return [_convert_value(name, value, single[name])]
    if name == "tensorboard" and isinstance(value, dict):
        return [ConvertedKey(name, value, "log.tensorboard", value.get("enabled", False) is True)]
    if name == "wandb" and isinstance(value, dict) and value.get("enabled") is True:
        return [ConvertedKey(name, value, "log.wandb", {"project": value.get("project", "deepspeed")})]
    return [ConvertedKey(name, value, drop_reason=LEARNING_KEYS[name])]


def suggest_fix(name: str, value: Any) -> str:
    """Return the fix for a training key in a preset."""
    settings = [key.recipe_line for key in convert_key(name, value) if key.recipe_key]
    return f"remove it and write {'; '.join(settings)} in the recipe" if settings else "remove it"


def _convert_value(path: str, value: Any, recipe_key: str) -> ConvertedKey:
    if value == "auto":
        return ConvertedKey(path, value, drop_reason=f"the recipe's {recipe_key} sets it")
    return ConvertedKey(path, value, recipe_key, value)


def _convert_optimizer(block: dict[str, Any]) -> Iterator[ConvertedKey]:
    type_name, params = block.get("type"), block.get("params", {})
    plain_adam = str(type_name).lower() == "adam" and isinstance(params, dict) and params.get("adam_w_mode") is False
    name = None if plain_adam else _OPTIMIZERS.get(str(type_name).lower())
    if name:
        yield ConvertedKey("optimizer.type", type_name, "optim.name", name)
    elif "type" in block:
        reason = f"the recipe's optim.name is one of {', '.join(sorted({*_OPTIMIZERS.values()}))}"
        yield ConvertedKey("optimizer.type", type_name, drop_reason=reason)
    yield from _convert_params("optimizer", block, _OPTIMIZER_PARAMS, {}, "the recipe's optim has no such key")


def _convert_scheduler(block: dict[str, Any]) -> Iterator[ConvertedKey]:
    type_name = block.get("type")
    if isinstance(type_name, str) and type_name in _SCHEDULES:
        yield ConvertedKey("scheduler.type", type_name, "optim.schedule", _SCHEDULES[type_name])
    elif "type" in block:
        reason = "the recipe's optim.schedule is cosine, linear, constant or wsd"
        yield ConvertedKey("scheduler.type", type_name, drop_reason=reason)
    unknown = "the recipe's schedule has no such key"
    yield from _convert_params("scheduler", block, _SCHEDULE_PARAMS, _IGNORED_SCHEDULE_PARAMS, unknown)


def _convert_params(
    section: str, block: dict[str, Any], recipe_keys: Mapping[str, str], ignored: Mapping[str, str], unknown: str
) -> Iterator[ConvertedKey]:
    """Yield the keys of a block's `params` and those beside `type` and `params`.

    `ignored` holds the reasons to drop some of them, `unknown` the reason to drop any other.
    """
    params = block.get("params", {})
    for key, value in params.items() if isinstance(params, dict) else ():
        path = f"{section}.params.{key}"
        if key in recipe_keys:
            yield _convert_value(path, value, recipe_keys[key])
        else:
            yield ConvertedKey(path, value, drop_reason=ignored.get(key, unknown))
    for key in block:
        if key not in ("type", "params") or (key == "params" and not isinstance(params, dict)):
            yield ConvertedKey(f"{section}.{key}", block[key], drop_reason=unknown)
