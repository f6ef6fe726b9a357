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
MASTER, STATES = "bf16_master_weights_and_grads", "bf16_optimizer_states"

CLASHES: dict[str, tuple[dict[str, Any], str]] = {
    "parameters are offloaded at stage 3 alone": (
        zero(2, offload_param=HOST),
        r"offload_param needs stage 3, and the stage is 2",
    ),
    "an optimizer is offloaded from stage 1 on": (
        zero(0, offload_optimizer=HOST),
        r"offload_optimizer needs stage 1, 2 or 3, and the stage is 0",
    ),
    "states on a disk below stage 3": (
        zero(2, offload_optimizer={"device": "nvme"}),
        r"at stage 2 DeepSpeed keeps the optimizer in host memory although device is nvme",
    ),
    "a share of an offloaded optimizer": (
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        r"ratio needs stage 3, and the stage is 2",
    ),
    "a folder without a disk": (
        zero(3, offload_param={"device": "cpu", "nvme_path": "/fast"}),
        r"a path is given, but device is not nvme",
    ),
    "both 16-bit types": (
        {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
        r"fp16 and bf16 are both enabled",
    ),
    "16-bit master weights at stage 0": (
        {"bf16": {"enabled": True, MASTER: True, STATES: True}},
        rf"{MASTER} needs stage 1, 2 or 3",
    ),
    "16-bit states without 16-bit masters": (
        {"bf16": {"enabled": True, STATES: True}, **zero(2)},
        rf"{STATES} needs {MASTER}",
    ),
    "16-bit states of an offloaded optimizer": (
        {"bf16": {"enabled": True, MASTER: True, STATES: True}, **zero(2, offload_optimizer=HOST)},
        rf"{STATES} is not supported by the CPU Adam",
    ),
    "16-bit masters without 16-bit states": (
        {"bf16": {"enabled": True, MASTER: True}, **zero(2)},
        rf"{MASTER} needs {STATES}, or the optimizer to be offloaded",
    ),
    "fp16 masters on the GPU": (
        {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}, **zero(2)},
        r"needs the optimizer to be offloaded",
    ),
    "scaling before a scattered reduction": (
        {"prescale_gradients": True, **zero(2)},
        r"stage 2 with reduce_scatter cannot scale beforehand",
    ),
    "division before a scattered reduction": (
        {"gradient_predivide_factor": 2.0, **zero(2)},
        r"stage 2 with reduce_scatter cannot divide beforehand",
    ),
    "an odd bucket": (zero(2, allgather_bucket_size=7), r"allgather_bucket_size 7 is odd"),
    "quantized gradients without their reduction": (
        zero(3, zero_quantized_gradients=True, reduce_scatter=False),
        r"zero_quantized_gradients needs reduce_scatter",
    ),
}


@pytest.mark.parametrize("case", CLASHES)
def test_keys_that_exclude_each_other_are_refused(case: str, tmp_path: Path) -> None:
    block, wanted = CLASHES[case]
    assert wanted.replace("\\", "") in refusal(tmp_path, block)


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
