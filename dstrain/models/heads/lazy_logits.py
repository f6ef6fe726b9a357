"""Lazy logits: stand-in for the head that records hidden states and postprocessing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

# Shapes: B rows, K targets of a row, V vocabulary, H width, N rows of one chunk.

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


class HeadRecorder(torch.nn.Module):
    """Output head that returns LazyLogits, and calls the real head only where they do not suffice."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        # Not by Module.__setattr__: the recorder owns no parameters, and nothing may find the head twice.
        self.__dict__.update(head=head, is_head_used=False)

    is_head_used: bool
    """True once the head was called: the model did something with its logits that cannot be repeated on chunks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)  # models read their head's weight or its dtype

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Only (B, K, H) alone can be split into rows later.
        if hidden_states.dim() != 3 or args or kwargs:
            self.__dict__["is_head_used"] = True
            return self.head(hidden_states, *args, **kwargs)
        # One row is enough to learn what a step does to dtype and V.
        template_row = hidden_states.detach().new_zeros(1, 1, self.head.out_features)
        return LazyLogits.create(template_row, self, hidden_states, ())

    def compute_logits(self, hidden_states: torch.Tensor, steps: Sequence[LogitsFunction]) -> torch.Tensor:
        """Return logits (B, K, V) of hidden states (B, K, H), after the recorded steps."""
        self.__dict__["is_head_used"] = True
        logits = self.head(hidden_states)
        for step in steps:
            logits = step(logits)
        return logits


class LazyLogits(torch.Tensor):
    """Stand-in for logits (B, K, V) that takes no memory: the head of `hidden_states`, followed by `steps`.

    Scaling, tanh, casts and a slice of the vocabulary are recorded as steps. For any other function the head is
    called, and the function gets the real logits.
    """

    recorder: HeadRecorder
    hidden_states: torch.Tensor
    steps: tuple[LogitsFunction, ...]
    template_row: torch.Tensor
    """(1, 1, V) zeros, of the dtype that the logits would have."""

    @staticmethod
    def create(
        template_row: torch.Tensor,
        recorder: HeadRecorder,
        hidden_states: torch.Tensor,
        steps: tuple[LogitsFunction, ...],
    ) -> LazyLogits:
        """Return a view of one row, expanded to (B, K, V)."""
        # Expanded dimensions have stride 0: (B, K, V) in the memory of (V,).
        lazy = template_row.expand(*hidden_states.shape[:2], -1).as_subclass(LazyLogits)
        lazy.recorder, lazy.hidden_states, lazy.steps, lazy.template_row = recorder, hidden_states, steps, template_row
        return lazy

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or [None]
        if function is torch.Tensor.detach:  # DeepSpeed's hooks detach the output of every module
            return LazyLogits.create(first.template_row, first.recorder, first.hidden_states, first.steps)
        if function in _SHAPE_FUNCTIONS or getattr(function, "__name__", "") == "__get__":
            # Otherwise reading the shape would come back to this method.
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs)
            if not isinstance(result, torch.Tensor):  # a shape, dtype or device
                return result
        if isinstance(first, LazyLogits) and _is_pointwise(function, rest, kwargs):
            step: LogitsFunction = lambda logits: function(logits, *rest, **kwargs)  # noqa: E731
            return LazyLogits.create(
                step(first.template_row), first.recorder, first.hidden_states, (*first.steps, step)
            )
        return function(*tree_map(_to_logits, tuple(args)), **tree_map(_to_logits, kwargs))


_POINTWISE = frozenset(
    {torch.tanh, torch.mul, torch.div, torch.Tensor.tanh, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__,
     torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.float, torch.Tensor.to, torch.Tensor.contiguous}
)  # fmt: skip
"""Functions that treat logits (N, V) and (B, K, V) alike, if their other arguments are numbers, dtypes or devices."""
_SHAPE_FUNCTIONS = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__})
"""Functions that read only the shape."""


def _is_pointwise(function: Callable[..., Any], rest: Sequence[Any], kwargs: Any) -> bool:
    """Return True where a function gives the same on chunks of the logits as on all of them."""
    if function is torch.Tensor.__getitem__:  # [..., a:b]
        (index,) = rest
        return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
    others = [*rest, *kwargs.values()]
    return function in _POINTWISE and all(isinstance(one, int | float | torch.dtype | torch.device) for one in others)


def _to_logits(value: Any) -> Any:
    """Return the real logits of LazyLogits, any other value as it is.

    Every call returns the same tensor, because the model may change it in place.
    """
    if not isinstance(value, LazyLogits):
        return value
    attributes = value.__dict__
    if "logits" not in attributes:
        attributes["logits"] = value.recorder.compute_logits(value.hidden_states, value.steps)
    return attributes["logits"]
