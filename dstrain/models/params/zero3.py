"""Building and reading models whose parameters ZeRO-3 keeps in shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from dstrain.distributed.deepspeed_patches import reuse_hpz_group, skip_shm_comm_build

if TYPE_CHECKING:
    import torch


def is_zero3(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the DeepSpeed JSON sets ZeRO stage 3."""
    return bool(ds_config.get("zero_optimization", {}).get("stage", 0) == 3)


def init_deepspeed() -> None:
    """Let DeepSpeed use the existing process group. Collective."""
    import deepspeed

    # Before `init_distributed`, which would compile the op.
    skip_shm_comm_build()
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)


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
    told = HfDeepSpeedConfig(dict(ds_config))  # transformers keeps only a weak reference
    try:
        yield
    finally:
        unset_hf_deepspeed_config()
        del told


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
