"""Which parameters learn, and how fast: freezing and groups by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dstrain.config.schema import GroupConfig, OptimConfig, RunConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.components import COMPONENTS, components_by_id
from dstrain.models.params.muon import full_shape, muon_lr_factor, muon_param_ids
from dstrain.models.zero3 import full_numel
from dstrain.units import format_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that share a learning rate and a weight decay."""

    params: list[torch.nn.Parameter]
    lr_scale: float
    """Times the run's learning rate."""
    weight_decay: float
    use_muon: bool = False
    """Whether Muon takes them; its other groups learn with AdamW."""


def matches_pattern(name: str, pattern: str) -> bool:
    """True where the pattern is a word of the dotted name, or a glob for the name or for a beginning of it.

    `embed_tokens`, `model.layers.0`, `*.embed_tokens` and `model.layers.*.mlp` all match parameters inside.
    """
    parts = name.split(".")
    return pattern in parts or any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def check_patterns(components: Mapping[str, str | None], patterns: Iterable[str], key: str) -> None:
    """Raise RecipeError for the patterns that match no parameter; `names`: name -> part of a model that sees, or None."""
    tops = sorted({".".join(name.split(".")[:2]) for name in components})
    mend = f"names here begin with {', '.join(tops[:12])}"
    words = [part for part in COMPONENTS if part in components.values()]
    mend += f", and the model's parts are {', '.join(words)}" if words else ""
    faults = [
        Fault(f"{key} '{pattern}'", "matches no parameter", mend)
        for pattern in patterns
        if not any(_is_selected(name, part, pattern) for name, part in components.items())
    ]
    if faults:
        raise RecipeError(faults)


def _is_selected(name: str, component: str | None, pattern: str) -> bool:
    """Whether a pattern means a parameter: by its name, or by the part it belongs to."""
    return pattern == component or matches_pattern(name, pattern)


def _components_by_name(model: torch.nn.Module, trainable_only: bool = False) -> dict[str, str | None]:
    """Name of a parameter -> its part."""
    known = components_by_id(model)
    return {name: known.get(id(p)) for name, p in model.named_parameters() if p.requires_grad or not trainable_only}


def check_freeze_and_groups(model: torch.nn.Module, recipe: RunConfig) -> None:
    """Raise RecipeError where model.freeze or optim.groups do not fit the model; a skeleton of it will do."""
    freeze(model, recipe.model.freeze)
    build_param_groups(model, recipe.optim)


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Take the matching parameters out of training. Raises RecipeError where nothing is left to train."""
    names = _components_by_name(model)
    check_patterns(names, patterns, "model.freeze")
    for name, parameter in model.named_parameters():
        if any(_is_selected(name, names[name], pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Fault("model.freeze", "leaves no parameter to train", "freeze less"))


def trains_on_text(model: torch.nn.Module) -> bool:
    """Whether anything learns that takes part where there is no image."""
    return any(part in (None, "language") for part in _components_by_name(model, trainable_only=True).values())


def build_param_groups(model: torch.nn.Module, optim: OptimConfig) -> list[ParamGroup]:
    """Trainable parameters by learning rate and weight decay; the first matching group of the recipe counts.

    Biases and norms (one dimension) get no weight decay. With Muon, the hidden matrices are groups of their own; raises
    RecipeError where there are none.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    parts = _components_by_name(model, trainable_only=True)
    check_patterns(parts, optim.groups, "optim.groups")
    matrices = muon_param_ids(model) if optim.name == "muon" else frozenset()
    found: dict[tuple[float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable:
        own, lr = _find_group_and_lr(name, parts[name], optim)
        decay = optim.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        scale = 1.0 if lr is None else lr / optim.peak_lr if optim.peak_lr else 0.0
        orthogonal = id(parameter) in matrices and (own is None or own.muon)
        if len(full_shape(parameter)) < 2:
            decay = 0.0
        elif orthogonal:
            factor = muon_lr_factor(parameter)
            scale, decay = scale * factor, decay / factor  # a step decays by rate times decay, as elsewhere
        found.setdefault((scale, decay, orthogonal), []).append(parameter)
    if optim.name == "muon" and not any(orthogonal for _, _, orthogonal in found):
        problem = "muon finds no hidden matrix that learns, and would be AdamW"
        raise RecipeError(Fault("optim.name", problem, "write adamw, or freeze less"))
    return [ParamGroup(params, *key) for key, params in found.items()]


def _find_group_and_lr(name: str, component: str | None, optim: OptimConfig) -> tuple[GroupConfig | None, float | None]:
    """The group of a parameter, and its peak learning rate; None: the run's, whatever that is."""
    own = next((group for pattern, group in optim.groups.items() if _is_selected(name, component, pattern)), None)
    rate = optim.lr if own is None or own.lr is None else own.lr
    return own, rate


@dataclass(frozen=True)
class ComponentSummary:
    """A part of a model that sees, and what of it learns."""

    part: str
    parameters: int
    trained: int
    rates: tuple[float, ...]
    """Peak learning rates of what is trained, the largest first."""

    def __str__(self) -> str:
        share = "all" if self.trained == self.parameters else f"{format_count(self.trained)} of them"
        rates = " and ".join(f"{rate:.3g}" for rate in self.rates)
        return f"{self.part:10} {format_count(self.parameters)} parameters, " + (
            f"{share} trained at lr {rates}" if self.trained else "frozen"
        )


def summarize_components(model: torch.nn.Module, optim: OptimConfig, lr_factor: float = 1.0) -> list[ComponentSummary]:
    """What of each part learns, and how fast; none for a model that does not see. `factor`: of all rates (scale_lr)."""
    parts, parameters = _components_by_name(model), dict(model.named_parameters())
    counts = []
    for part in COMPONENTS:
        names = [name for name, own in parts.items() if own == part]
        learning = [name for name in names if parameters[name].requires_grad]
        own = (_find_group_and_lr(name, part, optim)[1] for name in learning)
        rates = {(optim.peak_lr if rate is None else rate) * lr_factor for rate in own}
        sizes = [sum(full_numel(parameters[name]) for name in some) for some in (names, learning)]
        counts += [ComponentSummary(part, sizes[0], sizes[1], tuple(sorted(rates, reverse=True)))] if names else []
    return counts
