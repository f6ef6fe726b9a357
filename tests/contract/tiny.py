"""A second task in about fifty lines, to test the task interface: a regression on synthetic data."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.batch import Batch
from dstrain.data.loading.rows import pad
from dstrain.tasks import Loss, Split, Task


@dataclass(frozen=True, kw_only=True)
class Weigh(Task):
    """Learns what each of eight tokens weighs from the weights of bags of them."""

    metric_names = ("error",)

    bags: int = 40
    """Bags to learn from."""

    def examples(self, split: Split) -> Sequence[Any]:
        draw = random.Random(f"{split}/{self.recipe.seed}")
        bags = [[draw.randint(1, 8) for _ in range(draw.randint(1, 6))] for _ in range(self.bags)]
        return [{"id": index, "bag": bag, "weight": float(sum(bag))} for index, bag in enumerate(bags)]

    def collate(self, examples: Sequence[Any]) -> Batch:
        return Batch(
            tensors={
                "bag": pad([example["bag"] for example in examples], 0),  # (B, L)
                "weight": torch.tensor([example["weight"] for example in examples]),  # (B,)
            },
            weight=float(len(examples)),
            samples=tuple(example["id"] for example in examples),
            tokens=sum(len(example["bag"]) for example in examples),
        )

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(self.recipe.seed)
        return torch.nn.EmbeddingBag(9, 1, mode="sum", padding_idx=0)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        off = model(batch.tensors["bag"]).squeeze(-1).float() - batch.tensors["weight"]  # (B,)
        return Loss(off.square().sum(), {"error": off.detach().abs().sum()})
