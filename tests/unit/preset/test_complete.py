"""A preset that does not fit precision, device, optimizer or number of processes is refused before DeepSpeed starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import PresetError
from dstrain.preset import Device, RunSettings, complete_preset, read_preset, resolve_precision
from tests.unit.preset.presets import write, zero


def settings(**more: Any) -> RunSettings:
    return RunSettings(**{"precision": "bf16", "micro": 2, "accumulate": 4, "world_size": 1, "clip": 1.0, **more})


def test_a_recipe_in_16_bits_contradicts_a_json_that_disables_them(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"fp16": {"enabled": False}, "bf16": {"enabled": False}})))
    with pytest.raises(PresetError, match=r"precision: bf16, but this file disables fp16 and bf16"):
        resolve_precision(preset, "bf16", Device("cuda", True))


def test_quantized_collectives_need_a_gpu_and_their_groups_divide_the_processes() -> None:
    with pytest.raises(PresetError) as caught:
        complete_preset(read_preset("zero3_zeropp"), settings=settings(device_kind="cpu", world_size=12))
    assert "zero_quantized_weights: DeepSpeed's quantized collectives need a GPU" in str(caught.value)
    assert "zero_hpz_partition_size: is 8, which does not divide the 12 processes" in str(caught.value)


def test_muon_takes_no_scattered_gradients_at_stage_3(tmp_path: Path) -> None:
    full = complete_preset(read_preset("zero3"), settings=settings(uses_muon=True))
    assert full["zero_optimization"]["reduce_scatter"] is False
    preset = read_preset(str(write(tmp_path, zero(3, reduce_scatter=True))))
    with pytest.raises(PresetError, match=r"reduce_scatter: DeepSpeed's Muon needs complete gradients at stage 3"):
        complete_preset(preset, settings=settings(uses_muon=True))


def test_muon_takes_no_sums_of_another_precision_at_stage_2(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"data_types": {"grad_accum_dtype": "fp32"}, **zero(2)})))
    with pytest.raises(PresetError, match=r"with gradients summed in fp32, DeepSpeed's Muon computes a wrong update"):
        complete_preset(preset, settings=settings(uses_muon=True))


def test_at_stage_1_sums_are_also_sent_in_fp32() -> None:
    full = complete_preset(read_preset("zero1"), settings=settings())
    assert full["communication_data_type"] == "fp32"
