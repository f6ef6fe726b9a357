"""What functions that recompute their forward pass share: the state to compute it in, and gradients chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch.utils.checkpoint import get_device_states, set_device_states


def save_forward_state(tensor: torch.Tensor) -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which this forward pass is computed once more: with its random numbers and its autocast.

    The states are those of the host and of the tensor's device now. Inside, gradients are enabled; dropout drops the
    same units again. autograd calls `backward` outside of the caller's autocast context.
    """
    kind, host_state = tensor.device.type, torch.get_rng_state()
    dtype, is_autocast = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    devices, device_states = get_device_states(tensor)

    @contextmanager
    def restored() -> Iterator[None]:
        with (
            torch.random.fork_rng(devices=devices),
            torch.enable_grad(),
            torch.autocast(kind, dtype, enabled=is_autocast),
        ):
            torch.set_rng_state(host_state)
            set_device_states(devices, device_states)
            yield

    return restored


def chunk_gradients(
    function: Callable[[torch.Tensor, slice], Sequence[torch.Tensor]],
    rows: torch.Tensor,
    size: int,
    grad_outputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    needs_row_grad: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradient of the rows (N, H), and of each parameter; None where there is none.

    `function` gets `size` rows at a time, with their place, and returns results (n, …), of which those in floating
    point have a gradient: `grad_outputs`, each (N, …). The gradients of a parameter are summed in fp32 or fp64 and
    rounded once: autograd would round a 16-bit sum at each addition.
    """
    row_grad = torch.empty_like(rows) if needs_row_grad else None
    sums: list[torch.Tensor | None] = [None] * len(parameters)
    for start in range(0, len(rows), size):
        at = slice(start, start + size)
        # A leaf, (n, H): the gradient stops here, and the caller's own graph is left alone.
        chunk = rows[at].detach().requires_grad_(needs_row_grad)
        results = function(chunk, at)
        pairs = [(one, grad[at]) for one, grad in zip(results, grad_outputs, strict=True) if one.is_floating_point()]
        outputs, given = zip(*pairs, strict=True)
        inputs = [*parameters, *[chunk][:needs_row_grad]]
        grads = [*torch.autograd.grad(outputs, inputs, given, allow_unused=True)]
        if row_grad is not None:
            row_grad[at] = grads.pop()
        _add_gradients(sums, grads)
        del results, pairs, outputs, grads  # before the next chunk allocates its own
    found: list[torch.Tensor | None] = []
    for index, parameter in enumerate(parameters):  # each sum is freed as it is cast
        total, sums[index] = sums[index], None
        found.append(None if total is None else total.to(parameter.dtype))
    return row_grad, found


def _add_gradients(sums: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None]) -> None:
    for index, (total, grad) in enumerate(zip(sums, grads, strict=True)):
        if total is not None and grad is not None:
            total.add_(grad)
        elif grad is not None:
            sums[index] = grad if grad.dtype == torch.float64 else grad.float()
