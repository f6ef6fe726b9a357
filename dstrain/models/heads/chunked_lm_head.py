"""The output head of a language model, run on a few rows at a time: the logits of all rows are never held at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch.utils.checkpoint import get_device_states, set_device_states

from dstrain.models.heads.lazy_logits import HeadRecorder, LazyLogits

MAX_CHUNK_BYTES = {"cpu": 64 * 2**20, "cuda": 256 * 2**20}
"""Size of the fp32 logits that are held at once. Each chunk costs the host of a GPU about 0.4 ms: fewer are made there."""


class TokenScores(NamedTuple):
    """What a model says of one target token a row."""

    log_probs: torch.Tensor
    """(N,) log p of each target, in fp32 or finer."""
    is_correct: torch.Tensor
    """(N,) bool: whether the target is the likeliest token."""


def score_logits(logits: torch.Tensor, targets: torch.Tensor) -> TokenScores:
    """Of logits (N, V) and targets (N,)."""
    exact = logits if logits.dtype == torch.float64 else logits.float()
    log_probs = exact.gather(-1, targets[:, None]).squeeze(-1) - exact.logsumexp(-1)
    return TokenScores(log_probs, logits.detach().argmax(-1) == targets)


def rows_per_chunk(vocab_size: int, device: torch.device) -> int:
    """How many rows of logits are held at once."""
    return max(1, MAX_CHUNK_BYTES.get(device.type, MAX_CHUNK_BYTES["cuda"]) // (4 * vocab_size))


@dataclass(frozen=True)
class HeadInput:
    """What a forward pass would have given to its head, and what it would have done with the logits."""

    head: torch.nn.Module
    hidden_states: torch.Tensor
    """(B, K, H)"""
    postprocessing: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """In their order: Gemma 2 caps its logits, Granite and Cohere scale them, Mamba makes them fp32."""

    def score_targets(self, rows: torch.Tensor, targets: torch.Tensor) -> TokenScores:
        """Scores of targets (N,) for hidden states (N, H).

        The head is called once, around all chunks, so that ZeRO-3 gathers its weights once in each direction.
        The number of chunks may differ between ranks. Collective under ZeRO-3.
        """
        head, inner = self.head, self.head.forward

        def score_chunk(rows: torch.Tensor, targets: torch.Tensor) -> TokenScores:
            logits = inner(rows)
            for step in self.postprocessing:
                logits = step(logits)
            return score_logits(logits, targets)

        with _forward_overridden(head, lambda rows, targets: tuple(_score_in_chunks(score_chunk, head, rows, targets))):
            return TokenScores(*head(rows, targets))


def capture_head_input(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> HeadInput | torch.Tensor:
    """What `forward` gives to the head of `model`; its logits (B, K, V) where the head cannot be run apart.

    `forward` calls the model and returns the logits. During the call a tap stands for the head. Where the model changes its
    logits in place, it is called again with its own head, once, and so from then on. All this depends on the model alone:
    ranks decide alike.
    """
    head = _find_separable_head(model)
    if head is None:
        return forward()
    with _head_recorded(model, head) as tap:
        logits = forward()
    if not isinstance(logits, LazyLogits):
        return logits
    if not tap.is_head_used and hasattr(logits, "steps"):
        return HeadInput(head, logits.hidden_states, logits.steps)
    _IN_PLACE_MODELS.add(model)
    return forward()


_IN_PLACE_MODELS: WeakSet[torch.nn.Module] = WeakSet()
"""Models that change their logits in place, or may have."""


def _find_separable_head(model: torch.nn.Module) -> torch.nn.Module | None:
    """The model's head, where it can be called apart from the model.

    ZeRO-3 gathers the parts of a head with adapters at each call of a part, and ranks differ in their number of chunks.
    """
    find = getattr(model, "get_output_embeddings", None)
    head = find() if find is not None and model not in _IN_PLACE_MODELS else None
    if not isinstance(head, torch.nn.Module) or not isinstance(getattr(head, "out_features", None), int):
        return None
    sharded = any(hasattr(parameter, "ds_id") for parameter in head.parameters())
    return None if sharded and any(True for _ in head.children()) else head


@contextmanager
def _head_recorded(model: torch.nn.Module, head: torch.nn.Module) -> Iterator[HeadRecorder]:
    """Inside, a tap stands wherever the model holds its head."""
    tap = HeadRecorder(head)
    places = _find_head_parents(model, head)
    try:
        for part, name in places:
            part._modules[name] = tap
        yield tap
    finally:
        for part, name in places:
            part._modules[name] = head


def _find_head_parents(model: torch.nn.Module, head: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """Where the model holds its head: at its top, else anywhere. A walk over all modules takes a millisecond."""
    parts = [model] if any(child is head for child in model._modules.values()) else model.modules()
    return [(part, name) for part in parts for name, child in part._modules.items() if child is head]


@contextmanager
def _forward_overridden(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a call of the module runs `forward` between the module's hooks."""
    own = vars(module)
    before = {"forward": own["forward"]} if "forward" in own else {}
    own["forward"] = forward
    try:
        yield
    finally:
        del own["forward"]
        own.update(before)


def _score_in_chunks(
    score_chunk: Callable[..., TokenScores], head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor
) -> TokenScores:
    size = rows_per_chunk(cast(int, head.out_features), rows.device)
    if len(rows) <= size:
        return score_chunk(rows, targets)
    learning = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return TokenScores(
        *_ChunkedScores.apply(_ChunkConfig(score_chunk, size, _has_active_dropout(head)), rows, targets, *learning)
    )


def _has_active_dropout(head: torch.nn.Module) -> bool:
    """Whether dropout acts in the head (of its adapters): each chunk must drop the same in both passes."""
    dropout = torch.nn.modules.dropout._DropoutNd
    return any(isinstance(part, dropout) and part.training and part.p > 0 for part in head.modules())


class _ChunkConfig(NamedTuple):
    score_chunk: Callable[..., TokenScores]
    chunk_size: int
    has_dropout: bool


class _ChunkedScores(torch.autograd.Function):
    """Scores chunk by chunk; the backward pass computes the logits of each chunk again.

    As torch.utils.checkpoint around each chunk would, but that the chunks' gradients of a 16-bit weight are added up in
    fp32 and rounded once: autograd would round after each addition.
    """

    @staticmethod
    def forward(
        ctx: Any, config: _ChunkConfig, rows: torch.Tensor, targets: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        ctx.plan, ctx.learning = config, parameters  # not saved as tensors: ZeRO-3 frees and gathers them in between
        kind = rows.device.type
        ctx.autocast = kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        if config.has_dropout:
            ctx.random = torch.get_rng_state(), *get_device_states(rows)
        ctx.save_for_backward(rows, targets)
        found = [
            config.score_chunk(*chunk)
            for chunk in zip(rows.split(config.chunk_size), targets.split(config.chunk_size), strict=True)
        ]
        log_probs, right = (torch.cat(column) for column in zip(*found, strict=True))
        ctx.mark_non_differentiable(right)
        return log_probs, right

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, _: Any) -> Any:
        rows, targets = ctx.saved_tensors
        kind, dtype, enabled = ctx.autocast
        with (
            _fork_rng(ctx.random if ctx.plan.has_dropout else None),
            torch.enable_grad(),
            torch.autocast(kind, dtype, enabled=enabled),
        ):
            of_rows, of_learning = _chunk_gradients(ctx, rows, targets, grad_output)
        return None, of_rows, None, *of_learning


def _chunk_gradients(
    ctx: Any, rows: torch.Tensor, targets: torch.Tensor, grad_output: torch.Tensor
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Of the rows, and of each parameter that learns."""
    plan, needed = ctx.plan, ctx.needs_input_grad[1]
    of_rows: list[torch.Tensor] = []
    sums: list[torch.Tensor | None] = [None] * len(ctx.learning)
    for chunk, wanted, factor in zip(*(one.split(plan.size) for one in (rows, targets, grad_output)), strict=True):
        chunk = chunk.detach().requires_grad_(needed)
        log_probs = plan.score_chunk(chunk, wanted).log_probs
        inputs = [*ctx.learning, *[chunk][:needed]]
        found = [*torch.autograd.grad(log_probs, inputs, factor, allow_unused=True)]
        if needed:
            of_rows.append(found.pop())
        for place, one in enumerate(found):
            sums[place] = _accumulate(sums[place], one)
        del log_probs, found
    of_learning = [None if one is None else one.to(p.dtype) for one, p in zip(sums, ctx.learning, strict=True)]
    return torch.cat(of_rows) if needed else None, of_learning


def _accumulate(total: torch.Tensor | None, grad: torch.Tensor | None) -> torch.Tensor | None:
    """The sum in fp32 or finer; `total` is changed."""
    if grad is None:
        return total
    if total is None:
        return grad if grad.dtype == torch.float64 else grad.float()
    return total.add_(grad)


@contextmanager
def _fork_rng(rng_state: Any) -> Iterator[None]:
    """Inside, random numbers are drawn from this state on, on the host and on the devices; None: from where they are."""
    if rng_state is None:
        yield
        return
    host, devices, of_devices = rng_state
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(host)
        set_device_states(devices, of_devices)
        yield
