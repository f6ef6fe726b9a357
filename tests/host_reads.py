"""Finds operations that would make the host wait for a GPU, by the operators that are called; needs no GPU."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.workers import ROOT

READS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_unique2", "unique_consecutive",
         "masked_scatter_backward"}  # fmt: skip
"""Operators whose result, or its shape, the host has to learn from the values of a tensor."""


class HostReads(TorchDispatchMode):
    """Records where such an operator is called, as `operator file:line`; the line is the innermost one of dstrain."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name in READS or (name in ("index", "index_put", "index_put_", "_index_put_impl_") and _by_mask(args)):
            self._record(name)
        elif name == "lift_fresh":
            self._record("torch.tensor")  # on a GPU: a copy of a list from pageable memory
        return func(*args, **(kwargs or {}))

    def _record(self, name: str) -> None:
        frames = [one for one in traceback.extract_stack() if "torch/" not in one.filename]
        own = [one for one in frames if str(ROOT / "dstrain") in one.filename]
        last, inner = (own or frames)[-1], [one for one in frames if "host_reads" not in one.filename][-1]
        where = f"{last.filename.removeprefix(str(ROOT) + '/')}:{last.name}"
        other = "" if inner is last else f" <- {inner.filename.partition('site-packages/')[2]}:{inner.name}"
        self.found.append(f"{name} {where}{other}")


def _by_mask(args: tuple[Any, ...]) -> bool:
    indices = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indices)


def host_reads(function: Callable[[], Any]) -> list[str]:
    """Return the operators that `function` calls and that would wait for a GPU, each once."""
    with HostReads() as reads:
        function()
    return sorted({*reads.found})
