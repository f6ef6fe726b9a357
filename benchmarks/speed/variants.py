"""The variants that are compared: each takes the same steps on the same samples when it is called."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import LAUNCHER_VARIABLES, made_ds_config, made_engine
from benchmarks.speed.matmuls import MatrixProducts, count_work
from benchmarks.speed.plain_deepspeed import PlainDeepSpeed
from benchmarks.speed.settings import Setting, made_task
from benchmarks.trl_side import DPO, REWARD, SFT, StepByStep, made_side
from dstrain.data.loading.loader import make_batch

DSTRAIN, TRL, PLAIN, PRODUCTS = "dstrain zero2", "TRL", "plain DeepSpeed zero2", "matrix products alone"
TRAINERS = {"rm": REWARD, "dpo": DPO, "dpo-precomputed": DPO, "sft": SFT, "vlm": SFT}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One task in one setting, with its samples in the order of the steps."""

    setting: Setting
    task_name: str
    task: Any
    examples: Any
    """Dataset, in file order."""
    steps: int
    world: Any

    @property
    def rows(self) -> list[Mapping[str, Any]]:
        """The samples of all steps."""
        total = self.steps * self.setting.micro
        return [self.examples[index % len(self.examples)] for index in range(total)]


class Dstrain:
    """The real collation and the real DeepSpeedEngine, in one thread."""

    def __init__(self, case: Case, precision: str) -> None:
        self._case, self._step = case, 0
        self._engine = made_engine(case.task, "zero2", case.world, precision=precision, micro=case.setting.micro)
        self.losses: list[float] = []

    def __call__(self, turn: int = 0) -> None:
        """Take the next step: collate, forward, backward, clip, update."""
        micro, examples = self._case.setting.micro, self._case.examples
        ids = [(self._step * micro + index) % len(examples) for index in range(micro)]
        batch = make_batch(examples, self._case.task.collate, ids, 0)
        result = self._engine.step([batch], self._case.task.recipe.optim.lr)
        self.losses.append(float(result.loss) / result.weight)
        self._step += 1


class Trl:
    """TRL's trainer, stepped from outside; its losses are logged one step later."""

    def __init__(self, case: Case, precision: str) -> None:
        settings: dict[str, Any] = {"bf16": precision == "bf16", "optim": "adamw_torch_fused", "logging_steps": 1}
        if case.task_name == "dpo-precomputed":
            settings["precompute_ref_log_probs"] = True
        if case.task_name == "vlm":
            settings |= {"remove_unused_columns": False, "dataset_kwargs": {"skip_prepare_dataset": True}}
        with contextlib.redirect_stdout(io.StringIO()), _without_launcher():
            side = made_side(TRAINERS[case.task_name], case.task, case.rows, **settings)
        self.losses, self._step = side.losses, StepByStep(side)

    def __call__(self, turn: int = 0) -> None:
        """Take the next step: fetch and collate, forward, backward, clip, update, log."""
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every log line
            self._step()

    def stop(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._step.stop()


@contextlib.contextmanager
def _without_launcher() -> Iterator[None]:
    """Hide the variables of a launcher: with them accelerate wraps the model of one process in DDP."""
    held = {name: os.environ.pop(name) for name in LAUNCHER_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def made_case(
    setting: Setting, task_name: str, steps: int, world: Any, overrides: Sequence[str] = (), precision: str = "fp32"
) -> Case:
    """Return the case; cached outputs of a reference are computed here. Collective."""
    from dstrain.training.precompute_outputs import OutputsJob, add_outputs_and_select

    task = made_task(setting, task_name, steps, overrides)
    config = made_ds_config(task, "zero2", world, precision=precision, micro=setting.micro)
    job = OutputsJob(task=task, ds_config=config, micro_batch_size=setting.micro, world=world)
    examples = add_outputs_and_select(job, {"train": task.examples("train")})["train"]
    return Case(setting=setting, task_name=task_name, task=task, examples=examples, steps=steps, world=world)


def made_variant(name: str, case: Case, precision: str) -> Any:
    """Return a callable that takes the next step; it has `losses`, except for the matrix products."""
    import torch

    if name == DSTRAIN:
        return Dstrain(case, precision)
    if name == TRL:
        return Trl(case, precision)
    if name == PLAIN:
        return PlainDeepSpeed(case.task, case.task_name, case.rows, precision)
    micro, rows = case.setting.micro, case.rows
    works = [count_work(case.task_name, rows[start : start + micro]) for start in range(0, len(rows), micro)]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return MatrixProducts(case.setting, works, dtype, int(case.task_name == "dpo"), case.world.device)
