"""Learning from single answers: a policy makes wanted ones likelier and unwanted ones less likely than its reference does."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrain.batch import Batch
from dstrain.data.cache.build import StatefulEncode, compose_encode, prepare
from dstrain.data.cache.token_store import TokenStore
from dstrain.data.encoding.conversations import EncodingConfig
from dstrain.data.encoding.unpaired import UnpairedEncoder
from dstrain.data.fingerprint import tokenizer_fingerprint
from dstrain.data.formats.unpaired import UnpairedPreference, read_unpaired
from dstrain.data.records import BadRecord, try_parse
from dstrain.data.sources.open import ConcatSource
from dstrain.tasks.common.bad_record_policy import policy_of
from dstrain.tasks.common.reference import ReferenceTask
from dstrain.tasks.common.task import Loss
from dstrain.tasks.common.tiny import tiny_recipe

if TYPE_CHECKING:
    import torch

FORWARD_TENSORS = ("input_ids", "attention_mask", "learnt", "loss_positions")
"""What a forward pass over answers reads; with `mismatched_` before it, over answers to other prompts."""


@dataclass(frozen=True, kw_only=True)
class KTO(ReferenceTask):
    """Policies that learn from single answers, each wanted or not: KTO, and APO-zero on such data.

    Ethayarajh et al. (arXiv 2402.01306), eq. 8; D'Oosterlinck et al. (arXiv 2408.06266); summed over answers. The
    reference point of KTO, an estimate of the divergence from the reference, is one number for a whole step.
    """

    metric_names = ("accuracy", "kl", "reward_chosen", "reward_rejected", "logp_chosen", "logp_rejected")

    loss_type: Literal["kto", "apo_zero_unpaired"] = "kto"
    """kto compares with the mean log-ratio of answers to other prompts, apo_zero_unpaired with 0."""
    desirable_weight: float = 1.0
    """Weight of a wanted answer's loss."""
    undesirable_weight: float = 1.0
    """Weight of an unwanted answer's loss; times their number, the two weights shall be about equal."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("desirable_weight", "undesirable_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name):g}, below 0")
        if not self.desirable_weight + self.undesirable_weight:
            raise ValueError("desirable_weight and undesirable_weight are both 0: nothing would be learnt")
        if not self.needs_step_stats and self.recipe.eval.metric == "kl":
            raise ValueError(f"loss_type {self.loss_type} has no kl, and eval.metric names it; take loss")

    @property
    def needs_step_stats(self) -> bool:
        return self.loss_type == "kto"

    @property
    def ref_columns(self) -> tuple[str, ...]:  # type: ignore[override]  # the loss decides
        return ("ref_logps", "ref_mismatched_logps") if self.needs_step_stats else ("ref_logps",)

    def parse_record(self, record: dict[str, Any]) -> list[UnpairedPreference]:
        return read_unpaired(record)

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        for item in read_unpaired(record):
            for part in (item.prompt, item.answer):
                if isinstance(part, str):
                    yield part
                else:
                    yield from (message["content"] for message in part)

    def tokenize(self, source: ConcatSource) -> TokenStore:
        data = self.recipe.data
        settings = EncodingConfig(max_length=data.max_length, max_prompt_length=data.max_prompt_length)
        key = {
            "what": "labelled",
            "mismatched": self.needs_step_stats,
            "tokenizer": tokenizer_fingerprint(self.tokenizer),
        }
        encode = UnpairedEncoder(self.tokenizer, settings, self.needs_step_stats)

        def seek(previous_records: Iterator[dict[str, Any]]) -> None:
            found = (try_parse(read_unpaired, record) for record in previous_records)
            encode.restore_context(items for items in found if not isinstance(items, BadRecord))

        return prepare(
            source,
            StatefulEncode(compose_encode(read_unpaired, encode), seek),
            key | asdict(settings),
            policy_of(self.recipe),
        )

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        tensors = self._answer_tensors(examples, "answer")
        tensors["desirable"] = torch.tensor([example["desirable"] > 0 for example in examples])  # (B,)
        if self.needs_step_stats:
            tensors |= {
                f"mismatched_{name}": rows for name, rows in self._answer_tensors(examples, "mismatched").items()
            }
        return Batch(
            tensors=tensors | self.cached_reference_outputs(examples),
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(example["answer"]) for example in examples),
        )

    def _answer_tensors(self, examples: Sequence[Mapping[str, Any]], side: str) -> dict[str, torch.Tensor]:
        from dstrain.data.loading.collate import attention_mask, loss_mask_tail, loss_positions, pad

        sequences = [example[side] for example in examples]
        ids, mask = pad(sequences, self.tokenizer.pad_token_id), attention_mask(sequences)  # (B, L), (B, L)
        learnt = loss_mask_tail([example[f"{side}_learnt"] for example in examples])  # (B, K)
        return dict(zip(FORWARD_TENSORS, (ids, mask, learnt, loss_positions(learnt, ids.shape[1])), strict=True))

    def reference_outputs(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """(B,) each: log p under the reference, of the answers and of the answers to other prompts."""
        sides = (batch, _mismatched_batch(batch)) if self.needs_step_stats else (batch,)
        found = [_sequence_log_probs(model, side) for side in sides]
        return dict(zip(self.ref_columns, found, strict=True))

    def step_stats(self, model: torch.nn.Module, batch: Batch) -> Mapping[str, torch.Tensor]:
        """The log-ratios of answers to other prompts, whose mean is the estimate of the divergence."""
        ratio = _sequence_log_probs(model, _mismatched_batch(batch)) - batch.tensors["ref_mismatched_logps"]  # (B,)
        return {"kl": ratio.sum()}

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        import torch

        from dstrain.tasks.common.losses import kto

        desirable = batch.tensors["desirable"]  # (B,)
        logps = _sequence_log_probs(model, batch)  # (B,)
        ratio = logps - batch.tensors["ref_logps"]
        anchor = batch.tensors["kl"].clamp(min=0) if self.needs_step_stats else torch.zeros_like(ratio[0])
        weights = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        likelier, reward = ratio.detach() - anchor, self.beta * ratio.detach()
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

    @classmethod
    def tiny(cls, folder: Path) -> dict[str, Any]:
        return tiny_recipe(folder, "kto", _tiny_record)


def _mismatched_batch(batch: Batch) -> Batch:
    """The batch with the answers to other prompts in the place of its own."""
    return batch.with_tensors({name: batch.tensors[f"mismatched_{name}"] for name in FORWARD_TENSORS})


def _sequence_log_probs(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """(B,) float64: log p of each answer. Two sums of hundreds are compared, and their difference is small."""
    from dstrain.tasks.common.losses import answer_log_probs

    return answer_log_probs(model, batch).double().sum(-1)


def _tiny_record(split: str, index: int) -> dict[str, Any]:
    """A made-up answer of uneven length: the polite ones were wanted."""
    draw = random.Random(f"{split}/{index}")
    thing = draw.choice(("pump", "valve", "kettle", "lamp", "wheel", "belt"))
    ways = " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    wanted = draw.random() < 0.6
    return {
        "prompt": f"How do I mend the {thing}{', please' * draw.randint(0, 4)}?",
        "completion": f" Gladly: {ways}." if wanted else f" No idea{', really' * draw.randint(0, 3)}, go away.",
        "label": wanted,
    }
