"""Which parameters learn, and how fast: freezing and groups by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from dstrain.config.schema import OptimConfig, RunConfig
from dstrain.errors import Fault, RecipeError
from dstrain.models.matrices import hidden_matrices, rate_factor, shape

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Group:
    """Parameters that share a learning rate and a weight decay."""

    params: list[torch.nn.Parameter]
    lr_scale: float
    """Times the run's learning rate."""
    weight_decay: float
    orthogonal: bool = False
    """Whether Muon takes them; its other groups learn with AdamW."""


def matches(name: str, pattern: str) -> bool:
    """True where the pattern is a word of the dotted name, or a glob for the name or for a beginning of it.

    `embed_tokens`, `model.layers.0`, `*.embed_tokens` and `model.layers.*.mlp` all match parameters inside.
    """
    parts = name.split(".")
    return pattern in parts or any(fnmatchcase(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def check_patterns(names: Sequence[str], patterns: Iterable[str], key: str) -> None:
    """Raise RecipeError for the patterns that match no parameter."""
    tops = sorted({".".join(name.split(".")[:2]) for name in names})
    faults = [
        Fault(f"{key} '{pattern}'", "matches no parameter", f"names here begin with {', '.join(tops[:12])}")
        for pattern in patterns
        if not any(matches(name, pattern) for name in names)
    ]
    if faults:
        raise RecipeError(faults)


def check_parts(model: torch.nn.Module, recipe: RunConfig) -> None:
    """Raise RecipeError where model.freeze or optim.groups do not fit the model; a skeleton of it will do."""
    freeze(model, recipe.model.freeze)
    parameter_groups(model, recipe.optim)


def freeze(model: torch.nn.Module, patterns: Sequence[str]) -> None:
    """Take the matching parameters out of training. Raises RecipeError where nothing is left to train."""
    names = [name for name, _ in model.named_parameters()]
    check_patterns(names, patterns, "model.freeze")
    for name, parameter in model.named_parameters():
        if any(matches(name, pattern) for pattern in patterns):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise RecipeError(Fault("model.freeze", "leaves no parameter to train", "freeze less"))


def parameter_groups(model: torch.nn.Module, optim: OptimConfig) -> list[Group]:
    """Trainable parameters by learning rate and weight decay; the first matching group of the recipe counts.

    Biases and norms (one dimension) get no weight decay. With Muon, the hidden matrices are groups of their own; raises
    RecipeError where there are none.
    """
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    check_patterns([name for name, _ in trainable], optim.groups, "optim.groups")
    matrices = hidden_matrices(model) if optim.name == "muon" else frozenset()
    found: dict[tuple[float, float, bool], list[torch.nn.Parameter]] = {}
    for name, parameter in trainable:
        own = next((group for pattern, group in optim.groups.items() if matches(name, pattern)), None)
        lr = optim.lr if own is None or own.lr is None else own.lr
        decay = optim.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        scale = lr / optim.lr if optim.lr else 0.0
        orthogonal = id(parameter) in matrices and (own is None or own.muon)
        if len(shape(parameter)) < 2:
            decay = 0.0
        elif orthogonal:
            factor = rate_factor(parameter)
            scale, decay = scale * factor, decay / factor  # a step decays by rate times decay, as elsewhere
        found.setdefault((scale, decay, orthogonal), []).append(parameter)
    if optim.name == "muon" and not any(orthogonal for _, _, orthogonal in found):
        problem = "muon finds no hidden matrix that learns, and would be AdamW"
        raise RecipeError(Fault("optim.name", problem, "write adamw, or freeze less"))
    return [Group(params, *key) for key, params in found.items()]
