"""Combinations of keys that DeepSpeed refuses late, or ignores, are refused at once, each with its fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import PresetError
from dstrain.preset import check_ds_config, convert_preset, read_preset, summarize_presets
from dstrain.preset.keys import find_key, find_value_problem
from tests.unit.preset.presets import refusal, write, zero

HOST = {"device": "cpu"}


def test_a_stage_3_key_at_its_neutral_value_is_accepted_at_stage_2(tmp_path: Path) -> None:
    neutral = {"zero_hpz_partition_size": 1, "zero_quantized_weights": False}
    preset = read_preset(str(write(tmp_path, zero(2, **neutral))))
    assert neutral.items() <= preset.block["zero_optimization"].items()
    assert "zero_hpz_partition_size" in refusal(tmp_path, zero(2, zero_hpz_partition_size=2))


def test_a_config_of_another_program_is_checked_like_a_preset(tmp_path: Path) -> None:
    good = zero(2)
    assert check_ds_config(tmp_path / "run.json", good) is good
    with pytest.raises(PresetError, match=r"run\.json zero_optimization\.offload_param"):
        check_ds_config(tmp_path / "run.json", zero(2, offload_param=HOST))


def test_auto_is_a_word_of_train_alone() -> None:
    with pytest.raises(PresetError, match=r"is decided by `dstrain train`, not by this command"):
        read_preset("auto")


def test_a_renamed_key_comes_back_in_a_block_that_its_removal_has_emptied(tmp_path: Path) -> None:
    adopted = convert_preset(write(tmp_path, {"zero_optimization": {"cpu_offload": True}}))
    assert '"offload_optimizer"' in adopted.json_text
    both = {"zero_optimization": {"stage": 2, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}
    messages = convert_preset(write(tmp_path, both)).messages
    assert any("cpu_offload true -> dropped, `offload_optimizer` is set already" in line for line in messages)


def test_every_preset_is_summarized() -> None:
    assert all(summarize_presets().values())


@pytest.mark.parametrize(
    ("path", "value", "problem"),
    [
        (("autotuning", "arg_mappings"), object(), None),
        (("communication_data_type",), None, None),
        (("expert_parallel", "load_balance_coeff"), "auto", None),
        (("torch_autocast", "lower_precision_safe_modules"), ["a", 1], "the list contains values that are not strings"),
        (("torch_autocast", "lower_precision_safe_modules"), ["a"], None),
    ],
)
def test_a_value_has_the_type_of_its_key(path: tuple[str, ...], value: Any, problem: str | None) -> None:
    spec = find_key(path)
    assert spec is not None
    found = find_value_problem(spec, value)
    assert (found and found[0]) == problem
