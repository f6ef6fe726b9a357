"""Presets: what is refused, what is completed, what is adopted."""

from __future__ import annotations

import copy
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from dstrain.ds_config import Device, RunSettings, complete_preset, resolve_precision
from dstrain.errors import PresetError
from dstrain.preset import describe_preset, preset_names, read_preset
from tests.unit.preset.presets import write, zero

GPU, OLD_GPU, CPU = Device("cuda", bf16=True), Device("cuda", bf16=False), Device("cpu", bf16=True)
SETTINGS: dict[str, Any] = {
    "precision": "bf16",
    "micro": 2,
    "accumulate": 4,
    "world_size": 1,
    "clip": 1.0,
    "nvme_path": "/tmp/nvme",
}


@pytest.mark.parametrize("name", ["tensorboard", "csv_monitor", "hybrid_engine", "data_efficiency"])
def test_a_block_that_is_switched_off_does_no_harm(tmp_path: Path, name: str) -> None:
    assert read_preset(str(write(tmp_path, {name: {"enabled": False}}))).stage == 0


def test_values_that_dstrain_sets_anyway_may_be_written(tmp_path: Path) -> None:
    own = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_allreduce_op": "mean"}
    assert read_preset(str(write(tmp_path, own))).block == own


@pytest.mark.parametrize("name", preset_names())
def test_every_shipped_preset_reads_clean_and_speaks_of_memory_only(name: str) -> None:
    preset = read_preset(name)
    assert preset.name == name
    assert (preset.micro, preset.accumulate) == (None, None)
    assert preset.precision == next((word for word in ("bf16", "fp16") if word in name), None)
    assert name.startswith(f"zero{preset.stage}")
    assert "gather_16bit" not in json.dumps(preset.block)


def test_the_shipped_presets_go_from_no_sharding_to_all_of_it() -> None:
    names = preset_names()
    assert names == ["zero0", "zero1", "zero2", "zero2_bf16", "zero2_cpu_checkpointing", "zero2_fp16", "zero2_offload",
                     "zero3", "zero3_bf16", "zero3_hpz", "zero3_offload",
                     "zero3_partial_offload", "zero3_zeropp", "zero3_nvme"]  # fmt: skip
    offloaded = {name: (read_preset(name).offload_optimizer, read_preset(name).offload_param) for name in names}
    assert {name: devices for name, devices in offloaded.items() if any(devices)} == {
        "zero2_offload": ("cpu", None),
        "zero3_offload": ("cpu", "cpu"),
        "zero3_partial_offload": ("cpu", None),
        "zero3_nvme": ("nvme", "nvme"),
    }


def test_an_unknown_name_is_refused_with_a_hint() -> None:
    with pytest.raises(PresetError, match="did you mean 'zero2_offload'"):
        read_preset("zero2_ofload")


def test_a_path_without_a_file_is_refused() -> None:
    with pytest.raises(PresetError, match="there is no such file"):
        read_preset("nowhere/zero2.json")


@pytest.mark.parametrize("name", preset_names())
def test_every_key_of_a_shipped_preset_is_documented(name: str) -> None:
    text = describe_preset(name)
    assert text.startswith(f"{name}: ")
    assert "see DeepSpeed's documentation" not in text
    assert json.dumps(read_preset(name).block, indent=2) in text


@pytest.mark.parametrize(
    ("block", "spoken"),
    [
        ({}, None),
        ({"bf16": {"enabled": False}}, None),
        ({"fp16": {"loss_scale": 128}}, None),
        ({"bf16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}, **zero(1)}, "fp16"),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
    ],
)
def test_a_json_speaks_of_precision_only_where_it_decides_one(tmp_path: Path, block: Any, spoken: str | None) -> None:
    assert read_preset(str(write(tmp_path, block))).precision == spoken


@pytest.mark.parametrize(
    ("wanted", "device", "chosen"),
    [
        ("auto", GPU, "bf16"),
        ("auto", OLD_GPU, "fp16"),
        ("auto", CPU, "fp32"),
        ("bf16", CPU, "bf16"),
        ("fp32", GPU, "fp32"),
        ("fp16", GPU, "fp16"),
    ],
)
def test_precision_follows_the_recipe_and_then_the_device(wanted: str, device: Device, chosen: str) -> None:
    assert resolve_precision(read_preset("zero2"), wanted, device) == chosen


def test_a_json_that_speaks_wins_over_auto(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"fp16": {"enabled": True}, **zero(2)})))
    assert resolve_precision(preset, "auto", GPU) == "fp16"


def test_a_clash_of_precisions_names_both(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"bf16": {"enabled": True}})))
    with pytest.raises(PresetError, match=r"precision: fp16, but this file enables bf16"):
        resolve_precision(preset, "fp16", GPU)


def test_a_recipe_in_16_bits_contradicts_a_json_that_disables_them(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"fp16": {"enabled": False}, "bf16": {"enabled": False}})))
    with pytest.raises(PresetError, match=r"precision: bf16, but this file disables fp16 and bf16"):
        resolve_precision(preset, "bf16", GPU)


def test_bf16_is_refused_on_a_device_without_it() -> None:
    with pytest.raises(PresetError, match="this GPU does not support it"):
        resolve_precision(read_preset("zero2"), "bf16", OLD_GPU)


def test_completing_says_everything_and_changes_no_preset() -> None:
    preset = read_preset("zero3_nvme")
    before = copy.deepcopy(preset.block)
    full = complete_preset(preset, settings=RunSettings(**{**SETTINGS, "clip": 0.0, "world_size": 8}))
    assert preset.block == before
    assert full["train_batch_size"] == 2 * 4 * 8
    assert (full["train_micro_batch_size_per_gpu"], full["gradient_accumulation_steps"]) == (2, 4)
    assert full["gradient_clipping"] == 0.0
    assert (full["bf16"], full["fp16"]) == ({"enabled": True}, {"enabled": False})
    assert (full["zero_allow_untested_optimizer"], full["zero_force_ds_cpu_optimizer"]) == (True, False)
    assert full["steps_per_print"] > 10**9
    assert full["wall_clock_breakdown"] is False
    for name in ("offload_optimizer", "offload_param"):
        assert full["zero_optimization"][name]["nvme_path"] == "/tmp/nvme"


@pytest.mark.parametrize(
    ("name", "world_size", "overlaps"),
    [("zero1", 1, False), ("zero2", 1, False), ("zero2", 2, True), ("zero3", 1, True)],
)
def test_completing_lets_no_timer_and_no_overlap_of_nothing_wait_for_the_device(
    name: str, world_size: int, overlaps: bool
) -> None:
    full = complete_preset(read_preset(name), settings=RunSettings(**{**SETTINGS, "world_size": world_size}))
    assert full["timers"]["throughput"] == {"enabled": False}
    assert full["zero_optimization"]["overlap_comm"] is overlaps


def test_completing_keeps_what_the_json_says(tmp_path: Path) -> None:
    block = {
        "fp16": {"enabled": True, "loss_scale": 128},
        "aio": {"block_size": 1e6},
        "wall_clock_breakdown": True,
        **zero(3, offload_param={"device": "nvme", "nvme_path": "/fast"}),
    }
    preset = read_preset(str(write(tmp_path, block)))
    full = complete_preset(preset, settings=RunSettings(**{**SETTINGS, "precision": "fp16"}))
    assert full["fp16"] == {"enabled": True, "loss_scale": 128}
    assert repr(full["aio"]["block_size"]) == "1000000"
    assert full["wall_clock_breakdown"] is True
    assert full["zero_optimization"]["offload_param"]["nvme_path"] == "/fast"


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("zero0", {"precision": "fp16"}, "does not scale an fp16 loss"),
        ("zero2", {"precision": "fp16", "device_kind": "cpu"}, "fp16 needs a GPU"),
        ("zero3_nvme", {"nvme_path": None}, "needs a folder on a fast local disk"),
    ],
)
def test_a_run_that_cannot_be_had_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(PresetError, match=words):
        complete_preset(read_preset(name), settings=RunSettings(**{**SETTINGS, **change}))


def test_quantized_collectives_need_a_gpu_and_their_groups_divide_the_processes() -> None:
    with pytest.raises(PresetError) as caught:
        complete_preset(
            read_preset("zero3_zeropp"), settings=RunSettings(**SETTINGS | {"device_kind": "cpu", "world_size": 12})
        )
    assert "zero_quantized_weights: DeepSpeed's quantized collectives need a GPU" in str(caught.value)
    assert "zero_hpz_partition_size: is 8, which does not divide the 12 processes" in str(caught.value)


def test_groups_of_no_process_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 0}}')
    with pytest.raises(PresetError, match="zero_hpz_partition_size: is 0, which does not divide"):
        complete_preset(read_preset(str(file)), settings=RunSettings(**SETTINGS))


def test_stage_0_cannot_sum_in_another_precision(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, {"data_types": {"grad_accum_dtype": "fp32"}})))
    with pytest.raises(PresetError, match="stage 0 cannot sum gradients in fp32 while training in bf16"):
        complete_preset(preset, settings=RunSettings(**SETTINGS))
    complete_preset(preset, settings=RunSettings(**{**SETTINGS, "precision": "fp32"}))


@pytest.mark.parametrize("name", preset_names())
def test_bf16_micro_batches_are_summed_in_fp32(name: str) -> None:
    """But at stage 0, where DeepSpeed cannot, and where the preset keeps gradients in bf16 to save memory.

    At stage 1 it would cast the sum to bf16 again, to send it.
    """
    if "fp16" in name:
        return
    made = complete_preset(read_preset(name), settings=RunSettings(**SETTINGS))
    assert made.get("data_types", {}).get("grad_accum_dtype") == (None if name == "zero0" or "bf16" in name else "fp32")
    assert made.get("communication_data_type") == ("fp32" if name == "zero1" else None)


@pytest.mark.parametrize("change", [{"accumulate": 1}, {"precision": "fp32"}, {"uses_muon": True}])
def test_what_needs_no_sum_in_fp32_gets_none(change: dict[str, Any]) -> None:
    """One micro-batch, another precision; Muon, which would take another step at stage 2."""
    assert "data_types" not in complete_preset(read_preset("zero2"), settings=RunSettings(**{**SETTINGS, **change}))


@pytest.mark.parametrize(
    "given",
    [
        {"data_types": {"grad_accum_dtype": "bf16"}},
        {"communication_data_type": "bf16"},
        {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
    ],
)
def test_a_presets_own_word_on_sums_holds(tmp_path: Path, given: dict[str, Any]) -> None:
    preset = read_preset(str(write(tmp_path, zero(1) | given)))
    made = complete_preset(preset, settings=RunSettings(**SETTINGS))
    for key, value in given.items():
        assert made[key] == (made[key] | value if isinstance(value, dict) else value)
    assert (made.get("data_types", {}).get("grad_accum_dtype") == "fp32") == ("communication_data_type" in given)


def test_partial_offloading_needs_deepspeeds_own_adam(tmp_path: Path) -> None:
    preset = read_preset(str(write(tmp_path, zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}))))
    complete_preset(preset, settings=RunSettings(**SETTINGS))
    with pytest.raises(
        PresetError, match=r"offload_optimizer\.ratio: DeepSpeed supports this only with its own CPU Adam"
    ):
        complete_preset(preset, settings=RunSettings(**SETTINGS, uses_custom_optimizer=True))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_deepspeed_accepts_every_completed_preset(precision: Any) -> None:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("deepspeed is not installed")
    from deepspeed.runtime.config import DeepSpeedConfig

    for name in preset_names():
        if (precision == "fp16" and name == "zero0") or read_preset(name).precision not in (None, precision):
            continue
        full = complete_preset(
            read_preset(name), settings=RunSettings(**{**SETTINGS, "precision": precision, "clip": 0.0})
        )
        config = DeepSpeedConfig(full)
        assert config.zero_optimization_stage == read_preset(name).stage
        assert (config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps) == (2, 4)
        assert (config.gradient_clipping, config.zero_force_ds_cpu_optimizer) == (0.0, False)
        assert (config.bfloat16_config.enabled, config.float16_config.enabled) == (
            precision == "bf16",
            precision == "fp16",
        )
