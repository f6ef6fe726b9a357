"""What functions that recompute their forward pass share: the state to compute it in, and sums of gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


@dataclass(frozen=True)
class ForwardState:
    """Random generators and autocast of a forward pass, in which it is computed once more."""

    kind: str
    dtype: torch.dtype
    is_autocast: bool
    host_state: torch.Tensor
    devices: list[int]
    device_states: list[torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> ForwardState:
        """Return the state now, of the host and of the tensor's device."""
        kind = tensor.device.type
        devices, device_states = get_device_states(tensor)
        return cls(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.get_rng_state(), devices,
            device_states,
        )  # fmt: skip

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Compute in this state inside the context, with gradients.

        Dropout drops the same units again. autograd calls `backward` outside of the caller's autocast context.
        """
        with (
            torch.random.fork_rng(devices=self.devices),
            torch.enable_grad(),
            torch.autocast(self.kind, self.dtype, enabled=self.is_autocast),
        ):
            torch.set_rng_state(self.host_state)
            set_device_states(self.devices, self.device_states)
            yield


class GradientSums:
    """Sums of the gradients of parts of a pass, in fp32 or fp64: autograd would round a 16-bit sum at each addition."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        self._sums: list[torch.Tensor | None] = [None] * len(parameters)

    def add(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the gradient of each parameter; None counts as 0."""
        for index, gradient in enumerate(gradients):
            total = self._sums[index]
            if gradient is None:
                continue
            if total is None:
                self._sums[index] = gradient if gradient.dtype == torch.float64 else gradient.float()
            else:
                total.add_(gradient)

    def pop(self) -> list[torch.Tensor | None]:
        """Return the sum of each parameter in its type, None without a gradient; frees each sum as it is cast."""
        found: list[torch.Tensor | None] = []
        for index, parameter in enumerate(self._parameters):
            total, self._sums[index] = self._sums[index], None
            found.append(None if total is None else total.to(parameter.dtype))
        return found
