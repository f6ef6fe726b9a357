"""Loss and metrics of pairs under safety options, from log-ratios of policy and reference."""

# Shapes: B pairs, B' pairs with images.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from dstrain.batch import Batch
from dstrain.tasks.common.task import Sums
from dstrain.tasks.safety.losses import image_preference, reward_anchor, safe_dpo, scaled_beta
from dstrain.tasks.safety.options import SafetyOptions
from dstrain.tasks.safety.ordering import (
    COLUMNS,
    HARMLESS_COLUMNS,
    HELPFUL_COLUMNS,
    PairOrder,
    order_pairs,
    reward_margin,
)


@dataclass(frozen=True)
class SafePairs:
    """A batch of pairs, ordered by their labels or scores."""

    options: SafetyOptions
    columns: Mapping[str, torch.Tensor]
    """Labels, scores and margins of the pairs, (B,) float64 each."""
    order: PairOrder

    @classmethod
    def from_batch(cls, options: SafetyOptions, batch: Batch) -> SafePairs:
        """Return the pairs of a batch that has its scores, if reward models compute them in the step."""
        columns = {name: batch.tensors[name].double() for name in COLUMNS if name in batch.tensors}
        return cls(options, columns, order_pairs(columns, options.harmless_threshold))

    @property
    def trained_order(self) -> PairOrder:
        """The order that the loss follows: the one of the data without a method."""
        if self.options.method == "none":
            return replace(self.order, swap=self.order.swap & False, keep=self.order.keep | True)
        return self.order

    def reorder(self, sides: torch.Tensor) -> torch.Tensor:
        """Return values of the data's chosen and rejected answers as those of the preferred one and the other; (2, B)."""
        return torch.where(self.trained_order.swap, sides.flip(0), sides)

    def losses(self, preferred: torch.Tensor, other: torch.Tensor, beta: float) -> torch.Tensor:
        """Return the loss of each pair from log-ratios in the order of `reorder`, without the term on images; (B,), (B,) -> (B,)."""
        options, order = self.options, self.trained_order
        betas: float | torch.Tensor = beta
        if options.scaling_weight:
            margin = reward_margin(self.columns, order)
            betas = scaled_beta(beta, margin, options.scaling_weight, options.scaling_rate)
        delta = options.delta if options.method == "safedpo" else 0.0
        pairs = safe_dpo(preferred - other, betas, order.one_safe, delta)
        if options.anchor_weight:
            pairs = pairs + options.anchor_weight * reward_anchor(preferred, beta, options.anchor_delta)
        return torch.where(order.keep, pairs, 0.0)

    def image_losses(self, preferred: torch.Tensor, corrupted: torch.Tensor, beta: float) -> torch.Tensor:
        """Return the term on images of each kept pair that has some; (B,), (B,) with nan without images -> (B,)."""
        shown = self._image_mask(corrupted)
        terms = image_preference(preferred, torch.where(shown, corrupted, 0.0), beta)
        return self.options.image_weight * torch.where(shown, terms, 0.0)

    def _image_mask(self, corrupted: torch.Tensor) -> torch.Tensor:
        return ~corrupted.isnan() & self.trained_order.keep

    def metrics(self, rewards: torch.Tensor) -> Sums:
        """Return the margins on harmless and on helpful pairs, each with its weight, from (2, B) in the data's order.

        `harmless_margin` is the mean reward of the safe answer less that of the unsafe one, over pairs with exactly
        one safe answer; `helpful_margin` that of the preferred answer less the other's, over pairs of two safe ones.
        """
        margin = torch.where(self.order.swap, -1.0, 1.0) * (rewards[0] - rewards[1])
        kinds = {"harmless_margin": self.order.one_safe, "helpful_margin": self.order.both_safe}
        found = {name: (torch.where(pairs, margin, 0.0).sum(), pairs.sum()) for name, pairs in kinds.items()}
        if not self.options.drops_in_step:
            return found
        count = float(len(margin))
        shares = {"reordered": self.order.swap, "dropped": ~self.order.keep}
        return {**found, **{name: (pairs.sum(), count) for name, pairs in shares.items()}}

    def image_metrics(self, rewards: torch.Tensor, corrupted: torch.Tensor) -> Sums:
        """Return `image_margin`: the mean reward of the preferred answer less that with the corrupted image."""
        shown = self._image_mask(corrupted)
        return {"image_margin": (torch.where(shown, rewards - corrupted, 0.0).sum(), shown.sum())}


def with_pair_weight(options: SafetyOptions, batch: Batch) -> Batch:
    """Return a batch with its scores, weighted by the number of pairs that are kept. Waits for the device.

    The weight is nan where a score is not finite: a comparison with nan would keep or drop a pair without a word.
    """
    pairs = SafePairs.from_batch(options, batch)
    weight = pairs.trained_order.keep.sum().double()
    for name in (*HARMLESS_COLUMNS, *HELPFUL_COLUMNS):
        if name in pairs.columns:
            weight = torch.where(pairs.columns[name].isfinite().all(), weight, torch.nan)
    return replace(batch, weight=float(weight))
