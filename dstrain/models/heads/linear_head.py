"""Scores of target tokens: under given logits, and by a linear head with a gradient that is written by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F

# Shapes: N targets, n targets of a slice, V vocabulary, H width.
#
# With logits z = W x + b and the error e = softmax(z) - onehot(target), the gradient of log p is -e for z, -e W for x
# and -e x^T for W. A factor g from the loss scales e W and x, each (N, H), instead of e, (N, V).

MAX_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Device type -> bytes of the fp32 logits of one chunk.

On a GPU chunks are larger, because launching the kernels of one takes the host about 0.4 ms.
"""
DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Types of weights. Not fp16: most errors would be subnormal there, and the loss scale comes only after them."""
KEPT_SHARE = 3.0
"""Of MAX_CHUNK_BYTES, for the errors that are kept for the gradient of the weight; others are recomputed. Autograd
holds more than three copies of a chunk of logits at a time."""
SLICE_SHARE = 0.5
"""Of MAX_CHUNK_BYTES, for the logits of one matrix product: on a CPU they stay in the last-level cache."""
BLOCK_SHARE = {"cpu": 1 / 64, "cuda": 0.5}
"""Device type -> of MAX_CHUNK_BYTES, for fp32 logits that become errors at once: a CPU has them in its core's cache."""


class TokenScores(NamedTuple):
    """Scores of one target token per row."""

    log_probs: torch.Tensor
    """(N,) log-probability of each target, in fp32 or fp64."""
    is_correct: torch.Tensor | None = None
    """(N,) bool: True where the target is the most probable token; None where it was not requested."""
    mean_log_probs: torch.Tensor | None = None
    """(N,) mean of the log-probabilities of all V tokens, for label smoothing; None where it was not requested."""


class ScoreFields(NamedTuple):
    """Which fields of TokenScores are requested, in addition to `log_probs`."""

    is_correct: bool = True
    mean_log_probs: bool = False

    def select(self, scores: TokenScores) -> tuple[torch.Tensor, ...]:
        """Return the fields that are not None."""
        return tuple(column for column in scores if column is not None)

    def name(self, columns: tuple[torch.Tensor, ...]) -> TokenScores:
        """Return the scores of which `select` returned the fields."""
        rest = iter(columns[1:])
        return TokenScores(columns[0], *(next(rest) if is_requested else None for is_requested in self))


DEFAULT_FIELDS = ScoreFields()


def score_logits(logits: torch.Tensor, targets: torch.Tensor, fields: ScoreFields = DEFAULT_FIELDS) -> TokenScores:
    """Return the scores of targets (N,) under logits (N, V)."""
    exact = logits if logits.dtype == torch.float64 else logits.float()  # (N, V)
    # Faster than logsumexp, whose exponentials torch computes without vector instructions on a CPU.
    log_probs = -F.cross_entropy(exact, targets, reduction="none")  # (N,)
    mean = None
    if fields.mean_log_probs:
        normalizer = exact.gather(-1, targets[:, None]).squeeze(-1) - log_probs  # (N,)
        # Without a tensor of log-probabilities, which would be another (N, V).
        mean = exact.mean(-1) - normalizer
    return TokenScores(log_probs, is_argmax(exact, targets) if fields.is_correct else None, mean)


@torch.no_grad()
def is_argmax(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return True where a target is the argmax of its row, (N,); of equal logits it is the first one."""
    if logits.device.type != "cpu":
        return logits.argmax(-1) == targets
    # torch's argmax takes 8 times as long as its maximum on a CPU, so only for rows whose target has the maximum.
    found = logits.gather(-1, targets[:, None]).squeeze(-1) == logits.amax(-1)
    (rows,) = found.nonzero(as_tuple=True)
    found[rows] = logits[rows].argmax(-1) == targets[rows]
    return found


def rows_per_chunk(vocab_size: int, device: torch.device, item_bytes: int = 4, share: float = 1.0) -> int:
    """Return how many rows of logits, of `item_bytes` each, take this share of the bytes of one chunk; at least 1.

    4 bytes: scores are computed in fp32.
    """
    limit = MAX_CHUNK_BYTES.get(device.type, MAX_CHUNK_BYTES["cuda"])
    return max(1, int(limit * share) // (item_bytes * vocab_size))


@dataclass(frozen=True)
class LinearHead:
    """Weight (V, H) and bias (V,) of a head, and what the model does with its logits afterwards."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    postprocessing: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """Functions that treat each row alike."""
    fields: ScoreFields

    @staticmethod
    def supports(head: torch.nn.Module, rows: torch.Tensor, fields: ScoreFields) -> bool:
        """Return True where the head is a plain linear layer, and nothing but its weights' type is involved."""
        return (
            type(head) is torch.nn.Linear
            and head.weight.dtype == rows.dtype
            and rows.dtype in DTYPES
            and not torch.is_autocast_enabled(rows.device.type)
            and not fields.mean_log_probs
        )

    def score_targets(self, rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the requested fields of the scores of targets (N,) for hidden states (N, H)."""
        inputs = [rows, self.weight] if self.bias is None else [rows, self.weight, self.bias]
        if not torch.is_grad_enabled():
            inputs = [one.detach() for one in inputs]  # a Function learns from its inputs what to keep
        return cast("tuple[torch.Tensor, ...]", _LinearScores.apply(self, targets, *inputs))

    def score_slice(
        self, rows: torch.Tensor, targets: torch.Tensor, out: torch.Tensor, with_errors: bool
    ) -> list[torch.Tensor]:
        """Return the requested fields for hidden states (n, H); `out` (n, V) gets the logits, or the errors."""
        # The parameters are on the device of the rows: ZeRO-3 has gathered them.
        weight = self.weight.detach().t()
        torch.mm(rows, weight, out=out) if self.bias is None else torch.addmm(self.bias.detach(), rows, weight, out=out)
        share = BLOCK_SHARE.get(out.device.type, BLOCK_SHARE["cuda"])
        size = rows_per_chunk(out.shape[1], out.device, share=share)
        blocks = zip(out.split(size), targets.split(size), strict=True)
        columns = zip(*(self._score_block(*block, with_errors) for block in blocks), strict=True)
        return [torch.cat(column) for column in columns]

    def _score_block(self, logits: torch.Tensor, targets: torch.Tensor, with_errors: bool) -> list[torch.Tensor]:
        with torch.set_grad_enabled(with_errors and bool(self.postprocessing)):
            leaf = logits.detach().requires_grad_(torch.is_grad_enabled())
            final = leaf
            for step in self.postprocessing:
                final = step(final)
        exact = final.detach() if final.dtype == torch.float64 else final.detach().float()
        largest = exact.amax(-1)
        probabilities = exact.softmax(-1)
        # That of the largest logit is 1 / sum(exp(z - max)): one exponential per token for normalizer and errors.
        normalizer = largest - probabilities.amax(-1).log()
        columns = [exact.gather(-1, targets[:, None]).squeeze(-1) - normalizer]
        if self.fields.is_correct:
            columns.append(is_argmax(exact, targets))
        if with_errors:
            # Subtracted before the result is rounded to 16 bits: 1 - p would be lost where p is close to 1.
            probabilities[torch.arange(len(targets), device=targets.device), targets] -= 1
            if final is not leaf:
                (probabilities,) = torch.autograd.grad(final, leaf, probabilities.to(final.dtype))
            logits.copy_(probabilities)
        return columns


class _LinearScores(torch.autograd.Function):
    """Scores of all targets; the gradient of the rows is computed with them, that of the parameters from errors."""

    @staticmethod
    def forward(
        ctx: Any, head: LinearHead, targets: torch.Tensor, rows: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        _, _, needs_rows, *needs_parameters = ctx.needs_input_grad
        ctx.head, vocab_size = head, len(parameters[0])  # not as saved tensors: ZeRO-3 frees and gathers parameters
        rows_per_share = partial(rows_per_chunk, vocab_size, rows.device, rows.element_size())
        ctx.slice_rows = rows_per_share(SLICE_SHARE)
        kept = min(len(rows), rows_per_share(KEPT_SHARE)) if any(needs_parameters) else 0
        errors = rows.new_empty(kept, vocab_size)
        # The gradient of the rows up to a factor: without one for the weight, nothing is left to recompute.
        products = torch.empty_like(rows) if needs_rows else None
        columns = []
        first_kept = len(rows) - kept
        scratch = rows.new_empty(min(first_kept, ctx.slice_rows), vocab_size)
        # With an empty slice, whose scores have the right types, where there are no rows.
        parts = [*_slices(0, first_kept, ctx.slice_rows), *_slices(first_kept, len(rows), ctx.slice_rows)]
        for at in parts or [slice(0, 0)]:
            begin = at.start - first_kept
            out = scratch[: at.stop - at.start] if begin < 0 else errors[begin : at.stop - first_kept]
            columns.append(head.score_slice(rows[at], targets[at], out, needs_rows or bool(kept)))
            if products is not None:
                torch.mm(out, parameters[0], out=products[at])
        ctx.save_for_backward(rows, targets, errors, products)
        log_probs, *others = [torch.cat(column) for column in zip(*columns, strict=True)]
        ctx.mark_non_differentiable(*others)
        return log_probs, *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        rows, targets, errors, products = ctx.saved_tensors
        _, _, needs_rows, *needs_parameters = ctx.needs_input_grad
        factors = -grad_output[:, None]  # (N, 1)
        row_grad = (products * factors).to(rows.dtype) if needs_rows else None
        parameter_grads: list[torch.Tensor | None] = [None] * len(needs_parameters)
        if any(needs_parameters):
            # A bias is the weight of a constant input of 1.
            inputs = torch.cat([rows * factors, factors], 1) if len(needs_parameters) == 2 else rows * factors
            total = _parameter_gradient(ctx, targets, rows, errors, inputs.to(rows.dtype))
            grads = total[:, : rows.shape[1]], total[:, -1]
            parameter_grads = [
                grad.contiguous() if needed else None for grad, needed in zip(grads, needs_parameters, strict=False)
            ]
        # For each argument of `forward`: head, targets, rows, parameters.
        return None, None, row_grad, *parameter_grads


def _parameter_gradient(
    ctx: Any, targets: torch.Tensor, rows: torch.Tensor, errors: torch.Tensor, inputs: torch.Tensor
) -> torch.Tensor:
    """Return the sum over targets of error times input, (V, H) or (V, H + 1).

    `errors` are those of the last targets. The others are recomputed in the same memory, and the parts are added in
    fp32 and rounded once.
    """
    first_kept = len(rows) - len(errors)
    total = errors.t() @ inputs[first_kept:]
    for part in _slices(0, first_kept, len(errors)):
        for at in _slices(part.start, part.stop, ctx.slice_rows):
            out = errors[at.start - part.start : at.stop - part.start]
            ctx.head.score_slice(rows[at], targets[at], out, True)
        if total.dtype == torch.bfloat16:
            total = total.float()
        total += errors[: part.stop - part.start].t() @ inputs[part]
    return total.to(rows.dtype)


def _slices(begin: int, end: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, end)) for at in range(begin, end, max(size, 1)))
