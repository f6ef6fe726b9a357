"""A task over a backbone of transformers: is a text friendly? Records are {"text": ..., "label": 0 or 1}."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoModel, AutoTokenizer

from dstrain.task import BadRecord, Batch, Export, Loss, RecordTask, attention_mask, pad


class Classifier(torch.nn.Module):
    """A linear layer on the mean of the backbone's last hidden states."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.score = torch.nn.Linear(backbone.config.hidden_size, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        states = self.backbone(input_ids=ids, attention_mask=mask).last_hidden_state  # (B, L, H)
        weights = mask[..., None].to(states.dtype)
        return self.score((states * weights).sum(1) / weights.sum(1))  # (B, 2)


class WithTokenizer(Export):
    """Writes the tokenizer next to the exported weights."""

    def save_extras(self, folder: Path) -> None:
        self.task.tokenizer.save_pretrained(str(folder))


@dataclass(frozen=True, kw_only=True)
class FriendlyText(RecordTask):
    """A classifier of friendly texts: a transformers backbone (model.path) and one linear layer."""

    metric_names = ("accuracy",)
    learning_rate = 2.0e-5

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.recipe.model.path)

    def encode_record(self, record: dict[str, Any]) -> dict[str, Any]:
        if not record.get("text") or record.get("label") not in (0, 1):
            raise BadRecord("needs a 'text' and a 'label' of 0 or 1; write both")
        ids = self.tokenizer(record["text"])["input_ids"][: self.recipe.data.max_length]
        return {"input_ids": ids, "label": record["label"]}

    def collate(self, examples: Sequence[Any]) -> Batch:
        sequences = [example["input_ids"] for example in examples]
        return Batch(
            tensors={
                "ids": pad(sequences, self.tokenizer.pad_token_id or 0),  # (B, L)
                "mask": attention_mask(sequences),
                "label": torch.tensor([example["label"] for example in examples]),  # (B,)
            },
            weight=float(len(examples)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(sequence) for sequence in sequences),
        )

    def build_model(self) -> torch.nn.Module:
        torch.manual_seed(self.recipe.seed)
        backbone = AutoModel.from_pretrained(self.recipe.model.path)
        if self.recipe.model.gradient_checkpointing:
            backbone.gradient_checkpointing_enable({"use_reentrant": False})
        return Classifier(backbone)

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        scores = model(batch.tensors["ids"], batch.tensors["mask"]).float()
        label = batch.tensors["label"]
        right = (scores.argmax(-1) == label).sum()
        return Loss(F.cross_entropy(scores, label, reduction="sum"), {"accuracy": right})

    @property
    def export(self) -> Export:
        return WithTokenizer(self)
