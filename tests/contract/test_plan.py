"""`dstrain plan`, and `ds_config: auto` from the decision to a resumed run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from dstrain.commands import plan
from dstrain.errors import PresetError
from dstrain.preset import preset_names
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, write_recipe
from tests.workers import Workers

SFT_70B: dict[str, Any] = {
    "task": "sft",
    "model": {"path": "meta-llama/Llama-3.1-70B"},
    "data": {"train": "elsewhere/train.jsonl", "max_length": 4096},
    "batch": {"total": 512},
    "ds_config": "auto",
}


@pytest.fixture
def big(tmp_path: Path) -> str:
    return str(write_recipe(tmp_path, SFT_70B))


def plan_json(*words: Any) -> dict[str, Any]:
    result = invoke("plan", *words, "--json")
    assert result.exit_code == 0, result.output
    return dict(json.loads(result.output))


def test_every_preset_is_planned_with_every_line(big: str) -> None:
    found = plan_json(big, "--gpus", 8, "--nodes", 16, "--gpu-memory", "80GiB")
    assert [row["preset"] for row in found["presets"]] == preset_names()
    for row in found["presets"]:
        keys = {"name", "num_bytes", "place", "kind", "formula", "source", "when", "first", "last"}
        assert keys == row["lines"][0].keys()
        assert row["gpu_bytes"] > 0
    assert found["choice"]["preset"] == "zero3"
    assert {row["preset"]: row["fits"]["80.0 GiB"] for row in found["presets"]}["zero2"] is False


def test_operations_bytes_and_bound_are_told(big: str) -> None:
    words = (big, "--ds-config", "zero3", "--gpus", 8, "--nodes", 16, "--gpu-memory", "80GiB")
    found = plan_json(*words)
    roofline = found["roofline"]
    assert roofline["flops_per_token"] > 6 * 70e9
    assert roofline["bytes_per_token"]["liger"] < roofline["bytes_per_token"]["none"]
    assert [*roofline["bounds"]] == ["H100", "A100-SXM4-80GB", "RTX 4090", "T4"]
    assert roofline["bounds"]["T4"]["none"]["by"] in ("products", "memory")
    for row in found["presets"]:
        assert 0 < row["saved_bytes"]["liger"] <= row["saved_bytes"]["none"], "tiles keep the same"
    output = invoke("plan", *words).output
    assert "kept of the decoder for the backward pass" in output
    assert "per token, computed: " in output
    assert "most tokens/s of a process by published peaks" in output


def test_the_bound_is_that_of_the_gpu_of_this_machine(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "detect_gpu_bytes", lambda env: ([80 * 2**30], "nvidia-smi"))
    monkeypatch.setattr(plan, "detect_gpu_name", lambda env: "NVIDIA A100-SXM4-40GB")
    assert [*plan_json(big, "--ds-config", "zero3", "--gpus", 128)["roofline"]["bounds"]] == ["NVIDIA A100-SXM4-40GB"]


def test_the_table_says_what_fits_and_what_would_be_taken(big: str) -> None:
    words = ("plan", big, "--gpus", 8, "--nodes", 16, "--gpu-memory", "80GiB")
    output = invoke(*words).output
    assert "70.6 G parameters" in output
    assert "choice: zero3, batch.micro" in output
    assert "DeepSpeed runtime" not in output, "formulas and sources are for who asks"
    assert "--lines prints the formula" in output
    output = invoke(*words, "--lines").output
    assert "reduce_bucket_size x bytes" in output, "each line has its formula"
    assert "DeepSpeed runtime/zero/stage3.py" in output, "and its source"


def test_a_preset_that_does_not_fit_gets_its_cheapest_fixes(big: str) -> None:
    words = ("--set", "ds_config=zero2", "--set", "batch.micro=4", "--model-shape", "llama-3.1-8b")
    output = invoke("plan", big, *words, "--gpus", 8, "--gpu-memory", "24GiB").output
    fixes = output.partition("zero2 does not fit. Cheapest fixes:\n")[2].split("\n\n")[0].splitlines()
    assert 1 <= len(fixes) <= 3
    assert all(" saves " in fix for fix in fixes)
    assert fixes[0].strip().startswith(("ds_config zero2 -> zero3_partial_offload saves ", "batch.micro 4 -> "))


def test_without_a_gpu_common_sizes_are_compared(big: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    output = invoke("plan", big).output
    for size in (8, 12, 16, 24, 40, 80):
        assert f"fits {size}.0 GiB" in output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu-memory", "plenty"], "--gpu-memory: 'plenty' is not a size of memory; write it like 24GiB"),
        (["--model-shape", "llama"], "--model-shape llama: there is no such shape"),
        (["--set", "batch.mirco=1"], "no such key"),
        (
            ["--set", "model.path=/nowhere/model"],
            "model.path: '/nowhere/model' is not a folder; give an existing folder",
        ),
    ],
)
def test_bad_input_exits_with_2(big: str, words: list[str], message: str) -> None:
    result = invoke("plan", big, *words)
    assert result.exit_code == 2
    assert message in result.output


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    values = tiny_recipe("rm", tmp_path)
    values |= {"ds_config": "auto", "batch": {"total": 8}, "steps": 2, "save": {"every": 2}}
    return str(write_recipe(tmp_path, values))


def test_a_dry_run_names_the_preset_and_the_micro_batch(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DSTRAIN_GPU_MEMORY", "8GiB")
    result = invoke("train", tiny, "--num-gpus", 2, "--dry-run")
    assert result.exit_code == 0, result.output
    recipe = yaml.safe_load(result.stdout.partition("# DeepSpeed JSON")[0])
    assert (recipe["ds_config"], recipe["batch"]["micro"], recipe["batch"]["total"]) == ("zero1", 4, 8)
    assert "ds_config auto: zero1, batch.micro 4 (x 1 passes): the fastest that fits with 10% free" in result.stderr


def test_nothing_that_fits_is_refused_before_the_launch(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DSTRAIN_GPU_MEMORY", "100MiB")
    result = invoke("train", tiny, "--dry-run")
    assert result.exit_code == 2
    assert "ds_config auto: nothing fits: " in result.output
    assert "nearest fix: " in result.output or "use more GPUs" in result.output


def test_other_commands_name_the_one_that_decides(tiny: str) -> None:
    result = invoke("bench", tiny)
    assert result.exit_code == 2
    assert "ds_config auto: is decided by `dstrain train`" in result.output


def test_a_resumed_run_takes_the_stored_preset(
    tiny: str, tmp_path: Path, one: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    one(RUN, recipe=tiny, run_dir=str(run_dir))
    recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text())
    assert (recipe["ds_config"], recipe["batch"]["micro"]) == ("zero0", 8), "one process, fp32"
    # Nothing would fit now, but the choice of the run stays.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("DSTRAIN_GPU_MEMORY", "100MiB")
    result = invoke("train", tiny, "--run-dir", run_dir, "--dry-run", "--set", "steps=4", "--allow-change", "steps")
    assert result.exit_code == 0, result.output
    assert "ds_config auto: zero0, batch.micro 8, as step-00000002 was trained" in result.stderr


def test_gpus_of_unknown_memory_need_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    from dstrain.planner import workload
    from dstrain.training.start import find_budget

    monkeypatch.delenv("DSTRAIN_GPU_MEMORY", raising=False)
    monkeypatch.setattr(workload, "_ask_nvml", lambda: None)
    monkeypatch.setattr(workload, "_ask_nvidia_smi", list)
    with pytest.raises(
        PresetError, match=r"the memory of the GPUs cannot be read .*; name a preset, or set DSTRAIN_GPU_MEMORY=24GiB"
    ):
        find_budget(workload.Cluster(kind="cuda"))


LLAMA_8B = ("plan", "--task", "sft", "--model-shape", "llama-3.1-8b", "--set", "data.train=t.jsonl", "--set", "batch.micro=1",
            "--gpus", "1", "--gpu-memory", "24GiB", "--ds-config", "auto")  # fmt: skip


def test_a_host_that_is_too_small_is_said() -> None:
    unknown = invoke(*LLAMA_8B).output
    assert "choice: zero2_offload" in unknown
    assert "which is not checked without --host-memory" in unknown
    row = next(line for line in unknown.splitlines() if line.startswith("zero2_offload "))
    assert row.endswith("yes, host not checked")
    small = invoke(*LLAMA_8B, "--host-memory", "24GiB").output
    assert "zero2_offload" not in small.partition("choice: ")[2].partition(":")[0]
    assert "no, host lacks" in next(line for line in small.splitlines() if line.startswith("zero2_offload "))
    large = invoke(*LLAMA_8B, "--host-memory", "256GiB").output
    assert "choice: zero2_offload" in large
    assert "not checked" not in large


def test_auto_passes_over_partitions_that_an_8_bit_optimizer_cannot_take() -> None:
    words = [
        "plan",
        "--task",
        "sft",
        "--model-shape",
        "llama-3.2-3b",
        "--set",
        "data.train=t.jsonl",
        "--set",
        "batch.micro=1",
    ]
    output = invoke(
        *words, "--gpus", 1, "--gpu-memory", "80GiB", "--ds-config", "auto", "--set", "optim.name=adamw_8bit"
    ).output
    assert "choice: zero3: " in output
    assert "zero1: optim.name: adamw_8bit takes 2147483647 values in one partition" in output


def test_a_fix_is_written_as_in_a_recipe(big: str) -> None:
    words = (
        "--set",
        "ds_config=zero3_nvme",
        "--set",
        "batch.micro=1",
        "--model-shape",
        "llama-3.1-8b",
        "--gpu-memory",
        "4GiB",
    )
    assert "model.lora none -> {rank: 16} saves" in invoke("plan", big, *words, "--gpus", 1).output


def test_train_refuses_such_a_partition_before_the_launch(tmp_path: Path) -> None:
    from dstrain.commands.preflight import check_launch
    from dstrain.config import read_recipe
    from dstrain.ds_config import Device
    from dstrain.errors import RecipeError
    from dstrain.planner.shapes import named_config
    from dstrain.planner.workload import Cluster
    from dstrain.tasks import make_task
    from dstrain.training.start import ResumeOptions, ResumePoint, decide_start

    values = {"task": "sft", "model": {"config": named_config("llama-3.2-3b")}, "data": {"train": "t.jsonl"}, "optim": {"name": "adamw_8bit"},
              "batch": {"micro": 1, "accumulate": 1}, "ds_config": "zero2"}  # fmt: skip
    task, run_dir = make_task(read_recipe(write_recipe(tmp_path, values), (), None, None).config), tmp_path / "run"

    def check(processes: int) -> Any:
        cluster = Cluster(gpus_per_node=processes)
        start = decide_start(task.recipe, ResumeOptions("never"), processes, cluster, ResumePoint())
        return check_launch(task, start, run_dir, processes, Device("cuda", True))

    with pytest.raises(RecipeError, match="takes 2147483647 values in one partition"):
        check(1)
    assert check(2)["zero_optimization"]["stage"] == 2
