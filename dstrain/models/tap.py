"""A module in the place of a model's head: it takes the hidden states, and records what the model does with logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Tap(torch.nn.Module):
    """Takes the hidden states in the place of a head, and records what becomes of the logits."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        vars(self).update(head=head, taken=[], steps=[], repeatable=True)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["head"], name)  # a model may ask for its head's weight, or the weight's dtype

    def forward(self, states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        self.taken.append(states)
        vars(self)["repeatable"] &= states.dim() == 3 and not more and not named
        return Placeholder.of(states.detach().new_zeros(1, 1, self.head.out_features), self)


class Placeholder(torch.Tensor):
    """(1, 1, V) zeros in the place of logits. What functions do with it is recorded by its tap."""

    tap: Tap
    steps: int
    """How many steps its tap had recorded when it was made."""

    @staticmethod
    def of(values: torch.Tensor, tap: Tap) -> Placeholder:
        made = values.as_subclass(Placeholder)
        made.tap, made.steps = tap, len(tap.steps)
        return made

    @property
    def newest(self) -> bool:
        """Whether the recorded steps led to it, one after another."""
        return self.steps == len(self.tap.steps)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs)
        if isinstance(result, bool | int | torch.Size | torch.dtype | torch.device):
            return result
        tap = next((arg.tap for arg in [*args, *kwargs.values()] if isinstance(arg, Placeholder)), None)
        if tap is None:  # inside a list, say: what becomes of it has lost the placeholder, and is told by that
            return result
        if function is not torch.Tensor.detach:  # by DeepSpeed, of what a module returns
            _record(tap, function, args, kwargs)
        return Placeholder.of(result, tap) if isinstance(result, torch.Tensor) else result


_POINTWISE = frozenset(
    {torch.tanh, torch.mul, torch.div, torch.Tensor.tanh, torch.Tensor.mul, torch.Tensor.mul_, torch.Tensor.__mul__,
     torch.Tensor.__rmul__, torch.Tensor.__imul__, torch.Tensor.div, torch.Tensor.div_, torch.Tensor.__truediv__,
     torch.Tensor.__itruediv__, torch.Tensor.float, torch.Tensor.to, torch.Tensor.contiguous}
)  # fmt: skip
"""Functions that do the same to logits (N, V) as to logits (B, K, V), given numbers and types beside them."""


def _record(tap: Tap, function: Callable[..., Any], args: Sequence[Any], kwargs: Any) -> None:
    first, *rest = args or [None]
    plain = all(isinstance(arg, int | float | torch.dtype | torch.device) for arg in [*rest, *kwargs.values()])
    cut = function is torch.Tensor.__getitem__ and _of_vocabulary(*rest)
    known = isinstance(first, Placeholder) and first.newest
    if not known or not ((function in _POINTWISE and plain) or cut):
        vars(tap)["repeatable"] = False
        return
    tap.steps.append(lambda logits: function(logits, *rest, **kwargs))


def _of_vocabulary(index: Any) -> bool:
    """Whether an index is `[..., a:b]`."""
    return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
