"""Checks of adapters and of a quantized base."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dstrain.errors import RecipeError, first_names
from dstrain.models.adapters import merge_adapters
from dstrain.models.params import build_param_groups, unwrap_peft
from dstrain.models.quantization import QUANTIZE_KEY, check_bitsandbytes, dequantized_weights
from dstrain.training.build_model import build_model
from dstrain.training.engine.module import TrainModule
from dstrain.training.engine.torch import TorchEngine
from dstrain.verify.model import ShrunkModel, examples_of
from dstrain.verify.result import SINGLE, CheckResult, difference, judge
from dstrain.verify.rows import build_exact_model, exact_limit, log_probs_of, use_eager_experts

LORA = {"rank": 4, "alpha": 8.0}
CHANGED = 1e-4
"""Least relative change of the outputs by adapters with values as large as the weights'."""


def check_lora(shrunk: ShrunkModel) -> CheckResult:
    """A step moves adapters of each kind and nothing else; they change the outputs; merged, they change them alike."""
    check, task = "LoRA adapters", shrunk.task(model={"lora": LORA})
    model: Any = build_exact_model(task)
    batch = task.collate(examples_of(task))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    limit, precision = exact_limit(model, batch)
    plain = log_probs_of(model, batch)
    _draw_adapters(model)
    change = difference(log_probs_of(model, batch), plain)
    if change < CHANGED:
        problem = "the forward pass does not apply the adapters"
        return CheckResult(check=check, state="failed", figure=change, reason=problem)
    model.load_state_dict(before, strict=False)
    engine = TorchEngine(
        TrainModule(task, model), build_param_groups(model, task.recipe.optim), task.recipe.optim, torch.device("cpu")
    )
    engine.step([batch], lr=0.5)
    problem = _find_wrong_moves(model, before)
    if problem:
        return CheckResult(check=check, state="failed", reason=problem)
    _draw_adapters(model)
    model.eval()
    adapted = log_probs_of(model, batch)
    merged = log_probs_of(merge_adapters(model), batch)
    problem = "the merged model computes something else than the base with its adapters"
    return judge(check, difference(merged, adapted), limit, problem, precision)


def _find_wrong_moves(model: torch.nn.Module, before: Mapping[str, torch.Tensor]) -> str:
    """Return what a step has changed or left although it should not have; empty where all is well."""
    moved: dict[str, bool] = {}
    for name, parameter in model.named_parameters():
        has_moved = not torch.equal(parameter.detach(), before[name])
        if has_moved and not parameter.requires_grad:
            return f"a step of adapters has changed the base's {name}"
        if "lora_B" in name:  # A gets a gradient only once B is not zero
            kind = name.rsplit(".lora_B", 1)[0].rpartition(".")[2]
            moved[kind] = moved.get(kind, False) or has_moved
    still = sorted(kind for kind, has_moved in moved.items() if not has_moved)
    if not moved:
        return "no adapter was added"
    return f"the adapters of {first_names(still)} get no gradient in any layer" if still else ""


def _draw_adapters(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def check_quantized(shrunk: ShrunkModel) -> CheckResult:
    """Adapters on a base in 4 bits compute what they compute on the same values in fp32."""
    check = "quantized base"
    try:
        check_bitsandbytes(QUANTIZE_KEY)
    except RecipeError as error:
        return CheckResult(check=check, state="skipped", reason=str(error))
    task: Any = shrunk.task(model={"lora": LORA, "quantize": "nf4"})
    quantized: Any = build_model(task).eval()
    with dequantized_weights():
        whole: Any = build_model(task).eval()
    for model in (quantized, whole):
        use_eager_experts(model)
    batch = task.collate(examples_of(task))
    figure = difference(log_probs_of(quantized, batch), log_probs_of(whole, batch))
    total = sum(parameter.numel() for parameter in unwrap_peft(whole).parameters())
    share = _count_quantized(quantized) / total
    note = f"fp32; {share:.0%} of the small model's weights in 4 bits"
    return judge(check, figure, SINGLE, "the quantized layers do not compute with the values that they hold", note)


def _count_quantized(model: torch.nn.Module) -> int:
    """Return how many weights are in 4 bits."""
    states = [getattr(parameter, "quant_state", None) for parameter in model.parameters()]
    return sum(state.shape.numel() for state in states if state is not None)
