"""The values of one step: PackingMode, Batch, Progress and StepResult."""

# Shapes of a batch's tensors: B rows (samples or sides of pairs), L tokens, K tokens from the first
# target to the end. Each task says in its `collate` which tensors there are.

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from dstrain.distributed.world import SequenceGroup


@dataclass(frozen=True)
class PackingMode:
    """The form of a run's batches."""

    is_packed: bool
    """One row without padding instead of one row for each sequence."""
    shares_prefixes: bool = False
    """Sequences of a sample share their common beginning."""
    message: str = ""
    """Why `auto` is off; empty where it is on, or where the recipe decides."""


PADDED = PackingMode(False)


@dataclass(frozen=True)
class PackedGroup:
    """Lengths of one group of a packed batch: a shared prefix, and the branches that continue it, in tokens.

    The group's tokens are consecutive: prefix, first branch, second branch, … Positions count from 0 within the prefix
    and from `prefix` within each branch. A token attends to the prefix and to its own branch, causally. A sequence that
    shares nothing is a group with prefix 0 and one branch. Prefix sharing: Wang and Hegde (arXiv 2410.20305).
    """

    prefix: int
    branches: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the group in the packed row."""
        return self.prefix + sum(self.branches)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tensors of one forward pass (one micro-batch) and their weight in the loss."""

    tensors: Mapping[str, torch.Tensor]
    weight: float
    """Units that the loss sums over (pairs, tokens); known on the host before the forward pass."""
    samples: tuple[int, ...]
    """Ids of the samples, for messages and logs."""
    tokens: int = 0
    """Tokens without padding, for the throughput."""
    is_filler: bool = False
    """True if the rank had no sample left: the pass runs, so that no rank waits, with weight 0."""
    vision: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The model's inputs for the batch's images, by parameter name; empty without images."""
    dummy_rows: int = 0
    """Rows after those of the samples: one with a blank image if no sample has one, so that every
    rank gathers the same weights in the same order. Their outputs are ignored. In a packed batch they are groups."""
    groups: tuple[PackedGroup, ...] = ()
    """Groups of a packed batch in the order of their tokens: `input_ids` is (1, T), where T is the sum of their tokens,
    and there is no padding. Empty where rows are padded. Known on the host, so that no kernel waits for the device."""

    other_groups: Mapping[str, tuple[PackedGroup, ...]] = field(default_factory=dict)
    """Groups of further packed rows in `tensors`, by the prefix of the tensors' names."""
    has_padding: bool | None = None
    """Whether `attention_mask` hides a token; `to` sets it where the mask is still on the host. None: unknown, or there
    is no mask."""
    sequence: SequenceGroup | None = None
    """The processes that compute the batch together, of which each has this batch, with its own part of the weight,
    the targets and the number of tokens; None: this process computes all of it."""

    @property
    def is_packed(self) -> bool:
        """True if the batch is one row of concatenated groups."""
        return bool(self.groups)

    def as_filler(self) -> Batch:
        """Return the same tensors with weight 0 and without samples."""
        return replace(self, weight=0.0, samples=(), tokens=0, is_filler=True)

    def with_tensors(self, tensors: Mapping[str, torch.Tensor]) -> Batch:
        """Return the batch with additional tensors."""
        return replace(self, tensors={**self.tensors, **tensors})

    def to(self, device: torch.device) -> Batch:
        """Return the batch with its tensors on the device, copied asynchronously if pinned."""
        mask, has_padding = self.tensors.get("attention_mask"), self.has_padding
        if mask is not None and mask.device.type == "cpu":
            has_padding = not bool(mask.all())
        return replace(self._map_tensors(lambda tensor: tensor.to(device, non_blocking=True)), has_padding=has_padding)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory."""
        return self._map_tensors(lambda tensor: tensor.pin_memory())

    def _map_tensors(self, function: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        tensors, vision = ({k: function(v) for k, v in group.items()} for group in (self.tensors, self.vision))
        return replace(self, tensors=tensors, vision=vision)


@dataclass(frozen=True)
class Progress:
    """Optimizer steps and samples of a run so far.

    `samples` is the loader's whole state, the same for any world size.
    """

    step: int = 0
    samples: int = 0

    def advance(self, samples: int) -> Progress:
        """Return the progress after one more step with this many samples."""
        return Progress(self.step + 1, self.samples + samples)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Results of one optimizer step (or one evaluation pass) on this rank: sums, not means."""

    loss: torch.Tensor
    """Sum of the loss over this rank's micro-batches; scalar, detached, on the device."""
    weight: float
    """Units that this rank's loss sums over."""
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor | float]] = field(default_factory=dict)
    """Name -> (sum, weight) of this rank: scalar tensors on the device; the weight may be a float."""
    micro_batches: int = 0
    """Backward passes of this rank, fillers included."""
    samples: int = 0
    """Samples of this rank, without fillers."""
    tokens: int = 0
    computed_tokens: int = 0
    """Tokens that the model computed, padding and fillers included; 0 if unknown."""
    padding_tokens: int = 0
    """Those of them that are padding."""
    grad_norm: float | None = None
    """Norm of the whole gradient before clipping, the same on every rank."""
    applied: bool = True
    """False if the update was skipped because of a non-finite value."""
    suspects: tuple[int, ...] = ()
    """Ids of the samples with a non-finite loss in a skipped step; of all its samples if no loss was non-finite."""
    loss_is_finite: bool = True
    """False if a loss itself was not finite, not only a gradient (fp16 finds its loss scale that way)."""
