"""What travels from the loader to the gradient: Batch, Progress and what a step left behind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors for one forward pass (one micro-batch), and what they weigh."""

    tensors: Mapping[str, torch.Tensor]
    weight: float
    """Units the loss sums over (pairs, tokens); known on the host before the forward pass."""
    samples: tuple[int, ...]
    """Ids of the samples inside, for messages and for the record."""
    tokens: int = 0
    """Tokens that are not padding, for the throughput."""
    is_filler: bool = False
    """True where a rank had no sample left: the pass runs, so that no rank waits, and weighs nothing."""
    vision: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """What the model takes of the batch's images, by its names; empty where it sees none."""
    dummy_rows: int = 0
    """Rows of token ids behind those of the samples: a blank image where no sample has one, so that every rank asks for the
    same weights in the same order. What the model says of them is left out."""

    def as_filler(self) -> Batch:
        """The same tensors, weighing nothing."""
        return replace(self, weight=0.0, samples=(), tokens=0, is_filler=True)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """The same batch with more tensors."""
        return replace(self, tensors={**self.tensors, **tensors})

    def to(self, device: torch.device) -> Batch:
        """The same batch with its tensors on the device (asynchronously where pinned)."""
        return self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """The same batch in page-locked memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors, vision = ({k: function(v) for k, v in group.items()} for group in (self.tensors, self.vision))
        return replace(self, tensors=tensors, vision=vision)


@dataclass(frozen=True)
class Progress:
    """How far a run is. `samples` is the loader's whole state, the same for any world size."""

    step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Progress:
        return Progress(self.step + 1, self.samples + samples)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What one optimizer step (or one evaluation pass) left behind on this rank: sums, not means."""

    loss: torch.Tensor
    """Sum of the loss over this rank's micro-batches; scalar, detached, on the device."""
    weight: float
    """Units this rank's loss sums over."""
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor | float]] = field(default_factory=dict)
    """Name -> (sum, weight) of this rank: scalar tensors on the device, or a weight that the host knows."""
    samples: int = 0
    """Samples this rank took, fillers not counted."""
    tokens: int = 0
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping, the same on every rank."""
    applied: bool = True
    """False where the update was left out because something was not finite."""
    suspects: tuple[int, ...] = ()
    """Where it was left out: ids of the samples with a loss that is not finite, else of the whole step."""
    loss_is_finite: bool = True
    """False where a loss itself was not finite, not only a gradient (fp16 searches its loss scale that way)."""


def to_floats(values: Sequence[torch.Tensor | float]) -> list[float]:
    """The values as numbers; all tensors in one copy, which waits for their device."""
    import torch

    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    copied = iter(torch.stack([one.detach().double() for one in tensors]).tolist() if tensors else ())
    return [next(copied) if isinstance(value, torch.Tensor) else float(value) for value in values]
