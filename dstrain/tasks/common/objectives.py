"""Reward models with a score for each of several objectives, such as helpfulness and correctness."""

# Shapes: R answers (2B of B pairs), O objectives.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig
from dstrain.data.formats.answers import SIDES, PromptAnswers, read_prompt_answers
from dstrain.data.formats.messages import iter_parts
from dstrain.data.records import EncodeResult, Record, as_record
from dstrain.errors import BadRecord
from dstrain.tasks.common.scoring import collate_answers, encode_answers
from dstrain.tasks.common.task import Loss
from dstrain.tasks.rm import RewardModel, RewardModelSource, bradley_terry

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dstrain.data.encoding.rendering import PlaceholderExpansion


@dataclass(frozen=True)
class LabelledAnswers:
    """Answers to a prompt, and of each a label per objective."""

    prompt_answers: PromptAnswers
    labels: list[list[float]]
    """Of each answer, O numbers; NaN where the record has none."""

    @property
    def prompt(self) -> Any:
        """The prompt, for the split by prompts."""
        return self.prompt_answers.prompt


@dataclass(frozen=True, kw_only=True)
class ObjectivesSource(RewardModelSource):
    """A model with a score for each objective of a sequence."""

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        config, names = super().build_config(model), self.task.objectives
        config.id2label = dict(enumerate(names))  # sets num_labels
        config.label2id = {name: number for number, name in enumerate(names)}
        return config


@dataclass(frozen=True, kw_only=True)
class ObjectivesRewardModel(RewardModel):
    """Reward models where `objectives` is set: a score for each of them, from one head.

    Regression on labelled answers as in HelpSteer 2 (Wang et al., arXiv 2406.08673, section 4.1) and ArmoRM (Wang et al.,
    arXiv 2406.12845, section 2.1), or Bradley-Terry on pairs for each objective on its own. The loss is a mean over the
    labels that records have, weighted by objective.
    """

    packs_batches = True

    objectives: list[str] = field(default_factory=list)
    """Columns with a number for each answer, such as [helpfulness, correctness]: one score is trained on each of them."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names, weights = self.objectives, self.objective_weights
        if not names or len({*names}) < len(names):
            raise ValueError("objectives is empty or names a column twice; name each column with labels once")
        if weights is not None and (len(weights) != len(names) or min(weights) < 0 or not sum(weights)):
            raise ValueError(f"objective_weights has to hold {len(names)} numbers, one for each objective, not all 0")
        if not self.has_pairs and (self.label_smoothing or self.center_rewards_coefficient):
            raise ValueError(
                "label_smoothing and center_rewards_coefficient are for loss_type bradley_terry; remove them"
            )
        measure = "accuracy" if self.has_pairs else "mse"
        # Metrics depend on the options; the fields of a frozen dataclass are set this way in __post_init__.
        object.__setattr__(self, "metric_names", (measure, *(f"{measure}_{name}" for name in names)))

    @cached_property
    def model_source(self) -> ObjectivesSource:
        return ObjectivesSource(task=self)

    @property
    def has_pairs(self) -> bool:  # type: ignore[override]  # depends on the loss
        return self.loss_type == "bradley_terry"

    @property
    def token_columns(self) -> tuple[str, ...]:  # type: ignore[override]
        return SIDES if self.has_pairs else ("answer",)

    @property
    def rows_per_sample(self) -> int:  # type: ignore[override]
        return 2 if self.has_pairs else 1

    @property
    def weights(self) -> list[float]:
        """Weight of each objective, (O,)."""
        return self.objective_weights or [1.0] * len(self.objectives)

    def parse(self, record: Mapping[str, Any]) -> LabelledAnswers:  # type: ignore[override]
        record = as_record(record)
        answers = read_prompt_answers(record)
        if self.has_pairs and len(answers.answers) != 2:
            raise BadRecord(
                "the record is not a pair of answers, which loss_type bradley_terry needs; write mse, or a pair"
            )
        labels = [[*self._read_labels(record, answers, at)] for at in range(len(answers.answers))]
        known = [[not math.isnan(label) for label in row] for row in labels]
        if not any(any(row) for row in known):
            raise BadRecord(
                f"no label of {', '.join(self.objectives)}; write one, or rename a column with data.columns"
            )
        if self.has_pairs and not any(_is_ordered(*pair) for pair in zip(*labels, strict=True)):
            raise BadRecord("no objective whose labels say which answer is better; remove the record")
        return LabelledAnswers(answers, labels)

    def _read_labels(self, record: Record, answers: PromptAnswers, at: int) -> Iterator[float]:
        """Yield the label of answer `at` for each objective, NaN where there is none. Raises BadRecord."""
        for name in self.objectives:
            key = f"{SIDES[at]}_{name}" if answers.form == "pair" else name
            value = record.get(key)
            if answers.form == "list" and value is not None:
                if not isinstance(value, list) or len(value) != len(answers.answers):
                    raise BadRecord(f"'{key}' is not a list of {len(answers.answers)} labels, one for each completion")
                value = value[at]
            if value is None:
                yield math.nan
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
                raise BadRecord(f"'{key}' is {value!r:.40}, not a finite number; write a number or null")
            if self.loss_type == "cross_entropy" and not 0 <= value <= 1:
                raise BadRecord(f"'{key}' is {value:g}, and loss_type cross_entropy takes labels from 0 to 1; scale it")
            yield float(value)

    def encode(  # type: ignore[override]  # several examples for a record
        self, samples: list[LabelledAnswers], images: PlaceholderExpansion | None
    ) -> Sequence[Any]:
        if not self.has_pairs:
            encoded = encode_answers(self, [sample.prompt_answers for sample in samples], images)
            return [
                [_with_labels(example, labels) for example, labels in zip(examples, sample.labels, strict=True)]
                for examples, sample in zip(encoded, samples, strict=True)
            ]
        # A list of two completions is a pair too.
        pairs = [replace(sample.prompt_answers, form="pair").to_preference(0) for sample in samples]
        return [
            _with_labels(example, [label for row in sample.labels for label in row])
            for example, sample in zip(super().encode(pairs, images), samples, strict=True)
        ]

    def encode_key(self) -> dict[str, Any]:
        return {**super().encode_key(), "objectives": self.objectives, "loss_type": self.loss_type}

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        found = self.parse_record(record).parsed.prompt_answers
        yield from iter_parts(found.prompt, *found.answers)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        labels = torch.tensor([[*example["labels"]] for example in examples], dtype=torch.float32)
        weights = torch.tensor(self.weights)
        if self.has_pairs:
            labels = labels.view(len(examples), 2, -1).transpose(0, 1).flatten(0, 1)  # (2B, O), as the rows
            chosen, rejected = labels.chunk(2)
            known = (chosen - rejected).nan_to_num() != 0  # (B, O)
            batch = super().collate(examples)
        else:
            known = ~labels.isnan()  # (R, O)
            batch = collate_answers(self, self, examples)
        weight = float((known * weights).sum())
        return replace(batch, tensors={**batch.tensors, "labels": labels}, weight=weight)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        import torch

        scores, labels = self.scores(model, batch), batch.tensors["labels"]  # (R, O), (R, O)
        weights = torch.tensor(self.weights, device=scores.device)  # (O,)
        if self.has_pairs:
            order = (labels.chunk(2)[0] - labels.chunk(2)[1]).nan_to_num().sign()  # (B, O): which answer is better
            chosen, rejected = scores.chunk(2)
            better, worse = (torch.where(order < 0, two, one) for one, two in ((chosen, rejected), (rejected, chosen)))
            smoothing, center = self.label_smoothing, self.center_rewards_coefficient
            each, measure, known = bradley_terry(better, worse, None, smoothing, center), better > worse, order != 0
        else:
            each, known = regression(scores, labels.nan_to_num(), self.loss_type), ~labels.isnan()
            measure = (self._predict(scores.detach()) - labels.nan_to_num()).square()
        count, found = known.sum(0).float(), (measure.detach() * known).sum(0).float()  # (O,), (O,)
        name = self.metric_names[0]
        metrics: dict[str, Any] = {name: (found.sum(), count.sum())}
        for number, objective in enumerate(self.objectives):
            metrics[f"{name}_{objective}"] = found[number], count[number]
        return Loss((each * known * weights).sum(), metrics)

    def _predict(self, scores: torch.Tensor) -> torch.Tensor:
        """Return what a score says of a label, (R, O)."""
        return scores.sigmoid() if self.loss_type == "cross_entropy" else scores

    def scores(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return a score of each answer and objective, (R, O)."""
        return self.head_outputs(model, batch)

    def score_answers(self, model: torch.nn.Module, batch: Batch) -> dict[str, torch.Tensor]:
        """Return `score`, the weighted mean over the objectives, and the score of each, (R,)."""
        import torch

        scores = self.scores(model, batch).double()
        weights = torch.tensor(self.weights, device=scores.device, dtype=scores.dtype)
        mean = scores @ weights / weights.sum()
        return {"score": mean, **{f"score_{name}": scores[:, number] for number, name in enumerate(self.objectives)}}


def regression(scores: torch.Tensor, labels: torch.Tensor, loss_type: str) -> torch.Tensor:
    """Return (score - label)^2, or the cross-entropy of sigmoid(score) with the label; (R, O), (R, O) -> (R, O)."""
    import torch.nn.functional as F

    if loss_type == "cross_entropy":
        return F.binary_cross_entropy_with_logits(scores, labels, reduction="none")
    return (scores - labels).square()


def _is_ordered(first: float, second: float) -> bool:
    return not math.isnan(first - second) and first != second


def _with_labels(example: EncodeResult, labels: list[float]) -> EncodeResult:
    return example if isinstance(example, BadRecord) else {**example, "labels": labels}
