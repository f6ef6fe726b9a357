"""Checks of a model before training: folder, compatibility with packed batches, longest input."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.errors import MAX_NAMES, DataError, Fault, RecipeError, first_names, suggest_name
from dstrain.files import MAX_JSON_BYTES, parse_json, read_limited
from dstrain.models.adapters import add_adapters, check_adapter
from dstrain.models.attention.model_types import attends_both_ways, length_limit
from dstrain.models.folder import (
    ADAPTER_CONFIG,
    NON_CAUSAL_TYPES,
    Adapter,
    check_hub_code,
    check_hub_name,
    find_tokenizer_files,
    find_tokenizer_place,
    is_bidirectional,
    is_local_path,
    max_learned_positions,
    max_length_fault,
    missing_folder_fault,
    quantized_fault,
    read_adapter,
    revision_faults,
    wrong_size_fault,
)
from dstrain.models.init_weights import check_init
from dstrain.models.load_report import LoadReport, build_load_report, is_head_key, shape_fault
from dstrain.models.params import check_freeze_and_groups, components_by_id, freeze, trains_on_text
from dstrain.models.weights import check_weight_files

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel


LFS_POINTER = b"version https://git-lfs.github.com"
VISION_KEYS = (
    "vision_config",
    "vq_config",
    "vision_tower",
    "visual",
    "img_processor",
    "image_token_id",
    "image_token_index",
    "auto_map",
)
"""Keys of which a vision-language model's config.json has at least one."""


def check_model(config: RunConfig, *, can_generate: bool = False, needs_vision: bool = False) -> list[Fault]:
    """Return the faults of a recipe's model, found in config.json and the tokenizer's files; Hub ids are not checked.

    `can_generate`: the task's model writes text; `needs_vision`: it has to take images. A model that passes may still be
    rejected when transformers loads it.
    """
    model = config.model
    faults = revision_faults(model)
    if faults:
        return faults
    if model.path is None:
        return (
            []
            if model.config is None
            else _check_config(config, model.config, "model.config", can_generate, needs_vision)
        )
    try:
        adapter = read_adapter(model.path)
        base = model.path if adapter is None else adapter.base_model
        if (values := read_folder_config(base, "model.path")) is not None:
            faults += _check_config(config, values, "model.path", can_generate, needs_vision)
            faults += check_hub_code(values, base, "model.path", model.trust_remote_code)
            faults += _check_tokenizer(model)
            check_weight_files(model, open_pickles=False)
    except RecipeError as error:
        faults += error.faults
    return faults


def check_frozen_model(name: str, key: str, trust_remote_code: bool) -> list[Fault]:
    """Return the faults of the model that another recipe key names, found in its config.json."""
    try:
        return check_hub_code(read_folder_config(name, key), name, key, trust_remote_code)
    except RecipeError as error:
        return list(error.faults)


def read_folder_config(name: str, key: str) -> dict[str, Any] | None:
    """Return the config.json of a local folder; None for a Hub id. Raises RecipeError where it cannot be read."""
    folder = Path(name).expanduser()
    if not os.path.isdir(folder):
        if not is_local_path(name) and not os.path.exists(folder):
            check_hub_name(name, key)
            return None
        raise RecipeError(missing_folder_fault(name, key))
    file = folder / "config.json"
    try:
        data = read_limited(file, MAX_JSON_BYTES)
    except FileNotFoundError:
        raise RecipeError(_missing_config_fault(folder, name, key)) from None
    except OSError as error:
        fix = "correct its permissions, or give another folder"
        raise RecipeError(Fault(key, f"{file} cannot be read ({error.strerror or error})", fix)) from error
    if data.startswith(LFS_POINTER):
        raise RecipeError(_lfs_pointer_fault(file, key))
    try:
        values = parse_json(data)
    except ValueError as error:
        problem = f"{file} is not valid JSON ({error})"
        raise RecipeError(Fault(key, problem, "correct it, or download it again")) from error
    if not isinstance(values, dict):
        raise RecipeError(Fault(key, f"{file} holds no JSON object", "correct it, or download it again"))
    return values


def _lfs_pointer_fault(file: Path, key: str) -> Fault:
    return Fault(key, f"{file} is a Git LFS pointer, not the file itself", "run `git lfs pull` in its repository")


def _missing_config_fault(folder: Path, name: str, key: str) -> Fault:
    """Return the fault of a folder without config.json, by its other files."""
    if not os.access(folder, os.R_OK | os.X_OK):
        return Fault(key, f"'{name}' cannot be read (permission denied)", "correct its permissions")
    if (folder / ADAPTER_CONFIG).is_file():
        problem = f"'{name}' is an adapter, not a complete model"
        return Fault(key, problem, "merge it first (dstrain export RUN --merge-lora)")
    if (folder / "recipe.yaml").is_file() and (folder / "checkpoints").is_dir():
        fix = f"export it first: dstrain export {name} --to DIR, then name DIR"
        return Fault(key, f"'{name}' is a run folder, not an exported model", fix)
    if next(folder.glob("*.gguf"), None):
        problem = f"'{name}' holds GGUF files, which cannot be trained"
        return Fault(key, problem, "give the folder of the original model")
    return Fault(key, f"'{name}' holds no config.json", "give a folder that transformers can load")


def _check_config(
    config: RunConfig, values: Mapping[str, Any], key: str, can_generate: bool, needs_vision: bool
) -> list[Fault]:
    """Return the faults in a config.json, or in model.config."""
    model_type, model = values.get("model_type"), config.model
    if not isinstance(model_type, str) or not model_type:
        if "auto_map" in values:  # custom code need not have a model type
            return []
        problem = "has no model_type" if key == "model.config" else "has no model_type in its config.json"
        return [Fault(key, problem, "give a model of transformers, e.g. model_type: llama")]
    if key == "model.path" and not ("auto_map" in values and model.trust_remote_code) and not _is_known(model_type):
        return [_unknown_type_fault(model_type, values)]
    if fault := quantized_fault(values, key) or wrong_size_fault(values, key):
        return [fault]
    max_length, limit = config.data.max_length, max_learned_positions(values)
    faults = []
    if limit is not None and limit < max_length:
        faults.append(max_length_fault(max_length, limit))
    if can_generate and is_bidirectional(model_type, values.get("is_decoder")):
        faults.append(bidirectional_fault(key, model_type))
    has_vision = any(name in values for name in VISION_KEYS)
    if needs_vision and not has_vision and _is_text_only(model_type):
        faults.append(text_only_fault(key, model_type, f"task {config.task}"))
    return faults


def bidirectional_fault(key: str, model_type: str) -> Fault:
    """Return the fault of an encoder where a generative model is needed."""
    where = "model.config.is_decoder: true" if key == "model.config" else '"is_decoder": true in its config.json'
    problem = f"a {model_type} model attends in both directions, so it would see the tokens that it has to predict"
    return Fault(key, problem, f"set {where}, or use a causal language model (Llama, Qwen, GPT-2 …)")


def text_only_fault(key: str, model_type: str, needed_by: str) -> Fault:
    """Return the fault of a text-only model where a task or an option needs a vision-language model."""
    problem = f"{model_type} is a text-only model; {needed_by} needs a vision-language model"
    return Fault(key, problem, "name one (LLaVA, Gemma 3, Idefics 3, Qwen2.5-VL …), or use task sft")


def _family_folder(model_type: str) -> Path | None:
    """Return transformers' folder of a model type, found without importing transformers; None where it has none."""
    spec = importlib.util.find_spec("transformers")
    if (
        spec is None
        or spec.origin is None
        or not model_type.isascii()
        or not model_type.replace("-", "_").isidentifier()
    ):
        return None
    folder = Path(spec.origin).parent / "models" / model_type.replace("-", "_")
    return folder if folder.is_dir() else None


def _is_known(model_type: str) -> bool:
    """Return True where transformers has the model type. Imports transformers (2 s) only for one without a folder."""
    if _family_folder(model_type) is not None:
        return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    return model_type in CONFIG_MAPPING_NAMES


def _unknown_type_fault(model_type: str, values: Mapping[str, Any]) -> Fault:
    from transformers import __version__
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    problem = f"its config.json has model_type '{model_type}', which transformers {__version__} does not know"
    if "auto_map" in values:
        fix = "set model.trust_remote_code: true if you trust the Python code that comes with it"
        return Fault("model.path", problem, fix)
    near = suggest_name(model_type, [*CONFIG_MAPPING_NAMES])
    return Fault("model.path", problem, near if near.startswith("did you mean") else "install a newer transformers")


def _is_text_only(model_type: str) -> bool:
    """Return True for a model type without an image processor."""
    folder = _family_folder(model_type)
    return folder is not None and not [*folder.glob("processing_*.py"), *folder.glob("image_processing_*.py")]


def _check_tokenizer(model: ModelConfig) -> list[Fault]:
    """Return the faults of the tokenizer's files, if they are in a local folder."""
    if isinstance(model.processor, str):
        return _check_tokenizer_files(model.processor, "model.processor")
    if model.tokenizer is not None:
        return _check_tokenizer_files(model.tokenizer, "model.tokenizer") if isinstance(model.tokenizer, str) else []
    return _check_tokenizer_files(find_tokenizer_place(model)[0] or "", "model.path")


def _check_tokenizer_files(name: str, key: str) -> list[Fault]:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    fix = "set model.tokenizer (for a vision-language model, model.processor) to a folder or hub id that has one"
    files = find_tokenizer_files(folder)
    if not files:
        return [Fault(key, f"there is no tokenizer in '{name}'", fix)]
    for file in files:
        try:
            with file.open("rb") as opened:
                start = opened.read(len(LFS_POINTER))
        except OSError as error:
            return [Fault(key, f"{file} cannot be read ({error.strerror})", "correct its permissions")]
        if start == LFS_POINTER:
            return [_lfs_pointer_fault(file, key)]
        if not start:
            return [Fault(key, f"{file} is empty", f"download it again, or {fix}")]
    return []


def check_positions(model: torch.nn.Module, config: PretrainedConfig, max_length: int) -> None:
    """Raise RecipeError where `max_length` exceeds the model's learned positions. The model may be on the meta device.

    A longer sequence would end the run with an index out of range, on a GPU as an assert in some later kernel.
    """
    limit = max_positions(model, config)
    if limit is not None and limit < max_length:
        raise RecipeError(max_length_fault(max_length, limit))


def max_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """Return the number of tokens with learned positions; None for a model without a position table.

    Tables are embeddings of the text decoder with a position name (`wpe`, `position_embeddings`, `embed_positions`).
    OPT and BART reserve leading rows (`offset`), RoBERTa's positions start after its pad token, and Nystromformer has
    two rows more than its config says. GPT-J's table is a buffer.
    """
    text = config.get_text_config()
    if "rotary" in str(getattr(text, "position_embedding_type", "")):  # ESM has a table but does not use it
        return None
    sizes = [size for size in _iter_table_sizes(model) if size > 0]
    configured = getattr(text, "max_position_embeddings", None)
    if sizes and isinstance(configured, int) and 0 < configured < min(sizes):
        sizes.append(configured)
    return min(sizes, default=None)


def _iter_table_sizes(model: torch.nn.Module) -> Iterator[int]:
    """Yield the usable rows of each position table of the text decoder."""
    import torch

    components = components_by_id(model)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or not _is_position_table(name):
            continue
        # A vision tower has positions too, of patches.
        if components and components.get(id(module.weight)) != "language":
            continue
        # RoBERTa counts positions from the id after its pad token's.
        reserved = 0 if module.padding_idx is None else module.padding_idx + 1
        yield module.num_embeddings - reserved - int(getattr(module, "offset", 0) or 0)
    for name, buffer in model.named_buffers():
        if not components and _is_position_table(name) and buffer.dim() == 2 and buffer.is_floating_point():
            yield buffer.shape[0]


def _is_position_table(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "wpe" or ("pos" in last and "rel" not in last)


def check_length_dependent(config: PretrainedConfig, recipe: RunConfig, rows_per_sample: int) -> None:
    """Raise RecipeError where a row's rotary positions would depend on the other rows of its batch.

    longrope takes the long or the short factors for a whole batch, by its longest row; dynamic NTK keeps those of the
    longest row that it has seen.
    """
    found = length_limit(config)
    if found is None or recipe.data.max_length <= found[1]:
        return
    alone = found[0] == "longrope" and recipe.batch.micro == 1 and recipe.batch.tokens_per_micro is None
    if alone and rows_per_sample == 1:
        return
    how = "the longest row of a batch" if found[0] == "longrope" else "the longest row that was seen"
    problem = (
        f"is {recipe.data.max_length}, and the model's {found[0]} positions depend on {how} above {found[1]} tokens"
    )
    other = ", or set batch.micro to 1" if found[0] == "longrope" and rows_per_sample == 1 else ""
    raise RecipeError(Fault("data.max_length", problem, f"lower it to {found[1]}{other}"))


def rope_length_warning(config: PretrainedConfig, max_length: int) -> str:
    """Return a warning where `max_length` exceeds the trained range of rotary positions; else an empty string."""
    text = config.get_text_config()
    trained = getattr(text, "max_position_embeddings", None)
    if getattr(text, "rope_parameters", None) is None or not isinstance(trained, int) or not 0 < trained < max_length:
        return ""
    return (
        f"data.max_length is {max_length}, and the model's rotary positions were trained up to {trained} tokens "
        f"(max_position_embeddings): longer sequences work, but with lower quality at first"
    )


_EOS_HEAD_TYPES = ("bart", "bigbird_pegasus", "led", "mbart", "mvp", "plbart")
"""Encoder-decoders whose classification head reads the last EOS token of each row, and counts them."""


@dataclass
class ModelValidator:
    """Validator of a recipe's model and weight files for a task. `check` runs once, before training starts."""

    recipe: RunConfig
    heads: Sequence[str]
    """Names of modules that may be new."""
    can_generate: bool
    """True for a task whose model generates text."""
    warnings: Sequence[str] = ()
    """Warnings about positions beyond the trained range, missing keys, and unexpected keys of the model's body."""
    newly_initialized: Sequence[str] = ()
    """Keys of new heads."""
    info_messages: Sequence[str] = ()
    """Messages about new heads and merged adapters."""

    def check(self, meta_model: PreTrainedModel) -> None:
        """Raise RecipeError where the model does not fit. `meta_model`: on the meta device; it gets the run's adapters."""
        config, adapter = meta_model.config, read_adapter(self._model.path)
        key, type_key = ("model.path",) * 2 if self._model.path else ("model.config", "model.config.model_type")
        fix = "use a causal language model (Llama, Qwen, GPT-2 …)"
        if self.can_generate:
            if is_bidirectional(config.model_type, getattr(config, "is_decoder", None)):
                raise RecipeError(bidirectional_fault(key, config.model_type))
            problem = f"{config.model_type} models see the tokens that they have to predict"
            if config.model_type in NON_CAUSAL_TYPES:
                raise RecipeError(Fault(type_key, problem, fix))
            # Of models with images, such as PaliGemma, the prompt alone attends to later tokens.
            if not hasattr(config, "vision_config") and attends_both_ways(config):
                problem += " with use_bidirectional_attention, or is_causal: false"
                raise RecipeError(Fault(key, problem, fix))
        elif config.model_type in _EOS_HEAD_TYPES:
            problem = f"the score of a {config.model_type} model needs rows with equally many EOS tokens"
            raise RecipeError(Fault(type_key, problem, fix))
        from dstrain.models.router_loss import check_router_loss

        check_router_loss(meta_model, self._model.router_aux_loss_coef)
        check_positions(meta_model, config, self.recipe.data.max_length)
        self._check_files(meta_model)
        if self._model.init is not None:
            check_init(meta_model, self._model.init)
        lora, model = self._model.lora, meta_model
        if adapter is not None:
            model = check_adapter(model, adapter, is_merged=lora is None or lora.create_new_adapter)
        if lora is not None and lora.create_new_adapter:
            model = add_adapters(model, lora, self.heads, self.recipe.seed)
        check_freeze_and_groups(model, self.recipe)  # with the names of adapters

    @property
    def _model(self) -> ModelConfig:
        return self.recipe.model

    def _check_files(self, meta_model: PreTrainedModel) -> None:
        report = None if self._model.path is None else build_load_report(meta_model, self._model)
        report = report or LoadReport((), (), ())
        if faults := [shape_fault(one, self.heads) for one in report.mismatched[:MAX_NAMES]]:
            raise RecipeError(faults)
        missing = [name for name in report.missing if not is_head_key(name, self.heads)]
        total = len({id(tensor) for tensor in meta_model.state_dict(keep_vars=True).values()})
        layers = [name for name in missing if re.search(r"\.\d+\.", name)]
        # With a new head a few missing weights next to it (a pooler, a norm) are only worth a warning.
        if self._model.init is None and missing and (not self.heads or layers or len(missing) > total / 2):
            raise RecipeError(self._missing_weights_fault(meta_model, missing))
        too_long = rope_length_warning(meta_model.config, self.recipe.data.max_length)
        self.warnings = [*filter(None, [too_long]), *self._iter_warnings(meta_model, report, missing)]
        adapter = read_adapter(self._model.path)
        saved = () if adapter is None else adapter.modules_to_save
        if self._model.init is None:
            self.newly_initialized = [
                name for name in report.missing if is_head_key(name, self.heads) and not is_head_key(name, saved)
            ]
        self.info_messages = [*self._iter_info_messages(adapter)]

    def _iter_info_messages(self, adapter: Adapter | None) -> Iterator[str]:
        path = self._model.path
        if adapter is not None:
            lora = self._model.lora
            line = f"{path} is a LoRA adapter of {adapter.base_model}: it is "
            if lora is not None and not lora.create_new_adapter:
                yield f"{line}trained on (rank {lora.rank}, alpha {lora.alpha:g}), since model.lora.create_new_adapter is false"
                return
            line += "merged into these weights on loading"
            yield (
                line
                if lora is None
                else (f"{line}, and a new adapter is trained; model.lora.create_new_adapter: false trains this one on")
            )
        if self.newly_initialized:
            keys = f"{first_names(self.newly_initialized)} (the files of {path} have no such head)"
            yield f"newly initialized from seed {self.recipe.seed}: {keys}"

    def _missing_weights_fault(self, meta_model: PreTrainedModel, missing: Sequence[str]) -> Fault:
        architectures = ", ".join(meta_model.config.architectures or ()) or "none"
        keys = f"missing keys: {first_names(missing)}"
        problem = f"'{self._model.path}' does not hold all weights of a {type(meta_model).__name__} ({keys})"
        return Fault(
            "model.path", problem, f"use a model of this class (architectures in its config.json: {architectures})"
        )

    def _iter_warnings(self, meta_model: PreTrainedModel, report: LoadReport, missing: Sequence[str]) -> Iterator[str]:
        body, path = f"{meta_model.base_model_prefix}.", self._model.path
        unexpected = [name for name in report.unexpected if not self.heads or name.startswith(body)]
        if missing and self._model.init is None:
            yield f"missing keys in the files of {path}: {first_names(missing)}; newly initialized from the seed"
        if unexpected:
            yield f"unexpected keys in the files of {path}: {first_names(unexpected)}; ignored"


def check_trains_on_text(meta_model: PreTrainedModel, model: ModelConfig) -> None:
    """Raise DataError where no trainable parameter takes part in text-only samples. Freezes `meta_model`."""
    freeze(meta_model, model.freeze)
    if not trains_on_text(meta_model):
        problem = "no record has an image, and model.freeze leaves no parameter that text alone can train"
        raise DataError(Fault("data.train", problem, "give records with images, or freeze less"))
