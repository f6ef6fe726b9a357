"""Building and reading models whose parameters ZeRO-3 keeps in shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def sharded_construction(ds_config: Mapping[str, Any]) -> Iterator[None]:
    """Inside, transformers builds and loads models in shards where the JSON asks for stage 3.

    Rank 0 alone reads the weight files; no rank ever holds a full copy of the model.
    """
    if ds_config.get("zero_optimization", {}).get("stage", 0) < 3:
        yield
        return
    from transformers.integrations import HfDeepSpeedConfig
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    told = HfDeepSpeedConfig(dict(ds_config))  # transformers keeps only a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del told


@contextmanager
def whole(parameters: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, the parameters are whole on every rank, to be read. Collective."""
    sharded = [parameter for parameter in parameters if hasattr(parameter, "ds_id")]
    if not sharded:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(sharded, modifier_rank=None):
        yield


def numel(parameter: torch.nn.Parameter) -> int:
    """Elements of the whole parameter, sharded or not."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))
