"""Adapter folders as the base of a run: their LoRA is merged into the model they were trained on when that is loaded."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dstrain.errors import Fault, RecipeError, first_names

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

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
STATE_DICT_PREFIX = "base_model.model."
"""Stands before every name in an adapter's file."""


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
    values = _read_json(folder / CONFIG_FILE, key)
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


def _read_json(file: Path, key: str) -> dict[str, Any]:
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
    if wrong := _find_invalid_setting(values):
        return f"and {wrong}", DOWNLOAD_FIX
    if odd := _find_unsupported_setting(values):
        return f"and its {odd} is not supported here", MERGE_FIX
    if not (folder / WEIGHTS_FILE).is_file():
        return (
            f"and there is no {WEIGHTS_FILE}",
            "export or download it again; pickles (adapter_model.bin) are not read",
        )
    if base.startswith((".", "/", "~")) and not Path(base).expanduser().is_dir():
        return (
            "which is not there",
            f"put the model there, or write its folder into {CONFIG_FILE} (base_model_name_or_path)",
        )
    if (Path(base).expanduser() / CONFIG_FILE).is_file():
        return "which is an adapter as well", MERGE_FIX
    return None


def _find_unsupported_setting(values: Mapping[str, Any]) -> str:
    """A setting, with its value, that changes more than `USED` says; empty where there is none."""
    if values.get("bias", "none") != "none":
        return f"bias: {values['bias']}"
    if values.get("init_lora_weights", True) not in SUPPORTED_INITS:
        return f"init_lora_weights: {values['init_lora_weights']}"
    known = {*LORA_SETTINGS, *IGNORED_SETTINGS, "bias", "init_lora_weights"}
    return next((f"{name}: {value}" for name, value in values.items() if name not in known and value), "")


def _find_invalid_setting(values: Mapping[str, Any]) -> str:
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


def load_adapters(model: Any, folder: Path) -> Any:
    """The model with the adapters of an exported folder on it, as peft loads them. Raises RecipeError.

    peft is given known settings alone: others of adapter_config.json name modules that it would import.
    """
    from peft import LoraConfig, PeftModel

    values = _read_json(folder / CONFIG_FILE, str(folder))
    if wrong := _find_invalid_setting(values):
        raise RecipeError(Fault(str(folder / CONFIG_FILE), wrong, DOWNLOAD_FIX))
    if odd := _find_unsupported_setting({**values, "bias": "none", "init_lora_weights": True}):
        raise RecipeError(
            Fault(str(folder), f"its {odd} is not supported here", "merge it with peft's merge_and_unload")
        )
    kept = {
        name: value
        for name, value in values.items()
        if name in {*LORA_SETTINGS, *METADATA_SETTINGS} and value is not None
    }
    return PeftModel.from_pretrained(model, str(folder), config=LoraConfig(**kept))


def check_adapter(model: torch.nn.Module, adapter: Adapter) -> None:
    """Raise RecipeError where `merge_adapter` would. A skeleton of the model will do, and is of no use afterwards."""
    _match_tensors(model, adapter)


def merge_adapter(model: Any, adapter: Adapter) -> PreTrainedModel:
    """The model with the adapter's changes added to its weights. Collective under ZeRO-3, where one layer is whole at a time."""
    from dstrain.models.adapters.merge import merge_adapters
    from dstrain.models.weights.files import open_tensors
    from dstrain.models.zero3 import assign

    learns = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    wrapped, places = _match_tensors(model, adapter)
    stored = open_tensors([adapter.weights_file])
    for name, place in places.items():  # in one order on every rank
        assign(place, stored[name].read)
    merged = merge_adapters(wrapped)
    for parameter in merged.parameters():  # peft freezes what adapters lie on
        parameter.requires_grad_(learns.get(id(parameter), True))
    return merged


def _match_tensors(model: Any, adapter: Adapter) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with fresh adapters, and where each tensor of the file belongs. Raises RecipeError."""
    from peft import LoraConfig, get_peft_model, get_peft_model_state_dict

    from dstrain.models.weights.files import open_tensors
    from dstrain.models.zero3 import full_shape

    stored = open_tensors([adapter.weights_file])
    named = dict(model.named_parameters())  # before peft gives them other names
    try:
        with warnings.catch_warnings():  # transformers 6 will call is_gradient_checkpointing by another name
            warnings.simplefilter("ignore")
            wrapped = get_peft_model(model, LoraConfig(**adapter.settings))
    except (ValueError, TypeError) as error:
        lost = "Target modules" in str(error)
        raise _mismatch_error(
            adapter, "the model has none of the modules that it changes" if lost else str(error)
        ) from error
    places = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    lacking = sorted(places.keys() - stored.keys())
    if lacking:
        raise _mismatch_error(adapter, f"it lacks {first_names(lacking)}")
    saved = {name: named.get(_model_key(name)) for name in stored if name not in places}
    if homeless := sorted(name for name, place in saved.items() if place is None):
        raise _mismatch_error(adapter, f"the model has no place for its {first_names([*map(_model_key, homeless)])}")
    places |= cast("dict[str, torch.Tensor]", saved)
    for name, place in places.items():
        if stored[name].shape != full_shape(place):
            raise _mismatch_error(
                adapter, f"its {_model_key(name)} is {stored[name].shape}, and {full_shape(place)} would fit"
            )
    return wrapped, dict(sorted(places.items()))


def _model_key(name: str) -> str:
    """A name in the file as the model has it: peft saves an embedding that it adapts, too."""
    return name.removeprefix(STATE_DICT_PREFIX).replace(".base_layer.", ".")


def _mismatch_error(adapter: Adapter, reason: str) -> RecipeError:
    problem = f"the adapter in {adapter.folder} does not fit the model that is to be trained: {reason}"
    return RecipeError(
        Fault("model.path", problem, "name the folder of a model, or an adapter of a model of this kind")
    )
