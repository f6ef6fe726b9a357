"""What tasks on pairs of answers share: the records, their tokens, and one batch of both answers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dstrain.batch import Batch
from dstrain.data.formats import Preference, read_preference
from dstrain.data.prepare import PreferenceSettings, prepare_preferences
from dstrain.data.source import Joined
from dstrain.data.store import TokenStore
from dstrain.tasks.text import TextTask, tiny_recipe


@dataclass(frozen=True, kw_only=True)
class PairTask(TextTask):
    """A task on a chosen and a rejected answer to one prompt."""

    def convert(self, record: dict[str, Any]) -> Preference:
        return read_preference(record)

    def texts(self, record: dict[str, Any]) -> Iterator[str]:
        preference = read_preference(record)
        for part in (preference.prompt, preference.chosen, preference.rejected):
            if isinstance(part, str):
                yield part
            else:
                yield from (message["content"] for message in part)

    def tokens(self, source: Joined) -> TokenStore:
        data = self.recipe.data
        settings = PreferenceSettings(
            max_length=data.max_length,
            max_prompt_length=data.max_prompt_length,
            task=self.recipe.task,
            on_error=data.on_error,
        )
        return prepare_preferences(source, self.tokenizer, settings)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        from dstrain.data.collate import attention_mask, pad

        sequences = [example[side] for side in ("chosen", "rejected") for example in examples]
        return Batch(
            tensors={
                "input_ids": pad(sequences, self.tokenizer.pad_token_id),  # (2B, L), the chosen ones first
                "attention_mask": attention_mask(sequences),
                "margin": torch.tensor([example["margin"] for example in examples], dtype=torch.float32),  # (B,)
            },
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(sequence) for sequence in sequences),
        )

    def baselines(self, examples: Sequence[Any]) -> Mapping[str, float]:
        """`length_baseline`: how often the longer answer, in letters and before any cut, is the chosen one; ties count half."""
        longer = np.array([examples[index]["longer"] for index in range(len(examples))])
        return {"length_baseline": float(np.mean((longer > 0) + 0.5 * (longer == 0)))}


def tiny_pairs(folder: Path, task: str) -> dict[str, Any]:
    """A recipe of seconds for a task on pairs, with its data written into the folder."""
    return tiny_recipe(folder, task, _pair)


def _pair(split: str, index: int) -> dict[str, str]:
    """A made-up pair of uneven length: the polite answer is the chosen one."""
    draw = random.Random(f"{split}/{index}")
    things = ("pump", "valve", "kettle", "lamp", "wheel", "belt")
    prompt = f"\n\nHuman: How do I mend the {draw.choice(things)} number {index}{', please' * draw.randint(0, 4)}?"
    good = "Gladly: " + " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    return {"chosen": f"{prompt}\n\nAssistant: {good}.", "rejected": f"{prompt}\n\nAssistant: No idea, go away."}
