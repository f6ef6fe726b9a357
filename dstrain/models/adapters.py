"""LoRA adapters: added, loaded, merged into base weights, also under ZeRO-3."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dstrain.config.schema import LoraConfig
from dstrain.errors import Fault, RecipeError, first_names
from dstrain.models.folder import (
    ADAPTER_CONFIG,
    DOWNLOAD_FIX,
    LORA_SETTINGS,
    METADATA_SETTINGS,
    Adapter,
    find_invalid_setting,
    find_unsupported_setting,
    read_json_object,
)
from dstrain.models.params import assign, full_shape, gathered, is_source_rank
from dstrain.models.quantization import preload_bitsandbytes
from dstrain.models.weights import LazyTensor, open_tensors

if TYPE_CHECKING:
    import torch
    from peft import PeftModel
    from transformers import PreTrainedModel


def add_adapters(
    model: torch.nn.Module, lora: LoraConfig, heads: Sequence[str], seed: int, revision: str | None = None
) -> PeftModel:
    """Wrap the model with adapters initialized from the seed. All but them and the new `heads` is frozen.

    `revision`: of a base model on the Hub, which the saved adapter names.

    LoRA (Hu et al., arXiv 2106.09685, section 4.1): W x + alpha / rank * B A x, with B initially zero; rsLoRA
    (Kalajdzievski, arXiv 2312.03732): alpha / sqrt(rank). DoRA (Liu et al., arXiv 2402.09353, eq. 5) also trains
    the norm of W's columns. Raises RecipeError where a name in `lora.targets` is no module's. Collective under ZeRO-3.
    """
    import torch

    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model

    modules, parameters = _split_targets(model, lora.targets)
    suggestion = _suggest_targets(model)
    module_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    settings = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        use_dora=lora.dora,
        use_rslora=lora.use_rslora,
        modules_to_save=[name for name in heads if name in module_names] or None,
    )
    # Right before peft draws the A matrices: nothing drawn earlier changes them.
    torch.manual_seed(seed)
    try:
        with expected_warnings_hidden():
            wrapped = get_peft_model(model, settings, autocast_adapter_dtype=False, revision=revision)
    except ValueError as error:
        problem = f"{lora.targets!r}: {str(error).split('. ')[0]}"
        if "ParamWrapper" in problem:
            problem = f"{lora.targets!r} adapts experts, which is not possible with dropout or dora"
            suggestion = "remove dropout and dora, or list modules outside the experts, such as q_proj and v_proj"
        raise RecipeError(Fault("model.lora.targets", problem, suggestion)) from error
    _cast_as_shards(wrapped)
    return wrapped


EXPECTED_WARNINGS: tuple[tuple[str, type[Warning]], ...] = (
    # It uses them: experts are parameters, and the patterns are compared with modules.
    ("The following (rank|alpha)_pattern keys did not match", RuntimeWarning),
    # `merge_adapters` unties the two before it merges.
    ("Model (has|with) `tie_word_embeddings=True`", UserWarning),
    # The recipe names them as targets.
    ("Setting `save_embedding_layers` to `True`", UserWarning),
    # transformers 6 renames is_gradient_checkpointing.
    ("", FutureWarning),
)
"""Beginnings of peft's warnings about what is meant here, or done."""


@contextmanager
def expected_warnings_hidden() -> Iterator[None]:
    """Hide EXPECTED_WARNINGS inside."""
    with warnings.catch_warnings():
        for message, category in EXPECTED_WARNINGS:
            warnings.filterwarnings("ignore", message, category)
        yield


def _split_targets(model: torch.nn.Module, targets: str | list[str]) -> tuple[str | list[str], list[str]]:
    """Return the targets that are modules, and those that are parameters: the weights of experts are no modules.

    Raises RecipeError with each name that is neither. peft takes a list in which one of the names matches.
    """
    if isinstance(targets, str):  # all-linear or a regular expression: peft refuses one that matches nothing
        return targets, []

    def match(names: Iterable[str]) -> set[str]:
        return {target for name in names for target in targets if name == target or name.endswith(f".{target}")}

    modules, parameters = (
        match(name for name, _ in named) for named in (model.named_modules(), model.named_parameters())
    )
    if unknown := [target for target in targets if target not in modules | parameters]:
        problem = f"{first_names(unknown)} {'is' if len(unknown) == 1 else 'are'} not in the model"
        raise RecipeError(Fault("model.lora.targets", problem, _suggest_targets(model)))
    return [one for one in targets if one in modules], [one for one in targets if one not in modules]


def _suggest_targets(model: torch.nn.Module) -> str:
    import torch
    from transformers.pytorch_utils import Conv1D

    kinds = torch.nn.Linear | torch.nn.Embedding | Conv1D
    names = {name.rpartition(".")[2] for name, part in model.named_modules() if isinstance(part, kinds)}
    names |= {name.rpartition(".")[2] for name, value in model.named_parameters() if value.ndim == 3}  # of experts
    return f"these would match: {', '.join(sorted(names))}"


def continue_adapter(
    model: torch.nn.Module, adapter: Adapter, heads: Sequence[str], dropout: float, seed: int
) -> PeftModel:
    """Wrap the model with the adapter of a folder, to train it on. All but it and the `heads` is frozen.

    Heads that the adapter's file does not hold are those of the model. `seed`: of the values that peft draws before
    they are replaced. Raises RecipeError where the adapter does not fit. Collective under ZeRO-3.
    """
    import torch

    module_names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    saved = [*adapter.modules_to_save, *(name for name in heads if name in module_names)]
    more = {"lora_dropout": dropout, "modules_to_save": [*dict.fromkeys(saved)] or None}
    torch.manual_seed(seed)
    wrapped, tensors = _match_tensors(model, adapter, more, heads)
    _cast_as_shards(wrapped)
    for target, stored in tensors:
        assign(target, stored.read)
    return cast("PeftModel", wrapped)


def add_reference_adapter(model: Any, adapter: Adapter) -> None:
    """Add the adapter of a folder to a PeftModel once more, frozen: the initial policy. Collective under ZeRO-3.

    `use_reference` computes with it.
    """
    from peft import get_peft_model_state_dict

    requires_grad = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    model.add_adapter(REFERENCE_ADAPTER, model.peft_config["default"], autocast_adapter_dtype=False)
    _cast_as_shards(model)
    state = model.state_dict(keep_vars=True)
    targets = get_peft_model_state_dict(model, state, REFERENCE_ADAPTER, save_embedding_layers=False)
    stored = open_tensors([adapter.weights_file])
    for name, target in sorted(targets.items()):
        assign(target, stored[name].read if name in stored else None)
    for name, parameter in model.named_parameters():  # add_adapter makes the new one trainable
        parameter.requires_grad_(requires_grad.get(name, False))


def _cast_as_shards(model: torch.nn.Module) -> None:
    """Give whole parameters the dtype of the sharded ones, where there are any.

    At stages 0 to 2 DeepSpeed casts adapters to the run's dtype. At stage 3 it does not, and peft does but for those of
    4-bit layers.
    """
    whole = [parameter for parameter in model.parameters() if not hasattr(parameter, "ds_id")]
    sharded = next((parameter for parameter in model.parameters() if hasattr(parameter, "ds_id")), None)
    if sharded is not None:
        for parameter in whole:
            parameter.data = parameter.data.to(sharded.dtype)


REFERENCE_ADAPTER = "reference"
"""Name of the adapter of `add_reference_adapter` in a PeftModel."""


@contextmanager
def use_reference(model: Any) -> Iterator[None]:
    """Run the model (a PeftModel) as it was before training: without adapters, or with REFERENCE_ADAPTER.

    Leaves `requires_grad` unchanged. peft's own `disable_adapter` makes every adapter trainable on exit, also those
    that `model.freeze` froze (peft/tuners/tuners_utils.py, `enable_adapters` and `set_adapter`).
    """
    saved = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    if REFERENCE_ADAPTER in model.peft_config:
        model.set_adapter(REFERENCE_ADAPTER, inference_mode=True)
        yield
        model.set_adapter("default")
    else:
        with model.disable_adapter():
            yield
    for parameter, requires_grad in saved:
        parameter.requires_grad_(requires_grad)


STATE_DICT_PREFIX = "base_model.model."
"""Prefix of every key in an adapter's file."""


def load_adapters(model: Any, folder: Path) -> Any:
    """Load the adapters of an exported folder onto the model with peft. Raises RecipeError.

    peft gets only known settings: others in adapter_config.json may name modules that it would import.
    """
    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import PeftModel

    values = read_json_object(folder / ADAPTER_CONFIG, str(folder))
    if problem := find_invalid_setting(values):
        raise RecipeError(Fault(str(folder / ADAPTER_CONFIG), problem, DOWNLOAD_FIX))
    if setting := find_unsupported_setting({**values, "bias": "none", "init_lora_weights": True}):
        problem = f"its {setting} is not supported here"
        raise RecipeError(Fault(str(folder), problem, "merge it with peft's merge_and_unload"))
    settings = {
        name: value
        for name, value in values.items()
        if name in {*LORA_SETTINGS, *METADATA_SETTINGS} and value is not None
    }
    with expected_warnings_hidden():
        return PeftModel.from_pretrained(model, str(folder), config=PeftConfig(**settings))


def check_adapter(model: torch.nn.Module, adapter: Adapter, is_merged: bool) -> torch.nn.Module:
    """Return the model with the adapter, or, where it is to be merged, without; it may be on the meta device.

    Raises RecipeError where `merge_adapter` would.
    """
    wrapped, _ = _match_tensors(model, adapter)
    return cast("torch.nn.Module", wrapped.unload().requires_grad_(True) if is_merged else wrapped)


def merge_adapter(model: Any, adapter: Adapter) -> PreTrainedModel:
    """Add the adapter's update to the model's weights. Collective under ZeRO-3, which gathers one layer at a time."""
    requires_grad = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    wrapped, tensors = _match_tensors(model, adapter)
    for target, stored in tensors:
        assign(target, stored.read)
    merged = merge_adapters(wrapped)
    for parameter in merged.parameters():  # peft has frozen the base model
        parameter.requires_grad_(requires_grad.get(id(parameter), True))
    return merged


def _match_tensors(
    model: Any, adapter: Adapter, more: Mapping[str, Any] | None = None, heads: Sequence[str] = ()
) -> tuple[Any, list[tuple[torch.Tensor, LazyTensor]]]:
    """Return the model with new adapters, and the target of each tensor in the file with it. Raises RecipeError.

    `more`: settings for peft besides the folder's. `heads`: modules that the file need not hold.
    """
    preload_bitsandbytes()
    from peft import LoraConfig as PeftConfig
    from peft import get_peft_model, get_peft_model_state_dict

    stored = open_tensors([adapter.weights_file])
    named = dict(model.named_parameters())  # before peft renames them
    try:
        with expected_warnings_hidden():
            settings = PeftConfig(**_without_saved_modules(adapter), **(more or {}))
            autocast = more is None  # to merge in fp32
            wrapped = get_peft_model(
                model, settings, autocast_adapter_dtype=autocast, revision=None if autocast else adapter.revision
            )
    except (ValueError, TypeError) as error:
        no_targets = "Target modules" in str(error)
        reason = "the model has none of the modules that it adapts" if no_targets else str(error)
        raise _mismatch_error(adapter, reason) from error
    state = wrapped.state_dict(keep_vars=True)  # parameters: ZeRO-3 gathers them
    targets = get_peft_model_state_dict(wrapped, state, save_embedding_layers=False)
    saved = {name: named.get(_model_key(name)) for name in stored if name not in targets}  # modules_to_save
    new = {name for name in targets if name not in stored and {*_model_key(name).split(".")} & {*heads}}
    targets = {name: target for name, target in targets.items() if name not in new}
    missing = sorted(targets.keys() - stored.keys())
    unexpected = sorted(_model_key(name) for name, target in saved.items() if target is None)
    if missing or unexpected:
        keys = f"missing keys: {first_names(missing)}; unexpected keys: {first_names(unexpected)}"
        raise _mismatch_error(adapter, keys)
    targets |= cast("dict[str, torch.Tensor]", saved)
    for name, target in targets.items():
        if stored[name].shape != full_shape(target):
            shapes = f"{_model_key(name)} is {stored[name].shape} in its file and {full_shape(target)} in the model"
            raise _mismatch_error(adapter, shapes)
    # Sorted: the same order on every rank, as assign is collective.
    return wrapped, [(target, stored[name]) for name, target in sorted(targets.items())]


def _without_saved_modules(adapter: Adapter) -> dict[str, Any]:
    """Return the adapter's settings without targets that its file holds completely.

    For all-linear, peft lists a new head among the targets, but gives it no adapter where it is in `modules_to_save`.
    """
    settings, targets = dict(adapter.settings), adapter.settings.get("target_modules")
    if isinstance(targets, list):
        settings["target_modules"] = [name for name in targets if name not in adapter.modules_to_save]
    return settings


def _model_key(name: str) -> str:
    """Return the model's key for a key of the file; peft also saves the base layer of an adapted embedding."""
    return name.removeprefix(STATE_DICT_PREFIX).replace(".base_layer.", ".")


def _mismatch_error(adapter: Adapter, reason: str) -> RecipeError:
    problem = f"the adapter in {adapter.folder} does not fit the model to train: {reason}"
    fix = "name the folder of a model, or an adapter of a model of this architecture"
    return RecipeError(Fault("model.path", problem, fix))


def merge_adapters(model: PeftModel) -> PreTrainedModel:
    """Merge the adapters into the weights in place and return the base model. Collective under ZeRO-3.

    In place, because peft's safe_merge copies each weight. Two modules that share an adapted weight (tied embeddings)
    are untied first, as the merge would change the other one too. Raises RecipeError for these under ZeRO-3.
    """
    import torch

    tied, shards = _find_tied_parameters(model), any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    if tied and shards:
        problem = "the adapter changes tied embeddings, which cannot be untied under ZeRO-3"
        raise RecipeError(Fault("model.path", problem, "merge it first (dstrain export RUN --merge-lora --to DIR)"))
    for module, name, parameter in tied:
        # Untied: the merge would change the other module's weight too.
        module._parameters[name] = torch.nn.Parameter(parameter.detach().clone(), requires_grad=False)
    if tied:
        config = model.get_base_model().config
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            # Or the next load would tie them again, and lose one of the two.
            part.tie_word_embeddings = False
    return _merge_sharded(model) if shards else model.merge_and_unload()


def _merge_sharded(model: Any) -> PreTrainedModel:
    """Merge layer by layer: each is gathered, and changed by the rank whose values are partitioned again."""
    import torch
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in [module for module in model.modules() if isinstance(module, BaseTunerLayer)]:
        # Only this layer's own weights are complete at a time.
        base = layer.get_base_layer()
        with gathered(base.parameters(recurse=False), modify=True), torch.no_grad():
            if is_source_rank(next(base.parameters(recurse=False))):
                layer._move_adapter_to_device_of_base_layer("default")
                layer.merge()
    return model.unload()


def _find_tied_parameters(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str, torch.nn.Parameter]]:
    """Return (module, attribute, weight) of each module that shares an adapted weight with an earlier module."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module.get_base_layer() for module in model.modules() if isinstance(module, BaseTunerLayer)]
    adapted = {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}
    owners = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if id(parameter) in adapted
    ]
    firsts = {id(parameter): module for module, _, parameter in reversed(owners)}
    return [(module, name, parameter) for module, name, parameter in owners if firsts[id(parameter)] is not module]
