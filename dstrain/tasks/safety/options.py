"""Options of safety-aware DPO, the block `options.safety` of task dpo."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dstrain.config.field_types import check_limits

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


MIN_CROP_AREA = 0.01
"""Smallest share of an image that its corrupted copy shows."""
