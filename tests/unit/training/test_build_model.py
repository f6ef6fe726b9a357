"""What a model's parts say of how a run with it can be split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.commands.trained_model import SavedModel
from dstrain.config import RunConfig
from dstrain.ds_config import Device
from dstrain.errors import RecipeError
from dstrain.tasks import make_task
from dstrain.training import build_model
from dstrain.training.build_model import batch_norm_warnings, check_attention_compiler
from tests.tiny import tiny_recipe


def test_batch_normalization_is_warned_of() -> None:
    assert not batch_norm_warnings(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2)))
    [line] = batch_norm_warnings(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    assert line.startswith("the model has batch normalization (1), which takes means over each micro-batch")
    two = torch.nn.ModuleDict({"a": torch.nn.BatchNorm2d(2), "b": torch.nn.SyncBatchNorm(2)})
    assert "(a and more)" in batch_norm_warnings(two)[0]


NO_COMPILER = {"CC": "/nonexistent/gcc"}


def check_compiler(folder: Path, width: int, dtype_name: str | None, capability: tuple[int, int], **batch: Any) -> None:
    values = tiny_recipe("sft", folder)
    model = values["model"] | {"config": values["model"]["config"] | {"head_dim": width}}
    config = RunConfig.model_validate(values | {"model": model, "batch": values["batch"] | batch})
    check_attention_compiler(make_task(config), dtype_name, capability, NO_COMPILER)


@pytest.mark.parametrize(("dtype_name", "capability"), [(None, (9, 0)), ("float16", (7, 5))])
def test_a_run_that_compiles_attention_needs_a_compiler(
    dtype_name: str | None, capability: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_model, "is_triton_ready", lambda: False)
    with pytest.raises(RecipeError) as caught:
        check_compiler(tmp_path, 32, dtype_name, capability)
    text = str(caught.value)
    assert "batch.packing: attention of packed batches in float" in text
    assert "the compiler that CC names (/nonexistent/gcc)" in text
    assert text.endswith("(apt install gcc python3-dev), or set batch.packing: false")


def test_a_run_that_compiles_nothing_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_model, "is_triton_ready", lambda: False)
    check_compiler(tmp_path, 8, None, (9, 0))  # too narrow for FlexAttention
    check_compiler(tmp_path, 32, None, (9, 0), packing=False)


def test_what_was_compiled_before_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_model, "is_triton_ready", lambda: True)
    check_compiler(tmp_path, 32, None, (9, 0))


def test_evaluation_of_packed_batches_needs_a_compiler_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_model, "is_triton_ready", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    monkeypatch.setenv("CC", NO_COMPILER["CC"])
    values = tiny_recipe("sft", tmp_path)
    model = values["model"] | {"config": values["model"]["config"] | {"head_dim": 32}}
    task = make_task(RunConfig.model_validate(values | {"model": model}))
    saved = SavedModel(tmp_path, task)
    saved.check_forward(task, Device("cpu", True))
    with pytest.raises(RecipeError, match="compiled by Triton"):
        saved.check_forward(task, Device("cuda", False))
