"""A training loop on DeepSpeed in a few lines, with the losses of textbooks: padded rows, logits of all tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence


class PlainDeepSpeed:
    """Takes steps with `deepspeed.initialize`, forward, backward, step."""

    def __init__(
        self, task: Any, name: str, examples: Sequence[Mapping[str, Any]], precision: str, stage: int = 2
    ) -> None:
        import deepspeed

        optim = task.recipe.optim
        model = task.build_model()
        self._task, self._name, self._examples, self._step = task, name, examples, 0
        self._reference = task.reference.build() if name == "dpo" else None
        self._engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.AdamW(model.parameters(), optim.lr, optim.betas, optim.eps, optim.weight_decay),
            config={
                "train_micro_batch_size_per_gpu": task.recipe.batch.micro, "gradient_clipping": optim.clip,
                "zero_optimization": {"stage": stage}, "bf16": {"enabled": precision == "bf16"},
            },
        )  # fmt: skip
        self._device = self._engine.device
        if self._reference is not None:
            self._reference.to(self._device, torch.bfloat16 if precision == "bf16" else torch.float32)
        self.losses: list[float] = []

    def __call__(self, turn: int = 0) -> None:
        """Take the next step."""
        micro = self._task.recipe.batch.micro
        chosen = [self._examples[(self._step * micro + index) % len(self._examples)] for index in range(micro)]
        loss = {"rm": self._reward_loss, "sft": self._sft_loss, "vlm": self._sft_loss}.get(self._name, self._dpo_loss)(
            chosen
        )
        self._engine.backward(loss)
        self._engine.step()
        self._step += 1
        self.losses.append(float(loss.detach()))

    def _pad(self, rows: Sequence[Any]) -> dict[str, torch.Tensor]:
        ids = [torch.as_tensor(row, device=self._device).long() for row in rows]
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=self._task.tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        }

    def _reward_loss(self, examples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        inputs = self._pad([example[side] for side in ("chosen", "rejected") for example in examples])
        chosen, rejected = self._engine(**inputs).logits.float().chunk(2)
        return -F.logsigmoid(chosen - rejected).mean()

    def _dpo_loss(self, examples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        inputs = self._pad([example[side] for side in ("chosen", "rejected") for example in examples])
        starts = torch.tensor([int(example["prompt_length"]) for example in examples] * 2, device=self._device)
        positions = torch.arange(inputs["input_ids"].shape[1], device=self._device)
        answers = (positions >= starts[:, None]) & inputs["attention_mask"].bool()
        log_probs = self._log_probs(self._engine, inputs, answers)
        if self._reference is None:
            names = ("ref_chosen_logps", "ref_rejected_logps")
            values = [float(example[name]) for name in names for example in examples]
            reference = torch.tensor(values, device=self._device)
        else:
            with torch.no_grad():
                reference = self._log_probs(self._reference, inputs, answers)
        chosen, rejected = (log_probs - reference).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    def _log_probs(self, model: Any, inputs: Mapping[str, torch.Tensor], answers: torch.Tensor) -> torch.Tensor:
        logits = model(**inputs).logits[:, :-1].float()
        found = logits.log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
        return (found * answers[:, 1:]).sum(-1)

    def _sft_loss(self, examples: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        inputs = self._pad([example["input_ids"] for example in examples])
        loss_mask = pad_sequence(
            [torch.as_tensor(example["loss_mask"], device=self._device).bool() for example in examples],
            batch_first=True,
        )
        vision = self._task.collate(list(examples)).to(self._device).vision if self._name == "vlm" else {}
        return self._engine(**inputs, **vision, labels=inputs["input_ids"].masked_fill(~loss_mask, -100)).loss
