"""Models of ZeRO stage 3 that are built whole, and sharded one layer at a time."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from dstrain.errors import Fault, RecipeError
from dstrain.models.params import get_zero3_config

if TYPE_CHECKING:
    import torch


@contextmanager
def built_on_rank_0() -> Iterator[None]:
    """Inside `zero3_init`, build models in rank 0's host memory, and without values on the other ranks.

    For models whose layers change before they are sharded: quantized ones. Values from files in the run's dtype stay
    memory-mapped, so rank 0 needs no memory for them. Without effect outside of `zero3_init`.
    """
    told = get_zero3_config()
    if told is None:
        yield
        return
    import deepspeed
    from transformers.integrations.deepspeed import set_hf_deepspeed_config, unset_hf_deepspeed_config

    from dstrain.models.meta_init import meta_parameters

    unset_hf_deepspeed_config()
    try:
        if deepspeed.comm.get_rank() == 0:
            yield
        else:
            with meta_parameters():
                yield
    finally:
        set_hf_deepspeed_config(told)


class Sharder:
    """Shards the parameters of a model of `built_on_rank_0` one at a time. All methods are collective."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Raise RecipeError where rank 0 has built another model than the ranks without values."""
        import deepspeed
        import torch

        told = get_zero3_config()
        assert told is not None, "outside of zero3_init"
        # As a context it would shard new modules; around a module without parameters it only reads the settings.
        self._init = deepspeed.zero.Init(module=torch.nn.Identity(), config_dict_or_path=told.config)
        self._model = model
        self._check_equal_models()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the run, which DeepSpeed wants every parameter to have."""
        dtype: torch.dtype = self._init.dtype
        return dtype

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's values on the process's device, and zeros on the other ranks."""
        import torch

        if tensor.is_meta:
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=self._init.local_device)
        return tensor.detach().to(self._init.local_device)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Copy rank 0's values into the tensor, which is on the process's device."""
        import deepspeed

        deepspeed.comm.broadcast(tensor, 0)

    def shard(self, parameter: torch.nn.Parameter) -> None:
        """Keep this rank's part of rank 0's values, in place."""
        self._init._convert_to_zero_parameters([parameter])

    def shard_rest(self) -> None:
        """Shard the parameters that are whole still, and give all ranks rank 0's buffers."""
        import torch

        new: dict[int, torch.nn.Parameter] = {}  # by id of the old one, so that tied parameters stay tied
        for module in self._model.modules():
            for name, old in module._parameters.items():
                if old is None or hasattr(old, "ds_id"):
                    continue
                if id(old) not in new:
                    values = self.place(old).to(self.dtype if old.is_floating_point() else old.dtype)
                    new[id(old)] = torch.nn.Parameter(values, requires_grad=old.requires_grad)
                    self.shard(new[id(old)])
                module._parameters[name] = new[id(old)]
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = values = self.place(buffer).contiguous()
                    self.broadcast(values)

    def _check_equal_models(self) -> None:
        """Raise on all ranks where they would send tensors of different shapes, which hangs."""
        import torch

        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        digest = zlib.crc32(repr([(name, tuple(one.shape)) for name, one in named]).encode())
        ends = torch.tensor([digest, -digest], device=self._init.local_device)
        torch.distributed.all_reduce(ends, torch.distributed.ReduceOp.MAX)
        if int(ends[0]) != -int(ends[1]):
            problem = (
                "its files hold other parameters than its config.json describes, as an adapter on tied embeddings does"
            )
            fix = "merge the adapter first (dstrain export RUN --merge-lora --to DIR), or use ds_config: zero2"
            raise RecipeError(Fault("model.path", problem, fix))
