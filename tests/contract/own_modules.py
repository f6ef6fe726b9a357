"""Tasks in a file with a custom module: buffers, tied weights, a transformers backbone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.batch import Batch
from dstrain.tasks import Loss, Split, Task


class Net(torch.nn.Module):
    """With what state dicts hold beside plain weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(4, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.out = torch.nn.Linear(width, width, bias=False)
        self.again = torch.nn.Linear(width, width, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("table", torch.arange(6).reshape(2, 3))

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.again(self.out(self.norm(self.inner(numbers)))).sum(-1)


@dataclass(frozen=True, kw_only=True)
class Sums(Task):
    """Learns the sums of four numbers."""

    width: int = 8
    """Numbers of the inner layer."""

    def examples(self, split: Split) -> Sequence[Any]:
        draw = torch.Generator().manual_seed(int(split == "eval"))
        return [{"id": index, "numbers": torch.randn(4, generator=draw)} for index in range(16)]

    def collate(self, examples: Sequence[Any]) -> Batch:
        numbers = torch.stack([example["numbers"] for example in examples])
        ids = tuple(example["id"] for example in examples)
        return Batch(tensors={"numbers": numbers}, weight=float(len(examples)), samples=ids)

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(self.recipe.seed)
        return Net(self.width)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        return Loss((model(batch.tensors["numbers"]) - batch.tensors["numbers"].sum(-1)).square().sum())
