"""A module in the place of a model's head: it takes the hidden states, and records what the model does with logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


class HeadRecorder(torch.nn.Module):
    """Returns a placeholder for logits, and calls the head only where that does not do."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__.update(head=head, asked=False)

    is_head_used: bool
    """Whether the head was called: something was done with logits that is not repeated on chunks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)  # a model may ask for its head's weight, or the weight's dtype

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if hidden_states.dim() != 3 or args or kwargs:
            self.__dict__["asked"] = True
            return self.head(hidden_states, *args, **kwargs)
        return LazyLogits.create(
            hidden_states.detach().new_zeros(1, 1, self.head.out_features), self, hidden_states, ()
        )

    def compute_logits(self, hidden_states: torch.Tensor, steps: Sequence[LogitsFunction]) -> torch.Tensor:
        """(B, K, V), made by the head."""
        self.__dict__["asked"] = True
        found = self.head(hidden_states)
        for step in steps:
            found = step(found)
        return found


class LazyLogits(torch.Tensor):
    """(B, K, V) in the place of logits, without their memory: the head's of `states`, and then `steps`.

    Scaling, tanh, casts and a cut of the vocabulary are recorded as steps. For any other function the head is called, and
    the function gets the logits.
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
        made = template_row.expand(*hidden_states.shape[:2], -1).as_subclass(LazyLogits)
        made.recorder, made.hidden_states, made.steps, made.template_row = recorder, hidden_states, steps, template_row
        return made

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or [None]
        if function is torch.Tensor.detach:  # DeepSpeed's hooks, of what a module returns
            return LazyLogits.create(first.row, first.recorder, first.states, first.steps)
        if function in _SHAPE_FUNCTIONS or getattr(function, "__name__", "") == "__get__":
            with torch._C.DisableTorchFunctionSubclass():
                about = function(*args, **kwargs)
            if not isinstance(about, torch.Tensor):
                return about
        if isinstance(first, LazyLogits) and _is_pointwise(function, rest, kwargs):
            step = lambda logits: function(logits, *rest, **kwargs)  # noqa: E731
            return LazyLogits.create(
                step(first.template_row), first.recorder, first.hidden_states, (*first.steps, step)
            )
        return function(*tree_map(_to_logits, tuple(args)), **tree_map(_to_logits, kwargs))


_POINTWISE = frozenset(
    {torch.tanh, torch.mul, torch.div, torch.Tensor.tanh, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__,
     torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.float, torch.Tensor.to, torch.Tensor.contiguous}
)  # fmt: skip
"""Functions that do the same to logits (N, V) as to logits (B, K, V), given numbers and types beside them."""
_SHAPE_FUNCTIONS = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__})
"""Functions of the shape alone."""


def _is_pointwise(function: Callable[..., Any], rest: Sequence[Any], kwargs: Any) -> bool:
    """Whether a function can be called on chunks of logits as it is on all."""
    if function is torch.Tensor.__getitem__:  # [..., a:b]
        (index,) = rest
        return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
    beside = [*rest, *kwargs.values()]
    return function in _POINTWISE and all(isinstance(one, int | float | torch.dtype | torch.device) for one in beside)


def _to_logits(value: Any) -> Any:
    """The logits in the place of a placeholder; the same at each call, as they may be changed in place."""
    if not isinstance(value, LazyLogits):
        return value
    own = value.__dict__
    if "logits" not in own:
        own["logits"] = value.recorder.compute_logits(value.hidden_states, value.steps)
    return own["logits"]
