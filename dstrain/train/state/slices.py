"""Slices of a rank's state: one tensor each, with its optimizer state, as ranges of whole parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

WEIGHT_KEY = "weight"
"""The key of a parameter's own values; what an optimizer keeps has its own keys (exp_avg, step, ...)."""


@dataclass(frozen=True)
class ParamRange:
    """Where a stretch of a parameter lies in a part."""

    name: str
    """The parameter or buffer in the task's model."""
    start: int
    """First value in the flattened parameter."""
    numel: int
    offset: int
    """First value in the flattened part."""


@dataclass(frozen=True, eq=False)
class StateSlice:
    """One tensor of this process, and what the optimizer keeps for it."""

    tensor: torch.Tensor
    """The values that learn, in the master's precision; as the optimizer knows it."""
    ranges: Sequence[ParamRange]
    is_replicated: bool
    """Whether all processes hold the same."""
    optimizer: Any = None
    """Of torch's kind; None where nothing learns."""
    param_group: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's settings for it."""
    key_ranges: Mapping[str, Sequence[ParamRange]] = field(default_factory=dict)
    """Key -> places, for what the optimizer lays out in another way."""

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """What the optimizer keeps for it; empty before its first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.tensor, {})

    def get_ranges(self, key: str) -> Sequence[ParamRange]:
        """Where the stretches lie in the tensor of a key."""
        return self.key_ranges.get(key, self.ranges)

    def elementwise_state(self) -> dict[str, torch.Tensor]:
        """Key -> (n,), what has values for those of the parameters."""
        kept = {key: value for key, value in self.optimizer_state.items() if self._is_elementwise(key, value)}
        return {key: value.detach().view(-1) for key, value in {WEIGHT_KEY: self.tensor, **kept}.items()}

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Key -> the optimizer's other tensors, such as row and column means of a whole matrix."""
        return {
            key: value
            for key, value in self.optimizer_state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_elementwise(key, value)
        }

    def scalars(self) -> dict[str, float]:
        """Key -> what is one number for the whole part, such as the step."""
        return {
            key: float(value)
            for key, value in self.optimizer_state.items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }

    def set_scalar(self, key: str, value: float) -> None:
        """Set a number in the form that the optimizer gave it."""
        old = self.optimizer_state[key]
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            self.optimizer_state[key] = type(old)(value)

    def _is_elementwise(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        return key in self.key_ranges or value.shape == self.tensor.shape

    def allocate_state(self, key: str, dtype: torch.dtype) -> None:
        """Have room for what the optimizer makes only when it needs it."""
        numel = sum(place.numel for place in self.key_ranges[key]) if key in self.key_ranges else self.tensor.numel()
        self.optimizer.state[self.tensor][key] = torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def init_optimizer_state(self) -> None:
        """Have the optimizer make what it keeps: a step with zero gradients at rate 0. The weights are not looked at after.

        Where values are laid end to end it steps on two others, and what it keeps is made in the part's size: the step
        itself would take several times the part's memory.
        """
        kept, grad = self.optimizer.param_groups, self.tensor.grad
        probe = self.tensor if self.tensor.dim() > 1 else self.tensor.new_zeros(2)
        self.optimizer.param_groups = [{**self.param_group, "params": [probe], "lr": 0.0}]
        probe.grad = torch.zeros_like(probe)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, self.tensor.grad = kept, grad
        if probe is not self.tensor and probe in self.optimizer.state:
            self.optimizer.state[self.tensor] = {
                key: value.new_zeros(self.tensor.shape) if getattr(value, "shape", None) == probe.shape else value
                for key, value in self.optimizer.state.pop(probe).items()
            }
