"""Checks of the rows of a batch: padded, padded on the left, packed and with shared prompts, against single rows."""

# Shapes: R rows of a batch, K tokens from the first target of any row to the end, N targets.

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.batch import Batch
from dstrain.data.encoding.conversations import EncodedPrompt
from dstrain.data.loading.rows import PaddedRows
from dstrain.distributed.world import SingleProcessWorld
from dstrain.models.attention.packed import packing_unsupported_reason
from dstrain.models.params import unwrap_peft
from dstrain.tasks import Task
from dstrain.tasks.common.forward import answer_log_probs
from dstrain.training.build_model import build_model
from dstrain.training.generate import GenerationModel, SamplingParams, generate_answers
from dstrain.verify.model import SAMPLES, ShrunkModel, examples_of
from dstrain.verify.result import EXACT, SINGLE, CheckResult, State, difference, distance, judge, worst_of

PADDED = {"packing": False, "prefix_sharing": False}
NEW_TOKENS = 6


@dataclass(frozen=True)
class Row:
    """One sequence of an example, its loss mask and its images."""

    ids: Any
    loss_mask: Any
    images: list[Any]


@dataclass(frozen=True)
class Scores:
    """Log-probabilities of all targets, row by row, (N,), and the gradient of a loss that weighs each differently."""

    log_probs: torch.Tensor
    gradient: Mapping[str, torch.Tensor]

    def figures(self, expected: Scores) -> list[tuple[float, str]]:
        """Return the relative differences from other scores, with what they are of."""
        gradient, where = distance(self.gradient, expected.gradient)
        outputs = difference(self.log_probs, expected.log_probs)
        return [(outputs, "log-probabilities differ"), (gradient, f"gradients differ, most in {where}")]


def build_exact_model(task: Task, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """Return the task's model in fp64, or in another type, and in evaluation mode."""
    model = build_model(task).to(dtype).eval()
    use_eager_experts(model)
    return model


def use_eager_experts(model: Any) -> None:
    """Let the experts be computed one by one: torch's grouped products take no fp64."""
    for module in unwrap_peft(model).modules():  # some tasks give modules copies of the config
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) is not None:
            config._experts_implementation = "eager"


def list_rows(task: Task) -> list[Row]:
    """Return the sequences of all examples, in the order of the rows of a batch."""
    from dstrain.data.loading.rows import answer_masks

    examples = examples_of(task)
    images = task.collator.load_images(examples) or [[] for _ in examples]  # type: ignore[attr-defined]
    if not hasattr(task, "rows"):
        return [Row(item["input_ids"], item["loss_mask"], shown) for item, shown in zip(examples, images, strict=True)]
    answers = task.rows(examples)  # those of all chosen answers, then those of the rejected ones
    masks, repeated = answer_masks(answers), images * (len(answers) // len(images))
    return [Row(ids, mask, shown) for (ids, _), mask, shown in zip(answers, masks, repeated, strict=True)]


def single_batches(task: Any, rows: Sequence[Row]) -> Iterator[Batch]:
    """Yield a batch of each row alone, without padding."""
    for row in rows:
        padded = PaddedRows([row.ids], task.tokenizer.pad_token_id)
        batch = Batch(
            tensors={**padded.input_tensors(), **padded.target_tensors([row.loss_mask])}, weight=1.0, samples=(0,)
        )
        processor = task.model_source.vision_processor
        yield batch if processor is None else processor.attach_images(batch, row.images)


def score(model: torch.nn.Module, batches: Sequence[Batch]) -> Scores:
    """Return the scores of the batches' rows, as one loss over all of them."""
    model.zero_grad(set_to_none=True)
    inner = unwrap_peft(model)
    scored = []
    for batch in batches:
        values = answer_log_probs(inner, batch)  # (R, K)
        scored.append(values[batch.tensors["loss_mask"] != 0])
    log_probs = torch.cat(scored)
    weights = torch.rand(log_probs.shape, generator=torch.Generator().manual_seed(7)) + 0.5
    (log_probs * weights.to(log_probs.dtype)).sum().backward()
    gradients = ((name, parameter.grad) for name, parameter in model.named_parameters())
    gradient = {name: value.detach().clone() for name, value in gradients if value is not None}
    return Scores(log_probs.detach(), gradient)


@torch.no_grad()
def log_probs_of(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of all targets of a batch, row by row, (N,)."""
    return answer_log_probs(unwrap_peft(model), batch)[batch.tensors["loss_mask"] != 0]


class _FloatRecorder(TorchDispatchMode):
    """Notes whether an operation on values of fp64 gives values of fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.is_rounded = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and isinstance(result, torch.Tensor):
            self.is_rounded |= args[0].dtype == torch.float64 and result.dtype == torch.float32
        return result


def in_exact_type(check: Callable[[torch.dtype], CheckResult]) -> CheckResult:
    """Return the result of a check in fp64; in fp32 where the family gives no numbers in fp64.

    Eager attention casts the least value of fp64, with which it hides padding, to fp32: to -inf, and a row of padding
    to nan (Gemma 2).
    """
    result = check(torch.float64)
    is_nan = result.figure is not None and math.isnan(result.figure)
    return check(torch.float32) if is_nan else result


def exact_limit(model: torch.nn.Module, batch: Batch) -> tuple[float, str]:
    """Return the limit of differences, and the type; of fp64 also whether the family computes a part in fp32."""
    if next(model.parameters()).dtype == torch.float32:
        return SINGLE, "fp32; the family gives no numbers in fp64"
    with _FloatRecorder() as recorder:
        log_probs_of(model, batch)
    return (SINGLE, "fp64; the family rounds a part to fp32") if recorder.is_rounded else (EXACT, "fp64")


def check_padded_rows(shrunk: ShrunkModel) -> CheckResult:
    """Rows of unequal lengths, padded on the right, give the log-probabilities and gradients of single rows."""
    return _compare_with_single_rows("padded rows", shrunk.task(batch=PADDED))


def check_packed_rows(shrunk: ShrunkModel) -> CheckResult:
    """Sequences of one packed row do not see each other; a family that is not packed has padded batches."""
    task: Any = shrunk.task()
    if not task.packing.is_packed:
        reason = packing_unsupported_reason(shrunk.config, shares_prefixes=False) or task.packing.message
        return CheckResult(check="packed rows", state="padded", reason=reason)
    return _compare_with_single_rows("packed rows", task)


def check_shared_prompts(shrunk: ShrunkModel) -> CheckResult:
    """Both answers of a pair, packed behind one prompt, are scored as single rows; else the padded pair is."""
    task: Any = shrunk.task("dpo")
    reason = "" if task.packing.shares_prefixes else task.packing.message
    return _compare_with_single_rows("shared prompts", task, reason, "padded" if reason else "ok")


def _compare_with_single_rows(check: str, task: Any, note: str = "", state: State = "ok") -> CheckResult:
    return in_exact_type(lambda dtype: _compare_in_type(check, task, note, state, dtype))


def _compare_in_type(check: str, task: Any, note: str, state: State, dtype: torch.dtype) -> CheckResult:
    model, batch = build_exact_model(task, dtype), task.collate(examples_of(task))
    limit, precision = exact_limit(model, batch)
    measured = score(model, [batch])
    expected = score(model, [*single_batches(task, list_rows(task))])
    figure, where = worst_of(measured.figures(expected))
    problem = f"{where}: the other rows of a batch, or their padding, change what is computed"
    return judge(check, figure, limit, problem, note or precision, state)


def check_left_padding(shrunk: ShrunkModel) -> CheckResult:
    """Prompts of unequal lengths in a batch, padded on the left, are answered as each alone."""
    task: Any = shrunk.task(batch=PADDED)
    return in_exact_type(lambda dtype: _check_left_padding(task, dtype))


def _check_left_padding(task: Any, dtype: torch.dtype) -> CheckResult:
    model: Any = build_exact_model(task, dtype)
    prompts = []
    for example in examples_of(task):
        end = int(example["loss_mask"].argmax())
        ids = [int(token) for token in example["input_ids"][:end]]
        prompts.append(EncodedPrompt("", ids, tuple(example.get("images", ()))))
    prompts.sort(key=lambda prompt: len(prompt.ids))  # batches take like lengths together
    with recorded_logits(model) as together:
        answers = _generate(task, model, prompts, SAMPLES)
    alone: list[torch.Tensor] = []
    answers_alone = []
    for prompt in prompts:
        with recorded_logits(model) as steps:
            answers_alone += _generate(task, model, [prompt], 1)
        alone.append(steps[0][0])
    first = torch.cat(together)[: len(prompts)]
    limit, precision = exact_limit(model, next(single_batches(task, list_rows(task))))
    figure, different = difference(first, torch.stack(alone)), answers != answers_alone
    problem = "the padding before a prompt changes the answer to it"
    if figure <= limit and different:
        problem = "the first token's logits are those of each prompt alone, and later tokens of an answer differ"
        return CheckResult(check="left padding", state="failed", figure=figure, limit=limit, reason=problem)
    return judge("left padding", figure, limit, problem, precision)


def _generate(task: Any, model: Any, prompts: Sequence[EncodedPrompt], batch: int) -> list[list[int]]:
    engine = GenerationModel(model, SingleProcessWorld(), is_sharded=False)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, batch=batch)
    return generate_answers(engine, prompts, sampling, task.tokenizer, task.model_source.vision_processor)


@contextmanager
def recorded_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the logits of the last position of each row, (R, V), of every forward pass inside that reads a prompt."""
    steps: list[torch.Tensor] = []

    def record(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["input_ids"].shape[1] > 1:
            steps.append(output.logits[:, -1].detach().clone())

    handle = model.register_forward_hook(record, with_kwargs=True)
    try:
        yield steps
    finally:
        handle.remove()
