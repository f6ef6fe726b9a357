"""Worker functions of test_experts: each rank's tokens go to experts that no token of another rank goes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.parity import cases


class RouteBySample:
    """Sends the tokens of a micro-batch to `used` experts, which depend on its first sample; others get no token."""

    def __init__(self, model: torch.nn.Module, implementation: str, used: dict[int, int]) -> None:
        """`used`: sample -> the first of its two experts."""
        self.counts: list[list[int]] = []
        self._used, self._first = used, 0
        core: Any = model.unwrapped_model
        core.set_experts_implementation(implementation)
        model.register_forward_pre_hook(self._start)
        experts = [module for name, module in core.named_modules() if name.endswith(".experts")]
        assert experts
        for module in experts:
            module.register_forward_pre_hook(self._route, with_kwargs=True)

    def _start(self, module: torch.nn.Module, args: Any) -> None:
        self._first = self._used[args[0].samples[0]]

    def _route(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        hidden, index, *rest = (*args, *kwargs.values())
        experts = torch.arange(index.shape[-1], device=index.device) + self._first
        index = experts.expand_as(index).to(index.dtype)
        self.counts.append(torch.bincount(index.flatten(), minlength=4).tolist())
        return (hidden, index, *rest), {}


@contextmanager
def routed(implementation: str, used: dict[int, int]) -> Iterator[list[RouteBySample]]:
    """Context in which `cases.made` builds models with these routes."""
    routes: list[RouteBySample] = []
    made = cases.made

    def make(*args: Any, **kwargs: Any) -> Any:
        run = made(*args, **kwargs)
        routes.append(RouteBySample(run.engine.train_module, implementation, used))
        return run

    with mock.patch.object(cases, "made", make):
        yield routes


def step(implementation: str, used: dict[int, int], **arguments: Any) -> dict[str, Any]:
    """Return `one_step` with routed experts, and how many tokens each of them got in this process. Collective."""
    with routed(implementation, used) as routes:
        found = cases.one_step(**arguments)
    counts = torch.tensor(routes[0].counts).sum(dim=0).tolist()
    return found | {"tokens": counts}
