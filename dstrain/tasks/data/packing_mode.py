"""Decision whether the batches of a run are packed, from the recipe and from the models that read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING

from dstrain.batch import PADDED, PackingMode
from dstrain.config.schema import BatchConfig, ModelConfig
from dstrain.errors import Fault, RecipeError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FindUnsupportedReason = Callable[[bool], str | None]
"""shares_prefixes -> why the models cannot take packed batches, or None."""


def resolve_packing(
    batch: BatchConfig,
    find_unsupported_reason: FindUnsupportedReason,
    has_pairs: bool,
    override_reason: str | None = None,
) -> PackingMode:
    """Return the mode that batch.packing and batch.prefix_sharing ask for; auto is on where nothing is in the way.

    `override_reason`: why auto is off although no model is in the way; the value true is allowed then. Raises RecipeError
    where a value is true, and something is in the way.
    """
    shares = batch.prefix_sharing
    if shares is True and not has_pairs:
        raise RecipeError(
            Fault("batch.prefix_sharing", "is true, but the task has no pairs of answers", "leave it out")
        )
    if not batch.packing:
        if shares is True:
            problem = "is true, but batch.packing is false, and padded rows share nothing"
            raise RecipeError(Fault("batch.prefix_sharing", problem, "remove one of the two"))
        return PADDED
    forced = batch.packing is True or shares is True
    reason = find_unsupported_reason(False)
    if reason and forced:
        key = "batch.packing" if batch.packing is True else "batch.prefix_sharing"
        raise RecipeError(Fault(key, f"is true, but {reason}", "set it to auto or false"))
    reason = reason or (None if forced else override_reason)
    if reason:
        return PackingMode(False, message=f"batches are padded, not packed: {reason}")
    if not has_pairs or shares is False:
        return PackingMode(True)
    reason = find_unsupported_reason(True)
    if reason and shares is True:
        raise RecipeError(Fault("batch.prefix_sharing", f"is true, but {reason}", "set it to auto or false"))
    if reason:
        return PackingMode(True, message=f"the answers of a pair are packed, each with its own prompt: {reason}")
    return PackingMode(True, True)


def model_unsupported_reason(model: ModelConfig, config: PretrainedConfig, shares_prefixes: bool) -> str | None:
    """Return why this model cannot take packed batches, or None; `config`: its transformers config."""
    from dstrain.models.attention.packed import packing_unsupported_reason

    # Transformers' own config may belong to a model class that came with the weights.
    if model.trust_remote_code and getattr(config, "auto_map", None):
        return "the model runs code that came with its weights"
    if model.attn_implementation != "auto":
        config = copy.deepcopy(config)  # the model is built from the other one
        config._attn_implementation = model.attn_implementation
    return packing_unsupported_reason(config, shares_prefixes)
