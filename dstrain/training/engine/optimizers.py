"""Optimizers that a recipe can name, over its parameter groups."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from dstrain.config.schema import OptimConfig
from dstrain.distributed.patches import disable_muon_compile
from dstrain.errors import Fault, RecipeError
from dstrain.models.params import ParamGroup
from dstrain.models.quantization import MAX_NUMEL_8BIT, OPTIMIZERS_8BIT, import_bitsandbytes

MUON_MOMENTUM = 0.95
"""Nesterov momentum of Muon, the value of Keller Jordan (2024)."""


def make_optimizer(
    param_groups: Sequence[ParamGroup], optim: OptimConfig, offload: str | None, device: torch.device
) -> Any:
    """Return the optimizer for the groups, in their order, with lr 0 until the first `set_lr`.

    DeepSpeed may take a step with zero gradients during initialization, which must not decay the weights. `offload` is
    the device of ZeRO's optimizer offload (`cpu` or `nvme`), None without it.
    """
    params = [{"params": group.params, "weight_decay": group.weight_decay, "lr": 0.0} for group in param_groups]
    if optim.name == "sgd":
        return torch.optim.SGD(params, fused=True)
    if optim.name == "lion":
        return Lion(params, optim.betas)
    if optim.name == "adafactor":
        return torch.optim.Adafactor(params)
    if optim.name == "muon":
        return _make_muon(param_groups, optim)
    if optim.name in OPTIMIZERS_8BIT:
        return _make_adamw_8bit(params, optim)
    if offload:
        # With offload the state is on the host, where this one updates it.
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, betas=optim.betas, eps=optim.eps)
    return torch.optim.AdamW(params, betas=optim.betas, eps=optim.eps, fused=True)


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an average, with decoupled weight decay. Chen et al. (arXiv 2302.06675), algorithm 2.

    DeepSpeed's FusedLion and CPULion give the sign of 0 as +1 or -1: a weight that never had a gradient, such as the
    embedding of a token that does not occur, would move by lr in every step. Here it stays.
    """

    def __init__(self, params: Any, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "gradients are computed before a step"
        largest = max(parameter.numel() for group in self.param_groups for parameter in group["params"])
        for group in self.param_groups:
            for parameters in split_by_numel([p for p in group["params"] if p.grad is not None], largest):
                self._update(parameters, group)

    def _update(self, parameters: Sequence[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters of a group; its temporaries are as large as they are."""
        beta1, beta2 = group["betas"]
        for parameter in parameters:
            if "exp_avg" not in self.state[parameter]:
                self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
        averages = [self.state[parameter]["exp_avg"] for parameter in parameters]
        gradients = [parameter.grad for parameter in parameters]
        # Decoupled: the decay does not pass through the sign.
        torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
        # The direction mixes with beta1 into new tensors, the stored averages with beta2 (algorithm 2).
        directions = torch._foreach_lerp(averages, gradients, 1 - beta1)
        torch._foreach_sign_(directions)
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])
        torch._foreach_lerp_(averages, gradients, 1 - beta2)


def split_by_numel(tensors: Sequence[torch.Tensor], limit: int) -> Iterator[list[torch.Tensor]]:
    """Yield lists of successive tensors with at most `limit` values each; a larger tensor is alone."""
    chunk: list[torch.Tensor] = []
    numel = 0
    for tensor in tensors:
        if chunk and numel + tensor.numel() > limit:
            yield chunk
            chunk, numel = [], 0
        chunk.append(tensor)
        numel += tensor.numel()
    if chunk:
        yield chunk


def _make_adamw_8bit(params: Sequence[dict[str, Any]], optim: OptimConfig) -> Any:
    """Return bitsandbytes' AdamW with moments in 8 bits, in blocks of 256 values (Dettmers et al., arXiv 2110.02861).

    Tensors below 4096 values keep their moments in 32 bits. Paged: the moments are in memory that moves to the host
    where the GPU is full (Dettmers et al., arXiv 2305.14314, section 3); on a CPU they are ordinary ones.
    """
    bnb = import_bitsandbytes("optim.name")

    class AdamW8bit(bnb.optim.AdamW8bit):  # type: ignore[name-defined]
        @torch.no_grad()
        def init_state(self, group: Any, p: torch.Tensor, group_index: int, param_index: int) -> None:
            if p.numel() >= MAX_NUMEL_8BIT:
                # The kernel gets the size as a 32-bit integer, and would update a part.
                problem = f"{p.numel()} values in one partition, but 8-bit optimizers take {MAX_NUMEL_8BIT - 1}"
                fix = "use more processes, or ds_config: zero3, whose partitions are divided into groups"
                raise RecipeError(Fault("optim.name", problem, fix))
            super().init_state(group, p, group_index, param_index)

    with warnings.catch_warnings():  # paged states on a CPU
        warnings.simplefilter("ignore")
        is_paged = optim.name.startswith("paged")
        return AdamW8bit(params, lr=0.0, betas=optim.betas, eps=optim.eps, is_paged=is_paged)


def _make_muon(param_groups: Sequence[ParamGroup], optim: OptimConfig) -> Any:
    """Return DeepSpeed's Muon, for which its ZeRO optimizers gather complete matrices; AdamW for the other groups.

    Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024).
    """
    muon_optimizer = disable_muon_compile()
    params: list[dict[str, Any]] = []
    for group in param_groups:
        own = {"momentum": MUON_MOMENTUM} if group.use_muon else {"betas": optim.betas, "eps": optim.eps}
        params.append(
            {"params": group.params, "lr": 0.0, "weight_decay": group.weight_decay, "use_muon": group.use_muon, **own}
        )
        for parameter in group.params:
            parameter.use_muon = group.use_muon  # the attribute that ZeRO's optimizers read

    class Muon(muon_optimizer.MuonWithAuxAdam):  # type: ignore[name-defined]
        def step(self, closure: None = None, step_id: int | None = None) -> None:
            """Skip steps without gradients, as after a non-finite one: DeepSpeed's would apply the momentum again."""
            if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
                super().step(closure, step_id)

    return Muon(params)


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of an optimizer whose learning rates are 0, by a step with zero gradients."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None
