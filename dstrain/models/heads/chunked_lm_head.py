"""Chunked language-model head; the backward pass recomputes the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from dstrain.models.heads.lazy_logits import HeadRecorder, LazyLogits
from dstrain.models.heads.linear_head import (
    DEFAULT_FIELDS,
    LinearHead,
    ScoreFields,
    TokenScores,
    rows_per_chunk,
    score_logits,
)

# Shapes: B rows, K targets of a row, N targets of all rows, V vocabulary, H width.


@dataclass(frozen=True)
class HeadInput:
    """Input of the output head in a forward pass, and what the model does with the logits afterwards."""

    head: torch.nn.Module
    hidden_states: torch.Tensor
    """(B, K, H)"""
    postprocessing: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """Functions in call order: Gemma 2 caps its logits, Granite and Cohere scale them, Mamba casts them to fp32."""

    def score_targets(
        self, rows: torch.Tensor, targets: torch.Tensor, fields: ScoreFields = DEFAULT_FIELDS
    ) -> TokenScores:
        """Return the scores of targets (N,) for hidden states (N, H).

        The head is called once, around all chunks, so that ZeRO-3 gathers its weights once in each direction.
        The number of chunks may differ between ranks. Collective under ZeRO-3.
        """
        head, inner = self.head, self.head.forward

        def score_chunk(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = inner(rows)
            for step in self.postprocessing:
                logits = step(logits)
            return fields.select(score_logits(logits, targets, fields))

        def score_all(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if "forward" not in attributes and LinearHead.supports(head, rows, fields):
                linear = LinearHead(head.weight, head.bias, self.postprocessing, fields)
                return linear.score_targets(rows, targets)
            return _score_in_chunks(score_chunk, head, rows, targets)

        attributes = dict(vars(head))
        with _forward_overridden(head, score_all):
            return fields.name(head(rows, targets))


def capture_head_input(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> HeadInput | torch.Tensor:
    """Return the input of the model's head in `forward`; logits (B, K, V) where the head cannot be called separately.

    `forward` calls the model and returns the logits. During the call a HeadRecorder replaces the head. A model that
    changes its logits in place is called once more with its own head, and always with it from then on. The decision
    depends on the model alone, so all ranks decide alike.
    """
    head = _find_separable_head(model)
    if head is None:
        return forward()
    with _head_recorded(model, head) as recorder:
        logits = forward()
    # The model called something that needed real logits, or returned other ones.
    if not isinstance(logits, LazyLogits):
        return logits
    if not recorder.is_head_used and hasattr(logits, "steps"):
        return HeadInput(head, logits.hidden_states, logits.steps)
    _IN_PLACE_MODELS.add(model)
    return forward()


_IN_PLACE_MODELS: WeakSet[torch.nn.Module] = WeakSet()
"""Models that change their logits in place, or may do so."""


def _find_separable_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the model's head, None where it cannot be called separately.

    Under ZeRO-3 a head with adapters cannot: its submodules are gathered at every call, and ranks differ in their
    number of chunks, so some would wait for a collective that others never start.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None and model not in _IN_PLACE_MODELS else None
    if not isinstance(head, torch.nn.Module) or not isinstance(getattr(head, "out_features", None), int):
        return None
    # DeepSpeed sets `ds_id` on parameters that ZeRO-3 shards.
    sharded = any(hasattr(parameter, "ds_id") for parameter in head.parameters())
    return None if sharded and any(True for _ in head.children()) else head


@contextmanager
def _head_recorded(model: torch.nn.Module, head: torch.nn.Module) -> Iterator[HeadRecorder]:
    """Replace the model's head by a HeadRecorder inside the context."""
    recorder = HeadRecorder(head)
    places = _find_head_parents(model, head)
    try:
        for part, name in places:
            part._modules[name] = recorder
        yield recorder
    finally:
        for part, name in places:
            part._modules[name] = head


def _find_head_parents(model: torch.nn.Module, head: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Return (module, attribute) of each place of the head: at the top, else anywhere (a walk of about 1 ms)."""
    parts = [model] if any(child is head for child in model._modules.values()) else model.modules()
    return [(part, name) for part in parts for name, child in part._modules.items() if child is head]


@contextmanager
def _forward_overridden(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Run `forward` in place of the module's own, between its hooks, inside the context."""
    attributes = vars(module)
    saved = {"forward": attributes["forward"]} if "forward" in attributes else {}
    attributes["forward"] = forward
    try:
        yield
    finally:
        del attributes["forward"]
        attributes.update(saved)


def _score_in_chunks(
    score_chunk: Callable[..., tuple[torch.Tensor, ...]],
    head: torch.nn.Module,
    rows: torch.Tensor,
    targets: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    size = rows_per_chunk(cast(int, head.out_features), rows.device)
    # A single chunk keeps its logits for the backward pass: nothing is recomputed.
    if len(rows) <= size:
        return score_chunk(rows, targets)
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    config = _ChunkConfig(score_chunk, size, _has_active_dropout(head))
    return cast("tuple[torch.Tensor, ...]", _ChunkedScores.apply(config, rows, targets, *trainable))


def _has_active_dropout(head: torch.nn.Module) -> bool:
    """Return True where dropout is active in the head (in its adapters): both passes must drop the same units."""
    dropout = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(part, dropout) and part.training and part.p > 0 for part in head.modules())


class _ChunkConfig(NamedTuple):
    """Function and sizes of one chunked evaluation."""

    score_chunk: Callable[..., tuple[torch.Tensor, ...]]
    """(rows, targets) -> the fields of TokenScores that are not None."""
    chunk_size: int
    has_dropout: bool


class _ChunkedScores(torch.autograd.Function):
    """Scores chunk by chunk; the backward pass recomputes the logits of each chunk.

    Like torch.utils.checkpoint around each chunk, except that the chunks' gradients of a 16-bit weight are summed in
    fp32 and rounded once: autograd would round after each addition.
    """

    @staticmethod
    def forward(
        ctx: Any, config: _ChunkConfig, rows: torch.Tensor, targets: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        ctx.config, ctx.parameters = config, parameters  # not saved tensors: ZeRO-3 frees and gathers them in between
        kind = rows.device.type
        # autograd calls `backward` outside of the caller's autocast context.
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        if config.has_dropout:
            ctx.rng_state = torch.get_rng_state(), *get_device_states(rows)
        ctx.save_for_backward(rows, targets)
        chunks = zip(rows.split(config.chunk_size), targets.split(config.chunk_size), strict=True)
        scores = [config.score_chunk(*chunk) for chunk in chunks]
        columns = tuple(torch.cat(column) for column in zip(*scores, strict=True))
        ctx.mark_non_differentiable(*(column for column in columns if not column.is_floating_point()))
        return columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        rows, targets = ctx.saved_tensors
        kind, dtype, enabled = ctx.autocast
        with (
            _fork_rng(ctx.rng_state if ctx.config.has_dropout else None),
            torch.enable_grad(),
            torch.autocast(kind, dtype, enabled=enabled),
        ):
            row_grad, parameter_grads = _chunk_gradients(ctx, rows, targets, grad_outputs)
        # For each argument of `forward`: config, rows, targets, parameters.
        return None, row_grad, None, *parameter_grads


def _chunk_gradients(
    ctx: Any, rows: torch.Tensor, targets: torch.Tensor, grad_outputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Return the gradient of the rows (N, H), and of each trainable parameter.

    `grad_outputs`: those of the requested fields of TokenScores, each (N,).
    """
    config, needs_row_grad = ctx.config, ctx.needs_input_grad[1]
    row_grads: list[torch.Tensor] = []
    sums: list[torch.Tensor | None] = [None] * len(ctx.parameters)
    chunks = zip(*(one.split(config.chunk_size) for one in (rows, targets, *grad_outputs)), strict=True)
    for chunk, chunk_targets, *chunk_grads in chunks:
        # A leaf, (n, H): the gradient stops here, and the model's own graph is left alone.
        chunk = chunk.detach().requires_grad_(needs_row_grad)
        scores = config.score_chunk(chunk, chunk_targets)
        outputs = [pair for pair in zip(scores, chunk_grads, strict=True) if pair[0].is_floating_point()]
        inputs = [*ctx.parameters, *[chunk][:needs_row_grad]]
        differentiable, given = zip(*outputs, strict=True)
        grads = [*torch.autograd.grad(differentiable, inputs, given, allow_unused=True)]
        if needs_row_grad:
            row_grads.append(grads.pop())
        for index, grad in enumerate(grads):
            sums[index] = _accumulate(sums[index], grad)
        del scores, outputs, differentiable, grads  # before the next chunk allocates its logits
    parameter_grads = [None if one is None else one.to(p.dtype) for one, p in zip(sums, ctx.parameters, strict=True)]
    # (N, H) and the shapes of the parameters
    return torch.cat(row_grads) if needs_row_grad else None, parameter_grads


def _accumulate(total: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum in fp32 or fp64. Changes `total` in place."""
    if grad is None:
        return total
    if total is None:
        return grad if grad.dtype == torch.float64 else grad.float()
    return total.add_(grad)


@contextmanager
def _fork_rng(rng_state: Any) -> Iterator[None]:
    """Restore a state of the random generators inside the context, on host and devices; None changes nothing."""
    if rng_state is None:
        yield
        return
    host_state, devices, device_states = rng_state
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(host_state)
        set_device_states(devices, device_states)
        yield
