"""Process reward model: each step of a solution is right or wrong."""

# Shapes: B solutions, L tokens, S steps of all solutions together.

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrain.batch import Batch
from dstrain.config.schema import ModelConfig
from dstrain.data.formats.conversations import ParsedPrompt, read_prompt
from dstrain.data.formats.messages import iter_parts
from dstrain.data.formats.preferences import Prompt
from dstrain.data.records import EncodeResult, Record, as_record
from dstrain.errors import BadRecord, Fault, RecipeError
from dstrain.tasks.common.model_source import ModelSource
from dstrain.tasks.common.task import Loss
from dstrain.tasks.common.text import TextTask

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dstrain.data.encoding.rendering import PlaceholderExpansion
    from dstrain.data.loading.rows import PackedRows, PaddedRows

MATH_SHEPHERD_STEP = "ки"
"""Ends a step of Math-Shepherd's `input`; its `label` has + or - in the place of each."""
NO_LABEL = -100
"""A step without a label, in the target."""


@dataclass(frozen=True)
class Solution:
    """A question, the steps of an answer, and which of them are right."""

    prompt: Prompt
    steps: list[str]
    labels: list[int]
    """Of each step 1 for right, 0 for wrong, or NO_LABEL."""
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepModelSource(ModelSource):
    """A model with a score of two classes, wrong and right, for each token."""

    auto_class_name = "AutoModelForTokenClassification"

    def build_config(self, model: ModelConfig) -> PretrainedConfig:
        from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

        config = super().build_config(model)
        if self.is_multimodal or type(config) not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
            problem = f"transformers has no token classification for models of type {config.model_type}"
            raise RecipeError(Fault("model", problem, "use a model of another family, such as Qwen 3 or Llama"))
        config.id2label = {0: "wrong", 1: "right"}  # sets num_labels
        config.label2id = {"wrong": 0, "right": 1}
        return config


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModel(TextTask):
    """Process reward models: the token that ends a step says whether the step is right.

    Lightman et al. (arXiv 2305.20050), section 2.6: cross-entropy of each step's label, summed over steps. `first_error_f1`
    is the F1 of ProcessBench (Zheng et al., arXiv 2412.06559, section 3.3).
    """

    packs_batches = True
    rows_per_sample = 1
    scores_answers = False
    metric_names = ("accuracy", "first_error_accuracy", "no_error_accuracy", "first_error_f1")
    learning_rate = 1.0e-5
    modules_to_save = ("score", "classifier")

    step_separator: str = "\n"
    """Text after each step. The score of a step is read at its last token."""
    disable_dropout: bool = True
    """Train without dropout."""

    @cached_property
    def model_source(self) -> StepModelSource:
        return StepModelSource(task=self)

    def parse(self, record: Mapping[str, Any]) -> Solution:
        return read_solution(record)

    def encode(self, samples: list[Solution], images: PlaceholderExpansion | None) -> Sequence[EncodeResult]:
        from dstrain.data.encoding.conversations import encode_prompts
        from dstrain.data.encoding.rendered_text import check_control_tokens, find_template_marks

        data, ends = self.recipe.data, self._ids(self.step_separator)
        prompts = [ParsedPrompt(sample.prompt, sample.tools) for sample in samples]
        found: list[EncodeResult] = []
        marks = find_template_marks(self.tokenizer)
        for sample, prompt in zip(
            samples,
            encode_prompts(self.tokenizer, prompts, data.max_prompt_length, rendered_texts=data.rendered),
            strict=True,
        ):
            if isinstance(prompt, BadRecord):
                found.append(prompt)
                continue
            try:
                check_control_tokens(marks, "", sample.steps)
            except BadRecord as fault:
                found.append(fault)
                continue
            ids, places, labels = [*prompt.ids], list[int](), list[int]()
            # Each step is tokenized on its own, so that no token holds parts of two steps, as in TRL.
            for step, label in zip(sample.steps, sample.labels, strict=True):
                ids += [*self._ids(step), *ends]
                if label != NO_LABEL and len(ids) <= data.max_length:
                    places.append(len(ids) - 1)
                    labels.append(label)
            if places:
                cuts = {"response_cut": int(len(ids) > data.max_length), "prompt_cut": int(prompt.is_cut)}
                found.append(
                    {"input_ids": ids[: data.max_length], "ends": places, "labels": labels, **cuts, **prompt.lost}
                )
            else:
                limit = f"data.max_length {data.max_length}"
                found.append(BadRecord(f"no step with a label ends within {limit}; raise it or remove the record"))
        return found

    def _ids(self, text: str) -> list[int]:
        return [*self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    def encode_key(self) -> dict[str, Any]:
        data = self.recipe.data
        limits = {"max_length": data.max_length, "max_prompt_length": data.max_prompt_length}
        return {"what": "steps", "separator": self.step_separator, **limits, "rendered": data.rendered}

    def iter_texts(self, record: dict[str, Any]) -> Iterator[str]:
        solution = self.parse(record)
        yield from iter_parts(solution.prompt, *solution.steps)

    def collate(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        import torch

        rows = self.collator.make_rows([example["input_ids"] for example in examples])
        labels = [torch.tensor([*map(int, example["labels"])]) for example in examples]
        owner = [torch.full_like(one, row) for row, one in enumerate(labels)]
        return Batch(
            tensors={
                **rows.input_tensors(),
                "labels": torch.cat(labels),  # (S,)
                "solutions": torch.cat(owner),  # (S,): the row of a step
                "step_ends": self._step_positions(rows, [example["ends"] for example in examples]),
            },
            groups=rows.groups,
            weight=float(sum(len(one) for one in labels)),
            samples=tuple(example["sample"] for example in examples),
            tokens=sum(len(example["input_ids"]) for example in examples),
        )

    def _step_positions(self, rows: PaddedRows | PackedRows, ends: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return where each step ends, (S,): in the packed row, or in the flattened padded rows."""
        import numpy as np
        import torch

        indices = getattr(rows, "indices", None)
        length = max(len(sequence) for sequence in rows.sequences)
        found = [
            indices[row][np.asarray(places)] if indices is not None else np.asarray(places) + row * length
            for row, places in enumerate(ends)
        ]
        return torch.from_numpy(np.concatenate(found).astype(np.int64))

    def step_logits(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the logits of wrong and right at the end of each step, (S, 2)."""
        from dstrain.tasks.common.forward import forward_logits, forward_scores

        if batch.is_packed:
            return forward_scores(model, batch, batch.tensors["step_ends"]).float()
        return forward_logits(model, batch).flatten(0, 1).index_select(0, batch.tensors["step_ends"]).float()

    def loss(self, model: torch.nn.Module, batch: Batch) -> Loss:
        import torch.nn.functional as F

        logits, labels = self.step_logits(model, batch), batch.tensors["labels"]  # (S, 2), (S,)
        total = F.cross_entropy(logits, labels, reduction="sum")
        predicted = logits.detach().argmax(-1)
        metrics = {
            "accuracy": (predicted == labels).sum(),
            **first_error_sums(predicted, labels, batch.tensors["solutions"]),
        }
        return Loss(total, metrics)

    def finish_metrics(self, sums: Mapping[str, tuple[float, float]]) -> Mapping[str, float]:
        parts = [sums[name] for name in ("first_error_accuracy", "no_error_accuracy") if name in sums]
        if len(parts) < 2:
            return {}
        wrong, right = (total / weight for total, weight in parts)
        return {"first_error_f1": 2 * wrong * right / (wrong + right) if wrong + right else 0.0}

    def packing_unsupported_reason(self, shares_prefixes: bool) -> str | None:
        from transformers.modeling_layers import GenericForTokenClassification
        from transformers.models.auto.modeling_auto import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING

        if reason := super().packing_unsupported_reason(shares_prefixes):
            return reason
        config = self.model_source.config
        model_class = MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(config), object)
        is_known = issubclass(model_class, GenericForTokenClassification)
        return None if is_known else f"token classification of type {config.model_type} has another head"

    def export_outputs(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        return self.step_logits(model, batch)


def first_error_sums(predicted: torch.Tensor, labels: torch.Tensor, solutions: torch.Tensor) -> dict[str, Any]:
    """Return of how many solutions with, and without, a wrong step the first one, or none, is found; (S,) each.

    Zheng et al. (arXiv 2412.06559), section 3.3.
    """
    import torch

    # As many places as steps, of which there are at least as many as solutions: the host would wait for the number.
    steps = torch.arange(len(labels), device=labels.device)
    is_solution = torch.zeros_like(labels, dtype=torch.bool).scatter_(0, solutions, True)  # (S,)

    def first_zero(values: torch.Tensor) -> torch.Tensor:
        found = torch.full_like(steps, len(values))
        places = torch.where(values == 0, steps, len(values))
        return found.scatter_reduce(0, solutions, places, "amin")

    wanted = first_zero(labels)
    is_found, is_wrong = first_zero(predicted) == wanted, wanted < len(labels)
    is_right = is_solution & ~is_wrong
    return {
        "first_error_accuracy": ((is_found & is_wrong).sum(), is_wrong.sum()),
        "no_error_accuracy": ((is_found & is_right).sum(), is_right.sum()),
    }


def read_solution(record: Mapping[str, Any], needs_labels: bool = True) -> Solution:
    """Return a record of TRL's stepwise form, or of Math-Shepherd's. Raises BadRecord.

    Without `needs_labels` all steps are right, whatever the record says.
    """
    record = as_record(record)
    if not needs_labels:
        record = _with_labels(record)
    is_math_shepherd = {"input", "label"} <= record.present
    solution = _read_math_shepherd(record) if is_math_shepherd else _read_stepwise(record)
    if all(label == NO_LABEL for label in solution.labels):
        raise BadRecord("no step has a label; write true or false for each step, or remove the record")
    return solution


def _with_labels(record: Record) -> Record:
    """Return the record with a label for each step that says that it is right; its own labels count as read."""
    steps, text, *_ = record.read("completions", "input", "labels", "label")
    if isinstance(steps, list):
        return record.derive({**record, "labels": [True] * len(steps)})
    return (
        record.derive({**record, "label": text.replace(MATH_SHEPHERD_STEP, "+")}) if isinstance(text, str) else record
    )


def _read_stepwise(record: Record) -> Solution:
    """Return a record of TRL's stepwise form: `prompt`, `completions` and `labels`. Raises BadRecord."""
    steps, labels = record.read("completions", "labels")
    if not isinstance(steps, list) or not steps or not all(isinstance(step, str) and step.strip() for step in steps):
        raise BadRecord(
            "'completions' is not a list of steps, each a text that is not empty; write one text for each step"
        )
    if not isinstance(labels, list) or len(labels) != len(steps):
        raise BadRecord(f"'labels' is not a list of {len(steps)} labels, one for each step; write true, false or null")
    numbers = [NO_LABEL if label is None else label for label in labels]
    if wrong := [label for label in numbers if label not in (0, 1, NO_LABEL) or not isinstance(label, int | float)]:
        raise BadRecord(f"'labels' has {wrong[0]!r:.40}; write true for a right step, false for a wrong one, or null")
    asked = read_prompt(record.without("completions", "labels"))
    if not asked.prompt:
        raise BadRecord("'prompt' is empty; write the question")
    return Solution(asked.prompt, [*steps], [int(label) for label in numbers], asked.tools)


def _read_math_shepherd(record: Mapping[str, Any]) -> Solution:
    """Return a record of Math-Shepherd: `input` with the solution, `label` with + or - after each step. Raises BadRecord."""
    text, label = record["input"], record["label"]
    if not isinstance(text, str) or not isinstance(label, str) or MATH_SHEPHERD_STEP not in text:
        problem = f"'input' and 'label' are not texts whose steps end with '{MATH_SHEPHERD_STEP}'"
        raise BadRecord(f"{problem}; write 'prompt', 'completions' and 'labels', or rename columns with data.columns")
    *steps, rest = text.strip().split(MATH_SHEPHERD_STEP)
    pattern = r"\s*([+-])".join(re.escape(part.rstrip()) for part in [*steps, ""]) + re.escape(rest)
    found = re.fullmatch(pattern, label.strip(), flags=re.S)
    if found is None:
        raise BadRecord("'label' is not the text of 'input' with + or - at the end of each step; correct it")
    start = re.search(r"Step 1:", steps[0])
    if start is None or not steps[0][: start.start()].strip():
        raise BadRecord("'input' has no question before 'Step 1:'; write 'prompt', 'completions' and 'labels'")
    prompt, steps[0] = steps[0][: start.start()], steps[0][start.start() :]
    return Solution(prompt, [step.strip() for step in steps], [int(sign == "+") for sign in found.groups()])
