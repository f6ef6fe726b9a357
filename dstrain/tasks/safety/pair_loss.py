"""Loss and metrics of pairs under safety options, from log-ratios of policy and reference."""

# Shapes: B pairs, B' pairs with images.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from dstrain.batch import Batch
from dstrain.tasks.common.task import Sums
from dstrain.tasks.safety.options import (
    COLUMNS,
    HARMLESS_COLUMNS,
    HELPFUL_COLUMNS,
    PairOrder,
    SafetyOptions,
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


def safe_dpo(logits: torch.Tensor, beta: float | torch.Tensor, one_safe: torch.Tensor, delta: float) -> torch.Tensor:
    """Return -log sigmoid(beta h - (u_l - u_w) delta) per pair, h the difference of the two log-ratios; (B,) -> (B,).

    Kim et al. (arXiv 2505.20065), eq. 12, on pairs that `order_pairs` ordered: u is 1 for an unsafe answer, so
    u_l - u_w is 1 where exactly one answer is safe (`one_safe`), the preferred one, and 0 where both are. delta is
    compared with rewards, beta times log-ratios: it is not multiplied by beta.
    """
    return -F.logsigmoid(beta * logits - delta * one_safe)


def scaled_beta(beta: float, margin: torch.Tensor, weight: float, rate: float) -> torch.Tensor:
    """Return beta (1 + w (1 - exp(-k margin))), between beta and beta (1 + w) for margins of at least 0; (B,) -> (B,).

    MM-DPO's dynamic reward scaling, Zhang et al. (arXiv 2502.10391), section 4.2: margin is the difference of the
    rewards of the two answers, w is `weight`, k is `rate`. Both are 0.5 by default there (appendix F.2). Their SFT term,
    which they add for stability, is not part of it.
    """
    return beta * (1 - weight * torch.expm1(-rate * margin))


def image_preference(chosen: torch.Tensor, corrupted: torch.Tensor, beta: float) -> torch.Tensor:
    """Return -log sigmoid(beta (r - r')), r and r' log-ratios of one answer with its image and a corrupted one.

    mDPO's conditional preference optimization (CoPO), Wang et al. (arXiv 2406.11839); (B,), (B,) -> (B,).
    """
    return -F.logsigmoid(beta * (chosen - corrupted))


def reward_anchor(chosen: torch.Tensor, beta: float, delta: float) -> torch.Tensor:
    """Return -log sigmoid(beta r - delta), r the log-ratio of the preferred answer; (B,) -> (B,).

    mDPO's anchored preference optimization (AncPO), Wang et al. (arXiv 2406.11839), who take delta 0.
    """
    return -F.logsigmoid(beta * chosen - delta)
