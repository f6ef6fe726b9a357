"""A linear head has the gradient of autograd, without autograd's copies of the logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dstrain.models.heads import MAX_CHUNK_BYTES, HeadInput, LinearHead, ScoreFields, TokenScores

VOCABULARY, WIDTH, ROWS = 96, 16, 23
STEPS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], ...]] = {
    "none": (),
    "scaled": (lambda logits: logits / 3.0,),
    "capped": (lambda logits: logits / 2.0, torch.tanh, lambda logits: logits * 2.0),
    "cut": (lambda logits: logits[..., :90],),
    "in fp32": (lambda logits: logits.float(),),
}


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the logits that were computed. In fp32 the errors of 9 rows are kept, and a slice has one row."""
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", 4 * VOCABULARY * 3)
    return spied(monkeypatch)


def spied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    seen: list[tuple[int, ...]] = []
    score = LinearHead.score_slice

    def score_slice(self: LinearHead, rows: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        seen.append(tuple(rows.shape))
        return score(self, rows, *rest)

    monkeypatch.setattr(LinearHead, "score_slice", score_slice)
    return seen


def made(
    dtype: torch.dtype = torch.float32, bias: bool = False, rows: int = ROWS
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, VOCABULARY, bias=bias, dtype=dtype)
    return head, torch.randn(rows, WIDTH, dtype=dtype, requires_grad=True), torch.randint(90, (rows,))


def scored(head: torch.nn.Module, rows: torch.Tensor, targets: torch.Tensor, *more: Any) -> TokenScores:
    return HeadInput(head, rows[None], *more or ((),)).score_targets(rows, targets)


def gradients(log_probs: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    """Of a sum in which each target has its own weight, one of them 0."""
    weights = torch.linspace(-1, 3, log_probs.numel(), dtype=log_probs.dtype)
    weights[:1] = 0
    found = torch.autograd.grad((log_probs * weights).sum(), [one for one in leaves if one.requires_grad])
    assert [one.dtype for one in found] == [one.dtype for one in leaves if one.requires_grad]
    return [*found]


def by_autograd(head: torch.nn.Linear, rows: torch.Tensor, targets: torch.Tensor, steps: Any = ()) -> torch.Tensor:
    logits = F.linear(rows, head.weight, head.bias)
    for step in steps:
        logits = step(logits)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return exact.log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_and_gradients_are_those_of_autograd(dtype: torch.dtype, bias: bool, steps: str) -> None:
    if dtype == torch.float64 and steps == "in fp32":
        pytest.skip("a gradient through fp32 has the precision of fp32")
    head, rows, targets = made(dtype, bias)
    leaves = [rows, *head.parameters()]
    wanted = by_autograd(head, rows, targets, STEPS[steps])
    found = scored(head, rows, targets, STEPS[steps])
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-6}[dtype]
    torch.testing.assert_close(found.log_probs, wanted, rtol=0, atol=tolerance)
    limit = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1.5e-2}[dtype]
    for one, other in zip(gradients(found.log_probs, *leaves), gradients(wanted, *leaves), strict=True):
        assert float((one - other).norm() / other.norm()) <= limit


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("rows", [0, 1, 9, 10, 18, 19])
def test_any_number_of_rows_has_the_gradient_of_autograd(rows: int) -> None:
    """9 are kept: none, some and several parts are recomputed."""
    head, inputs, targets = made(torch.float64, rows=rows)
    leaves = [inputs, head.weight]
    for one, other in zip(
        gradients(scored(head, inputs, targets).log_probs, *leaves),
        gradients(by_autograd(head, inputs, targets), *leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.usefixtures("slices")
@pytest.mark.parametrize("trained", ["rows", "weight", "bias", "weight and bias"])
def test_what_is_frozen_has_no_gradient(trained: str) -> None:
    head, rows, targets = made(torch.float64, bias=True)
    leaves = {"rows": rows, "weight": head.weight, "bias": head.bias}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name in trained)
    found, wanted = (
        gradients(log_probs, *leaves.values())
        for log_probs in (scored(head, rows, targets).log_probs, by_autograd(head, rows, targets))
    )
    torch.testing.assert_close(found, wanted)


def test_only_errors_that_were_not_kept_are_recomputed(slices: list[tuple[int, ...]]) -> None:
    head, rows, targets = made()
    log_probs = scored(head, rows, targets).log_probs
    assert len(slices) == ROWS
    log_probs.sum().backward()
    assert len(slices) == ROWS + ROWS - 9


@pytest.mark.parametrize("grad", [False, True])
def test_a_frozen_head_keeps_no_logits(grad: bool, slices: list[tuple[int, ...]]) -> None:
    head, rows, targets = made()
    head.requires_grad_(False)
    kept: list[int] = []
    with (
        torch.set_grad_enabled(grad),
        torch.autograd.graph.saved_tensors_hooks(lambda one: (kept.append(one.numel()), one)[1], lambda one: one),
    ):
        log_probs = scored(head, rows, targets).log_probs
    assert max(kept, default=0) <= ROWS * WIDTH
    assert log_probs.requires_grad == grad
    if grad:
        log_probs.sum().backward()
    assert len(slices) == ROWS, "the gradient of the rows needs no second pass"


def test_without_a_gradient_nothing_is_kept(slices: list[tuple[int, ...]]) -> None:
    head, rows, targets = made()
    with torch.no_grad():
        assert scored(head, rows, targets).log_probs.grad_fn is None
    assert len(slices) == ROWS


@pytest.mark.usefixtures("slices")
def test_a_nearly_certain_target_keeps_its_gradient_in_bf16() -> None:
    """1 - p is 1e-4, and p rounded to bf16 is 1."""
    head = torch.nn.Linear(1, 2, bias=False, dtype=torch.bfloat16)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[9.2], [0.0]]))
    rows = torch.ones(1, 1, dtype=torch.bfloat16, requires_grad=True)
    scored(head, rows, torch.tensor([0])).log_probs.sum().backward()
    error = 1 - torch.tensor([float(head.weight.detach()[0]), 0.0]).softmax(0)[0]
    assert head.weight.grad is not None
    torch.testing.assert_close(head.weight.grad[0, 0].float(), error, rtol=1e-2, atol=0)


@pytest.mark.usefixtures("slices")
def test_of_equal_logits_the_first_is_the_most_probable() -> None:
    head, rows, _ = made()
    with torch.no_grad():
        head.weight.zero_()
    targets = torch.arange(ROWS) % 3
    assert torch.equal(scored(head, rows, targets).is_correct, targets == 0)


def test_fields_that_were_not_requested_are_none() -> None:
    head, rows, targets = made()
    scores = HeadInput(head, rows[None], ()).score_targets(rows, targets, ScoreFields(is_correct=False))
    assert scores.is_correct is None
    assert scores.mean_log_probs is None


class Doubled(torch.nn.Linear):
    """A head with a forward pass of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_other_heads_keep_their_own_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = spied(monkeypatch)
    plain, rows, targets = made()
    doubled = Doubled(WIDTH, VOCABULARY)
    patched = torch.nn.Linear(WIDTH, VOCABULARY)
    forward = patched.forward
    patched.forward = lambda rows: 2 * forward(rows)  # type: ignore[method-assign]
    for head in (doubled, patched):
        wanted = (2 * F.linear(rows, head.weight, head.bias)).log_softmax(-1).gather(-1, targets[:, None]).squeeze(-1)
        torch.testing.assert_close(scored(head, rows, targets).log_probs, wanted)
    with torch.autocast("cpu", torch.bfloat16):
        scored(plain, rows, targets)
    assert not seen
    scored(plain, rows, targets)
    assert seen
