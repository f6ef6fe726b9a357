"""Reward model: the chosen of two answers should score higher."""

# Shapes: B pairs, scores of 2B answers.

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig, check_limits
from dstrain.models.folder import has_score_head
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.pairs import PairChecks, PairTask
from dstrain.tasks.common.task import Loss, Task, select_subclass

if TYPE_CHECKING:
    import numpy as np
    import torch
    from transformers import PretrainedConfig

    from dstrain.data.loading.rows import PackedRows, PaddedRows

SCORE_POSITIONS = "score_positions"
"""Tensor of a packed batch, (2B,): the index in the row of the token whose hidden state gives an answer's score."""


NUM_BINS = 10
"""Bins of the confidence, for the calibration error."""
CALIBRATION_SUM = "_calibration_"
"""Begins the name of the sum over a bin's pairs of (1 where the ranking is right, else 0) - confidence."""
MARGIN_BINS = {
    "accuracy_margin_0_1": (0.0, 1.0),
    "accuracy_margin_1_2": (1.0, 2.0),
    "accuracy_margin_2_inf": (2.0, float("inf")),
}
"""Metric -> limits of the absolute difference of the two scores, for the pairs that it is the accuracy of."""


@dataclass(frozen=True, kw_only=True)
class RewardModelSource(ModelSource):
    """A model with one score for a sequence."""

    auto_class_name = "AutoModelForSequenceClassification"

    @property
    def auto_class(self) -> Any:
        from dstrain.models.reward_model import AutoRewardModel, has_classification_class

        return super().auto_class if has_classification_class(self.config) else AutoRewardModel()

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        config = super().build_config(model)
        config.num_labels = 1
        # By id: in a text-only model both are the same object.
        for part in {id(part): part for part in (config, config.get_text_config())}.values():
            # The model finds the position of the score, the last token before padding, by this id.
            part.pad_token_id = self.tokenizer.pad_token_id
        return config

    @cached_property
    def base_tokenizer(self) -> Any:
        """The tokenizer; a base's own that pads with EOS gets another pad token.

        A base that already gives scores keeps it: its scores are read with that pad token.
        """
        from dstrain.models.load import replace_eos_pad_token

        tokenizer, model = super().base_tokenizer, self.recipe.model
        own = model.tokenizer is None and model.path is not None
        if own and not has_score_head(model.path, self.config.architectures):
            replace_eos_pad_token(tokenizer)
        return tokenizer


@dataclass(frozen=True, kw_only=True)
class RewardChecks(PairChecks):
    """The checks of a task on pairs, and of where scores are read."""

    def warnings(self) -> Sequence[str]:
        tokenizer = self.task.tokenizer
        if tokenizer.pad_token_id != tokenizer.eos_token_id:
            return super().warnings()
        return (
            *super().warnings(),
            f"the tokenizer pads with its EOS ({tokenizer.eos_token}), so that scores are read at the token before the "
            "EOS of an answer, as transformers reads them; for scores at the EOS itself, give the tokenizer another pad "
            "token and name its folder as model.tokenizer",
        )


@dataclass(frozen=True, kw_only=True)
class RewardModel(PairTask):
    """Reward models: the chosen of two answers should score higher (Bradley-Terry).

    Christiano et al. (arXiv 1706.03741); the loss is eq. 1 of Ouyang et al. (arXiv 2203.02155), summed over pairs.
    """

    packs_batches = True
    metric_names = ("accuracy", "margin", "calibration_error", *MARGIN_BINS)
    learning_rate = 1.0e-5
    modules_to_save = ("score", "classifier", "classification_head")

    center_rewards_coefficient: float = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual (arXiv 2312.09244)."""
    label_smoothing: float = 0.0
    """Assumed share of flipped labels, from 0 to below 0.5."""
    objectives: list[str] | None = None
    """Columns with a number for each answer, such as [helpfulness, correctness]: one score is trained on each of them."""
    objective_weights: list[float] | None = None
    """Weight of each objective in the loss, and in `score`, the weighted mean of the scores; null: 1 each."""
    loss_type: Literal["bradley_terry", "mse", "cross_entropy"] = "bradley_terry"
    """bradley_terry: on pairs. With objectives also mse and cross_entropy, on each answer."""
    disable_dropout: bool = True
    """Train without dropout, so that both answers are scored by the same network."""

    def __post_init__(self) -> None:
        check_limits(self, "label_smoothing", below=0.5)
        check_limits(self, "center_rewards_coefficient")
        if self.objectives is None and (self.loss_type != "bradley_terry" or self.objective_weights is not None):
            raise ValueError("loss_type and objective_weights need objectives; name the columns with labels there")

    @classmethod
    def select_class(cls, options: Mapping[str, Any]) -> type[Task]:
        if options.get("objectives") is None:
            return cls
        return select_subclass(cls, "objectives", "dstrain.tasks.common.objectives:ObjectivesRewardModel")

    @cached_property
    def model_source(self) -> RewardModelSource:
        return RewardModelSource(task=self)

    @cached_property
    def checks(self) -> RewardChecks:
        return RewardChecks(parse_record=self.parse_record, task=self)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        # One forward pass for both answers: the chosen rows come first.
        chosen, rejected = self.scores(model, batch).chunk(2)  # (B,), (B,)
        pairs = bradley_terry(
            chosen, rejected, batch.tensors["margin"], self.label_smoothing, self.center_rewards_coefficient
        )
        # The metrics take no part in the backward pass.
        difference = (chosen - rejected).detach()
        metrics: dict[str, Any] = {"accuracy": (difference > 0).sum(), "margin": difference.sum()}
        # Rows of evaluations only: a training row has few pairs in a bin.
        return Loss(pairs.sum(), metrics if model.training else metrics | calibration_sums(difference))

    def finish_metrics(self, sums: Mapping[str, tuple[float, float]]) -> Mapping[str, float]:
        bins = [pair for name, pair in sums.items() if name.startswith(CALIBRATION_SUM)]
        found = {"calibration_error": sum(abs(total) for total, _ in bins) / bins[0][1]} if bins else {}
        parts = {name: sums[f"_{name}"] for name in MARGIN_BINS if f"_{name}" in sums}
        return found | {name: total / weight for name, (total, weight) in parts.items()}

    def loss_tensors(
        self, examples: Sequence[Mapping[str, Any]], rows: PaddedRows | PackedRows
    ) -> dict[str, torch.Tensor]:
        return rows.score_tensors({SCORE_POSITIONS: self.tokenizer.pad_token_id})

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        from dstrain.models.reward_model import has_separate_score

        if reason := super().packing_unsupported_reason(shares_prefixes):
            return reason
        config = self.model_source.config
        return None if has_separate_score(config) else f"reward models of type {config.model_type} have another head"

    def scores(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return rewards, the chosen ones first, (2B,)."""
        return self.head_outputs(model, batch).squeeze(-1)

    def head_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the outputs of the head, (R, labels), at the position of each row where an exported model reads them."""
        from dstrain.tasks.common.forward import forward_logits, forward_scores

        # fp32, since the losses take differences of scores that may be close.
        if batch.is_packed:
            return forward_scores(model, batch, batch.tensors[SCORE_POSITIONS]).float()
        return forward_logits(model, batch, **_no_cache_kwargs(model)).float()

    def answer_tensors(
        self, rows: PaddedRows | PackedRows, answers: Sequence[tuple[np.ndarray, int]]
    ) -> dict[str, torch.Tensor]:
        return self.loss_tensors((), rows)

    def score_answers(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        return {"score": self.scores(model, batch)}

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return self.scores(model, batch)


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    center: float = 0.0,
) -> torch.Tensor:
    """Return -log sigmoid(chosen - rejected - margin) per pair; (B,), (B,) -> (B,).

    Margin: Llama 2 (arXiv 2307.09288), eq. 2. `center` adds center * (chosen + rejected)^2, which keeps the
    scores around 0: Eisenstein et al. (arXiv 2312.09244), eq. 2. `label_smoothing` is the assumed share of
    flipped labels: Mitchell, a note on DPO with noisy preferences (2023), eq. 3, for rewards.
    """
    import torch.nn.functional as F

    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)  # (B,); log(sigmoid(x)) would be -inf for a very negative x
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-difference)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return loss


def calibration_sums(difference: torch.Tensor) -> dict[str, Any]:
    """Return the sums of the expected calibration error, and of the accuracy by margin; (B,) chosen minus rejected.

    Guo et al. (arXiv 1706.04599), eq. 2 to 5: of the answer that scores higher, sigmoid(|difference|) is the confidence
    that it is the chosen one. It is at least one half, so the bins are NUM_BINS equal parts of 1/2 to 1. A bin adds
    |B_m| |acc(B_m) - conf(B_m)| / n to the error, which is the absolute value of one sum over its pairs.
    """
    import torch

    size, is_right = difference.abs().float(), difference > 0
    confidence = size.sigmoid()
    # The upper end of a bin belongs to it, as in the paper.
    number = (((confidence - 0.5) * 2 * NUM_BINS).ceil().long() - 1).clamp(0, NUM_BINS - 1)
    bins = torch.zeros(NUM_BINS, device=size.device).index_add(0, number, is_right.float() - confidence)
    found: dict[str, Any] = {f"{CALIBRATION_SUM}{at}": total for at, total in enumerate(bins)}
    for name, (least, below) in MARGIN_BINS.items():
        inside = (size >= least) & (size < below)
        found[f"_{name}"] = (is_right & inside).sum(), inside.sum()
    return found


def _no_cache_kwargs(model: Any) -> dict[str, bool]:
    """Return the argument that switches the KV cache off, where the model's `forward` takes it."""
    from dstrain.models.reward_model import RewardModelMixin

    own, inside = (
        inspect.signature(type(one).forward).parameters for one in (model, getattr(model, "base_model", model))
    )
    handed_on, further = (any(one.kind == one.VAR_KEYWORD for one in names.values()) for names in (own, inside))
    # LLaVA's base model passes it on too; a BERT's would pass it to its attention, which fails.
    known = "use_cache" in own or (
        handed_on and ("use_cache" in inside or (further and isinstance(model, RewardModelMixin)))
    )
    return {"use_cache": False} if known else {}
