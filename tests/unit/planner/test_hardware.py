"""A starter recipe is written for the machine: model, adapters, preset, precision, workers."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from dstrain.config import RunConfig
from dstrain.errors import UsageError
from dstrain.planner import choose
from dstrain.planner.choose import Hardware, detect_hardware, suggest_model
from tests.vocabulary import invoke

GIB = 2**30


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
    found = suggest_model("sft", gpus(count, gib))
    assert found is not None
    assert (found.name, found.use_lora) == (model, use_lora)


def test_tasks_with_images_get_a_vision_language_model() -> None:
    found = suggest_model("vlm", gpus(1, 24))
    assert found is not None
    assert found.name == "Qwen/Qwen2.5-VL-7B-Instruct"


def test_a_task_with_its_own_model_gets_none() -> None:
    assert suggest_model("protein", gpus(1, 24)) is None
    assert yaml.safe_load(invoke("init", "protein", "--gpu-memory", "24GiB").output)["model"]["path"] is None


def test_what_the_planner_does_not_know_gets_the_smallest() -> None:
    found = suggest_model("temporal", gpus(1, 80))
    assert found is not None
    assert (found.name, found.use_lora) == ("Qwen/Qwen3-0.6B", False)


def test_without_a_gpu_the_smallest_is_suggested() -> None:
    found = suggest_model("rm", Hardware(gpus=0, gpu_bytes=None, bf16=True, cores=2))
    assert found is not None
    assert (found.name, found.use_lora) == ("Qwen/Qwen3-0.6B", False)


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
