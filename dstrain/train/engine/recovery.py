"""Forward passes of a step that goes on after one of them ran out of memory, to be dropped on all ranks alike."""

from __future__ import annotations

import gc
import math
import socket
from collections.abc import Callable, Iterable
from typing import Any

import torch

from dstrain.batch import Batch, FailedPass
from dstrain.distributed.world import World
from dstrain.report.allocation_errors import AllocationFailure, find_allocation_failure

MakeFiller = Callable[[], Batch]
"""Function that returns a filler batch of one sample."""
ForwardPass = Callable[[Batch], tuple[torch.Tensor, Any]]


class ForwardRecovery:
    """Forward passes of one step. After one ran out of memory, a filler takes the place of it and of those after it.

    So this rank enters the collectives that the others wait in, and its gradients become nan: every engine drops a step
    with a gradient that is not finite, on all ranks, and leaves weights and optimizer state as they are. Only for a
    pass in which this rank had entered no collective; there the error is raised.
    """

    def __init__(self, world: World, make_filler: MakeFiller, parameters: Iterable[torch.Tensor]) -> None:
        """`parameters`: those of the model; the trained ones get gradients of nan."""
        self._world, self._make_filler, self._parameters = world, make_filler, parameters
        self._hooks: list[Any] = []
        self._filler: Batch | None = None
        self.failed_pass: FailedPass | None = None

    def run(self, forward: ForwardPass, batch: Batch) -> tuple[torch.Tensor, Any]:
        """Return the results of the pass; of the filler, if this pass or one before it ran out of memory."""
        if self._filler is None:
            number = self._world.log.count_started()
            failure = None
            try:
                return forward(batch)
            except (RuntimeError, MemoryError) as error:
                failure = find_allocation_failure(error)
                if failure is None or self._world.log.count_started() != number:
                    raise
            # After the except clause: the error holds the frames of the pass, and they its activations.
            self._drop_pass(failure, batch)
            # A loss of nan alone is not enough: the gradient of relu (hinge) and of torch.where (dropped pairs) is 0 where
            # the filler is on their flat side, whatever the factor.
            for one in self._parameters:
                if one.requires_grad:
                    self._hooks.append(one.register_hook(lambda gradient: torch.full_like(gradient, math.nan)))
            self._filler = self._make_filler()
        return forward(self._filler)

    def close(self) -> None:
        """Call it after the last backward pass of the step."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def scale(self, scale: float) -> float:
        """Return the factor of the loss; nan after a failed pass."""
        return scale if self.failed_pass is None else math.nan

    def _drop_pass(self, failure: AllocationFailure, batch: Batch) -> None:
        text = f"{self._world.log.activity}: could not allocate {failure.describe()}"
        self.failed_pass = FailedPass(
            rank=self._world.rank, host=socket.gethostname(), samples=len(batch.samples), text=text
        )
        free_cached_memory()


def free_cached_memory() -> None:
    """Return unused memory of torch's allocator to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
