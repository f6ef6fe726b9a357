"""What tasks on pairs of answers share: the records, their tokens, and one batch of both answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dstrain.batch import Batch
from dstrain.data.cache.token_store import TokenStore
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.formats.image_placeholders import RecordWithImages
from dstrain.data.formats.preferences import Preference, Response, read_preference
from dstrain.data.records import BadRecord
from dstrain.data.sources.open import ConcatSource
from dstrain.data.vision.expansion import PlaceholderExpansion
from dstrain.tasks.common.text import TextTask
from dstrain.tasks.common.tiny import tiny_recipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class PairTask(TextTask):
    """A task on a chosen and a rejected answer to one prompt."""

    def parse_record(self, record: dict[str, Any]) -> RecordWithImages[Preference]:
        return self.parse_with_images(record, read_preference)

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        preference = self.parse_record(record).parsed
        for part in (preference.prompt, preference.chosen, preference.rejected):
            if isinstance(part, str):
                yield part
            else:
                yield from (message["content"] for message in part)

    def tokenize(self, source: ConcatSource) -> TokenStore:
        data = self.recipe.data
        limits = data.max_length, data.max_prompt_length

        def encode(items: list[Preference], expansion: PlaceholderExpansion | None) -> list[Any]:
            coded = encode_preferences(self.tokenizer, items, *limits, expansion)
            return [
                one if isinstance(one, BadRecord) else one | preference_columns(item)
                for item, one in zip(items, coded, strict=True)
            ]

        key = {"what": "preferences", "max_length": limits[0], "max_prompt_length": limits[1]}
        return self.build_store(source, read_preference, encode, key)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        from dstrain.data.loading.collate import attention_mask, pad

        sequences = [example[side] for side in ("chosen", "rejected") for example in examples]
        batch = Batch(
            tensors={
                "input_ids": pad(sequences, self.tokenizer.pad_token_id),  # (2B, L), the chosen ones first
                "attention_mask": attention_mask(sequences),
                "margin": torch.tensor([example["margin"] for example in examples], dtype=torch.float32),  # (B,)
                **self.extra_tensors(examples),
            },
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(sequence) for sequence in sequences),
        )
        return self.with_images(batch, examples, 2)

    def extra_tensors(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """What the loss needs beside the answers."""
        return {}

    def baselines(self, examples: Sequence[Any]) -> Mapping[str, float]:
        """`length_baseline`: how often the longer answer, in letters and before any cut, is the chosen one; ties count half."""
        longer = np.array([examples[index]["longer"] for index in range(len(examples))])
        return {"length_baseline": float(np.mean((longer > 0) + 0.5 * (longer == 0)))}


def preference_columns(preference: Preference) -> dict[str, float]:
    """`margin`, 0 where the record has none, and by how many letters the chosen answer is `longer`, before any cut."""
    return {
        "margin": preference.margin or 0.0,
        "longer": float(_count_characters(preference.chosen) - _count_characters(preference.rejected)),
    }


def _count_characters(answer: Response) -> int:
    return len(answer) if isinstance(answer, str) else sum(len(message["content"]) for message in answer)


def tiny_pair_recipe(folder: Path, task: str) -> dict[str, Any]:
    """A recipe of seconds for a task on pairs, with its data written into the folder."""
    return tiny_recipe(folder, task, _tiny_record)


def _tiny_record(split: str, index: int) -> dict[str, str]:
    """A made-up pair of uneven length: the polite answer is the chosen one."""
    draw = random.Random(f"{split}/{index}")
    things = ("pump", "valve", "kettle", "lamp", "wheel", "belt")
    prompt = f"\n\nHuman: How do I mend the {draw.choice(things)} number {index}{', please' * draw.randint(0, 4)}?"
    good = "Gladly: " + " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    return {"chosen": f"{prompt}\n\nAssistant: {good}.", "rejected": f"{prompt}\n\nAssistant: No idea, go away."}
