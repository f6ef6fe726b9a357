"""KTO: a policy trained on single answers labelled desirable or undesirable."""

# Shapes: B answers, L tokens, K targets.

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from dstrain.batch import Batch, PackedGroup
from dstrain.config.schema import check_limits
from dstrain.data.encoding.chat_template import tokenizer_fingerprint
from dstrain.data.encoding.preferences import UnpairedEncode, encode_unpaired
from dstrain.data.encoding.rendering import EncodingConfig
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.formats.messages import iter_parts
from dstrain.data.formats.preferences import Prompt
from dstrain.data.formats.unpaired import UnpairedPreference, read_unpaired
from dstrain.data.prepare import prepare
from dstrain.data.sources.base import ConcatSource
from dstrain.data.token_store import TokenStore
from dstrain.tasks.common.generation import Prompts
from dstrain.tasks.common.record_task import policy_of
from dstrain.tasks.common.reference import ReferenceOptions, cached_outputs, make_reference
from dstrain.tasks.common.task import Loss, LossInputs, Reference
from dstrain.tasks.common.text import TextChecks, TextTask

if TYPE_CHECKING:
    import torch

    from dstrain.data.encoding.rendering import PlaceholderExpansion

MISMATCHED = "mismatched_"
"""Prefix of the tensors of a forward pass over answers to other prompts."""


class LabelledPrompts(Prompts):
    """Prompts whose undesirable answers no generated answer is compared with."""

    def has_reference_answer(self, example: Mapping[str, Any]) -> bool:
        return bool(example["desirable"] > 0)


@dataclass(frozen=True, kw_only=True)
class KTO(TextTask, ReferenceOptions):
    """Policies trained on single answers, each desirable or not: KTO, and APO-zero on such data.

    Ethayarajh et al. (arXiv 2402.01306), eq. 8; D'Oosterlinck et al. (arXiv 2408.06266); summed over answers. The
    reference point of KTO, an estimate of the divergence from the reference, is one number for a whole step.
    """

    packs_batches = True
    learning_rate = 1.0e-6
    path_options = ("ref_model",)
    metric_names = ("accuracy", "kl", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto compares with the mean log-ratio of answers to other prompts, apo_zero_unpaired with 0."""
    desirable_weight: float = 1.0
    """Weight of a desirable answer's loss."""
    undesirable_weight: float = 1.0
    """Weight of an undesirable answer's loss; (weight x number) should be about equal for both labels."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_limits(self, "desirable_weight", "undesirable_weight")
        if not self.desirable_weight + self.undesirable_weight:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be trained")
        if not self.needs_step_stats and self.recipe.eval.metric == "kl":
            raise ValueError(f"loss_type {self.loss_type} has no metric kl, which eval.metric names; use loss")

    token_columns = ("answer", "mismatched")
    label_column = "desirable"

    @property
    def needs_step_stats(self) -> bool:
        return self.loss_type == "kto"

    @property
    def ref_columns(self) -> tuple[str, ...]:
        """Names of the reference's outputs."""
        return ("ref_logps", "ref_mismatched_logps") if self.needs_step_stats else ("ref_logps",)

    @property
    def reference(self) -> Reference:
        return make_reference(self, self.get_reference_kind(self.recipe), self.reference_outputs, self.ref_model)

    @property
    def loss_inputs(self) -> LossInputs:
        return replace(super().loss_inputs, step_stats=self.step_stats if self.needs_step_stats else None)

    @cached_property
    def checks(self) -> TextChecks:
        return TextChecks(parse_record=self.parse, task=self)

    @cached_property
    def prompts(self) -> LabelledPrompts:
        return LabelledPrompts(self)

    def parse(self, record: Mapping[str, Any]) -> list[UnpairedPreference]:
        return read_unpaired(record)

    def parse_with_images(
        self, record: Mapping[str, Any], parse: Callable[[Mapping[str, Any]], Any]
    ) -> RecordWithImages[Any]:
        return RecordWithImages(parse(record))  # `read_unpaired` itself refuses records with images

    def encode(self, samples: list[Any], images: PlaceholderExpansion | None) -> Sequence[Any]:
        items = [item for record in samples for item in record]

        def find_first(prompt: Prompt) -> UnpairedPreference | None:
            return next((item for item in items if item.prompt != prompt), None)

        find_following = find_first if self.needs_step_stats else None
        return encode_unpaired(self.tokenizer, self._encoding_config, find_following, samples)

    def encode_key(self) -> dict[str, Any]:
        config = asdict(self._encoding_config)
        return {"what": "labelled", "mismatched": self.needs_step_stats, **config}

    @property
    def _encoding_config(self) -> EncodingConfig:
        data = self.recipe.data
        return EncodingConfig(
            max_length=data.max_length, max_prompt_length=data.max_prompt_length, rendered=data.rendered
        )

    def build_store(self, source: ConcatSource) -> TokenStore:
        # Also for a vision-language model: the records have no images.
        key = {**self.encode_key(), "tokenizer": tokenizer_fingerprint(self.tokenizer)}
        encode = UnpairedEncode(
            self.tokenizer,
            self._encoding_config,
            lambda record: self.parse_record(record).parsed,
            source if self.needs_step_stats else None,
        )
        return prepare(source, encode, key, policy_of(self.recipe), settings=self.example_settings)

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        for item in self.parse(record):
            yield from iter_parts(item.prompt, item.answer)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        tensors, groups = self._answer_tensors(examples, "answer")
        tensors["desirable"] = torch.tensor([example["desirable"] > 0 for example in examples])  # (B,)
        other_groups = {}
        if self.needs_step_stats:
            mismatched, other_groups[MISMATCHED] = self._answer_tensors(examples, "mismatched")
            tensors |= {f"{MISMATCHED}{name}": rows for name, rows in mismatched.items()}
        return Batch(
            tensors=tensors | cached_outputs(examples, self.ref_columns),
            groups=groups,
            other_groups=other_groups,
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(example["answer"]) for example in examples),
        )

    def _answer_tensors(
        self, examples: Sequence[Mapping[str, Any]], side: str
    ) -> tuple[dict[str, torch.Tensor], tuple[PackedGroup, ...]]:
        rows = self.collator.make_rows([example[side] for example in examples])
        targets = rows.target_tensors([example[f"{side}_loss_mask"] for example in examples])
        return {**rows.input_tensors(), **targets}, rows.groups

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return log p under the reference of the answers and of the mismatched answers, (B,) each."""
        sides = (batch, _mismatched_batch(batch)) if self.needs_step_stats else (batch,)
        found = [_sequence_log_probs(model, side) for side in sides]
        return dict(zip(self.ref_columns, found, strict=True))

    def step_stats(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Return the sum of the log-ratios of mismatched answers, whose mean estimates the divergence."""
        ratio = _sequence_log_probs(model, _mismatched_batch(batch)) - batch.tensors["ref_mismatched_logps"]  # (B,)
        return {"kl": ratio.sum()}

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        import torch

        desirable = batch.tensors["desirable"]  # (B,)
        logps = _sequence_log_probs(model, batch)  # (B,)
        ratio = logps - batch.tensors["ref_logps"]
        # A scalar. An estimate of a divergence may be below 0, the divergence is not.
        anchor = batch.tensors["kl"].clamp(min=0) if self.needs_step_stats else torch.zeros_like(ratio[0])
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        likelier, reward = ratio.detach() - anchor, self.beta * ratio.detach()  # (B,), (B,)
        metrics = {"accuracy": torch.where(desirable, likelier > 0, likelier < 0).sum()}
        if self.needs_step_stats:
            metrics["kl"] = anchor.expand_as(ratio).sum()
        sides = {"chosen": desirable, "rejected": ~desirable}
        of_sides = {
            f"{name}_{side}": (torch.where(of, values, 0.0).sum(), of.sum())
            for name, values in (("reward", reward), ("logp", logps))
            for side, of in sides.items()
        }
        return Loss((weights * kto(ratio, desirable, anchor, self.beta)).sum(), {**metrics, **of_sides})

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        from dstrain.tasks.common.forward import answer_log_probs

        return answer_log_probs(model, batch)


def kto(
    log_ratio: torch.Tensor, desirable: torch.Tensor, reference_point: torch.Tensor | float, beta: float
) -> torch.Tensor:
    """Return 1 - sigmoid(beta (r - z0)) of desirable answers, 1 - sigmoid(beta (z0 - r)) of others; (B,) -> (B,).

    r is `log_ratio`, of an answer's probabilities under policy and reference; z0 is `reference_point`: Ethayarajh
    et al. (arXiv 2402.01306), eq. 8, for weights of 1. With z0 = 0 it is the unpaired APO-zero: D'Oosterlinck et al.
    (arXiv 2408.06266).
    """
    import torch

    sign = desirable.to(log_ratio.dtype) * 2 - 1  # (B,): 1 or -1
    return torch.sigmoid(-sign * beta * (log_ratio - reference_point))


def _mismatched_batch(batch: Batch) -> Batch:
    """Return the batch with the mismatched answers in place of its own."""
    own = {name.removeprefix(MISMATCHED): rows for name, rows in batch.tensors.items() if name.startswith(MISMATCHED)}
    return replace(batch.with_tensors(own), groups=batch.other_groups[MISMATCHED])


def _sequence_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return log p of each answer, (B,) float64: the small difference of two large sums needs the precision."""
    from dstrain.tasks.common.forward import answer_log_probs

    return answer_log_probs(model, batch).double().sum(-1)
