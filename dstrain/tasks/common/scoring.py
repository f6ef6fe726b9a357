"""The task of `dstrain score`: an example for each answer of a record, and its score under a trained model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch, PackingMode
from dstrain.data.formats.answers import SIDES, PromptAnswers, read_prompt_answers
from dstrain.data.records import BadRecord, EncodeResult
from dstrain.errors import TaskError
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.task import Loss, Outputs
from dstrain.tasks.common.text import TextTask

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
        encoded = encode_preferences(task.tokenizer, asked, data.max_length, data.max_prompt_length, images)
        for examples, sample, example in zip(found, samples, encoded, strict=True):
            if sample.form == "pair" and number == 0:
                examples += [_take(example, side, at) for at, side in enumerate(SIDES)]
            elif sample.form != "pair" and number < len(sample.answers):
                examples.append(_take(example, "chosen", number))
    return found


def collate_answers(task: TextTask, scored: TextTask, examples: Sequence[Mapping[str, Any]]) -> Batch:
    """Return a batch of examples of `encode_answers`, a row for each, with what `scored` needs to score them."""
    sequences = [example["answer"] for example in examples]
    rows = task.make_rows(sequences)
    answers = [(example["answer"], int(example["prompt_length"])) for example in examples]
    batch = Batch(
        tensors={**rows.input_tensors(), **scored.answer_tensors(rows, answers)},
        groups=rows.groups,
        weight=float(len(examples)),
        samples=tuple(example["sample"] for example in examples),
        tokens=sum(len(sequence) for sequence in sequences),
    )
    return task.with_images(batch, examples)


def _take(example: dict[str, Any] | BadRecord, side: str, number: int) -> EncodeResult:
    """Return one side of an encoded preference as the example of answer `number`."""
    if isinstance(example, BadRecord):
        return example
    rest = {name: value for name, value in example.items() if name not in ("chosen", "rejected")}
    return {"answer": example[side], "number": number, **rest}
