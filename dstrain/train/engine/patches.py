"""What must be mended of DeepSpeed's offloading to a disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

PAGE_BYTES = 4096
"""Bytes."""


def patch_gradient_swapper(swapper: Any) -> None:
    """Have gradients that do not begin at a page of their group's buffer stay in host memory.

    DeepSpeed writes each gradient above a MiB to a file and reads it back to its place between the others. Direct
    reading goes to whole pages: at any other place the values land up to a page too early, without an error, and another
    weight learns from them (seen with 0.19.8: deepspeed/runtime/swap_tensor/partitioned_optimizer_swapper.py,
    `_swap_in_pinned_gradients`).
    """
    swap_out = swapper.swap_out_gradients

    def swap_out_aligned(
        parameter: Any, gradient_offsets: Sequence[int], gradient_tensors: Sequence[torch.Tensor]
    ) -> None:
        told = swapper.swap_params_info.get(swapper.parameter_id(parameter))
        pairs = list(zip(gradient_offsets, gradient_tensors, strict=True))
        for offset, tensor in pairs:
            if told is not None and offset * tensor.element_size() % PAGE_BYTES:
                told.unswapped_gradients[offset] = tensor
        aligned = [(offset, tensor) for offset, tensor in pairs if not offset * tensor.element_size() % PAGE_BYTES]
        if aligned:
            swap_out(parameter, [offset for offset, _ in aligned], [tensor for _, tensor in aligned])

    swapper.swap_out_gradients = swap_out_aligned
