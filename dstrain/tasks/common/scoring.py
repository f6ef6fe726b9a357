"""The tasks of `dstrain score`: an example for each answer of a record, and its scores under a trained model."""

# Shapes: R answers, S steps of all of them, K of the longest.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch, PackingMode
from dstrain.data.formats.answers import SIDES, PromptAnswers, read_prompt_answers
from dstrain.data.records import EncodeResult, parse_record
from dstrain.errors import BadRecord, TaskError
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.task import Loss, Outputs, Task
from dstrain.tasks.common.text import TextTask
from dstrain.tasks.prm import ProcessRewardModel, Solution, read_solution

if TYPE_CHECKING:
    import torch

    from dstrain.data.encoding.rendering import PlaceholderExpansion


@dataclass(frozen=True, kw_only=True)
class AnswerScores(TextTask):
    """The answers of records, each a row, encoded and scored as the task of a trained model does."""

    scored: TextTask
    """Task of the model."""

    token_columns = ("answer",)
    rows_per_sample = 1
    packs_batches = True

    def parse(self, record: Mapping[str, Any]) -> PromptAnswers:
        return read_prompt_answers(record)

    def encode(  # type: ignore[override]  # several examples for a record
        self, samples: list[PromptAnswers], images: PlaceholderExpansion | None
    ) -> list[list[EncodeResult]]:
        return encode_answers(self, samples, images)

    def encode_key(self) -> dict[str, Any]:
        data = self.recipe.data
        return {"what": "answers", "max_length": data.max_length, "max_prompt_length": data.max_prompt_length}

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        return iter(())

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        return collate_answers(self, self.scored, examples)

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Outputs:
        """Return name -> value of each answer, (R,)."""
        return self.scored.score_answers(model, batch)

    def read_columns(
        self, record: Mapping[str, Any], names: Iterable[str], values: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Return the columns with scores of a record, null where there is none. Raises BadRecord.

        `names`: of the scores; `values`: those of each answer by its number.
        """
        parsed = parse_record(self.parse_record, record).parsed
        found: dict[str, Any] = {}
        for name in names:
            given = [values.get(number, {}).get(name) for number in range(len(parsed.answers))]
            if parsed.form == "pair":
                found |= {f"{side}_{name}": value for side, value in zip(SIDES, given, strict=True)}
            else:
                plural = name if name.endswith("s") else f"{name}s"
                found |= {plural: given} if parsed.form == "list" else {name: given[0]}
        return found

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        raise TaskError(f"task {self.scored.recipe.task}: its answers are scored here, and no loss is computed")

    def build_model(self) -> torch.nn.Module:
        return self.scored.build_model()

    @property
    def model_source(self) -> ModelSource:
        return self.scored.model_source

    @property
    def tokenizer(self) -> Any:
        return self.scored.tokenizer

    @cached_property
    def packing(self) -> PackingMode:
        return PackingMode(self.scored.packing.is_packed)


@dataclass(frozen=True, kw_only=True)
class StepScores(AnswerScores):
    """The steps of solutions, scored by a process reward model. Records need no labels."""

    scored: ProcessRewardModel

    token_columns = ("input_ids",)

    def parse(self, record: Mapping[str, Any]) -> Solution:  # type: ignore[override]
        return read_solution(record, needs_labels=False)

    def encode(self, samples: list[Any], images: PlaceholderExpansion | None) -> Any:
        return self.scored.encode(samples, images)

    def encode_key(self) -> dict[str, Any]:
        return {**self.scored.encode_key(), "what": "steps to score"}

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        batch, counts = self.scored.collate(examples), [len(example["ends"]) for example in examples]
        mask = torch.arange(max(counts)) < torch.tensor(counts)[:, None]  # (R, K)
        return batch.with_tensors({"loss_mask": mask.long()})

    def outputs(self, model: torch.nn.Module, batch: Batch) -> Outputs:
        """Return the probability that a step is right, (R, K); 0 where there is no step."""
        right = self.scored.step_logits(model, batch).softmax(-1)[:, 1]  # (S,)
        mask = batch.tensors["loss_mask"] != 0
        return {"step_scores": right.new_zeros(mask.shape).masked_scatter(mask, right)}

    def read_columns(
        self, record: Mapping[str, Any], names: Iterable[str], values: Mapping[int, Mapping[str, Any]]
    ) -> dict[str, Any]:
        steps, found = parse_record(self.parse_record, record).parsed.steps, values.get(0, {}).get("step_scores", [])
        return {"step_scores": [*found, *[None] * (len(steps) - len(found))]}  # the last ones were cut


def make_scores(task: Task) -> AnswerScores | None:
    """Return the task that scores records by the model of another; None where it has nothing to score."""
    if isinstance(task, ProcessRewardModel):
        return StepScores(recipe=task.recipe, scored=task)
    if not isinstance(task, TextTask) or not task.scores_answers:
        return None
    return AnswerScores(recipe=task.recipe, scored=task)


def encode_answers(
    task: TextTask, samples: Sequence[PromptAnswers], images: PlaceholderExpansion | None
) -> list[list[EncodeResult]]:
    """Return an example of each answer of each record: `answer`, ids with the prompt; `number`; `prompt_length`; cuts."""
    from dstrain.data.encoding.preferences import encode_preferences

    data, found = task.recipe.data, list[list[EncodeResult]]([] for _ in samples)
    rounds = max((len(one.answers) - (one.form == "pair") for one in samples), default=0)
    # All records each time, since their images are found by their place.
    for number in range(rounds):
        asked = [one.to_preference(min(number, len(one.answers) - 1)) for one in samples]
        encoded = encode_preferences(
            task.tokenizer, asked, data.max_length, data.max_prompt_length, images, data.rendered
        )
        for examples, sample, example in zip(found, samples, encoded, strict=True):
            if sample.form == "pair" and number == 0:
                examples += [_take(example, side, at) for at, side in enumerate(SIDES)]
            elif sample.form != "pair" and number < len(sample.answers):
                examples.append(_take(example, "chosen", number))
    return found


def collate_answers(task: TextTask, scored: TextTask, examples: Sequence[Mapping[str, Any]]) -> Batch:
    """Return a batch of examples of `encode_answers`, a row for each, with what `scored` needs to score them."""
    sequences = [example["answer"] for example in examples]
    rows = task.collator.make_rows(sequences)
    answers = [(example["answer"], int(example["prompt_length"])) for example in examples]
    batch = Batch(
        tensors={**rows.input_tensors(), **scored.answer_tensors(rows, answers)},
        groups=rows.groups,
        weight=float(len(examples)),
        samples=tuple(example["sample"] for example in examples),
        tokens=sum(len(sequence) for sequence in sequences),
    )
    return task.collator.attach_images(batch, task.collator.load_images(examples))


def _take(example: dict[str, Any] | BadRecord, side: str, number: int) -> EncodeResult:
    """Return one side of an encoded preference as the example of answer `number`."""
    if isinstance(example, BadRecord):
        return example
    rest = {name: value for name, value in example.items() if name not in ("chosen", "rejected")}
    return {"answer": example[side], "number": number, **rest}
