"""Slices of a rank's state: a tensor, its optimizer state, and the ranges of parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

WEIGHT_KEY = "weight"
"""Key of a parameter's own values; the optimizer's state has keys of its own (exp_avg, step, ...)."""

BLOCK = 256
"""Values with one scale, in bitsandbytes' 8-bit optimizers."""
SCALE_KEYS = ("absmax1", "absmax2")
"""Keys of 8-bit state: the scales of the blocks of both moments."""
BLOCKWISE_KEYS = (*SCALE_KEYS, "qmap1", "qmap2")
"""The same, and the numbers that codes stand for, which are constants."""


@dataclass(frozen=True)
class ParamRange:
    """Range of a flattened parameter, and its position in a slice."""

    name: str
    """Name of the parameter or buffer in the task's model."""
    start: int
    """Index of the first value in the flattened parameter."""
    numel: int
    offset: int
    """Index of the first value in the flattened slice."""


@dataclass(frozen=True, eq=False)
class StateSlice:
    """Tensor of this rank with its optimizer state, and the parameter ranges that it holds."""

    tensor: torch.Tensor
    """Values in the precision of the master weights; the tensor that the optimizer updates."""
    ranges: Sequence[ParamRange]
    is_replicated: bool
    """True if all ranks hold the same values."""
    optimizer: Any = None
    """A torch.optim.Optimizer; None for frozen tensors and buffers."""
    param_group: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's parameter group of the tensor."""
    key_ranges: Mapping[str, Sequence[ParamRange]] = field(default_factory=dict)
    """Key -> ranges, for optimizer state with another layout than the tensor."""

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state of the tensor; empty before its first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.tensor, {})

    def get_ranges(self, key: str) -> Sequence[ParamRange]:
        """Return the ranges in the tensor of a key."""
        return self.key_ranges.get(key, self.ranges)

    def elementwise_state(self) -> dict[str, torch.Tensor]:
        """Return key -> (n,): the weight, and optimizer state with one value per weight."""
        kept = {key: value for key, value in self.optimizer_state.items() if self._is_elementwise(key, value)}
        return {key: value.detach().view(-1) for key, value in {WEIGHT_KEY: self.tensor, **kept}.items()}

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Return key -> other tensors of the optimizer, such as Adafactor's row and column means of a matrix.

        Without those of 8-bit state, whose blocks are stored by position (`block_scales`).
        """
        return {
            key: value
            for key, value in self.optimizer_state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_elementwise(key, value)
            if key not in BLOCKWISE_KEYS
        }

    def block_scales(self, places: Sequence[ParamRange]) -> list[tuple[str, str, torch.Tensor]]:
        """Return (key, name in a file, scales) of the blocks of 8-bit state that the ranges touch: blockwise.py."""
        found = []
        for key in SCALE_KEYS:
            scales: Any = self.optimizer_state.get(key)
            for place in places if scales is not None else ():
                first, end = place.offset // BLOCK, -(-(place.offset + place.numel) // BLOCK)
                found.append((key, f"{place.name}/{key}.{place.start}.{place.offset % BLOCK}", scales[first:end]))
        return found

    def scalars(self) -> dict[str, float]:
        """Return key -> optimizer state that is one number, such as the step."""
        return {
            key: float(value)
            for key, value in self.optimizer_state.items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }

    def set_scalar(self, key: str, value: float) -> None:
        """Set a number of the optimizer state, keeping its type (tensor, int or float)."""
        old = self.optimizer_state[key]
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            self.optimizer_state[key] = type(old)(value)

    def _is_elementwise(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        if key in BLOCKWISE_KEYS:
            return False
        return key in self.key_ranges or value.shape == self.tensor.shape

    def allocate_state(self, key: str, dtype: torch.dtype) -> None:
        """Allocate state that the optimizer creates only at its first step, filled with zeros."""
        numel = sum(place.numel for place in self.key_ranges[key]) if key in self.key_ranges else self.tensor.numel()
        self.optimizer.state[self.tensor][key] = torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def init_optimizer_state(self) -> None:
        """Allocate optimizer state by one step with zero gradients and lr 0; weights are loaded afterwards.

        For flat partitions, step a 2-element probe and re-allocate its state at full size; stepping the partition would
        need several times its memory.
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
