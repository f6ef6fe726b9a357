"""Base class of tasks on pairs of answers: B pairs, L tokens, a batch of 2B rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.data.dataset import Samples
from dstrain.data.formats.messages import iter_parts
from dstrain.data.formats.preferences import Preference, Response, read_preference
from dstrain.errors import BadRecord
from dstrain.tasks.common.text import TextChecks, TextTask

if TYPE_CHECKING:
    import numpy as np
    import torch

    from dstrain.data.encoding.rendering import PlaceholderExpansion
    from dstrain.data.loading.rows import PackedRows, PaddedRows
    from dstrain.data.records import EncodeResult


@dataclass(frozen=True, kw_only=True)
class PairChecks(TextChecks):
    """The checks of a text task, and the baseline of the longer answer."""

    task: PairTask

    def baselines(self, examples: Samples) -> Mapping[str, float]:
        """`length_baseline`: the share of pairs whose longer answer is the chosen one.

        Lengths are characters before truncation; a tie counts half.
        """
        import numpy as np

        longer = np.array(self.task.length_diff([examples[index] for index in range(len(examples))]))
        return {"length_baseline": float(np.mean((longer > 0) + 0.5 * (longer == 0)))}


@dataclass(frozen=True, kw_only=True)
class PairTask(TextTask):
    """A task on a chosen and a rejected answer to one prompt."""

    packs_batches = True
    has_pairs = True
    token_columns = ("chosen", "rejected")

    @cached_property
    def checks(self) -> PairChecks:
        return PairChecks(parse_record=self.parse_record, task=self)

    def parse(self, record: Mapping[str, Any]) -> Preference:
        return read_preference(record)

    def encode(self, samples: list[Preference], images: PlaceholderExpansion | None) -> list[EncodeResult]:
        from dstrain.data.encoding.preferences import encode_preferences

        data = self.recipe.data
        encoded = encode_preferences(
            self.tokenizer, samples, data.max_length, data.max_prompt_length, images, data.rendered
        )
        return [
            example if isinstance(example, BadRecord) else example | self.scalar_columns(sample)
            for sample, example in zip(samples, encoded, strict=True)
        ]

    def scalar_columns(self, preference: Preference) -> dict[str, float]:
        """Return the numbers that are stored with a pair: `margin`, 0 by default, and `longer`, the difference of the answers'
        lengths in characters.
        """
        longer = _count_characters(preference.chosen) - _count_characters(preference.rejected)
        return {"margin": float(preference.margin or 0.0), "longer": float(longer)}

    def encode_key(self) -> dict[str, Any]:
        data = self.recipe.data
        limits = {"max_length": data.max_length, "max_prompt_length": data.max_prompt_length}
        return {"what": "preferences", **limits, "rendered": data.rendered}

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        preference = self.parse_record(record).parsed
        yield from iter_parts(preference.prompt, preference.chosen, preference.rejected)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        # Both sides in one batch: one forward pass scores them.
        sequences = self.sequences(examples)
        rows = self.collator.make_rows(sequences, len(examples))
        batch = Batch(
            tensors={
                **rows.input_tensors(),
                "margin": torch.tensor([example["margin"] for example in examples], dtype=torch.float32),  # (B,)
                **self.loss_tensors(examples, rows),
            },
            groups=rows.groups,
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(sequence) for sequence in sequences),
        )
        return self.attach_images(batch, examples)

    def attach_images(self, batch: Batch, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Return the batch with the images of its rows."""
        return self.collator.attach_images(batch, self.collator.load_images(examples), repeats=2)

    def sequences(self, examples: Sequence[Mapping[str, Any]]) -> list[np.ndarray]:
        """Return the token ids of each row: prompts with chosen answers first, then with rejected ones."""
        return [example[side] for side in ("chosen", "rejected") for example in examples]

    def length_diff(self, examples: Sequence[Mapping[str, Any]]) -> list[float]:
        """Return by how many characters the preferred answer of each pair is longer."""
        return [example["longer"] for example in examples]

    def loss_tensors(
        self, examples: Sequence[Mapping[str, Any]], rows: PaddedRows | PackedRows
    ) -> dict[str, torch.Tensor]:
        """Return what the loss reads beside the rows, which are those of `sequences`, and `margin`."""
        return {}


def _count_characters(answer: Response) -> int:
    return len(answer) if isinstance(answer, str) else sum(len(message["content"]) for message in answer)


def pair_metrics(rewards: torch.Tensor, logps: torch.Tensor) -> dict[str, Any]:
    """Return the sums of DPO's metrics from rewards and log-probs of chosen and rejected answers, (2, B) each.

    `accuracy` counts pairs whose chosen answer has the higher reward.
    """
    return {
        "accuracy": (rewards[0] > rewards[1]).sum(),
        "margin": (rewards[0] - rewards[1]).sum(),
        "reward_chosen": rewards[0].sum(),
        "reward_rejected": rewards[1].sum(),
        "logp_chosen": logps[0].sum(),
        "logp_rejected": logps[1].sum(),
    }
