"""The optimizer a recipe names, over its groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dstrain.config.schema import OptimConfig
from dstrain.distributed.deepspeed_patches import uncompile_muon
from dstrain.models.params.groups import ParamGroup

MUON_MOMENTUM = 0.95
"""Muon's, with Nesterov's look ahead: Keller Jordan's (2024)."""


def make_optimizer(
    param_groups: Sequence[ParamGroup], optim: OptimConfig, offload: str | None, device: torch.device
) -> Any:
    """The optimizer for the groups, in their order. Its rate is 0 until a step brings one.

    DeepSpeed may take a step with zero gradients at its start, which must not decay the weights.
    """
    params = [{"params": group.params, "weight_decay": group.weight_decay, "lr": 0.0} for group in param_groups]
    if optim.name == "sgd":
        return torch.optim.SGD(params)
    if optim.name == "lion":
        return Lion(params, optim.betas)
    if optim.name == "adafactor":
        return torch.optim.Adafactor(params)
    if optim.name == "muon":
        return _make_muon(param_groups, optim)
    if offload:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(params, adamw_mode=True, betas=optim.betas, eps=optim.eps)
    return torch.optim.AdamW(params, betas=optim.betas, eps=optim.eps, fused=device.type == "cuda")


class Lion(torch.optim.Optimizer):
    """The sign of an average, with decoupled weight decay: Chen et al. (arXiv 2302.06675), algorithm 2.

    DeepSpeed's FusedLion and CPULion take the sign of 0 for one of the two directions: a weight that never had a gradient
    (the embedding of a token that does not occur) moves by the rate in every step. Here it stays.
    """

    def __init__(self, params: Any, betas: tuple[float, float]) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "gradients are there before a step"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "exp_avg" not in state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                average = state["exp_avg"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(average.lerp(parameter.grad, 1 - beta1).sign_(), alpha=-group["lr"])
                average.lerp_(parameter.grad, 1 - beta2)


def _make_muon(param_groups: Sequence[ParamGroup], optim: OptimConfig) -> Any:
    """DeepSpeed's Muon, which its ZeRO optimizers know: they put whole matrices together before they step.

    Keller Jordan, "Muon: An optimizer for hidden layers in neural networks" (2024); AdamW for the other groups.
    """
    muon_optimizer = uncompile_muon()
    params: list[dict[str, Any]] = []
    for group in param_groups:
        own = {"momentum": MUON_MOMENTUM} if group.use_muon else {"betas": optim.betas, "eps": optim.eps}
        params.append(
            {"params": group.params, "lr": 0.0, "weight_decay": group.weight_decay, "use_muon": group.use_muon, **own}
        )
        for parameter in group.params:
            parameter.use_muon = group.use_muon  # ZeRO's optimizers look here

    class Muon(muon_optimizer.MuonWithAuxAdam):  # type: ignore[name-defined]
        def step(self, closure: None = None, step_id: int | None = None) -> None:
            """No step without gradients, as where one was not finite: DeepSpeed's would go on along the momentum."""
            if any(parameter.grad is not None for group in self.param_groups for parameter in group["params"]):
                super().step(closure, step_id)

    return Muon(params)
