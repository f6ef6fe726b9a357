"""Evaluation on the held-out split: each sample once, equal numbers of passes per rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import BatchConfig
from dstrain.data.dataset import Dataset
from dstrain.data.loading.loader import eval_micro_batches, iter_batches
from dstrain.data.loading.micro_batches import make_cost_function, make_limits
from dstrain.distributed.world import World, data_parallel_rank
from dstrain.models.params import unwrap_peft
from dstrain.report.meter import Meter
from dstrain.tasks import GenerationMetrics, Task
from dstrain.train.engine.base import EvalEngine
from dstrain.train.generate import GenerationModel, SamplingParams, generate_answers


@dataclass(frozen=True)
class Evaluation:
    """Evaluation data and its micro-batch size."""

    task: Task
    examples: Dataset
    micro_batch_size: int
    """Samples of a forward pass; of generated answers only, where the recipe limits the tokens of a forward pass."""
    best_metric: str = "loss"
    """The metric that `best` compares."""
    batch: BatchConfig | None = None
    """The recipe's `batch`, where it is no longer the one that the task was made with."""
    _shares: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Of `data_parallel_rank`: the micro-batches of the first evaluation."""

    def run(self, engine: EvalEngine, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return loss and metrics: each is one sum over all ranks, divided once. Collective.

        The rates are those of the losses, without the generation of answers. `should_stop` is a collective that
        tells every rank the same; where it is true before all answers are generated, the result is empty.
        """
        meter = Meter(engine.world, self.task.finish_metrics)
        shares = self._micro_batches(engine.world)
        for result in iter_eval_results(
            engine, self.task, lambda: iter_batches(self.examples, self.task.collate, shares, engine.world.sequence)
        ):
            meter.add(result)
            # A long evaluation must not look like a stalled run.
            engine.world.log.record_progress()
        row = meter.drain()
        for name in ("step_seconds", "padding"):  # the meter counts each forward pass as a step
            row.pop(name, None)
        generation = self.task.generation_metrics
        if generation is None or not len(self.examples):
            return row
        scores = self._score_answers(engine, generation, should_stop)
        return {**row, **scores} if scores else {}

    def _micro_batches(self, world: World) -> list[list[int]]:
        """Return the ids of each of this rank's micro-batches, the same at every evaluation."""
        ranks = rank, size = data_parallel_rank(world)
        if ranks not in self._shares:
            costs = make_cost_function(self.examples, self.task.loss_inputs.packing())
            limits = make_limits(self.batch or self.task.recipe.batch, self.micro_batch_size, costs)
            self._shares[ranks] = eval_micro_batches(len(self.examples), limits, size, rank, costs)
        return self._shares[ranks]

    def _score_answers(
        self, engine: EvalEngine, generation: GenerationMetrics, should_stop: Callable[[], bool]
    ) -> dict[str, float]:
        """Return the mean of each metric over the generated answers, alike on every rank; empty if stopped. Collective.

        Every sample is in one batch of one rank, and the batches do not depend on the number of processes.
        """
        count = min(len(self.examples), generation.max_samples or len(self.examples))
        model = GenerationModel(unwrap_peft(engine.unwrapped.model), engine.world, engine.is_sharded)
        sampling = SamplingParams(max_new_tokens=generation.max_new_tokens, batch=self.micro_batch_size)
        # Like lengths together, as in generate_answers. The prompts of a large dataset may not fit into memory.
        order = sorted(range(count), key=lambda index: len(generation.get_prompt(self.examples[index]).ids))
        scores: dict[int, Mapping[str, float]] = {}
        # A batch per rank at a time: a signal need not wait for all of them, nor a rank that has short answers.
        size = sampling.batch * engine.world.size
        for places in (order[start : start + size] for start in range(0, count, size)):
            if should_stop():
                return {}
            prompts = [generation.get_prompt(self.examples[index]) for index in places]
            answers = generate_answers(model, prompts, sampling, generation.tokenizer, generation.vision_processor)
            texts = generation.tokenizer.batch_decode(answers, skip_special_tokens=True)
            for index, text in zip(places, texts, strict=True):
                scores[index] = generation.score(self.examples[index], text.strip())
        return {name: sum(scores[index][name] for index in range(count)) / count for name in generation.names}


@dataclass(kw_only=True)
class EarlyStopping:
    """Count of evaluations in a row without a better metric. Each checkpoint records it in run.json."""

    metric: str
    mode: Literal["min", "max"]
    patience: int | None = None
    """Evaluations in a row without a better metric after which the run ends; None: never."""
    best: float | None = None
    """The best value; None before the first finite one."""
    best_step: int | None = None
    counter: int = 0
    """Evaluations since the best one."""

    def add(self, step: int, value: float | None) -> None:
        """Count an evaluation. A value that is missing or not finite is not better."""
        sign = 1 if self.mode == "min" else -1
        is_finite = value is not None and math.isfinite(value)
        if value is not None and is_finite and (self.best is None or sign * value < sign * self.best):
            self.best, self.best_step, self.counter = value, step, 0
        else:
            self.counter += 1

    @property
    def is_due(self) -> bool:
        """True where the run is to end."""
        return self.patience is not None and self.counter >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint records."""
        return {name: value for name, value in asdict(self).items() if name != "patience"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the count of a checkpoint; one of another metric is not continued."""
        if (state.get("metric"), state.get("mode")) == (self.metric, self.mode):
            self.best, self.best_step, self.counter = state["best"], state["best_step"], state["counter"]

    def __str__(self) -> str:
        best = "no finite value" if self.best is None else f"the best is {self.best:.6g} of step {self.best_step}"
        return f"{self.counter} evaluations in a row without a better {self.metric}; {best}"


def iter_eval_results(
    engine: EvalEngine, task: Task, load_batches: Callable[[], Iterable[Batch]]
) -> Iterator[StepResult]:
    """Yield the sums of each batch. Collective.

    For a task with step statistics they are computed over all batches first; `load_batches` is then
    called twice, since all batches together may not fit into memory.
    """
    batches = load_batches()
    if task.loss_inputs.step_stats is not None:
        stats = engine.compute_step_stats(batches)
        batches = (batch.with_tensors(more) for batch, more in zip(load_batches(), stats, strict=True))
    for batch in batches:
        yield engine.evaluate(batch)
