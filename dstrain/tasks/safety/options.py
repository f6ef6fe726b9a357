"""Options of safety in DPO, and the order of chosen and rejected that follows from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dstrain.config.schema import check_limits

SafetyMethod = Literal["none", "safedpo"]


@dataclass(frozen=True, kw_only=True)
class SafetyOptions:
    """What safety changes in DPO. The defaults change nothing and log the margins on harmless and helpful pairs."""

    method: SafetyMethod = "none"
    """safedpo: safe answers are preferred, pairs of two unsafe answers are dropped; none: the order of the data."""
    delta: float = 10.0
    """SafeDPO's offset: how much the reward of a safe answer is to be above that of an unsafe one."""
    helpful_rm: str | None = None
    """Folder of an exported reward model; its scores order two safe answers and give margins. Empty: the data does."""
    harmless_rm: str | None = None
    """Folder of an exported reward model; its scores say which answers are safe. Empty: the data's labels do."""
    harmless_threshold: float = 0.0
    """Harmless score from which on an answer is safe."""
    scoring: Literal["cached", "online"] = "cached"
    """cached: reward models score all pairs before training; online: in each step, held in memory."""
    scaling_weight: float = 0.0
    """MM-DPO's w: beta of a pair grows with its reward margin, up to beta x (1 + w). 0: one beta for all pairs. MM-DPO: 0.5."""
    scaling_rate: float = 0.5
    """MM-DPO's k: how fast beta grows with the margin."""
    image_weight: float = 0.0
    """Weight of mDPO's term on images: the answer is likelier with its image than with a corrupted one. mDPO: 1."""
    crop_max_area: float = 0.2
    """Largest share of an image that its corrupted copy shows, a random crop in the image's size. The least is 0.01."""
    anchor_weight: float = 0.0
    """Weight of mDPO's anchor: the reward of the preferred answer is above anchor_delta. mDPO: 1."""
    anchor_delta: float = 0.0
    """Reward that the anchor asks for."""

    def __post_init__(self) -> None:
        check_limits(self, "delta", "scaling_weight", "scaling_rate", "image_weight", "anchor_weight")
        if not MIN_CROP_AREA < self.crop_max_area <= 1:
            raise ValueError(
                f"crop_max_area is {self.crop_max_area:g}, but it must be above {MIN_CROP_AREA:g} and at most 1"
            )
        for name, is_used, fix in (
            ("delta", self.method == "safedpo", "write method: safedpo"),
            ("harmless_threshold", bool(self.harmless_rm), "name a reward model in harmless_rm"),
            ("scaling_rate", bool(self.scaling_weight), "set scaling_weight above 0"),
            ("crop_max_area", bool(self.image_weight), "set image_weight above 0"),
            ("anchor_delta", bool(self.anchor_weight), "set anchor_weight above 0"),
        ):
            # A default cannot be told from the same value written out, which the run folder's recipe has for each option.
            if not is_used and getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(
                    f"{name} is {getattr(self, name):g}, but it has no effect here; {fix}, or leave it out"
                )
        if self.scoring == "online" and self.image_weight:
            raise ValueError("image_weight needs the order of each pair before its step; write scoring: cached")

    @property
    def changes_loss(self) -> bool:
        """False where the block only adds metrics."""
        return self.method != "none" or bool(self.scaling_weight or self.image_weight or self.anchor_weight)

    @property
    def scores_pairs(self) -> bool:
        """True where reward models score the pairs."""
        return bool(self.helpful_rm or self.harmless_rm)

    @property
    def drops_in_step(self) -> bool:
        """True where it is known only in a step which pairs are reordered and dropped."""
        return self.method == "safedpo" and self.scores_pairs and self.scoring == "online"

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that these options add."""
        names = ["harmless_margin", "helpful_margin"]
        names += ["image_margin"] * bool(self.image_weight)
        return (*names, *(["reordered", "dropped"] if self.drops_in_step else []))

    @property
    def needs_labels(self) -> bool:
        """True where every record needs labels of its two answers."""
        return self.method == "safedpo" and not self.harmless_rm


HEADS = ("helpful", "harmless")
"""Names of the reward models: `options.safety.helpful_rm`, and the columns `helpful_chosen`, `helpful_rejected`."""
REWARD_MODEL_OPTIONS = tuple(f"safety.{name}_rm" for name in HEADS)
MIN_CROP_AREA = 0.01
"""Smallest share of an image that its corrupted copy shows."""


# Shapes: B pairs; a column is a numpy array or a tensor (B,).


LABEL_COLUMNS = ("chosen_safe", "rejected_safe")
"""Labels of the data: 1 safe, 0 unsafe, nan unknown."""
HARMLESS_COLUMNS = ("harmless_chosen", "harmless_rejected")
"""Scores of a harmless reward model. Where they are given, labels of the data are ignored."""
HELPFUL_COLUMNS = ("helpful_chosen", "helpful_rejected")
"""Scores of a helpful reward model."""
COLUMNS = ("margin", *LABEL_COLUMNS, *HARMLESS_COLUMNS, *HELPFUL_COLUMNS)
Columns = Mapping[str, Any]


@dataclass(frozen=True)
class PairOrder:
    """What safety says about pairs, each (B,) bool. Chosen and rejected are those of the data."""

    swap: Any
    """The rejected answer is preferred."""
    keep: Any
    """False: both answers are unsafe, and the pair is not trained on."""
    one_safe: Any
    """Exactly one answer is safe; it is preferred."""
    both_safe: Any
    """Both answers are safe."""


def order_pairs(columns: Columns, harmless_threshold: float = 0.0) -> PairOrder:
    """Return which answers are preferred and which pairs are kept; columns (B,) of numpy or of torch.

    SafeDPO, Kim et al. (arXiv 2505.20065), eq. 11: a pair with one safe answer prefers it, a pair of two unsafe
    answers is dropped, another keeps its order. An answer with a harmless score is safe from `harmless_threshold`
    on. With helpful scores the higher one of two safe answers is preferred; a tie keeps the order of the data.
    A pair with an unknown label keeps its order and counts as neither `one_safe` nor `both_safe`.
    """
    chosen, rejected, known = _safe_answers(columns, harmless_threshold)
    both_safe = known & chosen & rejected
    one_safe = known & (chosen ^ rejected)
    swap = one_safe & rejected
    if HELPFUL_COLUMNS[0] in columns:
        helpful_chosen, helpful_rejected = (columns[name] for name in HELPFUL_COLUMNS)
        swap = swap | (both_safe & (helpful_rejected > helpful_chosen))
    return PairOrder(swap=swap, keep=~known | chosen | rejected, one_safe=one_safe, both_safe=both_safe)


def _safe_answers(columns: Columns, harmless_threshold: float) -> tuple[Any, Any, Any]:
    """Return (chosen is safe, rejected is safe, both are known), each (B,) bool."""
    if HARMLESS_COLUMNS[0] in columns:
        chosen, rejected = (columns[name] for name in HARMLESS_COLUMNS)
        return chosen >= harmless_threshold, rejected >= harmless_threshold, (chosen == chosen) & (rejected == rejected)
    chosen, rejected = (columns[name] for name in LABEL_COLUMNS)
    return chosen > 0, rejected > 0, (chosen == chosen) & (rejected == rejected)  # nan differs from itself


def reward_margin(columns: Columns, order: PairOrder) -> Any:
    """Return by how much the preferred answer is better, (B,), at least 0; 0 for pairs that are not kept.

    From the scores where there are some: the harmless scores of a pair with one safe answer, the helpful scores of
    another. Else from the data's `margin`, which counts in the order of the data: reversed by a swap, it is 0.
    """
    sign = 1.0 - 2.0 * order.swap
    margin = columns["margin"] * sign
    if HELPFUL_COLUMNS[0] in columns:
        margin = (columns[HELPFUL_COLUMNS[0]] - columns[HELPFUL_COLUMNS[1]]) * sign
    if HARMLESS_COLUMNS[0] in columns:
        harmless = (columns[HARMLESS_COLUMNS[0]] - columns[HARMLESS_COLUMNS[1]]) * sign
        no_helpful = HELPFUL_COLUMNS[0] not in columns
        use_harmless = order.one_safe | no_helpful
        margin = harmless * use_harmless + margin * ~use_harmless
    return margin * (margin > 0) * order.keep
