"""Weights to start from, out of files that something else wrote."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError, first_names
from dstrain.models.params.zero3 import assign, full_shape
from dstrain.models.weights.files import INIT_KEY, LazyTensor, find_init_files, open_tensors
from dstrain.models.weights.key_matching import diff_prefix, match_keys

if TYPE_CHECKING:
    import torch

MAX_NAMES_IN_EVENT = 50
SHAPE_SETTINGS = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "num_labels")
"""Settings of transformers' configs that decide shapes."""


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """Which weights came from the file."""

    file: str
    """The file or folder."""
    total: int
    """Weights and saved buffers of the model; tied ones count once."""
    matched: int
    """How many of them the file brought."""
    missing: tuple[str, ...]
    """The model's that the file lacks: they stay as they were loaded or drawn."""
    unexpected: tuple[str, ...]
    """The file's, by its own names, that the model has no place for: they are left out."""
    removed_prefix: str
    """What was taken off the file's names, such as `module.`."""
    added_prefix: str
    """What was put before them, such as `model.`."""

    def as_event(self) -> dict[str, Any]:
        """For events.jsonl: counts, and the first names."""
        return {
            "file": self.file,
            "total": self.total,
            "matched": self.matched,
            "missing": len(self.missing),
            "missing_names": list(self.missing[:MAX_NAMES_IN_EVENT]),
            "unexpected": len(self.unexpected),
            "unexpected_names": list(self.unexpected[:MAX_NAMES_IN_EVENT]),
            "removed": self.removed_prefix,
            "added": self.added_prefix,
        }

    def __str__(self) -> str:
        changes = [f"'{self.removed_prefix}' taken off its names"] if self.removed_prefix else []
        changes += [f"'{self.added_prefix}' put before them"] if self.added_prefix else []
        said = [f"{self.matched} of {self.total} weights from {Path(self.file).name}"]
        said[0] += f" ({', '.join(changes)})" if changes else ""
        said += [f"missing: {first_names(self.missing)}"] if self.missing else []
        said += [f"unexpected: {first_names(self.unexpected)}"] if self.unexpected else []
        return f"{INIT_KEY}: {'; '.join(said)}"


def load_init(model: torch.nn.Module, path: str) -> InitReport:
    """Put the weights of a file or folder into the model, as far as their names are the model's.

    What DistributedDataParallel and torch.compile put into names (`module.`, `_orig_mod.`) is taken off, and
    transformers' `base_model_prefix` is put before them or taken off where that reaches more weights. Values are cast
    to the model's dtype. Raises RecipeError where nothing matches or a shape differs. Collective under ZeRO-3.
    """
    fit = _match_weights(model, path)
    for name, tensor in fit.targets.items():  # every one on every rank, whatever that rank finds in its file
        stored = fit.tensors.get(name)
        assign(tensor, None if stored is None else stored.read)
    return fit.report


def check_init(model: torch.nn.Module, path: str) -> None:
    """Raise RecipeError where `load_init` would. A skeleton of the model will do."""
    _match_weights(model, path)


@dataclass(frozen=True)
class _WeightMatch:
    targets: Mapping[str, torch.Tensor]
    """The model's weights and saved buffers, each under its first name."""
    tensors: Mapping[str, LazyTensor]
    """By the same names, as far as the file has them."""
    report: InitReport


def _match_weights(model: torch.nn.Module, path: str) -> _WeightMatch:
    """What belongs where; nothing is changed, and of the values only tied ones are read."""
    import torch

    stored = open_tensors(find_init_files(path))
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    firsts: dict[int, str] = {}
    known = {name: firsts.setdefault(id(tensor), name) for name, tensor in tensors.items()}  # tied: one tensor
    renamed = match_keys(stored, known, str(getattr(model, "base_model_prefix", "")))
    sources = _group_by_target(renamed, known, path)
    places = {name: tensors[name] for name in firsts.values()}
    found = {first: stored[min(names, key=lambda name: renamed[name] != first)] for first, names in sources.items()}
    _check_shapes(model, places, found, path)
    _check_tied(stored, sources, path)
    changes = Counter(diff_prefix(name, renamed[name]) for names in sources.values() for name in names)
    removed, added = changes.most_common(1)[0][0]
    report = InitReport(
        file=path,
        total=len(places),
        matched=len(found),
        missing=tuple(name for name in places if name not in found),
        unexpected=tuple(name for name, target in renamed.items() if target not in known),
        removed_prefix=removed,
        added_prefix=added,
    )
    return _WeightMatch(places, found, report)


def _group_by_target(key_map: Mapping[str, str], canonical_keys: Mapping[str, str], path: str) -> dict[str, list[str]]:
    """First name of a tensor in the model -> the file's names of it: several only where it is tied. Raises RecipeError."""
    sources: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for name, target in key_map.items():
        if target in taken and target in canonical_keys:
            problem = f"'{taken[target]}' and '{name}' in {path} would both become the model's '{target}'"
            raise RecipeError(Fault(INIT_KEY, problem, "take one of them out of the file"))
        taken[target] = name
        if target in canonical_keys:
            sources.setdefault(canonical_keys[target], []).append(name)
    if not sources:
        problem = (
            f"no name in {path} is one of the model's: there {first_names(key_map)}, here {first_names(canonical_keys)}"
        )
        raise RecipeError(Fault(INIT_KEY, problem, "give weights of a model of this kind"))
    return sources


def _check_shapes(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], tensors: Mapping[str, LazyTensor], path: str
) -> None:
    """Raise RecipeError where a tensor of the file does not fit its place."""
    faults = []
    for name, stored in tensors.items():
        place, shape = targets[name], full_shape(targets[name])
        if stored.shape != shape:
            mend = _suggest_shape_fix(model, shape, stored.shape)
            faults.append(Fault(INIT_KEY, f"'{name}' is {stored.shape} in {path} and {shape} in the model", mend))
        elif stored.is_float != place.is_floating_point():
            kind = str(place.dtype).removeprefix("torch.")
            problem = f"'{name}' is {stored.dtype} in {path}, which cannot become the model's {kind}"
            faults.append(Fault(INIT_KEY, problem, "give weights that are not quantized"))
    if len(faults) > 1:
        first = faults[0]
        raise RecipeError(Fault(INIT_KEY, f"{first.problem}, and {len(faults) - 1} more do not fit", first.fix))
    if faults:
        raise RecipeError(faults)


def _suggest_shape_fix(model: torch.nn.Module, model_shape: tuple[int, ...], file_shape: tuple[int, ...]) -> str:
    """What to do about a shape, by the setting of the model's config that it follows, where one is known."""
    config = getattr(model, "config", None)
    if len(model_shape) == len(file_shape):
        for one, other in zip(model_shape, file_shape, strict=True):
            names = [name for name in SHAPE_SETTINGS if one != other and getattr(config, name, None) == one]
            if names:
                return f"the model's {names[0]} is {one} and would have to be {other}, or leave it out of the file"
    return "give weights of a model of this size, or leave it out of the file"


def _check_tied(tensors: Mapping[str, LazyTensor], sources: Mapping[str, list[str]], path: str) -> None:
    """Raise RecipeError where the file has several values for what is one tensor in the model."""
    import torch

    for names in sources.values():
        first = tensors[names[0]]
        for name in names[1:]:
            other = tensors[name]
            if first.shape != other.shape or not torch.equal(first.read(), other.read().to(first.read().dtype)):
                problem = f"'{names[0]}' and '{name}' differ in {path}, and in the model they are tied"
                mend = "set tie_word_embeddings to false in the model's config, or take one of them out of the file"
                raise RecipeError(Fault(INIT_KEY, problem, mend))
