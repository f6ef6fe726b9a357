"""Adapters: what of them is trained is decided once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.models.adapters import adapters_disabled
from dstrain.tasks import find_task, make_task
from dstrain.train.build_model import build_train_module
from dstrain.train.engine.module import TrainModule


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))


def objective(task: str, folder: Path, **lora: Any) -> TrainModule:
    """A tiny policy whose first layer's adapters are frozen; its reference is the model without adapters."""
    values = find_task(task).tiny(folder)
    values["model"] |= {"lora": {"rank": 2, **lora}, "freeze": ["*.layers.0"]}
    return build_train_module(make_task(RunConfig.model_validate(values)))


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("task", ["dpo", "kto"])
@pytest.mark.parametrize("dora", [False, True])
def test_asking_the_reference_trains_no_frozen_adapter(task: str, dora: bool, tmp_path: Path) -> None:
    made: Any = objective(task, tmp_path, dora=dora)
    before, names = trained(made.model), set(made.stored_model.shapes())
    assert before == made.trainable_names
    assert before
    assert not any(".layers.0." in name for name in before)
    batch = made.task.collate([made.task.examples("train")[index] for index in range(2)])
    made.train()
    made(batch, only="stats" if made.task.loss_inputs.step_stats is not None else None)
    assert trained(made.model) == before
    assert set(made.stored_model.shapes()) == names


def test_the_model_answers_without_its_adapters_inside(tmp_path: Path) -> None:
    made: Any = objective("dpo", tmp_path)
    ids = torch.arange(8)[None]
    with torch.no_grad():
        plain = made.model.get_base_model()(input_ids=ids).logits
        for name, parameter in made.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
        with adapters_disabled(made.model):
            assert torch.equal(made.model(input_ids=ids).logits, plain)
        assert not torch.equal(made.model(input_ids=ids).logits, plain)
