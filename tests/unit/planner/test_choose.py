"""ds_config: auto takes the fastest preset that fits, and solves the micro-batch."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from dstrain.config import RunConfig
from dstrain.errors import PresetError, RecipeError, UsageError
from dstrain.planner import choose
from dstrain.planner.choose import (
    MARGIN,
    PRESETS_BY_SPEED,
    Budget,
    Hardware,
    choose_preset,
    detect_hardware,
    suggest_fixes,
    suggest_model,
)
from dstrain.planner.memory import plan_memory
from dstrain.planner.shapes import read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import preset_names, read_preset
from tests.unit.planner.recipes import GIB, made_config
from tests.vocabulary import invoke

EIGHT = Cluster(gpus_per_node=8)
OPEN = {"batch": {"total": 64, "micro": None}}


def test_presets_that_auto_may_take_exist() -> None:
    assert {*PRESETS_BY_SPEED} <= {*preset_names()}


@pytest.mark.parametrize(("gib", "preset"), [(80, "zero1"), (24, "zero3"), (10, "zero3_offload")])
def test_less_memory_takes_a_slower_preset(gib: int, preset: str) -> None:
    config = made_config(batch={"total": 8, "micro": 1})
    choice = choose_preset(config, EIGHT, Budget(gpu_bytes=gib * GIB, host_bytes=512 * GIB))
    assert choice.preset == preset
    assert choice.plan.gpu_bytes <= gib * GIB * (1 - MARGIN)
    for faster in PRESETS_BY_SPEED[1 : PRESETS_BY_SPEED.index(preset)]:
        assert plan_memory(config, read_preset(faster), EIGHT).gpu_bytes > gib * GIB * (1 - MARGIN)


def test_the_micro_batch_is_the_largest_that_fits_and_the_total_stays() -> None:
    config = made_config(shape="llama-3.2-1b", **OPEN)
    budget = Budget(gpu_bytes=24 * GIB)
    choice = choose_preset(config, EIGHT, budget)
    assert choice.micro is not None
    assert choice.plan.batch.total == 64
    assert choice.micro * (choice.plan.batch.accumulate or 0) * 8 >= 64
    assert f"batch.micro {choice.micro}" in choice.reason
    small = choose_preset(config, EIGHT, Budget(gpu_bytes=12 * GIB))
    assert small.micro is not None
    assert small.micro <= choice.micro


def test_a_given_micro_batch_is_kept() -> None:
    assert choose_preset(made_config(batch={"total": 64, "micro": 1}), EIGHT, Budget(gpu_bytes=80 * GIB)).micro is None


def test_a_full_host_rules_out_offloading() -> None:
    config = made_config(batch={"total": 8, "micro": 1})
    with pytest.raises(PresetError, match=r"ds_config auto: nothing fits: .*; nearest fix: "):
        choose_preset(config, Cluster(gpus_per_node=1), Budget(gpu_bytes=24 * GIB, host_bytes=8 * GIB))


@pytest.mark.parametrize(
    ("gpu_gib", "host_gib", "short_of"),
    [(24, 8, "of a host where 7.2 GiB may be used"), (1, 512, "of a GPU where 921.6 MiB may be used")],
)
def test_the_error_names_the_memory_that_is_short(gpu_gib: int, host_gib: int, short_of: str) -> None:
    config = made_config(batch={"total": 8, "micro": 1})
    with pytest.raises(PresetError) as refusal:
        choose_preset(config, Cluster(gpus_per_node=1), Budget(gpu_bytes=gpu_gib * GIB, host_bytes=host_gib * GIB))
    assert short_of in str(refusal.value)


def test_what_does_not_fit_names_the_nearest_fix() -> None:
    config = made_config(model={"gradient_checkpointing": False}, batch={"total": 8, "micro": 8}, shape="llama-3.2-1b")
    with pytest.raises(PresetError, match=r"nearest fix: batch\.micro 8 -> \d"):
        choose_preset(config, Cluster(gpus_per_node=1), Budget(gpu_bytes=9 * GIB, host_bytes=512 * GIB))


def test_adafactor_and_one_process_in_fp32_take_stage_0() -> None:
    adafactor = made_config(optim={"name": "adafactor"}, shape="llama-3.2-1b")
    assert choose_preset(adafactor, EIGHT, Budget(gpu_bytes=80 * GIB)).preset == "zero0"
    alone = made_config(precision="fp32", shape="qwen2.5-0.5b", batch={"total": 4, "micro": 1})
    assert choose_preset(alone, Cluster(), Budget(gpu_bytes=40 * GIB)).preset == "zero0"


def test_fixes_save_what_they_say_and_the_cheapest_are_first() -> None:
    config = made_config("dpo", model={"gradient_checkpointing": False}, batch={"total": 64, "micro": 8})
    preset = read_preset("zero2")
    fixes = suggest_fixes(config, preset, EIGHT, read_shape(config))
    before = plan_memory(config, preset, EIGHT).gpu_bytes
    assert [*fixes[0].changes] == ["options.precompute_ref_log_probs"]
    assert [*fixes[1].changes] == ["batch.micro"]
    assert fixes[1].describe().startswith("batch.micro 8 -> 4 saves ")
    changed = config.model_copy(update={"batch": config.batch.model_copy(update={"micro": 4})})
    assert fixes[1].saved_bytes == before - plan_memory(changed, preset, EIGHT).gpu_bytes
    assert all(fix.saved_bytes > 0 for fix in fixes)
    assert (
        next(fix for fix in fixes if "data.max_length" in fix.changes).describe().endswith("(changes what is learnt)")
    )


def test_a_step_that_is_not_enough_is_replaced_by_a_smaller_one() -> None:
    config = made_config(model={"gradient_checkpointing": False}, batch={"total": 64, "micro": 8}, shape="llama-3.2-1b")
    preset = read_preset("zero2")
    plan = plan_memory(config.model_copy(update={"batch": config.batch.model_copy(update={"micro": 2})}), preset, EIGHT)
    (fix, *_) = suggest_fixes(config, preset, EIGHT, plan.shape, Budget(gpu_bytes=plan.gpu_bytes))
    assert fix.changes == {"batch.micro": 2}
    assert fix.is_enough


def test_weights_of_4_bits_are_planned_in_shards_and_those_of_8_bits_are_not() -> None:
    """A run refuses 8 bits at ZeRO 3, so `auto` must not choose it where it alone would fit."""
    of = lambda kind: made_config(  # noqa: E731
        model={"quantize": kind, "lora": {"rank": 8}}, batch={"total": 8, "micro": 1}
    )
    one, budget = Cluster(gpus_per_node=1), Budget(gpu_bytes=5 * GIB, host_bytes=512 * GIB)
    with pytest.raises(RecipeError, match=r"model\.quantize: zero3 is of ZeRO stage 3, which shards weights of 4 bits"):
        plan_memory(of("int8"), read_preset("zero3"), one)
    with pytest.raises(PresetError, match=r"ds_config auto: nothing fits: "):
        choose_preset(of("int8"), one, budget)
    assert choose_preset(of("nf4"), one, budget).preset == "zero3_offload"


def test_a_preset_that_changes_codes_is_refused() -> None:
    config = made_config(model={"quantize": "nf4", "lora": {"rank": 8}}, batch={"total": 8, "micro": 1})
    message = (
        r"model\.quantize: is nf4, but zero3_zeropp has zero_optimization\.zero_quantized_weights: .*changes 4-bit"
    )
    with pytest.raises(RecipeError, match=message):
        plan_memory(config, read_preset("zero3_zeropp"), EIGHT)


def test_a_70b_fits_two_gpus_of_40_gib_and_four_of_24_gib() -> None:
    """docs/quantization.md has these sizes; PEFT publishes 36.6 GB per GPU for 2 x 40 GB."""
    config = made_config(
        shape="llama-3.1-70b", model={"quantize": "nf4", "lora": {"rank": 16}}, optim={"name": "adamw_8bit"},
        batch={"total": 16, "micro": 1}, data={"max_length": 2048},
    )  # fmt: skip
    for gpus_per_node, gib in ((2, 40), (4, 24)):
        cluster = Cluster(gpus_per_node=gpus_per_node)
        assert choose_preset(config, cluster, Budget(gpu_bytes=gib * GIB, host_bytes=512 * GIB)).preset == "zero3"


def test_muon_with_a_clip_takes_stage_0() -> None:
    config = made_config(optim={"name": "muon", "clip": 1.0}, shape="qwen2.5-0.5b")
    assert choose_preset(config, EIGHT, Budget(gpu_bytes=80 * GIB)).preset == "zero0"


def test_a_preset_that_cannot_run_is_not_called_too_large() -> None:
    config = made_config(model={"quantize": "int8", "lora": {"rank": 512}}, batch={"total": 8, "micro": 1})
    one, host = Cluster(gpus_per_node=1), 512 * GIB
    sizes = {name: plan_memory(config, read_preset(name), one).gpu_bytes for name in ("zero2", "zero2_offload")}
    budget = Budget(gpu_bytes=int(sum(sizes.values()) / 2 / (1 - MARGIN)), host_bytes=host)
    choice = choose_preset(config, one, budget)
    assert choice.preset == "zero2_offload"
    assert choice.reason.endswith("; zero1, zero2 would need more"), "zero3 does not run weights of 8 bits"


# A starter recipe is written for the machine: model, adapters, preset, precision, workers.


def gpus(count: int, gib: int, **more: Any) -> Hardware:
    return Hardware(gpus=count, gpu_bytes=gib * GIB, **{"bf16": True, "cores": 16, **more})


@pytest.mark.parametrize(
    ("gib", "count", "model", "use_lora"),
    [
        (8, 1, "Qwen/Qwen3-1.7B", True),
        (24, 1, "Qwen/Qwen3-8B", True),
        (80, 1, "Qwen/Qwen3-32B", True),
        (80, 8, "Qwen/Qwen3-32B", False),
        (2, 1, "Qwen/Qwen3-0.6B", True),
    ],
)
def test_the_largest_model_that_fits_is_suggested(gib: int, count: int, model: str, use_lora: bool) -> None:
    assert suggest_model("sft", gpus(count, gib)) == (model, use_lora)


def test_tasks_with_images_get_a_vision_language_model() -> None:
    assert suggest_model("vlm", gpus(1, 24))[0] == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_a_task_with_its_own_model_gets_none() -> None:
    assert suggest_model("protein", gpus(1, 24)) == (None, False)
    assert yaml.safe_load(invoke("init", "protein", "--gpu-memory", "24GiB").output)["model"]["path"] is None


def test_what_the_planner_does_not_know_gets_the_smallest() -> None:
    assert suggest_model("temporal", gpus(1, 80)) == ("Qwen/Qwen3-0.6B", False)


def test_without_a_gpu_the_smallest_is_suggested() -> None:
    hardware = Hardware(gpus=0, gpu_bytes=None, bf16=True, cores=2)
    assert suggest_model("rm", hardware) == ("Qwen/Qwen3-0.6B", False)


def test_a_machine_is_described_in_words() -> None:
    assert gpus(1, 24).describe() == "1 GPU with 24.0 GiB free (bf16), 16 cores"
    assert gpus(2, 11, bf16=False).describe() == "2 GPUs with 11.0 GiB free each (no bf16), 16 cores"
    assert Hardware(gpus=0, gpu_bytes=None, bf16=True, cores=2).describe() == "a CPU with 2 cores"


def test_precision_and_workers_follow_from_the_devices() -> None:
    assert [gpus(1, 24).precision, gpus(1, 24, bf16=False).precision] == ["bf16", "fp16"]
    assert Hardware(gpus=0, gpu_bytes=None, bf16=True, cores=2).precision == "fp32"
    assert [gpus(8, 80).loader_workers, gpus(1, 80).loader_workers, gpus(8, 80, cores=4).loader_workers] == [2, 4, 1]


def test_this_machine_is_read_from_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "visible_gpus", lambda env: 2)
    monkeypatch.setattr(choose, "detect_gpu_bytes", lambda env: ([24 * GIB, 20 * GIB], "pynvml"))
    monkeypatch.setattr(choose, "gpus_support_bf16", lambda: False)
    found = detect_hardware()
    assert (found.gpus, found.gpu_bytes, found.bf16) == (2, 20 * GIB, False)


def test_another_machine_is_given_by_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert detect_hardware(8, "80GiB").gpus == 8
    assert detect_hardware(None, "80GiB").gpus == 1
    assert detect_hardware().gpus == 0
    with pytest.raises(UsageError, match=r"--gpu-memory: 'much' is not a size of memory"):
        detect_hardware(1, "much")


@pytest.mark.parametrize("task", ["sft", "dpo", "vlm"])
def test_a_recipe_for_gpus_leaves_the_preset_and_the_micro_batch_to_auto(task: str) -> None:
    text = invoke("init", task, "--gpus", "6", "--gpu-memory", "24GiB").output
    config = RunConfig.model_validate(yaml.safe_load(text))
    assert (config.ds_config, config.batch.micro, config.batch.total) == ("auto", None, 48)
    assert config.model.lora is not None
    assert "on 6 GPUs with 24.0 GiB free each" in text.splitlines()[0]
    assert re.search(r"^precision: .* Here: (bf16|fp16)\.$", text, re.MULTILINE)
    assert all("#" in line for line in text.splitlines() if line.startswith("  ")), "a comment beside every key"


@pytest.mark.slow
def test_the_nearest_fix_counts_the_images_that_were_asked_for() -> None:
    sets = ("data.max_length=16384", "data.train=t.jsonl", "batch={total: 8}", "ds_config=auto", "model.lora={rank: 8}")
    words = [word for one in sets for word in ("--set", one)]
    machine = ("--model-shape", "qwen2.5-vl-7b", "--gpu-memory", "6GiB", "--host-memory", "512GiB")
    saved = list[str]()
    for images in (1, 8):
        output = invoke("plan", "--task", "docqa", *words, *machine, "--images", images).output
        saved += re.findall(r"nearest fix: data.max_length 16384 -> 8192 saves ([\d.]+) GiB", output)
    few, many = map(float, saved)
    assert many > 2 * few
