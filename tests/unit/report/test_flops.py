"""Operations of a step are those of its formulas, recomputation aside, and peaks are those of a device's own name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from dstrain.batch import Batch
from dstrain.config.schema import RunConfig
from dstrain.models.heads import MAX_CHUNK_BYTES, HeadInput, ScoreFields
from dstrain.models.params import unwrap_peft
from dstrain.planner.gpu_peaks import find_peak_flops
from dstrain.report.flops import StepFlops
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from tests.tiny import tiny_recipe

ROWS, WIDTH, OUT, VOCABULARY = 3, 4, 5, 7
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


@pytest.mark.parametrize(
    ("model", "inputs_learn", "products"),
    [
        (Model(recomputes=False), True, 3 * 2),
        (Model(recomputes=True), True, 3 * 2),  # recomputation does not count
        (Model(recomputes=False), False, 5),  # nor a gradient that nobody needs
        (Model(recomputes=False, has_reference=True), True, 4 * 2),  # a reference counts its forward pass alone
    ],
    ids=["plain", "recomputed", "fixed inputs", "with a reference"],
)
def test_a_step_has_three_products_for_each_of_the_forward_pass(
    model: Model, inputs_learn: bool, products: int
) -> None:
    assert count(model, inputs_learn=inputs_learn) == products * PRODUCT


class WithHead(torch.nn.Module):
    """Two layers and a head that is called on its own, behind them."""

    def __init__(self, fields: ScoreFields, recomputes: bool) -> None:
        super().__init__()
        self.model = Layers(recomputes)
        self.model.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.fields = fields

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        head_input = HeadInput(self.model.head, self.model(rows)[None], ())
        targets = torch.arange(len(rows)) % VOCABULARY
        return head_input.score_targets(head_input.hidden_states[0], targets, self.fields).log_probs.sum()


@pytest.mark.parametrize("fields", [ScoreFields(), ScoreFields(mean_log_probs=True)], ids=["linear", "in chunks"])
@pytest.mark.parametrize("limit", [2**26, 64], ids=["kept", "recomputed"])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_head_behind_the_model_counts_in_both_passes(
    fields: ScoreFields, limit: int, recomputes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MAX_CHUNK_BYTES, "cpu", limit)
    module = WithHead(fields, recomputes)
    with StepFlops(module, module.model) as flops:
        module(torch.randn(ROWS, WIDTH, requires_grad=True)).backward()
    assert flops.total == 3 * (2 * PRODUCT + 2 * ROWS * WIDTH * VOCABULARY)


@pytest.mark.parametrize("lora", [None, {"rank": 1, "targets": ["v_proj"]}])
@pytest.mark.parametrize("task", ["sft", "dpo", "rm"])
def test_a_task_counts_its_head(task: str, lora: dict[str, Any] | None, tmp_path: Path) -> None:
    """Its model and its head are called in more than one piece; each weight has a product per token and pass."""
    recipe = tiny_recipe(task, tmp_path)
    recipe["model"]["lora"] = lora
    made: Any = make_task(RunConfig.model_validate(recipe))
    module, batch = build_train_module(made), made.collate([made.examples("train")[0]])
    with StepFlops(module, module.model) as flops:
        module(batch)[0].backward()
    model: Any = unwrap_peft(module.model)
    inner = sum(p.numel() for layer in model.model.layers for name, p in layer.named_parameters() if p.dim() == 2)
    tokens = batch.tensors["input_ids"].numel()
    head = model.score.weight.numel() * 2 if task == "rm" else model.lm_head.weight.numel() * count_targets(batch)
    attention = 6 * model.config.num_hidden_layers * 2 * 2 * model.config.hidden_size * tokens**2
    passes = 3 if lora is None else 2
    reference = 1 if task == "dpo" else 0
    assert flops.total >= (passes + reference) * 2 * (inner * tokens + head)
    assert flops.total <= (3 + reference) * 2 * (inner * tokens + head) + attention


def test_recomputed_layers_of_frozen_weights_do_not_count(tmp_path: Path) -> None:
    """A frozen weight has one product in the backward pass: the recomputed one must not take the place of a second.

    Checkpointing makes the input of the first layer require a gradient, which is computed and counts: 4 % here.
    """
    totals = []
    for checkpointing in (False, True):
        recipe = tiny_recipe("sft", tmp_path)
        recipe["model"] |= {"lora": {"rank": 1}, "gradient_checkpointing": checkpointing}
        made: Any = make_task(RunConfig.model_validate(recipe))
        module, batch = build_train_module(made), made.collate([made.examples("train")[0]])
        with StepFlops(module, module.model) as flops:
            module(batch)[0].backward()
        totals.append(flops.total)
    assert totals[1] == pytest.approx(totals[0], rel=0.05)


def count_targets(batch: Batch) -> int:
    return int(batch.tensors["loss_mask"].sum())


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
