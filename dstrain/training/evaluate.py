"""Evaluation on the held-out split: each sample once, equal numbers of passes per rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from dstrain.batch import Batch, StepResult
from dstrain.config.schema import BatchConfig
from dstrain.data.dataset import Dataset, of_one_sequence
from dstrain.data.formats.preferences import Response
from dstrain.data.loading.loader import eval_micro_batches, iter_batches
from dstrain.data.loading.micro_batches import costs_of, make_cost_function, make_limits
from dstrain.distributed.world import World, data_parallel_rank
from dstrain.models.params import unwrap_peft
from dstrain.report.meter import Meter
from dstrain.tasks import GenerationMetrics, Task
from dstrain.tasks.common.judge import Judge, count_wins, make_judge, same_text, to_answer
from dstrain.training.engine.base import EvalEngine
from dstrain.training.generate import GenerationModel, SamplingParams, generate_answers


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
    _reference_rewards: list[float | None] = field(default_factory=list, init=False, repr=False, compare=False)
    """What the judge gives to the answers of the data; empty before the first evaluation."""

    @cached_property
    def judge(self) -> Judge | None:
        """The reward model of generated answers."""
        return make_judge(self.task)

    def run(self, engine: EvalEngine, should_stop: Callable[[], bool] = lambda: False) -> dict[str, float]:
        """Return loss and metrics: each is one sum over all ranks, divided once. Collective.

        The rates are those of the losses, without the generation of answers. `should_stop` is a collective that
        tells every rank the same, called after each forward pass; where it is true, the result is empty.
        """
        meter = Meter(engine.world, self.task.finish_metrics)
        shares, pin_memory = self._micro_batches(engine.world), _pins(self.task, engine.world)

        def load_batches() -> Iterator[Batch]:
            return iter_batches(self.examples, self.task.collate, shares, engine.world.sequence, pin_memory)

        for result in iter_eval_results(engine, self.task, load_batches):
            meter.add(result)
            # A long evaluation must not look like a stalled run, nor outlast the time between SIGTERM and SIGKILL.
            engine.world.log.record_progress()
            if should_stop():
                return {}
        row = meter.drain()
        for name in ("step_seconds", "padding"):  # the meter counts each forward pass as a step
            row.pop(name, None)
        prompts = self.task.prompts
        generation = None if prompts is None else prompts.metrics
        if generation is None or not len(self.examples):
            return row
        scores = self._score_answers(engine, generation, should_stop)
        return {} if scores is None else {**row, **scores}

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
    ) -> dict[str, float] | None:
        """Return each metric of the generated answers, alike on every rank; None if stopped. Collective.

        Every sample is in one batch of one rank, and the batches do not depend on the number of processes.
        """
        lengths = self._prompt_lengths(generation)
        model = GenerationModel(unwrap_peft(engine.unwrapped.model), engine.world, engine.is_sharded)
        sampling = SamplingParams(max_new_tokens=generation.max_new_tokens, batch=self.micro_batch_size)
        # Like lengths together, as in generate_answers. The prompts of a large dataset may not fit into memory.
        order = sorted(lengths, key=lambda index: lengths[index])
        found: dict[int, str] = {}
        # A batch per rank at a time: a signal need not wait for all of them, nor a rank that has short answers.
        size = sampling.batch * engine.world.size
        for places in (order[start : start + size] for start in range(0, len(order), size)):
            if should_stop():
                return None
            prompts = [prompt for index in places if (prompt := generation.get_prompt(self.examples[index]))]
            answers = generate_answers(model, prompts, sampling, generation.tokenizer, generation.vision_processor)
            texts = generation.tokenizer.batch_decode(answers, skip_special_tokens=True)
            found |= dict(zip(places, texts, strict=True))
        found = {index: found[index] for index in lengths}
        scores = [generation.score(self.examples[index], text.strip()) for index, text in found.items()]
        means = {name: sum(score[name] for score in scores) / len(scores) for name in generation.names if scores}
        if self.judge is None or should_stop():
            return means if self.judge is None else None
        return {**means, **self._judge_answers(engine, self.judge, found)}

    def _prompt_lengths(self, generation: GenerationMetrics) -> dict[int, int]:
        """Return the tokens of the prompt of each sample to which an answer is generated, by index."""
        found: dict[int, int] = {}
        for index in range(len(self.examples)):
            if generation.max_samples is not None and len(found) == generation.max_samples:
                break
            if (prompt := generation.get_prompt(self.examples[index])) is not None:
                found[index] = len(prompt.ids)
        return found

    def _judge_answers(self, engine: EvalEngine, judge: Judge, answers: Mapping[int, str]) -> dict[str, float]:
        """Return the reward and the win rate of generated answers, each absent where nothing counts. Collective."""
        prompts = judge.policy.prompts
        asked, folders = {}, {}
        for index in answers:
            example = self.examples[index]
            if (one := prompts.read(example)) is not None:
                asked[index], folders[index] = one, prompts.folder(example)

        def score(responses: Iterable[Response]) -> list[float | None]:
            return compute_rewards(
                engine, judge, judge.encode([*asked.values()], [*responses], [*folders.values()]), self.micro_batch_size
            )

        right = [one.parsed.answers[0] for one in asked.values()]
        if not self._reference_rewards:
            self._reference_rewards.extend(score(right))
        texts = [answers[index] for index in asked]
        rewards = score(to_answer(text, one.parsed) for text, one in zip(texts, asked.values(), strict=True))
        known = [reward for reward in rewards if reward is not None]
        wins, compared = count_wins(rewards, self._reference_rewards, [*map(same_text, texts, right)])
        means = {"reward": (sum(known), len(known)), "win_rate": (wins, compared)}
        return {name: total / count for name, (total, count) in means.items() if count}


def _pins(task: Task, world: World) -> bool:
    """Return True where the task's batches are to be in page-locked memory (data.pin)."""
    return task.recipe.data.pin and world.device.type == "cuda"


def compute_rewards(
    engine: EvalEngine, judge: Judge, examples: Sequence[Mapping[str, Any] | None], micro_batch_size: int
) -> list[float | None]:
    """Return the score of each example of `judge.encode`, alike on every rank; None for one without. Collective.

    Each rank scores a share, in as many forward passes as the others.
    """
    known = [example for example in examples if example is not None]
    scores: dict[int, float] = {}
    if known:
        lengths = np.array([len(example["answer"]) for example in known])
        costs = costs_of(of_one_sequence(lambda ids: lengths[ids]), judge.scores.packing)
        world, limits = engine.world, make_limits(judge.scores.recipe.batch, micro_batch_size, costs)
        mine: dict[int, float] = {}
        shares = eval_micro_batches(len(known), limits, world.size, world.rank, costs)
        batches = iter_batches(known, judge.scores.collate, shares, pin_memory=_pins(judge.scores, world))
        for ids, batch in zip(shares, batches, strict=True):
            values = engine.unwrapped.judge(batch.to(world.device))["score"]
            mine |= dict(zip(ids, values.double().tolist(), strict=False))  # a filler has no ids
            world.log.record_progress()
        for share in world.gather(mine):
            scores |= share
    rows = iter(range(len(known)))
    return [None if example is None else scores[next(rows)] for example in examples]


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
