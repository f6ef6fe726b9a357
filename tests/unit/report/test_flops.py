"""Operations of a step are those of its formulas, recomputation aside, and peaks are those of a device's own name."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dstrain.report.flops import StepFlops, find_peak_flops

ROWS, WIDTH, OUT = 3, 4, 5
PRODUCT = 2 * ROWS * WIDTH * OUT


class Layers(torch.nn.Module):
    """Two products, recomputed in the backward pass if asked."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, OUT, bias=False), torch.nn.Linear(OUT, WIDTH, bias=False)
        )
        self.recomputes = recomputes

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return checkpoint(self._run, rows, use_reentrant=False) if self.recomputes else self._run(rows)

    def _run(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows).exp()


class Model(torch.nn.Module):
    """The layers, and once more without gradients if there is a reference."""

    def __init__(self, recomputes: bool, has_reference: bool = False) -> None:
        super().__init__()
        self.model, self.has_reference = Layers(recomputes), has_reference

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        reference = torch.zeros(())
        if self.has_reference:
            with torch.no_grad():
                reference = self.model(rows).sum()
        return self.model(rows).sum() - reference


def count(model: Model, *, inputs_learn: bool = True) -> int:
    rows = torch.randn(ROWS, WIDTH, requires_grad=inputs_learn)
    with StepFlops(model, model.model) as flops:
        model(rows).backward()
    return flops.total


def test_a_step_has_three_products_for_each_of_the_forward_pass() -> None:
    assert count(Model(recomputes=False)) == 3 * 2 * PRODUCT


def test_recomputation_does_not_count() -> None:
    assert count(Model(recomputes=True)) == 3 * 2 * PRODUCT


def test_a_gradient_that_nobody_needs_does_not_count() -> None:
    assert count(Model(recomputes=False), inputs_learn=False) == 5 * PRODUCT


def test_a_reference_counts_its_forward_pass_alone() -> None:
    assert count(Model(recomputes=False, has_reference=True)) == 4 * 2 * PRODUCT


def test_attention_on_a_cpu_counts_in_both_passes() -> None:
    class Attention(torch.nn.Module):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.scaled_dot_product_attention(rows, rows, rows).sum()

    rows = torch.randn(1, 2, 8, 16, requires_grad=True)
    module = Attention()
    with StepFlops(module, module) as flops:
        module(rows).backward()
    assert flops.total == 3 * 4 * 2 * 8 * 8 * 16


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A10", 125),
        ("NVIDIA L40S", 362),
        ("Tesla T4", 65),
        ("NVIDIA A10G", None),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", None),
        ("a card of next year", None),
    ],
)
def test_a_peak_is_found_by_the_whole_name(name: str, tflops: float | None) -> None:
    assert find_peak_flops(name) == (None if tflops is None else tflops * 1e12)
