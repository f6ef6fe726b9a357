"""Floating point operations of a step, and the peak rates of GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

PEAK_TFLOPS: dict[str, float] = {
    "B200": 2250,
    "H200 NVL": 835,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "H20": 148,
    "A100": 312,
    "A800": 312,
    "A40": 149.7,
    "A30": 165,
    "A10": 125,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX A6000": 154.8,
    "RTX 6000 Ada": 364.2,
    "RTX 4090": 165.2,
    "RTX 3090": 71,
    "V100-SXM2": 125,
    "V100-SXM3": 125,
    "V100-PCIE": 112,
    "T4": 65,
    "MI300X": 1307.4,
}
"""Words of a device's name -> dense TFLOP/s of matrix products in bf16, or in fp16 where the device has no bf16.

From the data sheets and architecture white papers of NVIDIA (Volta, Turing, Ampere, Ada, Hopper, Blackwell) and AMD (CDNA 3),
with accumulation in fp32. A figure that is given with sparsity is halved. The first name that fits counts.
"""


def find_peak_flops(device_name: str) -> float | None:
    """Return the device's dense peak in FLOP/s in 16 bits; None for an unknown device, or a MIG slice of one."""
    if "MIG" in device_name:
        return None
    for name, tflops in PEAK_TFLOPS.items():
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", device_name):
            return tflops * 1e12
    return None


class StepFlops:
    """Counter of a model's floating point operations in training steps; recomputation does not count.

    As in appendix B of Chowdhery et al. (PaLM, arXiv 2204.02311): the operations that the mathematics of a step needs,
    whatever was computed twice to save memory. Use it as a context around the steps.
    """

    def __init__(self, module: torch.nn.Module, model: torch.nn.Module) -> None:
        """`module` is called for each micro-batch; `model`, inside it, is trained, its frozen reference is not."""
        self._counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        self._forward, self._trained = _CallCounter(module, self._counter), _CallCounter(model, self._counter)

    def __enter__(self) -> StepFlops:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._counter.__exit__(*error)
        self._forward.remove()
        self._trained.remove()

    @property
    def total(self) -> int:
        """Operations so far: of the forward passes, and at most twice those of the trained model's for the backward."""
        backward = self._counter.get_total_flops() - self._forward.flops
        # The backward pass of a matrix product has two of its size; what is above that was recomputed.
        return self._forward.flops + min(backward, 2 * self._trained.flops_with_grad)


class _CallCounter:
    """Sum of the operations inside the calls of one module."""

    def __init__(self, module: torch.nn.Module, counter: FlopCounterMode) -> None:
        self._counter, self._start = counter, 0
        self.flops, self.flops_with_grad = 0, 0
        self._hooks = [
            module.register_forward_pre_hook(self._enter),
            module.register_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, *_: Any) -> None:
        self._start = self._counter.get_total_flops()

    def _leave(self, *_: Any) -> None:
        spent = self._counter.get_total_flops() - self._start
        self.flops += spent
        if torch.is_grad_enabled():
            self.flops_with_grad += spent

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _count_cpu_attention(
    query_shape: Sequence[int], key_shape: Sequence[int], value_shape: Sequence[int], *_: Any, **__: Any
) -> int:
    """Return operations of the two matrix products; shapes are (B, heads, L or S, width)."""
    batch, heads, length, width = query_shape
    return 2 * batch * heads * length * key_shape[2] * (width + value_shape[3])


def _count_cpu_attention_backward(gradient_shape: Sequence[int], *shapes: Sequence[int], **__: Any) -> int:
    """Return operations of the gradients of queries, keys, values and probabilities: twice those of the forward pass."""
    return 2 * _count_cpu_attention(*shapes[:3])


def or_zero(formula: Callable[..., int]) -> Callable[..., int]:
    """Return a formula of torch's table that counts 0 for shapes it does not know.

    They raise for some valid calls, such as attention with fewer key heads than query heads, and they
    are called in the middle of the model's forward pass: the run would stop.
    """

    def count(*args: Any, out_shape: Any = None, **kwargs: Any) -> int:
        try:
            return formula(*args, out_val=out_shape, **kwargs)
        except Exception:
            return 0

    return count


# Higher-order operators (flex_attention) have no overloads and take tensors, not shapes: their formulas stay.
FLOP_FORMULAS: dict[Any, Callable[..., int]] = {
    **{op: or_zero(formula) for op, formula in flop_registry.items() if hasattr(op, "overloads")},
    # torch 2.13 has formulas of the attention kernels for GPUs only (torch/utils/flop_counter.py).
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _count_cpu_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _count_cpu_attention_backward,
}
"""Operation -> formula of its floating point operations; 0 where torch's own formula fails."""
