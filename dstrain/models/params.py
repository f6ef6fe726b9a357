"""Parameters of a model: components, freezing, optimizer groups, gathering under ZeRO-3."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import sqrt
from typing import TYPE_CHECKING, Any, Literal, cast

from dstrain.config.schema import GroupConfig, OptimConfig, RunConfig
from dstrain.distributed.patches import (
    ask_cuda_for_free_memory,
    reuse_hpz_group,
    save_inputs_of_trained_weights,
    skip_shm_comm_build,
    skip_waits_for_local_weights,
)
from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    import torch


Component = Literal["vision", "projector", "language"]
COMPONENTS: tuple[Component, ...] = ("vision", "projector", "language")

VISION_TOWER_NAMES = (
    "vision_tower",
    "visual",
    "vision_model",
    "vision_encoder",
    "image_tower",
    "image_encoder",
    "video_tower",
)
"""Attributes of a base model that hold its vision tower, in transformers' families."""
DECODER_NAMES = ("language_model", "text_model", "text_decoder")
"""Attributes of a base model that hold its text decoder."""
PROJECTOR_WORDS = ("merger", "project", "connector", "aligner", "perceiver", "qformer")
"""Words in the names of projector modules inside a tower or next to the decoder."""
EXCLUDED_WORDS = ("audio",)
"""Words in the names of modules that belong to no component."""


def unwrap_peft(model: Any) -> Any:
    """Return the model inside a PeftModel; any other model as it is."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def components_by_id(model: torch.nn.Module) -> dict[int, Component]:
    """Return id of a parameter -> its component; an empty dict for a text-only model.

    Only the part that transformers calls the base model is divided: `vision` is the tower (`get_encoder("image")`)
    without the merger that Qwen's towers contain; `language` the decoder and the embeddings at both ends, tied or not;
    `projector` the rest. A new head outside, such as a reward model's, belongs to no component. Adapters belong to the
    component of the module they adapt. Parameters may be on the meta device, or sharded.
    """
    core: Any = unwrap_peft(model)
    body = getattr(core, "base_model", core)
    towers = list(_find_vision_towers(core, body))
    if not towers:
        return {}
    components: dict[int, Component] = {}
    excluded = {
        id(parameter)
        for name, child in body.named_children()
        if _contains_any(name, EXCLUDED_WORDS)
        for parameter in child.parameters()
    }
    # From the general to the special: each assignment overrides the ones before.
    _assign_component(components, "projector", [body])
    _assign_component(components, "language", [*_find_decoders(core, body, towers), *_find_embeddings(core)])
    _assign_component(components, "vision", towers)
    mergers = [
        child for tower in towers for name, child in tower.named_children() if _contains_any(name, PROJECTOR_WORDS)
    ]
    # Qwen's merger is inside the tower, but belongs to the projector.
    _assign_component(components, "projector", mergers)
    return {key: component for key, component in components.items() if key not in excluded}


def components_by_name(model: torch.nn.Module, trainable_only: bool = False) -> dict[str, str | None]:
    """Return name of a parameter, as in a model without adapters -> its component, None where it has none."""
    known = components_by_id(model)
    return {
        name: known.get(id(parameter))
        for name, parameter in unwrap_peft(model).named_parameters()
        if parameter.requires_grad or not trainable_only
    }


def _assign_component(components: dict[int, Component], component: Component, modules: list[torch.nn.Module]) -> None:
    """Set the component of every parameter of the modules; a later call overrides an earlier one."""
    components.update((id(parameter), component) for module in modules for parameter in module.parameters())


def _contains_any(name: str, words: tuple[str, ...]) -> bool:
    return any(word in name for word in words)


def _find_vision_towers(core: Any, body: Any) -> Iterator[torch.nn.Module]:
    towers = [getattr(body, name) for name in VISION_TOWER_NAMES if _is_module(getattr(body, name, None))]
    if not towers and hasattr(core, "get_encoder") and hasattr(core, "config"):
        encoder = core.get_encoder("image")  # returns the model itself where it has none
        towers = [encoder] if _is_module(encoder) and encoder not in (core, body) else []
    yield from towers


def _find_decoders(core: Any, body: Any, towers: list[Any]) -> Iterator[torch.nn.Module]:
    """Yield the decoder; where the base model is itself the decoder, its children other than towers and projectors."""
    named = [getattr(body, name) for name in DECODER_NAMES if _is_module(getattr(body, name, None))]
    if named:
        yield from named[:1]
        return
    decoder = core.get_decoder() if hasattr(core, "get_decoder") else None
    if _is_module(decoder) and decoder not in (core, body):
        yield decoder
        return
    yield from (
        child
        for name, child in body.named_children()
        if child not in towers and not _contains_any(name, PROJECTOR_WORDS)
    )


def _find_embeddings(core: Any) -> Iterator[torch.nn.Module]:
    for end in ("get_input_embeddings", "get_output_embeddings"):
        embedding = getattr(core, end)() if hasattr(core, end) else None
        if _is_module(embedding):
            yield embedding


def _is_module(value: Any) -> bool:
    import torch

    return isinstance(value, torch.nn.Module)


def matches_pattern(name: str, pattern: str) -> bool:
    """Return True where the pattern is one part of the dotted name, or a glob for the name or for one of its prefixes.

    `embed_tokens`, `model.layers.0`, `*.embed_tokens` and `model.layers.*.mlp` all match parameters inside.
    """
    parts = name.split(".")
    return pattern in parts or any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def is_selected(name: str, component: str | None, pattern: str) -> bool:
    """Return True where a pattern selects a parameter by its name or by its component."""
    return pattern == component or matches_pattern(name, pattern)


def check_patterns(components: Mapping[str, str | None], patterns: Iterable[str], key: str) -> None:
    """Raise RecipeError, one fault per pattern, for patterns that match no parameter.

    `components`: parameter name -> its component, None in a text-only model. `key`: the recipe key of the patterns.
    """
    prefixes = sorted({".".join(name.split(".")[:2]) for name in components})
    fix = f"names here begin with {', '.join(prefixes[:12])}"
    present = [component for component in COMPONENTS if component in components.values()]
    fix += f", and the model's components are {', '.join(present)}" if present else ""
    faults = [
        Fault(f"{key} '{pattern}'", "matches no parameter", fix)
        for pattern in patterns
        if not any(is_selected(name, component, pattern) for name, component in components.items())
    ]
    if faults:
        raise RecipeError(faults)


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Set `requires_grad` to False for matching parameters. Raises RecipeError where no trainable parameter is left."""
    components = components_by_name(model)
    check_patterns(components, patterns, "model.freeze")
    for name, parameter in unwrap_peft(model).named_parameters():
        if any(is_selected(name, components[name], pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    # An optimizer without parameters fails later, with an unclear message.
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Fault("model.freeze", "leaves no parameter to train", "freeze less"))


def trains_on_text(model: torch.nn.Module) -> bool:
    """Return True where a trainable parameter takes part in a forward pass without images."""
    return any(part in (None, "language") for part in components_by_name(model, trainable_only=True).values())


def is_zero3(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the DeepSpeed JSON sets ZeRO stage 3."""
    return bool(ds_config.get("zero_optimization", {}).get("stage", 0) == 3)


def init_deepspeed() -> None:
    """Let DeepSpeed use the existing process group. Collective."""
    import deepspeed

    # Before `init_distributed`, which would compile the op.
    skip_shm_comm_build()
    ask_cuda_for_free_memory()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


_ZERO3_CONFIG: ContextVar[Any] = ContextVar("_ZERO3_CONFIG", default=None)


def get_zero3_config() -> Any:
    """Return transformers' HfDeepSpeedConfig inside `zero3_init` at stage 3; else None."""
    return _ZERO3_CONFIG.get()


@contextmanager
def zero3_init(ds_config: Mapping[str, Any]) -> Iterator[None]:
    """Context in which transformers builds and loads models in shards if the JSON sets stage 3.

    Rank 0 alone reads the weight files; no rank ever holds a full copy of the model.
    """
    if not is_zero3(ds_config):
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    if ds_config["zero_optimization"].get("zero_hpz_partition_size", 1) > 1:
        reuse_hpz_group()
    init_deepspeed()  # without it zero.Init assumes one process, and rejects the batch of several
    save_inputs_of_trained_weights()
    skip_waits_for_local_weights()
    told = HfDeepSpeedConfig(dict(ds_config))  # transformers keeps only a weak reference
    token = _ZERO3_CONFIG.set(told)
    try:
        yield
    finally:
        _ZERO3_CONFIG.reset(token)
        unset_hf_deepspeed_config()


@contextmanager
def gathered(parameters: Iterable[torch.nn.Parameter], modify: bool = False) -> Iterator[None]:
    """Gather the complete parameters on every rank inside; with `modify`, rank 0's changes are kept. Collective."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=0 if modify else None):
        yield


def assign(tensor: torch.Tensor, read: Callable[[], torch.Tensor] | None) -> None:
    """Copy the result of `read` into a parameter or buffer; None changes nothing. Shards get rank 0's. Collective."""
    import torch

    # Every rank enters, also one that has nothing to copy: gathering is collective.
    with gathered([cast("torch.nn.Parameter", tensor)], modify=True), torch.no_grad():
        if read is not None and is_source_rank(tensor):
            tensor.copy_(read())


def is_source_rank(tensor: torch.Tensor) -> bool:
    """Return True if this process's values are kept when the tensor is partitioned again."""
    if not hasattr(tensor, "ds_id"):
        return True
    import deepspeed

    return bool(deepspeed.comm.get_rank(group=tensor.ds_process_group) == 0)


def full_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the complete tensor, sharded or not."""
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def full_numel(parameter: torch.nn.Parameter) -> int:
    """Return the number of elements of the complete parameter, sharded or not, quantized or not."""
    quant_state = getattr(parameter, "quant_state", None)
    if quant_state is not None:  # in 4 bits, with two values in a byte
        return int(quant_state.shape.numel())
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay."""

    params: list[torch.nn.Parameter]
    lr_scale: float
    """Factor on the run's learning rate."""
    weight_decay: float
    use_muon: bool = False
    """True for matrices that Muon updates; its other groups are updated by AdamW."""


def check_freeze_and_groups(model: torch.nn.Module, recipe: RunConfig) -> None:
    """Raise RecipeError where model.freeze or optim.groups do not fit the model, which may be on the meta device."""
    freeze(model, recipe.model.freeze)
    build_param_groups(model, recipe.optim)


def build_param_groups(model: torch.nn.Module, optim: OptimConfig) -> list[ParamGroup]:
    """Group the trainable parameters by learning rate and weight decay; the first matching recipe group counts.

    Biases and norms get no weight decay (`can_decay`). With Muon, the hidden matrices form groups of their own.
    Raises RecipeError for a pattern or a group's setting that changes nothing, and where Muon finds no trainable hidden
    matrix.
    """
    named = unwrap_peft(model).named_parameters()
    trainable = [(name, parameter) for name, parameter in named if parameter.requires_grad]
    components = components_by_name(model, trainable_only=True)
    check_patterns(components, optim.groups, "optim.groups")
    matrices = muon_param_ids(model) if optim.name == "muon" else frozenset()
    _check_group_effects(trainable, components, optim, matrices)
    groups: dict[tuple[float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable:
        group, lr = find_group_and_lr(name, components[name], optim, len(full_shape(parameter)))
        decay = optim.weight_decay if group is None or group.weight_decay is None else group.weight_decay
        # As a factor, so that one schedule sets the rates of all groups.
        scale = 1.0 if lr is None else lr / optim.peak_lr if optim.peak_lr else 0.0
        use_muon = id(parameter) in matrices and (group is None or group.muon)
        if not can_decay(name, parameter):
            decay = 0.0
        elif use_muon:
            factor = muon_lr_factor(parameter)
            scale, decay = scale * factor, decay / factor  # a step decays by rate times decay, as for AdamW
        groups.setdefault((scale, decay, use_muon), []).append(parameter)
    if optim.name == "muon" and not any(use_muon for _, _, use_muon in groups):
        problem = "muon finds no trainable hidden matrix, so it would be the same as adamw"
        raise RecipeError(Fault("optim.name", problem, "write adamw, or freeze less"))
    return [ParamGroup(params, *key) for key, params in groups.items()]


def can_decay(name: str, parameter: torch.Tensor) -> bool:
    """Return False for biases and norms, as HF Trainer: parameters of one dimension, and biases of stacked experts."""
    return len(full_shape(parameter)) >= 2 and not name.endswith("bias")  # not .shape: ZeRO-3 flattens the parameter


def _check_group_effects(
    trainable: Sequence[tuple[str, torch.nn.Parameter]],
    components: Mapping[str, str | None],
    optim: OptimConfig,
    matrices: Collection[int],
) -> None:
    """Raise RecipeError, one fault each, for groups and their settings that change no parameter."""
    patterns = [*optim.groups]
    matches: dict[str, list[str]] = {}
    for name, _ in trainable:
        matches[name] = [pattern for pattern in patterns if is_selected(name, components[name], pattern)]
    faults = []
    for pattern, group in optim.groups.items():
        taken = [(name, parameter) for name, parameter in trainable if matches[name][:1] == [pattern]]
        place = f"optim.groups '{pattern}'"
        if not taken:
            problem = "has no effect: earlier groups take all of its parameters, and the first one counts"
            faults.append(Fault(place, problem, "put it before them, or remove it"))
            continue
        if group.weight_decay and not any(can_decay(name, parameter) for name, parameter in taken):
            problem = f"weight_decay {group.weight_decay:g} has no effect: it takes biases and norms alone, which do not decay"
            faults.append(Fault(place, problem, "leave weight_decay out"))
        if not group.muon and not any(id(parameter) in matrices for _, parameter in taken):
            problem = "muon: false has no effect: none of its parameters would be optimized with Muon"
            faults.append(Fault(place, problem, "leave muon out"))
        is_empty = group.lr is None and group.weight_decay is None and group.muon
        if is_empty and all(len(matches[name]) == 1 for name, _ in taken):  # else it keeps them from later groups
            faults.append(Fault(place, "sets nothing", "give it lr or weight_decay, or remove it"))
    if faults:
        raise RecipeError(faults)


def find_group_and_lr(
    name: str, component: str | None, optim: OptimConfig, dimensions: int
) -> tuple[GroupConfig | None, float | None]:
    """Return a parameter's recipe group and its peak learning rate; None means the run's rate, known later.

    `dimensions`: of its shape. With LoRA+ (Hayou et al., arXiv 2402.12354) the rate of B and, as in peft's
    `create_loraplus_optimizer`, of parameters of one dimension is `loraplus_lr_ratio` times the other one.
    """
    group = next((group for pattern, group in optim.groups.items() if is_selected(name, component, pattern)), None)
    lr = optim.lr if group is None or group.lr is None else group.lr
    if optim.loraplus_lr_ratio is None or lr is None:
        return group, lr
    if "lora_embedding_" in name:
        return group, optim.loraplus_lr_embedding
    return group, lr * optim.loraplus_lr_ratio if "lora_B" in name or dimensions < 2 else lr


ADAMW_UPDATE_RMS = 0.2
"""Approximate root mean square of an AdamW update at rate 1: Liu et al. (arXiv 2502.16982), section 2.2."""


def muon_param_ids(model: torch.nn.Module) -> frozenset[int]:
    """Return the ids of the weights of linear layers inside the model's body.

    Left out are embeddings, heads, biases and norms (Keller Jordan, "Muon: An optimizer for hidden layers in neural
    networks", 2024), and parameters outside linear layers: position tables, state matrices, stacked experts,
    convolutions. A head is anything that transformers puts around its base model. In a module that is not
    transformers', every linear layer counts.
    """
    import torch
    from transformers.pytorch_utils import Conv1D  # GPT-2's linear layer, with a transposed weight

    core = unwrap_peft(model)
    body = getattr(core, "base_model", core)
    output = core.get_output_embeddings() if hasattr(core, "get_output_embeddings") else None
    # a linear layer that shares its weight with an embedding (tied head) is an embedding
    excluded = {id(module.weight) for module in core.modules() if isinstance(module, torch.nn.Embedding)}
    excluded |= {id(getattr(output, "weight", None))}
    return frozenset(id(one.weight) for one in body.modules() if isinstance(one, torch.nn.Linear | Conv1D)) - excluded


def muon_lr_factor(parameter: torch.nn.Parameter) -> float:
    """Return the factor on a matrix's learning rate with which one rate serves Muon and AdamW alike.

    An orthogonal update (r, c) has a root mean square of 1 / sqrt(max(r, c)). Muon's own factor, sqrt(max(1, r / c)),
    makes it 1 / sqrt(c); 0.2 sqrt(c) on top gives Liu et al. (arXiv 2502.16982), eq. 4: 0.2 sqrt(max(r, c)) in all.
    """
    return ADAMW_UPDATE_RMS * sqrt(full_shape(parameter)[-1])
