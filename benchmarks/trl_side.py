"""Run both sides of a comparison with TRL: `dstrain train`, and TRL's trainers on its tokens, order and rates.

TRL is not a dependency of dstrain. To reproduce the figures: pip install trl==1.16.0
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common import ROOT
from dstrain.config import resolve_steps
from dstrain.data.loading.loader import StepSampler

Row = dict[str, Any]

REWARD, DPO, ORPO, SIMPO, SFT = "RewardTrainer", "DPOTrainer", "ORPOTrainer", "CPOTrainer", "SFTTrainer"


@dataclass(frozen=True, kw_only=True)
class Side:
    """A TRL trainer with the start, samples and rates of dstrain's run."""

    trainer: Any
    losses: list[float] = field(default_factory=list)
    """Of every step so far, as TRL logs them."""


def train_with_dstrain(recipe: Mapping[str, Any], run_dir: Path) -> None:
    """Run the command in one process."""
    path = run_dir.parent / f"{run_dir.name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(recipe)))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "dstrain", "train", str(path), "--run-dir", str(run_dir)]
    subprocess.run(command, env=environment, check=True, stdout=sys.stderr)


def told(run_dir: Path, split: str) -> list[dict[str, Any]]:
    """Return the rows of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["split"] == split]


def ordered(task: Any) -> list[Mapping[str, Any]]:
    """Return the training examples of the run in the order of `dstrain train` on one process."""
    examples, recipe = task.examples("train"), task.recipe
    total = recipe.batch.total
    order = StepSampler(
        sizes=examples.sizes, weights=examples.weights, seed=recipe.seed, samples_per_step=total,
        world_size=1, accumulate=1,
    )  # fmt: skip
    _, count = resolve_steps(recipe, order.samples_per_epoch, total)
    order = replace(order, total_samples=count)
    return [examples[int(index)] for start in range(0, count, total) for index in order.step_ids(start)]


def reward_rows(examples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows in RewardTrainer's format for tokenized data."""
    return [{f"{side}_ids": example[side].tolist() for side in ("chosen", "rejected")} for example in examples]


def answer_rows(examples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows in DPOTrainer's format after tokenization: prompt, and answers without it."""
    rows = []
    for example in examples:
        start = int(example["prompt_length"])
        answers = {f"{side}_ids": example[side][start:].tolist() for side in ("chosen", "rejected")}
        rows.append({"prompt_ids": example["chosen"][:start].tolist(), **answers})
    return rows


def labelled_rows(examples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows in ORPOTrainer's and CPOTrainer's format after tokenization: complete sequences, -100 on the prompt."""
    rows = []
    for example in examples:
        start, row = int(example["prompt_length"]), {}
        for side in ("chosen", "rejected"):
            ids = example[side].tolist()
            row[f"{side}_input_ids"], row[f"{side}_attention_mask"] = ids, [1] * len(ids)
            row[f"{side}_labels"] = [-100] * start + ids[start:]
        rows.append(row)
    return rows


def sft_rows(examples: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return rows in SFTTrainer's format after tokenization: -100 where a token is no target; and the numbers of images."""
    rows = []
    for index, example in enumerate(examples):
        ids, loss_mask = example["input_ids"].tolist(), example["loss_mask"].tolist()
        labels = [token if wanted else -100 for token, wanted in zip(ids, loss_mask, strict=True)]
        rows.append({"input_ids": ids, "labels": labels, **({"example": index} if "images" in example else {})})
    return rows


def _image_collator(task: Any, examples: Sequence[Mapping[str, Any]]) -> Callable[[list[Row]], dict[str, Any]]:
    """Return a collator of `sft_rows` that reads and processes the images of each batch, as TRL's own does."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    def collate(rows: list[Row]) -> dict[str, Any]:
        ids, labels = ([torch.tensor(row[name]) for row in rows] for name in ("input_ids", "labels"))
        return {
            "input_ids": pad_sequence(ids, batch_first=True, padding_value=task.tokenizer.pad_token_id),
            "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
            "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
            **task.collate([examples[row["example"]] for row in rows]).vision,
        }

    return collate


ROWS: dict[str, Callable[[Sequence[Mapping[str, Any]]], list[Row]]] = {
    REWARD: reward_rows, DPO: answer_rows, ORPO: labelled_rows, SIMPO: labelled_rows,
    SFT: sft_rows,
}  # fmt: skip


def _kinds(name: str) -> tuple[type, type]:
    """Return (trainer class, config class) by name."""
    import trl

    if name == ORPO:
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer, ORPOConfig
    if name == SIMPO:
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        return CPOTrainer, CPOConfig
    return getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))


def made_side(name: str, task: Any, examples: Sequence[Mapping[str, Any]], **settings: Any) -> Side:
    """Return the trainer with the initial weights of dstrain's task; `settings` override values of its config.

    With `bf16` its weights are bf16 too.
    """
    from datasets import Dataset
    from transformers import TrainerCallback

    side = Side(trainer=None)

    class Listener(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "loss" in logs:
                side.losses.append(float(logs["loss"]))

    kind, config = _kinds(name)
    recipe, steps = task.recipe, math.ceil(len(examples) / task.recipe.batch.total)
    words: dict[str, Any] = {"model": task.build_model(), "args": config(**{**_arguments(recipe), **settings})}
    if name == DPO:
        words["ref_model"] = task.reference.build()
    if settings.get("bf16"):  # weights too; buffers such as rotary frequencies stay in fp32, as after from_pretrained
        for model in (words["model"], words.get("ref_model")):
            for parameter in model.parameters() if model is not None else ():
                if parameter.is_floating_point():  # not the integers of quantized weights
                    parameter.data = parameter.data.bfloat16()
    if name == SFT and "images" in examples[0]:
        words["data_collator"] = _image_collator(task, examples)
    rows = ROWS[name](examples)
    if name in (ORPO, SIMPO):  # they always tokenize, so they get one dummy pair
        rows, later = [{"prompt": "a", "chosen": "b", "rejected": "c"}], rows
    trainer = _aligned(kind, _rates(recipe, steps))(
        **words, train_dataset=Dataset.from_list(rows), processing_class=task.tokenizer, callbacks=[Listener()]
    )
    if name in (ORPO, SIMPO):
        trainer.train_dataset = Dataset.from_list(later)
    return Side(trainer=trainer, losses=side.losses)


def _arguments(recipe: Any) -> dict[str, Any]:
    """Return the recipe's values under TRL's names."""
    optim, micro = recipe.optim, recipe.batch.micro
    return {
        "output_dir": tempfile.mkdtemp(prefix="dstrain-trl-"), "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": recipe.batch.total // micro, "per_device_eval_batch_size": micro,
        "num_train_epochs": 1, "train_sampling_strategy": "sequential",
        "optim": {"adamw": "adamw_torch", "sgd": "sgd"}[optim.name], "learning_rate": optim.lr,
        "adam_beta1": optim.betas[0], "adam_beta2": optim.betas[1], "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay, "max_grad_norm": optim.clip or 0.0, "seed": recipe.seed,
        "max_length": recipe.data.max_length, "gradient_checkpointing": False, "bf16": False, "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip


def _rates(recipe: Any, steps: int) -> Callable[[int], float]:
    """Return dstrain's learning rate relative to its peak: transformers' cosine starts its warmup at 0, dstrain's does not."""
    from dstrain.schedule import LRSchedule

    return LRSchedule(1.0, recipe.optim.schedule, steps, recipe.optim.warmup)


def _aligned(kind: type, rates: Callable[[int], float]) -> type:
    """Return the trainer class adapted to tokenized rows and these rates; its computations are unchanged."""
    from torch.optim.lr_scheduler import LambdaLR

    class Aligned(kind):  # type: ignore[misc,valid-type]
        def _prepare_dataset(self, dataset: Any, *_: Any) -> Any:
            return dataset

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.lr_scheduler = LambdaLR(optimizer or self.optimizer, rates)
            return self.lr_scheduler

    Aligned.__name__ = kind.__name__
    return Aligned


class StepByStep:
    """Runs a trainer in its own thread, one step per call: its loop cannot be stepped from outside."""

    def __init__(self, side: Side) -> None:
        from transformers import TrainerCallback

        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._fault: BaseException | None = None
        self._side, self._stopped, paused = side, False, self

        class Pause(TrainerCallback):
            def on_train_begin(self, *_: Any, **__: Any) -> None:
                paused._go.acquire()

            def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                paused._done.release()
                paused._go.acquire()
                control.should_training_stop |= paused._stopped

        side.trainer.add_callback(Pause())
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def __call__(self, turn: int = 0) -> None:
        """Take a step; TRL logs it within the next one."""
        self._go.release()
        self._done.acquire()
        if self._fault is not None:
            raise self._fault

    def stop(self) -> None:
        """End the training, so that its memory can be freed."""
        self._stopped = True
        self._go.release()
        self._thread.join()

    def _train(self) -> None:
        try:
            self._side.trainer.train()
        except BaseException as fault:
            self._fault = fault
        self._done.release()
