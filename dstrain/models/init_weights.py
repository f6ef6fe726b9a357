"""Initial weights from a foreign checkpoint file (model.init)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.errors import Fault, RecipeError, first_names
from dstrain.models.params import assign, full_shape
from dstrain.models.weights import INIT_KEY, LazyTensor, find_init_files, open_tensors

if TYPE_CHECKING:
    import torch


MAX_NAMES_IN_EVENT = 50
SHAPE_SETTINGS = ("vocab_size", "hidden_size", "intermediate_size", "max_position_embeddings", "num_labels")
"""Config settings that determine shapes."""


@dataclass(frozen=True, kw_only=True)
class InitReport:
    """Result of loading model.init: matched, missing and unexpected keys."""

    file: str
    """The file or folder."""
    total: int
    """Number of weights and saved buffers of the model; tied ones count once."""
    matched: int
    """Number of these that were loaded from the file."""
    missing: tuple[str, ...]
    """Keys of the model that are not in the file: these weights stay as they were."""
    unexpected: tuple[str, ...]
    """Keys of the file that are not in the model: these tensors are ignored."""
    removed_prefix: str
    """Prefix removed from the file's keys, such as `module.`."""
    added_prefix: str
    """Prefix added to the file's keys, such as `model.`."""

    def as_event(self) -> dict[str, Any]:
        """Return counts and the first keys, for events.jsonl."""
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
        changes = [f"'{self.removed_prefix}' removed from its keys"] if self.removed_prefix else []
        changes += [f"'{self.added_prefix}' added to its keys"] if self.added_prefix else []
        parts = [f"{self.matched} of {self.total} weights from {Path(self.file).name}"]
        parts[0] += f" ({', '.join(changes)})" if changes else ""
        parts += [f"missing keys: {first_names(self.missing)}"] if self.missing else []
        parts += [f"unexpected keys: {first_names(self.unexpected)}"] if self.unexpected else []
        return f"{INIT_KEY}: {'; '.join(parts)}"


def load_init(model: torch.nn.Module, path: str) -> InitReport:
    """Load the weights of a file or folder whose keys match the model's.

    Prefixes of DistributedDataParallel and torch.compile (`module.`, `_orig_mod.`) are removed, and transformers'
    `base_model_prefix` is added or removed where that matches more weights. Values are cast to the model's dtype.
    Raises RecipeError where nothing matches or a shape differs. Collective under ZeRO-3.
    """
    targets, found, report = _match_weights(model, path)
    for name, tensor in targets.items():  # every tensor on every rank: assign is collective
        assign(tensor, found[name].read if name in found else None)
    return report


def check_init(model: torch.nn.Module, path: str) -> None:
    """Raise RecipeError where `load_init` would. The model may be on the meta device."""
    _match_weights(model, path)


def _match_weights(
    model: torch.nn.Module, path: str
) -> tuple[dict[str, torch.Tensor], dict[str, LazyTensor], InitReport]:
    """Return the model's weights and saved buffers, each under its first key, and the file's tensors by the same keys.

    Changes nothing; reads only values of tied tensors.
    """
    import torch

    stored = open_tensors(find_init_files(path))
    state = model.state_dict(keep_vars=True)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    first_keys: dict[int, str] = {}
    # tied: several keys of one tensor
    canonical = {name: first_keys.setdefault(id(tensor), name) for name, tensor in tensors.items()}
    key_map = match_keys(stored, canonical, str(getattr(model, "base_model_prefix", "")))
    sources = _group_by_target(key_map, canonical, path)
    targets = {name: tensors[name] for name in first_keys.values()}
    # Of several keys of a tied tensor the model's own first one; their values are equal, which _check_tied
    # verifies.
    found = {first: stored[min(names, key=lambda name: key_map[name] != first)] for first, names in sources.items()}
    _check_shapes(model, targets, found, path)
    _check_tied(stored, sources, path)
    # A key may fit without the change that most of them need.
    changes = Counter(diff_prefix(name, key_map[name]) for names in sources.values() for name in names)
    removed, added = changes.most_common(1)[0][0]
    report = InitReport(
        file=path,
        total=len(targets),
        matched=len(found),
        missing=tuple(name for name in targets if name not in found),
        unexpected=tuple(name for name, target in key_map.items() if target not in canonical),
        removed_prefix=removed,
        added_prefix=added,
    )
    return targets, found, report


def _group_by_target(key_map: Mapping[str, str], canonical_keys: Mapping[str, str], path: str) -> dict[str, list[str]]:
    """Return first key of a tensor in the model -> the file's keys for it, several only if it is tied.

    Raises RecipeError where two keys map to one, and where nothing matches.
    """
    sources: dict[str, list[str]] = {}
    taken: dict[str, str] = {}
    for name, target in key_map.items():
        if target in taken and target in canonical_keys:
            problem = f"'{taken[target]}' and '{name}' in {path} would both become the model's '{target}'"
            raise RecipeError(Fault(INIT_KEY, problem, "remove one of them from the file"))
        taken[target] = name
        if target in canonical_keys:
            sources.setdefault(canonical_keys[target], []).append(name)
    if not sources:
        keys = f"keys of the file: {first_names(key_map)}; keys of the model: {first_names(canonical_keys)}"
        problem = f"no key in {path} matches the model ({keys})"
        raise RecipeError(Fault(INIT_KEY, problem, "give weights of this architecture"))
    return sources


def _check_shapes(
    model: torch.nn.Module, targets: Mapping[str, torch.Tensor], tensors: Mapping[str, LazyTensor], path: str
) -> None:
    """Raise RecipeError where a tensor of the file differs in shape or kind of dtype from the model's."""
    faults = []
    for name, stored in tensors.items():
        target, shape = targets[name], full_shape(targets[name])
        if stored.shape != shape:
            fix = _suggest_shape_fix(model, shape, stored.shape)
            faults.append(Fault(INIT_KEY, f"'{name}' is {stored.shape} in {path} and {shape} in the model", fix))
        elif stored.is_float != target.is_floating_point():
            dtype = str(target.dtype).removeprefix("torch.")
            problem = f"'{name}' is {stored.dtype} in {path}, which cannot be cast to the model's {dtype}"
            faults.append(Fault(INIT_KEY, problem, "give weights that are not quantized"))
    if len(faults) > 1:
        first = faults[0]
        raise RecipeError(Fault(INIT_KEY, f"{first.problem}, and {len(faults) - 1} more do not fit", first.fix))
    if faults:
        raise RecipeError(faults)


def _suggest_shape_fix(model: torch.nn.Module, model_shape: tuple[int, ...], file_shape: tuple[int, ...]) -> str:
    """Return the fix for a shape mismatch, with the config setting that determines the shape, if it is known."""
    config = getattr(model, "config", None)
    if len(model_shape) == len(file_shape):
        for one, other in zip(model_shape, file_shape, strict=True):
            names = [name for name in SHAPE_SETTINGS if one != other and getattr(config, name, None) == one]
            if names:
                return f"set the model's {names[0]} to {other} instead of {one}, or remove the tensor from the file"
    return "give weights of a model of this size, or remove the tensor from the file"


def _check_tied(tensors: Mapping[str, LazyTensor], sources: Mapping[str, list[str]], path: str) -> None:
    """Raise RecipeError where the file has different values for keys that are tied in the model."""
    import torch

    for names in sources.values():
        first = tensors[names[0]]
        for name in names[1:]:
            other = tensors[name]
            # Compared in one dtype: a file may hold the two in different ones.
            if first.shape != other.shape or not torch.equal(first.read(), other.read().to(first.read().dtype)):
                problem = f"'{names[0]}' and '{name}' differ in {path}, but are tied in the model"
                fix = "set tie_word_embeddings to false in the model's config, or remove one of them from the file"
                raise RecipeError(Fault(INIT_KEY, problem, fix))


COMPILE_PREFIX = "_orig_mod"
"""Part that torch.compile inserts into keys."""
WRAPPER_PREFIX = "module"
"""Part that DistributedDataParallel and DataParallel put before keys."""


def match_keys(keys: Collection[str], canonical_keys: Mapping[str, str], base_prefix: str) -> dict[str, str]:
    """Return file key -> model key: without wrappers, then as it is, or with `base_prefix` added or removed.

    Of the three the one that matches most weights, the first of equals. `canonical_keys`: every key of the model -> the
    first key of that tensor, which tied tensors share. `base_prefix`: the name of transformers' base model. Keys that
    are not in the model are returned too.
    """

    def count_matches(key_map: Mapping[str, str]) -> int:
        # A set: tied keys count once, so that repeating a tensor is no better match.
        return len({canonical_keys[name] for name in key_map.values() if name in canonical_keys})

    plain = {name: _strip_wrappers(name, canonical_keys) for name in keys}
    if not base_prefix:
        return plain
    base = f"{base_prefix}."
    added = {name: base + short if base + short in canonical_keys else short for name, short in plain.items()}
    removed = {name: short.removeprefix(base) for name, short in plain.items()}
    return max((plain, added, removed), key=count_matches)


def _strip_wrappers(key: str, canonical_keys: Collection[str]) -> str:
    """Return the key without wrappers, except those that belong to the model's own key."""
    if key in canonical_keys:
        return key
    short = ".".join(word for word in key.split(".") if word != COMPILE_PREFIX)
    while short not in canonical_keys and short.startswith(f"{WRAPPER_PREFIX}."):
        short = short.removeprefix(f"{WRAPPER_PREFIX}.")
    return short


def diff_prefix(key: str, target: str) -> tuple[str, str]:
    """Return the prefixes removed and added to turn `key` into `target`: `module.a.b`, `a.b` -> (`module.`, "")."""
    removed, added = key.split("."), target.split(".")
    while removed and added and removed[-1] == added[-1]:
        removed, added = removed[:-1], added[:-1]
    while removed and added and removed[0] == added[0]:
        removed, added = removed[1:], added[1:]
    return "".join(f"{part}." for part in removed), "".join(f"{part}." for part in added)
