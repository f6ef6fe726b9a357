"""The fused cross entropy gives scores, errors and gradients of the head that computes with torch's operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.interpreted import use_interpreted_kernels

use_interpreted_kernels()

from dstrain.models import fused_kernels  # noqa: E402
from dstrain.models.chunk_sizes import MAX_CHUNK_BYTES  # noqa: E402
from dstrain.models.fused_cross_entropy import compute_cross_entropy, has_fused_cross_entropy  # noqa: E402
from dstrain.models.fused_kernels import fuse_kernels  # noqa: E402
from dstrain.models.heads import DEFAULT_FIELDS, LinearHead  # noqa: E402
from tests.model_families import family  # noqa: E402

WIDTH = 16


def score(is_fused: bool, head: torch.nn.Linear, rows: torch.Tensor, targets: torch.Tensor) -> list[torch.Tensor]:
    """Return log-probabilities, correctness, and the gradients of rows and parameters of a weighted sum."""
    linear = LinearHead(head.weight, head.bias, (), DEFAULT_FIELDS, is_fused)
    log_probs, is_correct = linear.score_targets(rows, targets)
    weights = torch.linspace(-1, 3, len(targets))
    return [
        log_probs.detach(),
        is_correct,
        *torch.autograd.grad((log_probs * weights).sum(), [rows, *head.parameters()]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("vocabulary", [2, 97, 40_000])  # the last one takes two blocks of the kernel
@pytest.mark.parametrize("kept_rows", [3, 1000])
def test_a_fused_head_scores_as_the_eager_one(
    dtype: torch.dtype, has_bias: bool, vocabulary: int, kept_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", max(1, kept_rows * vocabulary * dtype.itemsize // 3))
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, vocabulary, bias=has_bias, dtype=dtype)
    rows = torch.randn(7, WIDTH, dtype=dtype, requires_grad=True)
    targets = torch.randint(vocabulary, (7,))
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    for wanted, computed in zip(score(False, head, rows, targets), score(True, head, rows, targets), strict=True):
        assert wanted.dtype == computed.dtype
        assert float((wanted.float() - computed.float()).norm()) <= limit * float(wanted.float().norm())


def test_of_equal_logits_the_first_is_the_largest() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0], [3.0, 3.0, 3.0, 3.0], [0.0, 1.0, 2.0, 3.0]])
    _, is_correct = compute_cross_entropy(logits, torch.tensor([1, 1, 3]), with_errors=False, with_accuracy=True)
    assert is_correct is not None
    assert is_correct.tolist() == [True, False, True]
    assert logits[2].tolist() == [0.0, 1.0, 2.0, 3.0], "without errors the logits are not changed"


def test_a_nearly_certain_target_keeps_its_error_in_bf16() -> None:
    """1 - p is 1e-4, and p rounded to bf16 is 1."""
    logits = torch.tensor([[9.25, 0.0]], dtype=torch.bfloat16)
    error = float(logits.float().softmax(-1)[0, 0]) - 1
    compute_cross_entropy(logits, torch.tensor([0]), with_errors=True, with_accuracy=False)
    assert abs(float(logits[0, 0]) - error) <= 1e-2 * abs(error)


def make_model(name: str) -> Any:
    values = dict(family(name))
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values))


def test_the_head_of_a_model_is_fused() -> None:
    model = make_model("llama")
    report = fuse_kernels(model)
    assert report.fused["cross entropy of Linear"] == 1
    assert has_fused_cross_entropy(model.get_output_embeddings())


def test_a_kernel_that_does_not_run_leaves_the_head_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise TypeError("the kernel takes another argument")

    monkeypatch.setattr(fused_kernels, "compute_cross_entropy", fail)
    model = make_model("llama")
    report = fuse_kernels(model)
    assert report.eager["cross entropy of Linear"] == "its kernel does not run: TypeError"
    assert not has_fused_cross_entropy(model.get_output_embeddings())
