"""What is refused once precision, preset and recipe stand together."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain.config import BatchPlan, RunConfig, read_recipe, resolve_batch
from dstrain.config.schema import BatchConfig
from dstrain.ds_config import Device, batch_warnings, resolve_ds_config
from dstrain.errors import RecipeError
from dstrain.preset import read_preset

CPU = Device("cpu", True)


def resolved(dtype: str | None, precision: str, device: Device = CPU) -> dict[str, Any]:
    recipe = RunConfig.model_validate({"task": "rm", "model": {"dtype": dtype}, "precision": precision})
    return resolve_ds_config(recipe, read_preset("zero0"), BatchPlan(4, 4, 1), 1, device, Path("/tmp/run"))


def test_inputs_of_layers_go_to_the_host_only_where_layers_are_recomputed(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text('{"activation_checkpointing": {"cpu_checkpointing": true}}')
    preset, one = read_preset(str(path)), BatchPlan(4, 4, 1)
    for on in (True, False):
        recipe = RunConfig.model_validate({"task": "rm", "model": {"gradient_checkpointing": on}})
        if on:
            assert resolve_ds_config(recipe, preset, one, 1, CPU, tmp_path)["activation_checkpointing"]
            continue
        with pytest.raises(
            RecipeError, match=r"^model\.gradient_checkpointing: is false, .* or remove cpu_checkpointing"
        ):
            resolve_ds_config(recipe, preset, one, 1, CPU, tmp_path)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("precision", ["auto", "fp32"])
def test_fp32_needs_weights_in_fp32(dtype: str, precision: str) -> None:
    """`auto` is fp32 on a CPU: a step at 1e-5 would be lost in a weight of 16 bits."""
    with pytest.raises(
        RecipeError, match=rf"^model\.dtype: is {dtype} while precision is fp32, .* leave model\.dtype out"
    ):
        resolved(dtype, precision)


def test_the_recipe_alone_says_so_where_it_names_both(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text("task: rm\nmodel: {dtype: bfloat16}\nprecision: fp32\n")
    with pytest.raises(RecipeError, match=r"recipe\.yaml:2 model\.dtype: is bfloat16 while precision is fp32"):
        read_recipe(path)


def test_what_the_run_computes_in_may_be_loaded() -> None:
    assert resolved("bfloat16", "bf16")["bf16"]["enabled"]
    assert resolved("bfloat16", "auto", Device("cuda", True))["bf16"]["enabled"]
    assert not resolved("float32", "auto")["bf16"]["enabled"]
    with pytest.raises(RecipeError, match="is float16 while precision is bf16"):
        resolved("float16", "auto", Device("cuda", True))


@pytest.mark.parametrize(
    ("total", "micro", "processes", "told"),
    [(16, 8, 8, (16, 2, 1)), (6, 2, 2, (None, 2, 2)), (16, 4, 2, (16, 4, 2)), (4, 8, 8, (None, 1, 1))],
)
def test_deepspeed_is_told_the_batch_that_is_trained(
    total: int, micro: int, processes: int, told: tuple[int | None, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It asserts that train_batch_size is the product: a total that does not divide evenly is left out."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config as of_deepspeed

    group = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda: processes)
    monkeypatch.setattr(of_deepspeed, "dist", group)
    batch = resolve_batch(BatchConfig(total=total, micro=micro), processes)
    recipe = RunConfig.model_validate({"task": "rm"})
    made = resolve_ds_config(recipe, read_preset("zero2"), batch, processes, CPU, Path("/tmp/run"))
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert tuple(made.get(name) for name in names) == told
    assert of_deepspeed.DeepSpeedConfig(made).train_batch_size == told[1] * told[2] * processes


def test_a_micro_that_no_step_reaches_is_warned_of() -> None:
    words = "batch.micro is 8, but a step of 16 samples on 8 processes takes at most 2 in one forward pass; raise"
    assert [line.startswith(words) for line in batch_warnings(BatchPlan(16, 8, 1), 8)] == [True]
    assert not batch_warnings(BatchPlan(16, 8, 1), 2)
    assert not batch_warnings(BatchPlan(10, 6, 2), 1), "5 and 5 is how two passes share them"
