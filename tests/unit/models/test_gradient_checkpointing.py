"""Recomputed layers: a share of them, and their inputs in host memory; gradients do not change."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.errors import RecipeError
from dstrain.models.gradient_checkpointing import (
    choose_layers,
    enable_gradient_checkpointing,
    offload_activation_checkpoints,
)
from dstrain.tasks import make_task
from dstrain.training.build_model import build_train_module
from tests.tiny import tiny_recipe

LAYERS, WIDTH = 2, 32


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what goes to host memory; each comes back as a copy."""
    shapes: list[tuple[int, ...]] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(lambda tensor: shapes.append(tuple(tensor.shape)) or tensor.clone(), lambda kept: kept)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recorded)
    return shapes


def gradients(folder: Path, on_host: bool, model: dict[str, Any]) -> dict[str, torch.Tensor]:
    values = tiny_recipe("sft", folder)
    values["model"] |= model
    task = make_task(RunConfig.model_validate(values))
    objective = build_train_module(task)
    if on_host:
        assert offload_activation_checkpoints(objective.model, pin_memory=False) >= LAYERS
    objective.train()
    examples: Any = task.examples("train")
    total, _ = objective(make_batch(examples, task.collate, [0, 1, 2], 0))
    total.backward()
    return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("model", [{}, {"lora": {"rank": 2}}], ids=["full", "lora"])
def test_gradients_are_the_same_and_each_layers_input_goes_to_the_host(
    model: dict[str, Any], tmp_path: Path, saved: list[tuple[int, ...]]
) -> None:
    wanted = gradients(tmp_path, False, model)
    assert not saved
    found = gradients(tmp_path, True, model)
    assert found.keys() == wanted.keys()
    assert wanted
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    inputs = [shape for shape in saved if shape[-1:] == (WIDTH,)]
    assert len(inputs) == LAYERS, saved
    assert len({len(shape) for shape in inputs}) == 1
    assert all(shape in inputs or shape == (0,) for shape in saved), "only the inputs, and torch's empty stand-in"


def test_without_recomputation_there_is_nothing_to_keep(tmp_path: Path) -> None:
    with pytest.raises(
        RecipeError, match=r"activation_checkpointing\.cpu_checkpointing: the model checkpoints no layer"
    ):
        gradients(tmp_path, True, {"gradient_checkpointing": False})


def test_a_share_of_the_layers_is_recomputed_at_even_distances() -> None:
    assert choose_layers(4, 0.5) == [False, True, False, True]
    assert choose_layers(6, 1 / 3) == [False, False, True, False, False, True]
    assert choose_layers(3, 0.01) == [False, False, True]
    assert choose_layers(3, 1.0) == [True] * 3
    assert choose_layers(2, 0.0) == [False] * 2


def test_recomputing_a_share_of_the_layers_changes_no_gradient(tmp_path: Path, saved: list[tuple[int, ...]]) -> None:
    wanted = gradients(tmp_path, False, {"gradient_checkpointing": False})
    found = gradients(tmp_path, False, {"gradient_checkpointing": 0.5})
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    task = make_task(RunConfig.model_validate(tiny_recipe("sft", tmp_path) | {}))
    layers = build_train_module(task).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True] * LAYERS
    values = tiny_recipe("sft", tmp_path)
    values["model"]["gradient_checkpointing"] = 0.5
    layers = build_train_module(make_task(RunConfig.model_validate(values))).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [False, True]


def test_a_share_of_a_model_without_such_layers_is_refused() -> None:
    class Whole(torch.nn.Module):
        supports_gradient_checkpointing = True

        def gradient_checkpointing_enable(self, **_: Any) -> None: ...

    enable_gradient_checkpointing(Whole())  # type: ignore[arg-type]
    with pytest.raises(
        RecipeError, match=r"^model\.gradient_checkpointing: is 0\.5, but Whole does not .* true or false"
    ):
        enable_gradient_checkpointing(Whole(), 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, 1.5, -1, "half"])
def test_another_number_is_no_share(value: Any) -> None:
    with pytest.raises(ValueError, match=r"must be true, false, or the share of the layers|valid"):
        RunConfig.model_validate({"task": "rm", "model": {"gradient_checkpointing": value}})


@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["q_proj", "gate_proj"]}], ids=["full", "lora"])
def test_a_frozen_encoder_runs_once_and_keeps_nothing(tmp_path: Path, lora: dict[str, Any] | None) -> None:
    """transformers makes the outputs of every embedding require gradients, also the encoder's (modeling_utils.py,
    enable_input_require_grads): its layers would be recomputed, and gradients sent through them to nothing."""
    values = tiny_recipe("vlm", tmp_path)
    values["model"] |= {"gradient_checkpointing": True, "freeze": ["vision"], "lora": lora}
    task = make_task(RunConfig.model_validate(values))
    objective = build_train_module(task)
    calls: list[str] = []
    for name, module in objective.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.self_attn.register_forward_hook(lambda *_, kept=name: calls.append(kept))
    outputs: list[torch.Tensor] = []
    tower = next(module for name, module in objective.named_modules() if name.endswith("vision_tower"))
    tower.register_forward_hook(lambda module, inputs, output: outputs.append(output.last_hidden_state))
    examples: Any = task.examples("train")
    total, _ = objective.train()(make_batch(examples, task.collate, [0, 1, 2], 0))
    total.backward()
    times = Counter("vision" if "vision" in name else "language" for name in calls)
    assert times == {"vision": LAYERS, "language": 2 * LAYERS}
    assert len(outputs) == 1
    assert not any(output.requires_grad for output in outputs)
    if lora is None:
        assert objective.model.get_input_embeddings().weight.grad is not None
