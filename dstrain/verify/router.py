"""Check of the router's loss of a mixture of experts."""

from __future__ import annotations

from typing import Any

import torch

from dstrain.errors import RecipeError
from dstrain.models.router_loss import METRIC, check_router_loss, find_router_loss
from dstrain.training.engine.module import TrainModule
from dstrain.verify.model import ShrunkModel, examples_of
from dstrain.verify.result import CheckResult, difference, judge
from dstrain.verify.rows import PADDED, build_exact_model, exact_limit, list_rows, single_batches

COEFFICIENT = 0.01


def check_router(shrunk: ShrunkModel) -> CheckResult:
    """The router's loss of a batch is that of the tokens of its rows, each of which is computed alone."""
    check = "router loss"
    text = shrunk.config.get_text_config()
    if not any(getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return CheckResult(check=check, state="skipped", reason="the model has no experts")
    changes: dict[str, Any] = {"model": {"router_aux_loss_coef": COEFFICIENT}}
    task: Any = shrunk.task(**changes, batch=PADDED)
    model: Any = build_exact_model(task)
    try:
        check_router_loss(model, COEFFICIENT)
    except RecipeError as error:
        return CheckResult(check=check, state="refused", reason=error.faults[0].problem)
    expected = _loss_of_single_rows(model, task)
    limit, precision = exact_limit(model, next(single_batches(task, list_rows(task))))
    packed: Any = shrunk.task(**changes)
    figures = []
    for form in (task, packed):
        module = TrainModule(form, form.enable_packing(model))
        batch = form.collate(examples_of(form))
        _, metrics = module(batch)
        total, weight = metrics[METRIC]
        figures.append(difference(torch.as_tensor(float(total) / float(weight)), expected))
    problem = "the router's loss of a batch is not that of its tokens: padding or other sequences are counted"
    return judge(check, max(figures), limit, problem, f"{precision}; padded" + " and packed" * packed.packing.is_packed)


def _loss_of_single_rows(model: Any, task: Any) -> torch.Tensor:
    """Return the loss by transformers' function, from the router's logits of each row alone."""
    function, counts = find_router_loss(model)
    by_layer: list[list[torch.Tensor]] = []
    for batch in single_batches(task, list_rows(task)):
        with torch.no_grad():
            output = model(input_ids=batch.tensors["input_ids"], **batch.vision, output_router_logits=True)
        by_layer.append([logits.reshape(-1, logits.shape[-1]) for logits in output.router_logits])
    logits = tuple(torch.cat(layers) for layers in zip(*by_layer, strict=True))
    loss: torch.Tensor = function(logits, *counts, None)
    return loss
