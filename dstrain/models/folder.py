"""Contents of a model folder, read without torch: config, model type, tokenizer files, code, adapters."""

from __future__ import annotations

import os.path
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from dstrain.errors import Fault, RecipeError, one_line
from dstrain.files import MAX_JSON_BYTES, parse_json, read_limited

if TYPE_CHECKING:
    from dstrain.config.schema import ModelConfig


def is_local_path(name: str) -> bool:
    """Return True for a name that can only be a path: Hub ids have one slash and do not begin with `.`, `/` or `~`."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def check_local_folder(name: str, key: str) -> bool:
    """Return True for a local folder, False for a hub id. Raises RecipeError where a path has no folder.

    `key`: the recipe key that holds the name.
    """
    if not is_local_path(name):
        if not os.path.isdir(os.path.expanduser(name)):
            check_hub_name(name, key)
        return False
    if not Path(name).expanduser().is_dir():
        raise RecipeError(missing_folder_fault(name, key))
    return True


def check_hub_name(name: str, key: str) -> None:
    """Raise RecipeError for a name, of no folder here, that no model on the Hub can have."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        pass
    else:
        return
    problem = f"'{one_line(name)}' is not a folder, and no name of a model on the Hub"
    fix = f"give an existing folder (working directory: {Path.cwd()}), or a hub id: NAME or ORG/NAME of letters, digits, - _ ."
    raise RecipeError(Fault(key, problem, fix))


def missing_folder_fault(name: str, key: str) -> Fault:
    """Return the fault of a path without a folder."""
    # os.path: Path.exists raises OSError for a path that may not be read, or is too long.
    is_file = os.path.exists(os.path.expanduser(name))
    problem = f"'{name}' is a file, not a folder" if is_file else f"'{name}' is not a folder"
    return Fault(key, problem, f"give an existing folder or a hub id (working directory: {Path.cwd()})")


def revision_faults(model: ModelConfig) -> list[Fault]:
    """Return the fault of a revision of something that has none: a local folder, or a model from scratch."""
    path = model.path
    if model.revision is None or (path and not is_local_path(path) and not os.path.isdir(os.path.expanduser(path))):
        return []
    reason = "model.path is not set" if path is None else f"'{path}' is a local folder"
    return [Fault("model.revision", f"is '{model.revision}', but {reason}", "remove it: only Hub ids have revisions")]


POSITIVE_SIZES = frozenset({
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth", "hidden_size", "n_embd", "d_model",
    "intermediate_size", "n_inner", "ffn_dim", "d_ff", "num_attention_heads", "n_head", "num_heads", "num_key_value_heads",
    "head_dim", "vocab_size", "patch_size", "image_size",
})  # fmt: skip
"""Keys of a config whose value is a whole number above 0, where there is one."""
SIZE_LIMITS = (
    # Dimensions, positions and ids. transformers makes lists of what other integers count, such as labels.
    (r"(^|_)(ids?|index|sizes?|dims?|vocab|offset|floor|length|len|window|positions?|embeddings|ctx|embd|inner|model|ffn?"
     r"|pixels|tokens?)(_|\d|$)", 10**9),
    # They count nothing.
    ("theta|base|seed", 10**18),
    # Each layer is built.
    ("layer|depth|block", 10_000),
    ("", 100_000),
)  # fmt: skip
"""Pattern of keys -> the largest number that a config may have there; the first that fits counts."""
MAX_ENTRIES, MAX_VALUES = 100_000, 1_000_000
"""Limits for the entries of a list or map in a config, and for all its values."""


def wrong_size_fault(values: Mapping[str, Any], key: str) -> Fault | None:
    """Return the fault of a number, list or map in a config that makes no model; None if there is none.

    The file may come from elsewhere, and building a config or a model of it could take all memory.
    """
    waiting: list[tuple[str, Any, bool]] = [(str(name), value, True) for name, value in values.items()]
    num_values = 0
    while waiting:
        name, value, is_top = waiting.pop()
        num_values += 1
        problem, fix = _find_size_problem(name, value)
        if num_values > MAX_VALUES:
            return Fault(key, "its config holds more than a million values", "name another model")
        if problem and key == "model.config" and is_top:
            return Fault(f"{key}.{name}", problem, fix)
        if problem:
            return Fault(key, f"{name} {problem} in its config", fix)
        if isinstance(value, Mapping):
            waiting += [(str(inner), below, False) for inner, below in value.items()]
        elif isinstance(value, (list, tuple)):
            waiting += [(name, below, False) for below in value]
    return None


def _find_size_problem(name: str, value: Any) -> tuple[str, str]:
    """Return problem and fix of one value of a config; empty where it is none."""
    if isinstance(value, (list, tuple, Mapping)):
        if len(value) > MAX_ENTRIES:
            return f"has {len(value)} entries", f"correct it: {MAX_ENTRIES} at most"
        return "", ""
    most = next(limit for pattern, limit in SIZE_LIMITS if re.search(pattern, name))
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    problem = f"is {one_line(repr(value))[:40]}"
    if name in POSITIVE_SIZES and value is not None and not (is_integer and 1 <= value <= most):
        return problem, f"correct it: a whole number from 1 to {most}"
    if is_integer and abs(value) > most:
        return problem, f"correct it: {most} at most"
    return "", ""


TEMPORAL_TYPE = "dstrain_temporal"
"""Model type of task temporal's models."""
POSITION_KEYS = ("max_position_embeddings", "n_positions")
"""Config settings with the number of learned positions."""
LEARNED_POSITION_TYPES = frozenset({
    "albert", "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small",
    "canine", "codegen", "convbert", "ctrl", "distilbert", "electra", "ernie", "flaubert", "fnet", "gpt-sw3", "gpt2",
    "gpt_bigcode", "gpt_neo", "gptj", "marian", "mbart", "megatron-bert", "mobilebert", "mvp", "openai-gpt", "opt", "pegasus",
    "plbart", "rembert", "roc_bert", "roformer", "squeezebert", "xlm",
})  # fmt: skip
"""Model types with a learned position table of the configured size."""
PAD_OFFSET_TYPES = frozenset({
    "camembert", "data2vec-text", "longformer", "luke", "mpnet", "roberta", "roberta-prelayernorm", "xlm-roberta", "xmod",
})  # fmt: skip
"""Model types whose positions start after the pad token's id (transformers' `create_position_ids_from_input_ids`)."""
BIDIRECTIONAL_TYPES = frozenset({
    "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod",
})  # fmt: skip
"""Encoders whose AutoModelForCausalLM attends in both directions unless the config has `is_decoder: true`."""


NON_CAUSAL_TYPES = frozenset({"cpmant", "xlm", "xlnet"})
"""Other language models of transformers whose tokens see later ones, whatever their config says."""


def find_quantization(config: Mapping[str, Any]) -> Any:
    """Return the quantization_config of a config.json, or of its text_config; None without one."""
    text = config.get("text_config")
    return config.get("quantization_config") or (text.get("quantization_config") if isinstance(text, Mapping) else None)


def quantized_fault(config: Mapping[str, Any], key: str) -> Fault | None:
    """Return the fault of quantized weights that cannot be dequantized, by the model's config.json; None for others."""
    settings = find_quantization(config)
    if not settings:
        return None
    method = settings.get("quant_method", "unknown") if isinstance(settings, Mapping) else "unknown"
    if key != "model.config" and method in ("mxfp4", "fp8"):
        return None
    if method == "compressed-tensors":
        if key != "model.config" and settings.get("format") == "float-quantized":
            return None
        method = f"compressed-tensors, format {settings.get('format')}"
    problem = f"its weights are already quantized (quantization_config in its config.json, quant_method {method})"
    fix = "name the original model in 16 bits, and set model.quantize: nf4 to train adapters on it; FP8 and MXFP4 files can be read"
    return Fault(key, problem, fix)


def max_learned_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of tokens with learned positions; None where config.json alone does not determine it.

    Needs no torch. `dstrain.models.checks` inspects the model itself, for every family.
    """
    model_type = config.get("model_type")
    size = next((config[name] for name in POSITION_KEYS if isinstance(config.get(name), int)), None)
    if (
        size is None
        or model_type not in LEARNED_POSITION_TYPES | PAD_OFFSET_TYPES
        or "rotary" in str(config.get("position_embedding_type"))
    ):
        return None
    pad = config.get("pad_token_id", 1)
    return size - ((pad if isinstance(pad, int) else 1) + 1 if model_type in PAD_OFFSET_TYPES else 0)


def max_length_fault(max_length: int, limit: int) -> Fault:
    """Return the fault of a `data.max_length` above the model's learned positions."""
    problem = f"is {max_length}, but the model has only {limit} learned positions"
    return Fault("data.max_length", problem, f"write {limit} or less, or use a model with rotary positions")


def is_bidirectional(model_type: str, is_decoder: object) -> bool:
    """Return True where the causal language model of this type attends to later tokens."""
    return model_type in BIDIRECTIONAL_TYPES and is_decoder is not True


def is_temporal_folder(name: str | None) -> bool:
    """Return True for a local folder with the config of a temporal model."""
    try:
        values = parse_json(read_limited(Path(name or "").expanduser() / "config.json", MAX_JSON_BYTES))
    except (OSError, ValueError):
        return False
    return isinstance(values, dict) and values.get("model_type") == TEMPORAL_TYPE


SETTING_SUFFIXES = ("_implementation", "_implementation_internal")
ATTRIBUTE_MAP = "attribute_map"
"""Class attribute of configs; as a key of config.json it would replace the class's (configuration_utils.py,
__setattr__), and so rename settings behind this check."""


def find_hub_code(config: Any) -> str:
    """Return which setting of a config, or of its JSON, names code on the Hub; an empty string without one.

    Attention or another part may name a kernel ORG/NAME (transformers/integrations/hub_kernels.py). Sub-configs are
    searched too.
    """
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:  # not recursive: a hostile file may be nested deeply
        setting, value = waiting.pop()
        if isinstance(value, str) and setting and "/" in value:
            return f"{setting} names code on the Hub ({value!r})"
        if isinstance(value, (list, tuple)):
            waiting += [(setting, inner) for inner in value]
        settings = _settings(value)
        if not setting and ATTRIBUTE_MAP in settings:
            return f"{ATTRIBUTE_MAP} renames settings"
        waiting += [
            (setting or (key if str(key).endswith(SETTING_SUFFIXES) else ""), inner) for key, inner in settings.items()
        ]
    return ""


def check_hub_code(config: Any, name: str, key: str, trust_remote_code: bool) -> list[Fault]:
    """Return a fault where the config of `name`, the value of the recipe's `key`, runs Hub code that is not trusted."""
    if trust_remote_code or not (found := find_hub_code(config)):
        return []
    fix = "remove the key from config.json, or add --set model.trust_remote_code=true if you trust that code"
    return [Fault(key, f"in the config of '{name}' {found}", fix)]


def _settings(value: Any) -> Mapping[Any, Any]:
    """Return the settings of a config object, or of its JSON; an empty mapping for anything else."""
    if isinstance(value, Mapping):
        return value
    if not hasattr(type(value), "sub_configs"):  # every config class of transformers has it
        return {}
    properties = ("_attn_implementation", "_experts_implementation")  # not in vars()
    return {**vars(value), **{name: getattr(value, name, None) for name in properties}}


ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MERGE_FIX = "merge it first (dstrain export RUN --merge-lora --to DIR, or peft's merge_and_unload) and name that folder"
LORA_SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("r", "lora_alpha"), float),
    **dict.fromkeys(("target_modules", "exclude_modules", "layers_pattern"), str | list[str]),
    "target_parameters": list[str],
    **dict.fromkeys(("use_rslora", "use_dora", "fan_in_fan_out"), bool),
    **dict.fromkeys(("rank_pattern", "alpha_pattern"), dict[str, float]),
    "layers_to_transform": int | list[int],
}
"""Setting that determines what an adapter adds to the weights -> its type."""
METADATA_SETTINGS = (
    "base_model_name_or_path",
    "bias",
    "inference_mode",
    "lora_dropout",
    "modules_to_save",
    "task_type",
)
"""Further settings that peft gets when it loads an exported adapter."""
IGNORED_SETTINGS = (
    "auto_mapping", "base_model_name_or_path", "inference_mode", "lora_dropout", "megatron_core", "modules_to_save",
    "peft_type", "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
)  # fmt: skip
"""Settings that do not affect the merged weights. Modules in `modules_to_save` are loaded from the file."""
DOWNLOAD_FIX = "export or download it again"
SUPPORTED_INITS = (True, False, "gaussian", "orthogonal")
"""Initializations of an adapter that leave the base weights unchanged; others (PiSSA, OLoRA, LoftQ, …) change them."""


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter in a folder, as peft and `dstrain export` write it."""

    folder: Path
    base_model: str
    """Folder or Hub id of the model that it was trained on."""
    settings: Mapping[str, Any]
    """Values of LORA_SETTINGS, for peft's LoraConfig."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that its file holds completely."""
    revision: str | None = None
    """Branch, tag or commit of `base_model` on the Hub."""

    @property
    def weights_file(self) -> Path:
        return self.folder / ADAPTER_WEIGHTS


def read_adapter(name: str | None, key: str = "model.path") -> Adapter | None:
    """Read the adapter in a local folder; None where there is none. Raises RecipeError for one that cannot be merged.

    Only known settings of its JSON are used, so that the file cannot cause imports.
    """
    folder = Path(name or "").expanduser()
    if not name or not (folder / ADAPTER_CONFIG).is_file():
        return None
    values = read_json_object(folder / ADAPTER_CONFIG, key)
    base = values.get("base_model_name_or_path")
    about = f"'{name}' is a {_peft_type(values)} adapter" + (f" of {base}" if base else "")
    if fault := _find_merge_problem(folder, values):
        raise RecipeError(Fault(key, f"{about}, {fault[0]}", fault[1]))
    settings = {name: values[name] for name in LORA_SETTINGS if values.get(name) is not None}
    revision = values.get("revision")
    return Adapter(
        folder=folder,
        base_model=str(base),
        settings=settings,
        modules_to_save=tuple(map(str, values.get("modules_to_save") or ())),
        revision=revision if isinstance(revision, str) and revision and not is_local_path(str(base)) else None,
    )


def resolve_base_model(model: ModelConfig) -> ModelConfig:
    """Return the config with its base model as path if `model.path` is an adapter folder, else the config itself."""
    adapter = read_adapter(model.path)
    if adapter is None:
        return model
    return model.model_copy(update={"path": adapter.base_model, "revision": adapter.revision})


def _peft_type(values: Mapping[str, Any]) -> str:
    peft_type = str(values.get("peft_type", "PEFT"))
    return "LoRA" if peft_type == "LORA" else peft_type


def read_json_object(file: Path, key: str) -> dict[str, Any]:
    """Read a JSON object. Raises RecipeError for the recipe's `key`."""
    try:
        values = parse_json(read_limited(file, MAX_JSON_BYTES))
    except (ValueError, OSError) as error:
        raise RecipeError(Fault(key, f"{file} cannot be read ({error})", DOWNLOAD_FIX)) from None
    if not isinstance(values, dict):
        raise RecipeError(Fault(key, f"{file} holds no JSON object", DOWNLOAD_FIX))
    return values


def _find_merge_problem(folder: Path, values: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return (problem, fix) of an adapter that cannot be merged into its base, None for one that can."""
    others = [file.name for file in folder.glob("*.safetensors") if file.name != ADAPTER_WEIGHTS]
    base = values.get("base_model_name_or_path")
    if (folder / "config.json").is_file() and others:
        return (
            f"but the folder also holds complete weights ({sorted(others)[0]})",
            f"remove one of the two ({ADAPTER_CONFIG} or the weights)",
        )
    if not isinstance(base, str) or not base:
        return (
            "without the name of its base model (base_model_name_or_path)",
            f"write the model's folder into {ADAPTER_CONFIG}",
        )
    if values.get("peft_type") != "LORA":
        return "which cannot be merged into the weights", "name a model, or a LoRA adapter"
    if problem := find_invalid_setting(values):
        return f"but {problem}", DOWNLOAD_FIX
    if setting := find_unsupported_setting(values):
        return f"but its {setting} is not supported here", MERGE_FIX
    if not (folder / ADAPTER_WEIGHTS).is_file():
        return (
            f"but {ADAPTER_WEIGHTS} is missing",
            f"{DOWNLOAD_FIX}; pickles (adapter_model.bin) are not read",
        )
    if is_local_path(base) and not Path(base).expanduser().is_dir():
        return (
            "which does not exist",
            f"put the model there, or write its folder into {ADAPTER_CONFIG} (base_model_name_or_path)",
        )
    if (Path(base).expanduser() / ADAPTER_CONFIG).is_file():
        return "which is an adapter as well", MERGE_FIX
    return None


def find_unsupported_setting(values: Mapping[str, Any]) -> str:
    """Return a setting, with its value, that changes more than LORA_SETTINGS do; an empty string without one."""
    if values.get("bias", "none") != "none":
        return f"bias: {values['bias']}"
    if values.get("init_lora_weights", True) not in SUPPORTED_INITS:
        return f"init_lora_weights: {values['init_lora_weights']}"
    known = {*LORA_SETTINGS, *IGNORED_SETTINGS, "bias", "init_lora_weights"}
    return next((f"{name}: {value}" for name, value in values.items() if name not in known and value), "")


def find_invalid_setting(values: Mapping[str, Any]) -> str:
    """Return the problem of a setting whose value peft could not use; an empty string without one."""
    for name, kind in {**LORA_SETTINGS, "modules_to_save": list[str]}.items():
        value = values.get(name)
        try:
            TypeAdapter(kind | None).validate_python(value, strict=True)
        except ValidationError:
            return f"its {name} is {value!r}"[:200]
    return ""


SCORE_HEAD_FILE = "score.safetensors"
"""File with the head of a reward model next to a base model's files."""


def has_score_head(path: str | None, architectures: Sequence[str] | None) -> bool:
    """Return True where the architectures of a config, or a head in the folder, show a trained reward model."""
    adapter = read_adapter(path)
    return (
        any(str(name).endswith("ForSequenceClassification") for name in architectures or ())
        or (Path(path or "").expanduser() / SCORE_HEAD_FILE).is_file()
        or (adapter is not None and "score" in adapter.modules_to_save)
    )


TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "tekken.json", "processor_config.json",
)  # fmt: skip
"""Every folder that transformers reads a tokenizer from holds at least one of them."""


def find_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that a tokenizer may be read from."""
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return named + [file for pattern in ("*.tiktoken", "*.spm", "tokenizer.model.v*") for file in folder.glob(pattern)]


def find_tokenizer_place(model: ModelConfig) -> tuple[str | None, str | None]:
    """Return the folder or hub id with the tokenizer of `model.path`, and its revision.

    For an adapter, that is its own folder if it holds a tokenizer, else its base model's.
    """
    adapter = read_adapter(model.path)
    if adapter is None or find_tokenizer_files(adapter.folder):
        return model.path, model.revision
    return adapter.base_model, adapter.revision
