"""Names of tensors in a base model's files, which an export has too, so that the same servers load it."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.config.schema import ModelConfig
from dstrain.errors import first_names
from dstrain.files import MAX_JSON_BYTES, parse_json, read_limited
from dstrain.models.folder import resolve_base_model
from dstrain.models.weights import find_cached_config, open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel

INDEX_FILE = "model.safetensors.index.json"
HEADS = ("lm_head", "embed_out", "score", "classifier", "qa_outputs")
"""Modules at the end of a model."""


def read_base_names(model: ModelConfig) -> frozenset[str]:
    """Return the names of the tensors in the safetensors files of `model.path`; empty where there are none here."""
    base = resolve_base_model(model)
    if base.path is None:
        return frozenset()
    folder = Path(base.path).expanduser()
    if not folder.is_dir():
        config = find_cached_config(base.path, base.revision)
        if config is None:
            return frozenset()
        folder = config.parent
    return list_tensors(folder)


def list_tensors(folder: Path) -> frozenset[str]:
    """Return the names of the tensors in the safetensors files of a model folder."""
    index, file = folder / INDEX_FILE, folder / "model.safetensors"
    if index.is_file():
        return frozenset(parse_json(read_limited(index, MAX_JSON_BYTES))["weight_map"])
    return frozenset(open_tensors([file])) if file.is_file() else frozenset()


def keep_file_names(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Let `save_pretrained` write a model's tensors under the names that its base's files have.

    transformers renames tensors while it reads them and keeps in the model which of its rules did, to save with their
    reverse. A model that is built from its config has read nothing: transformers would then leave out the rules that
    take a part of a name away, such as `vision_model.` of CLIP's towers, which servers ask for.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    for name in sorted(names, key=dot_natural_key):
        rename_source_key(name, renamings, converters)
    model._weight_conversions = [rule for rule in rules if rule.was_used()]


def describe_name_changes(model: PreTrainedModel, names: Collection[str], written: Collection[str]) -> list[str]:
    """Return a line on tensors that a base's files have and an export lacks, or the reverse; [] where none.

    Left out are tied tensors, of which one is enough, and the layers at the end: a model that scores has another one.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    parts = {name for pair in tied.items() for name in pair}

    def is_compared(name: str) -> bool:
        return not any(name.endswith(part) for part in parts) and not {*HEADS} & {*name.split(".")}

    lost = sorted(name for name in {*names} - {*written} if is_compared(name))
    new = sorted(name for name in {*written} - {*names} if is_compared(name))
    lines = [f"the base's files also hold {first_names(lost)}, which transformers does not load"] if lost else []
    if new:
        lines.append(f"the base's files do not name {first_names(new)}: a server that reads the base may not read them")
    return lines
