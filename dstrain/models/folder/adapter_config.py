"""The adapter_config.json of a LoRA adapter folder: reading and validation, without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError
from dstrain.models.folder.location import is_local_path

if TYPE_CHECKING:
    from dstrain.config.schema import ModelConfig

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
MERGE_FIX = "merge it first (dstrain export RUN --merge-lora --to DIR, or peft's merge_and_unload) and name that folder"
LORA_SETTINGS = (
    "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora", "use_dora", "fan_in_fan_out", "rank_pattern",
    "alpha_pattern", "layers_to_transform", "layers_pattern",
)  # fmt: skip
"""Settings that decide what an adapter adds to the weights."""
METADATA_SETTINGS = (
    "base_model_name_or_path",
    "bias",
    "inference_mode",
    "lora_dropout",
    "modules_to_save",
    "task_type",
)
"""Settings that decide how an adapter is held."""
IGNORED_SETTINGS = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
"""Settings that do not change the sum of weights and adapter. Modules that were saved whole are taken from the file."""
STRING_SETTINGS, PATTERN_SETTINGS, BOOL_SETTINGS = ("target_modules", "exclude_modules", "layers_pattern"), ("rank_pattern", "alpha_pattern"), (
    "use_rslora", "use_dora", "fan_in_fan_out",
)  # fmt: skip
"""Settings that are names, numbers by name, and yes or no."""
DOWNLOAD_FIX = "export or download it again"
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal")
"""Starts of an adapter that leave the base as it is; others (PiSSA, OLoRA, LoftQ, ...) change it."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder, as peft and `dstrain export` write it."""

    folder: Path
    base_model: str
    """Folder or hub id of the model that it was trained on."""
    settings: Mapping[str, Any]
    """Of USED, for peft's LoraConfig."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that its file holds whole."""

    @property
    def weights_file(self) -> Path:
        return self.folder / WEIGHTS_FILE


def read_adapter(name: str | None, key: str = "model.path") -> Adapter | None:
    """The adapter in a local folder; None where the folder holds none. Raises RecipeError for one that cannot be merged.

    Needs no torch. Of its JSON only known settings are used, so that nothing in it decides what is imported.
    """
    folder = Path(name or "").expanduser()
    if not name or not (folder / CONFIG_FILE).is_file():
        return None
    values = read_json_object(folder / CONFIG_FILE, key)
    base = values.get("base_model_name_or_path")
    about = f"'{name}' is a {_peft_type(values)} adapter" + (f" of {base}" if base else "")
    if fault := _find_merge_problem(folder, values):
        raise RecipeError(Fault(key, f"{about}, {fault[0]}", fault[1]))
    settings = {name: values[name] for name in LORA_SETTINGS if values.get(name) is not None}
    return Adapter(folder, str(base), settings, tuple(map(str, values.get("modules_to_save") or ())))


def resolve_base_model(model: ModelConfig) -> ModelConfig:
    """What the weights under an adapter folder are loaded from; the model itself where its path is none."""
    adapter = read_adapter(model.path)
    return model if adapter is None else model.model_copy(update={"path": adapter.base_model})


def _peft_type(values: Mapping[str, Any]) -> str:
    kind = str(values.get("peft_type", "PEFT"))
    return "LoRA" if kind == "LORA" else kind


def read_json_object(file: Path, key: str) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise RecipeError(Fault(key, f"{file} cannot be read ({error})", "export or download it again")) from None
    if not isinstance(values, dict):
        raise RecipeError(Fault(key, f"{file} holds no JSON object", "export or download it again"))
    return values


def _find_merge_problem(folder: Path, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """(Why the adapter cannot be merged into its base, what to do); None where it can."""
    others = [file.name for file in folder.glob("*.safetensors") if file.name != WEIGHTS_FILE]
    base = values.get("base_model_name_or_path")
    if (folder / "config.json").is_file() and others:
        return (
            f"and whole weights ({sorted(others)[0]}) lie beside it",
            f"remove one of the two ({CONFIG_FILE} or the weights)",
        )
    if not isinstance(base, str) or not base:
        return (
            "and does not say of which model (base_model_name_or_path)",
            f"write the model's folder into {CONFIG_FILE}",
        )
    if values.get("peft_type") != "LORA":
        return "which cannot be merged into the weights", "name a model, or a LoRA adapter"
    if wrong := find_invalid_setting(values):
        return f"and {wrong}", DOWNLOAD_FIX
    if odd := find_unsupported_setting(values):
        return f"and its {odd} is not supported here", MERGE_FIX
    if not (folder / WEIGHTS_FILE).is_file():
        return (
            f"and there is no {WEIGHTS_FILE}",
            "export or download it again; pickles (adapter_model.bin) are not read",
        )
    if is_local_path(base) and not Path(base).expanduser().is_dir():
        return (
            "which is not there",
            f"put the model there, or write its folder into {CONFIG_FILE} (base_model_name_or_path)",
        )
    if (Path(base).expanduser() / CONFIG_FILE).is_file():
        return "which is an adapter as well", MERGE_FIX
    return None


def find_unsupported_setting(values: Mapping[str, Any]) -> str:
    """A setting, with its value, that changes more than `USED` says; empty where there is none."""
    if values.get("bias", "none") != "none":
        return f"bias: {values['bias']}"
    if values.get("init_lora_weights", True) not in SUPPORTED_INITS:
        return f"init_lora_weights: {values['init_lora_weights']}"
    known = {*LORA_SETTINGS, *IGNORED_SETTINGS, "bias", "init_lora_weights"}
    return next((f"{name}: {value}" for name, value in values.items() if name not in known and value), "")


def find_invalid_setting(values: Mapping[str, Any]) -> str:
    """A setting whose value peft could not use, in words; empty where there is none."""
    for name in (*LORA_SETTINGS, "modules_to_save"):
        value = values.get(name)
        if value is not None and not _is_valid_setting(name, value):
            return f"its {name} is {value!r}"[:200]
    return ""


def _is_valid_setting(name: str, value: Any) -> bool:
    listed = isinstance(value, list)
    if name in BOOL_SETTINGS:
        return isinstance(value, bool)
    if name in PATTERN_SETTINGS:
        return isinstance(value, dict) and all(_is_number(size) for size in value.values())
    if name in STRING_SETTINGS:
        return isinstance(value, str) or (listed and all(isinstance(item, str) for item in value))
    if name == "modules_to_save":
        return listed and all(isinstance(item, str) for item in value)
    if name == "layers_to_transform":
        return all(isinstance(item, int) for item in (value if listed else [value]))
    return _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
