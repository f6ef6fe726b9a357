"""Reward model: of two answers, the chosen one shall score higher."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.data.formats import Preference, read_preference
from dstrain.data.prepare import PreferenceSettings, prepare_preferences
from dstrain.data.source import Joined
from dstrain.data.store import TokenStore
from dstrain.models.freeze import check_parts
from dstrain.models.load import load_model, skeleton, switch_on_checkpointing
from dstrain.tasks.base import Loss
from dstrain.tasks.text import TextTask

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


@dataclass(frozen=True, kw_only=True)
class RewardModel(TextTask):
    """Reward models: the chosen of two answers shall score higher (Bradley-Terry).

    Christiano et al. (arXiv 1706.03741); the loss is eq. 1 of Ouyang et al. (arXiv 2203.02155), summed over pairs.
    """

    metric_names = ("accuracy", "margin")

    center_rewards_coefficient: float = 0.0
    """Weight of (chosen + rejected)^2, which keeps scores around 0; 0.01 is usual (arXiv 2312.09244)."""
    label_smoothing: float = 0.0
    """Share of pairs whose label is taken for flipped, from 0 to below 0.5."""
    disable_dropout: bool = True
    """Train without dropout, so that both answers are scored by the same network."""

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing is {self.label_smoothing:g}, but it must be at least 0 and below 0.5")
        if self.center_rewards_coefficient < 0:
            raise ValueError(f"center_rewards_coefficient is {self.center_rewards_coefficient:g}, below 0")

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

    def check(self) -> None:
        from transformers import AutoModelForSequenceClassification

        super().check()
        check_parts(skeleton(AutoModelForSequenceClassification, self.recipe.model, self.head_config), self.recipe)

    @property
    def head_config(self) -> PretrainedConfig:
        """The model's config with one score for a sequence."""
        config = self.model_config
        config.num_labels = 1
        config.pad_token_id = self.tokenizer.pad_token_id  # the model looks for the last token before it
        return config

    def build_model(self) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        from dstrain.tasks.ops import switch_off_dropout

        model = load_model(AutoModelForSequenceClassification, self.recipe.model, self.head_config, self.recipe.seed)
        if self.disable_dropout:
            switch_off_dropout(model)
        if self.recipe.model.gradient_checkpointing:
            switch_on_checkpointing(model)
        return model

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        from dstrain.tasks.ops import bradley_terry

        chosen, rejected = self.scores(model, batch).chunk(2)  # (B,), (B,)
        pairs = bradley_terry(
            chosen, rejected, batch.tensors["margin"], self.label_smoothing, self.center_rewards_coefficient
        )
        difference = (chosen - rejected).detach()
        return Loss(pairs.sum(), {"accuracy": (difference > 0).sum(), "margin": difference.sum()})

    def scores(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """(2B,) rewards, the chosen ones first, read where an exported model reads them."""
        ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
        return model(input_ids=ids, attention_mask=mask).logits.squeeze(-1).float()

    def outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return self.scores(model, batch)

    def reload(self, folder: Path) -> torch.nn.Module:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification.from_pretrained(str(folder))

    @classmethod
    def tiny(cls, folder: Path) -> dict[str, Any]:
        for name, count in (("train", 64), ("eval", 16)):
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(_pair(name, i)) + "\n" for i in range(count)))
        return {
            "task": "rm",
            "model": {
                "config": {
                    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48,
                    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
                }
            },
            "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 48},
            "batch": {"total": 4, "micro": 2},
            "optim": {"lr": 1e-3},
            "steps": 4,
            "log": {"every": 1, "tensorboard": False},
            "ds_config": "zero2",
        }  # fmt: skip


def _pair(split: str, index: int) -> dict[str, str]:
    """A made-up pair of uneven length: the polite answer is the chosen one."""
    draw = random.Random(f"{split}/{index}")
    things = ("pump", "valve", "kettle", "lamp", "wheel", "belt")
    prompt = f"\n\nHuman: How do I mend the {draw.choice(things)} number {index}{', please' * draw.randint(0, 4)}?"
    good = "Gladly: " + " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    return {"chosen": f"{prompt}\n\nAssistant: {good}.", "rejected": f"{prompt}\n\nAssistant: No idea, go away."}
