"""Floating point operations of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry


class StepFlops:
    """Counter of a model's floating point operations in training steps; recomputation does not count.

    As in appendix B of Chowdhery et al. (PaLM, arXiv 2204.02311): the operations that the mathematics of a step needs,
    whatever was computed twice to save memory. Use it as a context around the steps.
    """

    def __init__(self, module: torch.nn.Module, model: torch.nn.Module) -> None:
        """`module` is called for each micro-batch; `model`, inside it, is trained, its frozen reference is not."""
        self._counter = FlopCounterMode(display=False, custom_mapping=FLOP_FORMULAS)
        self._forward = _TopLevelCalls(self._counter, [module])
        self._trained = _TrainedCalls(self._counter, model.modules(), self._forward)

    def __enter__(self) -> StepFlops:
        self._counter.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._counter.__exit__(*error)
        self._forward.remove()
        self._trained.remove()

    @property
    def total(self) -> int:
        """Operations so far: of the forward passes, and at most those that the trained model's gradients need."""
        backward = self._counter.get_total_flops() - self._forward.flops - self._trained.recomputed_flops
        return self._forward.flops + min(backward, self._trained.backward_flops)


class _TopLevelCalls:
    """Sum of the operations inside the calls of modules; a call inside of another one is a part of it."""

    def __init__(self, counter: FlopCounterMode, modules: Iterable[torch.nn.Module]) -> None:
        self._counter, self._start, self.depth, self.flops = counter, 0, 0, 0
        self._hooks = [
            hook
            for module in modules
            for hook in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _enter(self, *_: Any) -> None:
        if not self.depth:
            self._start = self._counter.get_total_flops()
        self.depth += 1

    def _leave(self, module: torch.nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
        self.depth -= 1
        if not self.depth:
            self.add(self._counter.get_total_flops() - self._start, module, inputs)

    def add(self, flops: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        """Add the operations of an outermost call."""
        self.flops += flops

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


class _TrainedCalls(_TopLevelCalls):
    """Operations of the backward pass of a model's outermost parts: a head may be called on its own, after the rest."""

    def __init__(
        self, counter: FlopCounterMode, modules: Iterable[torch.nn.Module], forward_pass: _TopLevelCalls
    ) -> None:
        super().__init__(counter, modules)
        self._forward_pass, self._is_recomputed = forward_pass, False
        self.backward_flops = 0
        """Operations that the gradients of the calls need."""
        self.recomputed_flops = 0
        """Operations of calls in the backward pass."""

    def _enter(self, *_: Any) -> None:
        if not self.depth:
            self._is_recomputed = not self._forward_pass.depth
        super()._enter()

    def add(self, flops: int, module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._is_recomputed:
            self.recomputed_flops += flops
            return
        if not torch.is_grad_enabled():  # of a reference
            return
        product, done = flops, 0
        if type(module) is torch.nn.Linear and inputs:
            # `dstrain.models.heads` computes the gradient of the rows in the forward pass.
            product = 2 * inputs[0].numel() * module.out_features
            done = flops - product
        # The backward pass of a matrix product has two of its size.
        self.backward_flops += 2 * product - done


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
