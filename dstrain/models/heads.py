"""Scores of targets without all logits at once: chunks over the vocabulary projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_map

from dstrain.models.chunk_sizes import BLOCK_SHARE, KEPT_SHARE, MAX_CHUNK_BYTES, SLICE_SHARE
from dstrain.models.fused_cross_entropy import compute_cross_entropy, has_fused_cross_entropy
from dstrain.models.recompute import chunk_gradients, save_forward_state

# Shapes: N targets, n targets of a slice, V vocabulary, H width.
#
# With logits z = W x + b and the error e = softmax(z) - onehot(target), the gradient of log p is -e for z, -e W for x
# and -e x^T for W. A factor g from the loss scales e W and x, each (N, H), instead of e, (N, V).

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
"""Types of weights. Not fp16: most errors would be subnormal there, and the loss scale comes only after them."""


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
    """Functions that treat each logit alike."""
    fields: ScoreFields
    is_fused: bool = False
    """True where a fused kernel computes scores and errors. It takes logits without postprocessing."""

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
        """Return normalizers (n,) and the requested fields for hidden states (n, H).

        `out` (n, V) gets the logits, or the errors. A normalizer is log(sum(exp(z))) of a row.
        """
        self._compute_logits(rows, slice(0, len(self.weight)), out)
        if self.is_fused and len(out):
            return self._score_by_kernel(out, targets, with_errors)
        size = _rows_per_block(out)
        blocks = zip(out.split(size), targets.split(size), strict=True)
        columns = zip(*(self._score_block(*block, with_errors) for block in blocks), strict=True)
        return [torch.cat(column) for column in columns]

    def recompute_errors(
        self, rows: torch.Tensor, targets: torch.Tensor, normalizers: torch.Tensor, tokens: slice, out: torch.Tensor
    ) -> None:
        """Write the errors of a block of the vocabulary for hidden states (n, H) into `out` (n, tokens)."""
        self._compute_logits(rows, tokens, out)
        is_inside = (targets >= tokens.start) & (targets < tokens.stop)
        places = (targets - tokens.start).clamp(0, out.shape[1] - 1)[:, None]
        minus_one = -is_inside.to(normalizers.dtype)[:, None]
        for at in _slices(0, len(out), _rows_per_block(out)):
            leaf, final = self._postprocess(out[at], with_gradient=True)
            probabilities = (final.detach() - normalizers[at, None]).exp_()
            probabilities.scatter_add_(1, places[at], minus_one[at])
            out[at] = _differentiate(leaf, final, probabilities)

    def _compute_logits(self, rows: torch.Tensor, tokens: slice, out: torch.Tensor) -> None:
        # The parameters are on the device of the rows: ZeRO-3 has gathered them.
        weight = self.weight.detach()[tokens].t()
        if self.bias is None:
            torch.mm(rows, weight, out=out)
        else:
            torch.addmm(self.bias.detach()[tokens], rows, weight, out=out)

    def _postprocess(self, logits: torch.Tensor, with_gradient: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and what the model makes of them, with the graph between where a gradient is needed."""
        with torch.set_grad_enabled(with_gradient and bool(self.postprocessing)):
            leaf = logits.detach().requires_grad_(torch.is_grad_enabled())
            final = leaf
            for step in self.postprocessing:
                final = step(final)
        return leaf, final

    def _score_block(self, logits: torch.Tensor, targets: torch.Tensor, with_errors: bool) -> list[torch.Tensor]:
        leaf, final = self._postprocess(logits, with_errors)
        exact = final.detach() if final.dtype == torch.float64 else final.detach().float()
        largest = exact.amax(-1)
        probabilities = exact.softmax(-1)
        # That of the largest logit is 1 / sum(exp(z - max)): one exponential per token for normalizer and errors.
        normalizers = largest - probabilities.amax(-1).log()
        columns = [normalizers, exact.gather(-1, targets[:, None]).squeeze(-1) - normalizers]
        if self.fields.is_correct:
            columns.append(is_argmax(exact, targets))
        if with_errors:
            # Subtracted before the result is rounded to 16 bits: 1 - p would be lost where p is close to 1.
            probabilities[torch.arange(len(targets), device=targets.device), targets] -= 1
            logits.copy_(_differentiate(leaf, final, probabilities))
        return columns

    def _score_by_kernel(self, logits: torch.Tensor, targets: torch.Tensor, with_errors: bool) -> list[torch.Tensor]:
        target_logits = logits.gather(-1, targets[:, None]).squeeze(-1).float()
        losses, is_correct = compute_cross_entropy(logits, targets, with_errors, self.fields.is_correct)
        columns = [target_logits + losses, -losses]
        return columns if is_correct is None else [*columns, is_correct]


def _rows_per_block(logits: torch.Tensor) -> int:
    """Return how many rows of logits (n, v) are computed at once in fp32."""
    device = logits.device
    return rows_per_chunk(logits.shape[1], device, share=BLOCK_SHARE.get(device.type, BLOCK_SHARE["cuda"]))


def _differentiate(leaf: torch.Tensor, final: torch.Tensor, errors: torch.Tensor) -> torch.Tensor:
    """Return the errors of `leaf` for those of `final`, which the model made of it."""
    if final is leaf:
        return errors
    return torch.autograd.grad(final, leaf, errors.to(final.dtype))[0]


class _LinearScores(torch.autograd.Function):
    """Scores of all targets; the gradient of the rows is computed with them, that of the parameters from errors."""

    @staticmethod
    def forward(
        ctx: Any, head: LinearHead, targets: torch.Tensor, rows: torch.Tensor, *parameters: torch.Tensor
    ) -> Any:
        _, _, needs_rows, *needs_parameters = ctx.needs_input_grad
        ctx.head, vocab_size = head, len(parameters[0])  # not as saved tensors: ZeRO-3 frees and gathers parameters
        slice_rows = _rows_per_share(rows, vocab_size, SLICE_SHARE)
        keeps_errors = any(needs_parameters) and len(rows) <= _rows_per_share(rows, vocab_size, KEPT_SHARE)
        errors = rows.new_empty(len(rows) if keeps_errors else 0, vocab_size)
        scratch = rows.new_empty(0 if keeps_errors else min(len(rows), slice_rows), vocab_size)
        # The gradient of the rows up to a factor: without one for the weight, nothing is left to recompute.
        products = torch.empty_like(rows) if needs_rows else None
        columns = []
        # With an empty slice, whose scores have the right types, where there are no rows.
        for at in [*_slices(0, len(rows), slice_rows)] or [slice(0, 0)]:
            out = errors[at] if keeps_errors else scratch[: at.stop - at.start]
            columns.append(head.score_slice(rows[at], targets[at], out, needs_rows or keeps_errors))
            if products is not None:
                torch.mm(out, parameters[0], out=products[at])
        normalizers, log_probs, *others = [torch.cat(column) for column in zip(*columns, strict=True)]
        trained = (rows, targets, normalizers, errors) if any(needs_parameters) else (None,) * 4
        ctx.save_for_backward(products, *trained)
        ctx.mark_non_differentiable(*others)
        return log_probs, *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor, *_: Any) -> Any:
        products, rows, targets, normalizers, errors = ctx.saved_tensors
        _, _, needs_rows, *needs_parameters = ctx.needs_input_grad
        factors = -grad_output[:, None]  # (N, 1)
        row_grad = (products * factors).to(products.dtype) if needs_rows else None
        parameter_grads: list[torch.Tensor | None] = [None] * len(needs_parameters)
        if any(needs_parameters):
            # A bias is the weight of a constant input of 1.
            inputs = torch.cat([rows * factors, factors], 1) if len(needs_parameters) == 2 else rows * factors
            total = _parameter_gradient(ctx.head, targets, rows, normalizers, errors, inputs.to(rows.dtype))
            grads = total[:, : rows.shape[1]], total[:, -1]
            parameter_grads = [
                grad.contiguous() if needed else None for grad, needed in zip(grads, needs_parameters, strict=False)
            ]
        # For each argument of `forward`: head, targets, rows, parameters.
        return None, None, row_grad, *parameter_grads


def _parameter_gradient(
    head: LinearHead,
    targets: torch.Tensor,
    rows: torch.Tensor,
    normalizers: torch.Tensor,
    errors: torch.Tensor,
    inputs: torch.Tensor,
) -> torch.Tensor:
    """Return the sum over targets of error times input, (V, H) or (V, H + 1).

    If `errors` (N, V) were not kept, they are computed again, for a block of the vocabulary at a time: each value of
    the gradient is one sum over all targets, rounded once.
    """
    if len(errors) == len(rows):
        return errors.t() @ inputs
    vocab_size = errors.shape[1]
    total = inputs.new_empty(vocab_size, inputs.shape[1])
    block_size = min(vocab_size, _rows_per_share(rows, len(rows), SLICE_SHARE))
    scratch = rows.new_empty(len(rows) * block_size)
    for tokens in _slices(0, vocab_size, block_size):
        width = tokens.stop - tokens.start
        block = scratch[: len(rows) * width].view(len(rows), width)
        head.recompute_errors(rows, targets, normalizers, tokens, block)
        torch.mm(block.t(), inputs, out=total[tokens])
    return total


def _rows_per_share(like: torch.Tensor, num_columns: int, shares: Mapping[str, float]) -> int:
    """Return how many rows of this many values, of the type and on the device of `like`, take this device's share."""
    share = shares.get(like.device.type, shares["cuda"])
    return rows_per_chunk(num_columns, like.device, like.element_size(), share)


def _slices(begin: int, end: int, size: int) -> Iterator[slice]:
    return (slice(at, min(at + size, end)) for at in range(begin, end, max(size, 1)))


# Shapes: B rows, K targets of a row, V vocabulary, H width, N rows of one chunk.

LogitsFunction = Callable[[torch.Tensor], torch.Tensor]


class HeadRecorder(torch.nn.Module):
    """Output head that returns LazyLogits, and calls the real head only where they do not suffice."""

    def __init__(self, head: torch.nn.Module) -> None:
        super().__init__()
        # Not by Module.__setattr__: the recorder owns no parameters, and nothing may find the head twice.
        self.__dict__.update(head=head, is_head_used=False)

    is_head_used: bool
    """True once the head was called: the model did something with its logits that cannot be repeated on chunks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["head"], name)  # models read their head's weight or its dtype

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        # Only (B, K, H) alone can be split into rows later.
        if hidden_states.dim() != 3 or args or kwargs:
            self.__dict__["is_head_used"] = True
            return self.head(hidden_states, *args, **kwargs)
        # One row is enough to learn what a step does to dtype and V.
        template_row = hidden_states.detach().new_zeros(1, 1, self.head.out_features)
        return LazyLogits.create(template_row, self, hidden_states, ())

    def compute_logits(self, hidden_states: torch.Tensor, steps: Sequence[LogitsFunction]) -> torch.Tensor:
        """Return logits (B, K, V) of hidden states (B, K, H), after the recorded steps."""
        self.__dict__["is_head_used"] = True
        logits = self.head(hidden_states)
        for step in steps:
            logits = step(logits)
        return logits


class LazyLogits(torch.Tensor):
    """Stand-in for logits (B, K, V) that takes no memory: the head of `hidden_states`, followed by `steps`.

    Scaling, tanh, casts and a slice of the vocabulary are recorded as steps. For any other function the head is
    called, and the function gets the real logits.
    """

    recorder: HeadRecorder
    hidden_states: torch.Tensor
    steps: tuple[LogitsFunction, ...]
    template_row: torch.Tensor
    """(1, 1, V) zeros, of the dtype that the logits would have."""

    @staticmethod
    def create(
        template_row: torch.Tensor,
        recorder: HeadRecorder,
        hidden_states: torch.Tensor,
        steps: tuple[LogitsFunction, ...],
    ) -> LazyLogits:
        """Return a view of one row, expanded to (B, K, V)."""
        # Expanded dimensions have stride 0: (B, K, V) in the memory of (V,).
        lazy = template_row.expand(*hidden_states.shape[:2], -1).as_subclass(LazyLogits)
        lazy.recorder, lazy.hidden_states, lazy.steps, lazy.template_row = recorder, hidden_states, steps, template_row
        return lazy

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first, *rest = args or [None]
        if function is torch.Tensor.detach:  # DeepSpeed's hooks detach the output of every module
            return LazyLogits.create(first.template_row, first.recorder, first.hidden_states, first.steps)
        if function in _SHAPE_FUNCTIONS or getattr(function, "__name__", "") == "__get__":
            # Otherwise reading the shape would come back to this method.
            with torch._C.DisableTorchFunctionSubclass():
                result = function(*args, **kwargs)
            if not isinstance(result, torch.Tensor):  # a shape, dtype or device
                return result
        if isinstance(first, LazyLogits) and _is_pointwise(function, rest, kwargs):
            step: LogitsFunction = lambda logits: function(logits, *rest, **kwargs)  # noqa: E731
            return LazyLogits.create(
                step(first.template_row), first.recorder, first.hidden_states, (*first.steps, step)
            )
        return function(*tree_map(_to_logits, tuple(args)), **tree_map(_to_logits, kwargs))


_POINTWISE = frozenset(
    {torch.tanh, torch.mul, torch.div, torch.Tensor.tanh, torch.Tensor.mul, torch.Tensor.__mul__, torch.Tensor.__rmul__,
     torch.Tensor.div, torch.Tensor.__truediv__, torch.Tensor.float, torch.Tensor.to, torch.Tensor.contiguous}
)  # fmt: skip
"""Functions that treat logits (N, V) and (B, K, V) alike, if their other arguments are numbers, dtypes or devices."""
_SHAPE_FUNCTIONS = frozenset({torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__})
"""Functions that read only the shape."""


def _is_pointwise(function: Callable[..., Any], rest: Sequence[Any], kwargs: Any) -> bool:
    """Return True where a function gives the same on chunks of the logits as on all of them."""
    if function is torch.Tensor.__getitem__:  # [..., a:b]
        (index,) = rest
        return isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis and isinstance(index[1], slice)
    others = [*rest, *kwargs.values()]
    return function in _POINTWISE and all(isinstance(one, int | float | torch.dtype | torch.device) for one in others)


def _to_logits(value: Any) -> Any:
    """Return the real logits of LazyLogits, any other value as it is.

    Every call returns the same tensor, because the model may change it in place.
    """
    if not isinstance(value, LazyLogits):
        return value
    attributes = value.__dict__
    if "logits" not in attributes:
        attributes["logits"] = value.recorder.compute_logits(value.hidden_states, value.steps)
    return attributes["logits"]


# Shapes: B rows, K targets of a row, N targets of all rows, n targets of a chunk, V vocabulary, H width.

ChunkFunction = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]
"""Logits (n, V), targets (n, …) -> results (n, …), of which those in floating point have a gradient."""


@dataclass(frozen=True)
class HeadInput:
    """Input of the output head in a forward pass, and what the model does with the logits afterwards."""

    head: torch.nn.Module
    """The identity for a model whose head cannot be called separately: its hidden states are its logits."""
    hidden_states: torch.Tensor
    """(B, K, H)"""
    postprocessing: tuple[Callable[[torch.Tensor], torch.Tensor], ...]
    """Functions in call order: Gemma 2 caps its logits, Granite and Cohere scale them, Mamba casts them to fp32."""

    def score_targets(
        self, rows: torch.Tensor, targets: torch.Tensor, fields: ScoreFields = DEFAULT_FIELDS
    ) -> TokenScores:
        """Return the scores of targets (N,) for hidden states (N, H). Collective under ZeRO-3."""

        def score(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return fields.select(score_logits(logits, targets, fields))

        return fields.name(self.map_logits(rows, targets, score, fields))

    def map_logits(
        self, rows: torch.Tensor, targets: torch.Tensor, function: ChunkFunction, fields: ScoreFields | None = None
    ) -> tuple[torch.Tensor, ...]:
        """Return the results (N, …) of `function` on the logits of hidden states (N, H) and on targets (N, …).

        It gets a chunk at a time, and treats each row alike. `fields`: those of TokenScores that it returns, which a
        plain linear head computes in a faster way. The head is called once, around all chunks, so that ZeRO-3 gathers
        its weights once in each direction. The number of chunks may differ between ranks. Collective under ZeRO-3.
        """
        head, inner = self.head, self.head.forward

        def map_chunk(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            logits = inner(rows)
            for step in self.postprocessing:
                logits = step(logits)
            return function(logits, targets)

        def map_all(rows: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
            if fields is None or "forward" in attributes:
                return _score_in_chunks(map_chunk, head, rows, targets)
            if LinearHead.supports(head, rows, fields) and self._keeps_vocabulary(rows):
                is_fused = has_fused_cross_entropy(head) and not self.postprocessing
                linear = LinearHead(head.weight, head.bias, self.postprocessing, fields, is_fused)
                return linear.score_targets(rows, targets)
            return _score_in_chunks(map_chunk, head, rows, targets)

        attributes = dict(vars(head))
        with _forward_overridden(head, map_all):
            return cast("tuple[torch.Tensor, ...]", head(rows, targets))

    def _keeps_vocabulary(self, rows: torch.Tensor) -> bool:
        """Return True where the model makes one value of each logit: some families cut off unused tokens."""
        if not self.postprocessing:
            return True
        width = cast(int, self.head.out_features)
        logits = rows.new_empty(1, width)
        for step in self.postprocessing:
            logits = step(logits)
        return logits.shape[-1] == width


def capture_head_input(model: torch.nn.Module, forward: Callable[[], torch.Tensor]) -> HeadInput:
    """Return the input of the model's head in `forward`, or the logits where the head cannot be called separately.

    `forward` calls the model and returns the logits. During the call a HeadRecorder replaces the head. A model that
    changes its logits in place is called once more with its own head, and always with it from then on. The decision
    depends on the model alone, so all ranks decide alike.
    """
    head = _find_separable_head(model)
    if head is None:
        return HeadInput(torch.nn.Identity(), forward(), ())
    with _head_recorded(model, head) as recorder:
        logits = forward()
    # The model called something that needed real logits, or returned other ones.
    if not isinstance(logits, LazyLogits):
        return HeadInput(torch.nn.Identity(), logits, ())
    if not recorder.is_head_used and hasattr(logits, "steps"):
        return HeadInput(head, logits.hidden_states, logits.steps)
    _IN_PLACE_MODELS.add(model)
    return HeadInput(torch.nn.Identity(), forward(), ())


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
    vocab_size = rows.shape[-1] if isinstance(head, torch.nn.Identity) else cast(int, head.out_features)
    size = rows_per_chunk(vocab_size, rows.device)
    # A single chunk keeps its logits for the backward pass: nothing is recomputed.
    if len(rows) <= size:
        return score_chunk(rows, targets)
    trainable = [parameter for parameter in head.parameters() if parameter.requires_grad]
    return cast("tuple[torch.Tensor, ...]", _ChunkedScores.apply(score_chunk, size, rows, targets, *trainable))


class _ChunkedScores(torch.autograd.Function):
    """Scores chunk by chunk; the backward pass recomputes the logits of each chunk.

    Like torch.utils.checkpoint around each chunk, except that the chunks' gradients of a 16-bit weight are summed in
    fp32 and rounded once: autograd would round after each addition.
    """

    @staticmethod
    def forward(
        ctx: Any,
        score_chunk: Callable[..., tuple[torch.Tensor, ...]],
        size: int,
        rows: torch.Tensor,
        targets: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> Any:
        ctx.score_chunk, ctx.size = score_chunk, size
        ctx.parameters = parameters  # not saved tensors: ZeRO-3 frees and gathers them in between
        ctx.restored = save_forward_state(rows)  # of dropout in adapters of the head
        ctx.save_for_backward(rows, targets)
        chunks = zip(rows.split(size), targets.split(size), strict=True)
        scores = [score_chunk(*chunk) for chunk in chunks]
        columns = tuple(torch.cat(column) for column in zip(*scores, strict=True))
        ctx.mark_non_differentiable(*(column for column in columns if not column.is_floating_point()))
        return columns

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:
        rows, targets = ctx.saved_tensors

        def score_chunk(chunk: torch.Tensor, at: slice) -> tuple[torch.Tensor, ...]:
            scores: tuple[torch.Tensor, ...] = ctx.score_chunk(chunk, targets[at])
            return scores

        with ctx.restored():
            row_grad, parameter_grads = chunk_gradients(
                score_chunk, rows, ctx.size, grad_outputs, ctx.parameters, ctx.needs_input_grad[2]
            )
        # For each argument of `forward`: score_chunk, size, rows, targets, parameters.
        return None, None, row_grad, None, *parameter_grads
