"""Keys that contradict each other are refused, and values that mean nothing, each with its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.config import RunConfig, read_recipe, resolve_batch
from dstrain.config.resolve import BatchPlan
from dstrain.config.schema import BatchConfig
from dstrain.errors import RecipeError


def refusal(folder: Path, text: str, *sets: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, sets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("{precision: fp32, model: {dtype: bfloat16}}", "is bfloat16 while precision is fp32"),
        ("{precision: bf16, model: {dtype: float16}}", "is float16 while precision is bf16"),
        ("{batch: {prefix_sharing: true, packing: false}}", "is true while batch.packing is false"),
        ("{optim: {name: sgd, betas: [0.8, 0.9]}}", "optim.betas: has no effect with optim.name sgd"),
        ("{optim: {name: lion, eps: 1.0e-6}}", "optim.eps: has no effect with optim.name lion"),
        ("{model: {gradient_checkpointing: 1.5}}", "must be true, false, or the share of the layers"),
    ],
)
def test_a_contradiction_is_refused(override: str, wanted: str, tmp_path: Path) -> None:
    assert wanted in refusal(tmp_path, "{task: rm, " + override[1:])


def test_a_key_of_a_merged_block_is_named_though_it_has_no_line(tmp_path: Path) -> None:
    text = "task: rm\nmodel:\n  lora: &a {rank: 8, rnak: 4}\noptim:\n  lr: 1.0\n"
    assert "rnak" in refusal(tmp_path, text)
    assert "wieght" in refusal(tmp_path, "task: rm\ndata:\n  train:\n    - <<: {path: a, wieght: 2}\n")


def test_a_variable_is_named_or_given_a_value_that_is_no_secret() -> None:
    config = RunConfig.model_validate({"launch": {"env": ["API_KEY", "NCCL_DEBUG=INFO"]}})
    assert config.launch.env == ["API_KEY", "NCCL_DEBUG=INFO"]


@pytest.mark.parametrize(
    ("block", "wanted"),
    [
        ("{path: x, TokenizerConfig: 1}", r"model.TokenizerConfig: no such key; did you mean 'tokenizer'?"),
        ("{path: x, tokenizer: {vocab_size: 9, TokenizerConfig: 1}}", r"model.tokenizer.TokenizerConfig: no such key"),
    ],
)
def test_an_unknown_key_with_the_name_of_a_class_is_named(block: str, wanted: str, tmp_path: Path) -> None:
    text = f"task: rm\nsteps: 2\ndata: {{train: y}}\nmodel: {block}\n"
    assert f"recipe.yaml:4 {wanted}" in refusal(tmp_path, text)


def test_a_folder_is_not_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"cannot be read \(is a folder\)"):
        read_recipe(tmp_path, [])


def test_a_preset_that_fixes_the_micro_batch_leaves_nothing_to_shrink() -> None:
    with pytest.raises(RecipeError, match=r"is shrink, but the DeepSpeed JSON fixes the micro-batch"):
        resolve_batch(BatchConfig(total=8, on_oom="shrink"), 1, 2, None)


def test_a_batch_of_tokens_is_halved_and_written_back() -> None:
    plan = BatchPlan(total=8, micro=8, accumulate=None, tokens=512)
    assert plan.generation_micro == min(8, 8)
    half = plan.half(1)
    assert half == BatchPlan(total=8, micro=8, accumulate=None, tokens=256)
    assert BatchPlan(total=8, micro=4, accumulate=None, tokens=512).half(1) == BatchPlan(8, 2, None, 256)
    assert BatchPlan(total=8, micro=8, accumulate=None, tokens=1).half(1) is None
    assert BatchPlan(total=8, micro=4, accumulate=2).half(1) == BatchPlan(8, 2, 4)
    assert BatchPlan(total=8, micro=1, accumulate=8).half(1) is None
    assert half is not None
    assert half.ds_accumulate == 2
    assert BatchPlan(total=8, micro=8, accumulate=1).ds_accumulate == 1
    sizes = BatchPlan(total=8, micro=4, accumulate=2).to_config(BatchConfig(total=8))
    assert (sizes.total, sizes.micro, sizes.accumulate) == (8, 4, None)
    written = half.to_config(BatchConfig(total=8, tokens_per_micro=512))
    assert (written.total, written.micro, written.tokens_per_micro) == (8, None, 256)


def test_what_a_made_task_fills_in_is_missing_before() -> None:
    config = RunConfig.model_validate({"task": "rm", "model": {"attn_implementation": "sdpa"}, "data": {"train": []}})
    with pytest.raises(ValueError, match=r"optim\.lr is not set"):
        config.optim.peak_lr  # noqa: B018
