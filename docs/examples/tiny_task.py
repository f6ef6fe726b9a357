"""A task in one file: is a line of text friendly? Records are {"text": ..., "label": 0 or 1}."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from dstrain.task import BadRecord, Batch, Loss, RecordTask, pad

PAD = 256


@dataclass(frozen=True, kw_only=True)
class Friendly(RecordTask):
    """Friendly or not: the mean of a vector for each byte, and one linear layer."""

    metric_names = ("accuracy",)
    learning_rate = 1.0e-2  # where the recipe names none

    width: int = 32
    """Numbers that stand for one byte."""

    def encode_record(self, record: dict[str, Any]) -> dict[str, Any]:
        if not record.get("text") or record.get("label") not in (0, 1):
            raise BadRecord("needs a 'text' and a 'label' of 0 or 1; write both")
        return {"input_ids": list(record["text"].encode()), "label": record["label"]}

    def collate(self, examples: Sequence[Any]) -> Batch:
        texts = [example["input_ids"] for example in examples]
        return Batch(
            tensors={
                "bytes": pad(texts, PAD),  # (B, L)
                "label": torch.tensor([example["label"] for example in examples]),  # (B,)
            },
            weight=float(len(examples)),  # what the loss sums over
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(text) for text in texts),
        )

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(self.recipe.seed)  # the same weights on every process
        vectors = torch.nn.EmbeddingBag(PAD + 1, self.width, padding_idx=PAD)
        return torch.nn.Sequential(vectors, torch.nn.Linear(self.width, 2))

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        scores = model(batch.tensors["bytes"]).float()  # (B, 2)
        label = batch.tensors["label"]
        right = (scores.argmax(-1) == label).sum()
        return Loss(F.cross_entropy(scores, label, reduction="sum"), {"accuracy": right})  # sums, never means
