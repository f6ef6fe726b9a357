"""Preference optimization: a policy trained on pairs of answers."""

# Shapes: B pairs, K targets.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dstrain.batch import Batch
from dstrain.config.schema import check_limits
from dstrain.tasks.common.pairs import PairTask, pair_metrics
from dstrain.tasks.common.reference import ReferenceOptions, cached_outputs, make_reference
from dstrain.tasks.common.task import Loss, Reference, Task, select_subclass
from dstrain.tasks.safety.options import REWARD_MODEL_OPTIONS, SafetyOptions

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dstrain.data.loading.rows import PackedRows, PaddedRows

LossType = Literal["sigmoid", "ipo", "hinge", "robust", "orpo", "simpo"]
REFERENCE_FREE_LOSSES = ("orpo", "simpo")
LENGTH_NORMALIZED_LOSSES = ("ipo", "orpo", "simpo")


@dataclass(frozen=True, kw_only=True)
class DPO(PairTask, ReferenceOptions):
    """Policies trained on pairs: DPO and its variants (IPO, SLiC's hinge, robust DPO, ORPO, SimPO).

    Rafailov et al. (arXiv 2305.18290), eq. 7, and the papers that the functions below name;
    summed over pairs. With `safety`: SafeDPO, MM-DPO and mDPO, see `dstrain.tasks.safety.pair_loss`.
    Rows of a batch: B prompts with the chosen answers, then B with the rejected ones.
    """

    path_options = ("ref_model", *REWARD_MODEL_OPTIONS)
    packs_batches = True
    learning_rate = 1.0e-6
    metric_names = ("accuracy", "margin", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")

    beta: float = 0.1
    """Strength of the penalty on the divergence from the reference; IPO's tau, ORPO's lambda, SimPO's scale."""
    loss_type: LossType = "sigmoid"
    """sigmoid (DPO), ipo, hinge (SLiC), robust; orpo and simpo need no reference."""
    label_smoothing: float = 0.0
    """Assumed share of flipped labels, from 0 to below 0.5; for sigmoid and robust."""
    rpo_alpha: float = 0.0
    """Weight of an SFT term: the mean -log p of the chosen answer's tokens, added to the loss of each pair."""
    simpo_gamma: float = 0.5
    """SimPO's margin: the target difference of the two rewards."""
    safety: SafetyOptions | None = None
    """Safety-aware DPO: a block of options. An empty one, safety: {}, logs the safety metrics of the data's labels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "label_smoothing", below=0.5)
        if self.label_smoothing and self.loss_type not in ("sigmoid", "robust"):
            raise ValueError(f"label_smoothing has no meaning for loss_type {self.loss_type}; leave it out")
        if self.simpo_gamma != 0.5 and self.loss_type != "simpo":
            raise ValueError(f"simpo_gamma has no meaning for loss_type {self.loss_type}; leave it out")
        if self.rpo_alpha < 0 or (self.rpo_alpha and self.loss_type == "orpo"):
            raise ValueError(
                f"rpo_alpha is {self.rpo_alpha:g}, but it must be at least 0, and unset for orpo, whose loss has an SFT term"
            )
        if self.safety is not None and self.select_class({"safety": self.safety}) is not type(self):
            raise ValueError("safety belongs to SafeDPO, which make_task takes where it is set")
        if self.loss_type in REFERENCE_FREE_LOSSES and (self.precompute_ref_log_probs or self.ref_model):
            raise ValueError(f"loss_type {self.loss_type} has no reference; leave its options out")

    @classmethod
    def select_class(cls, options: Mapping[str, Any]) -> type[Task]:
        if options.get("safety") is None:
            return cls
        return select_subclass(cls, "safety", "dstrain.tasks.safety.safe_dpo:SafeDPO")

    @property
    def reference(self) -> Reference:
        if self.loss_type in REFERENCE_FREE_LOSSES:
            return Reference()
        kind = self.get_reference_kind(self.recipe)
        return make_reference(self, kind, self.reference_outputs, self.ref_model, key=self.reference_key)

    @property
    def reference_key(self) -> Mapping[str, Any]:
        """What the reference's outputs depend on besides data, model and precision."""
        return {}

    def sequences(self, examples: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        return [ids for ids, _ in self.rows(examples)]

    def rows(self, examples: Sequence[Mapping[str, Any]]) -> list[tuple[np.ndarray, int]]:
        """Return (token ids, index where the answer starts) of each row."""
        shown = [(side, example) for side in ("chosen", "rejected") for example in examples]
        return [(example[side], int(example["prompt_length"])) for side, example in shown]

    def loss_tensors(
        self, examples: Sequence[Mapping[str, Any]], rows: PaddedRows | PackedRows
    ) -> dict[str, torch.Tensor]:
        """Return `loss_mask`, (2B, K), which is 1 at the tokens of answers, and `ref_columns`, if they are cached."""
        from dstrain.data.loading.rows import answer_masks

        return {
            **rows.target_tensors(answer_masks(self.rows(examples))),
            **cached_outputs(examples, self.ref_columns),
        }

    @property
    def ref_columns(self) -> tuple[str, ...]:
        """Names of the reference's outputs."""
        return ("ref_chosen_logps", "ref_rejected_logps")

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return log p of the answers under the reference, (B,) each."""
        from dstrain.tasks.common.forward import answer_log_probs

        return dict(zip(self.ref_columns, answer_log_probs(model, batch).sum(-1).chunk(2), strict=True))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        """Return the sum over pairs, from the tensors of `PairTask.collate`, `loss_tensors` and `reference_outputs`.

        `TrainModule.forward` puts the outputs of a reference in memory into the batch, and `loss_tensors` cached ones.
        """
        import torch

        from dstrain.tasks.common.forward import answer_log_probs

        sums = answer_log_probs(model, batch).sum(-1)  # (2B,); SafeDPO has B' more rows
        pairs = sums[: 2 * len(batch.tensors["margin"])]  # (2B,)
        reference = torch.zeros_like(pairs)  # (2B,)
        if self.loss_type not in REFERENCE_FREE_LOSSES:
            reference = torch.cat([batch.tensors["ref_chosen_logps"], batch.tensors["ref_rejected_logps"]])
        scale = answer_lengths(batch, pairs) if self.loss_type in LENGTH_NORMALIZED_LOSSES else torch.ones_like(pairs)
        ratios = ((pairs - reference) / scale).view(2, -1)  # (2, B): chosen, rejected
        return self.pair_loss(ratios, sums, batch)

    def pair_loss(self, ratios: torch.Tensor, sums: torch.Tensor, batch: Batch) -> Loss:
        """Return the loss; (2, B) log-ratios, (2B,) log-probs under the policy."""
        sums = sums[: ratios.numel()]
        losses = self._pair_losses(*ratios)
        if self.rpo_alpha or self.loss_type == "orpo":
            nll_chosen = -(sums / answer_lengths(batch, sums)).chunk(2)[0]  # (B,), mean over the tokens of an answer
            losses = nll_chosen + losses if self.loss_type == "orpo" else losses + self.rpo_alpha * nll_chosen
        return Loss(losses.sum(), pair_metrics(self.beta * ratios.detach(), sums.view(2, -1)))

    def _pair_losses(self, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        """Return the losses of log-ratios, or of mean log-probabilities without a reference; (B,), (B,) -> (B,)."""
        difference = chosen - rejected
        match self.loss_type:
            case "sigmoid":
                return dpo_sigmoid(difference, self.beta, self.label_smoothing)
            case "robust":
                return robust_dpo(difference, self.beta, self.label_smoothing)
            case "ipo":
                return ipo(difference, self.beta)
            case "hinge":
                return hinge(difference, self.beta)
            case "simpo":
                return simpo(difference, self.beta, self.simpo_gamma)
            case "orpo":
                return self.beta * orpo(chosen, rejected)

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        from dstrain.tasks.common.forward import answer_log_probs

        return answer_log_probs(model, batch)


def answer_lengths(batch: Batch, sums: torch.Tensor) -> torch.Tensor:
    """Return the tokens of each answer, at least 1 so that a row without a target does not divide by 0; like `sums`."""
    return batch.tensors["loss_mask"].sum(-1)[: len(sums)].clamp(min=1)


def dpo_sigmoid(logits: torch.Tensor, beta: float, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return -log sigmoid(beta h) per pair, h the difference of the two log-ratios; (B,) -> (B,).

    Rafailov et al. (arXiv 2305.18290), eq. 7; label smoothing: Mitchell (2023), eq. 3.
    """
    import torch.nn.functional as F

    loss = -F.logsigmoid(beta * logits)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-beta * logits)
    return loss


def robust_dpo(logits: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """Return the sigmoid loss, unbiased under flipped labels: Chowdhury et al. (arXiv 2403.00409), eq. 12."""
    import torch.nn.functional as F

    right, flipped = -F.logsigmoid(beta * logits), -F.logsigmoid(-beta * logits)  # (B,), (B,)
    return ((1 - label_smoothing) * right - label_smoothing * flipped) / (1 - 2 * label_smoothing)


def ipo(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Return (h - 1 / (2 beta))^2 per pair: Azar et al. (arXiv 2310.12036), eq. 17, beta being its tau."""
    return (logits - 1 / (2 * beta)).square()


def hinge(logits: torch.Tensor, beta: float) -> torch.Tensor:
    """Return max(0, 1 - beta h) per pair: SLiC, Zhao et al. (arXiv 2305.10425), eq. 1, with a margin of 1 as in RSO."""
    import torch.nn.functional as F

    return F.relu(1 - beta * logits)


def simpo(logits: torch.Tensor, beta: float, gamma: float) -> torch.Tensor:
    """Return -log sigmoid(beta h - gamma), h the difference of mean log-probabilities; (B,) -> (B,).

    Meng et al. (arXiv 2405.14734), eq. 6.
    """
    import torch.nn.functional as F

    return -F.logsigmoid(beta * logits - gamma)


def orpo(chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
    """Return -log sigmoid of the log odds ratio, from mean log-probabilities; (B,), (B,) -> (B,).

    Hong et al. (arXiv 2403.07691), eq. 4 and 7.
    """
    import torch
    import torch.nn.functional as F

    odds = [mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7))) for mean in (chosen, rejected)]  # finite at p = 1
    return -F.logsigmoid(odds[0] - odds[1])
