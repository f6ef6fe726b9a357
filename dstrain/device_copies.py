"""Copies between host and device that wait for it as little as they can."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def to_floats(values: Sequence[torch.Tensor | float]) -> list[float]:
    """Return the values as floats; copies all tensors at once, which waits for their device."""
    import torch

    tensors = [value.detach().double() for value in values if isinstance(value, torch.Tensor)]
    if not tensors:
        return [float(value) for value in values]
    copied = iter(torch.stack(tensors).tolist())  # in one copy: each would wait for the device anew
    return [next(copied) if isinstance(value, torch.Tensor) else float(value) for value in values]


def copy_to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return the array on the device, copied from page-locked memory: the host does not wait for earlier work."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
