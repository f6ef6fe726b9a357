"""A run with quantized base weights (QLoRA) learns, resumes as the same run, and is evaluated and exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cells import SLOW
from tests.tiny import tiny_recipe
from tests.vocabulary import RUN, invoke, metric_rows, read_events, read_jsonl, write_recipe
from tests.workers import WorkerError, Workers

pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")

CASES = "tests.contract.lora_cases:"
SETS = ["steps=12", "save.every=4", "save.keep=9"]
SHORT = ["steps=4", "save.every=4"]


def quantized_recipe(folder: Path, task: str, worker: Workers, quantize: str = "nf4", **changes: Any) -> Path:
    """Write a recipe that trains adapters on a quantized model of a folder; return its path."""
    values = tiny_recipe(task, folder)
    worker(CASES + "save_base", folder=str(folder / "base"), recipe=values)
    model = {"path": str(folder / "base"), "lora": {"rank": 4, "alpha": 16.0}, "quantize": quantize}
    values |= {"model": model, "optim": {"lr": 1e-2}, "ds_config": "zero2", **changes}
    return write_recipe(folder, values)


def losses(run_dir: Path) -> list[float]:
    return [row["loss"] for row in read_jsonl(run_dir / "metrics.jsonl") if row["split"] == "train"]


@pytest.mark.parametrize(
    ("task", "quantize", "preset"),
    # Stage 3: test_a_run_goes_on_in_shards_and_out_of_them, and a new head in parity/test_quantized.
    [SLOW("rm", "nf4", "zero1"), ("dpo", "nf4", "zero2"), SLOW("sft", "int8", "zero0"), SLOW("sft", "nf4", "zero2"),
     SLOW("sft", "nf4", "zero3"), SLOW("dpo", "nf4", "zero3"), SLOW("rm", "nf4", "zero3"), SLOW("vlm", "nf4", "zero3")],
)  # fmt: skip
def test_a_quantized_run_learns_and_resuming_changes_nothing(
    task: str, quantize: str, preset: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    run = {"recipe": str(quantized_recipe(tmp_path, task, one, quantize, ds_config=preset))}
    run |= {"sets": ["steps=8", "save.every=4"]}
    whole = two(RUN, **run, run_dir=str(tmp_path / "whole"))
    two(RUN, **run, run_dir=str(tmp_path / "broken"), crash_at=7)
    again = two(RUN, **run, run_dir=str(tmp_path / "broken"))
    assert all(result["code"] == 0 for result in (*whole, *again))
    assert metric_rows(tmp_path / "broken") == metric_rows(tmp_path / "whole"), "bit for bit"
    assert losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    (event,) = read_events(tmp_path / "whole", "quantized")
    assert event["kind"] == quantize
    assert event["num_layers"] == 7 * 2, "four of attention and three of the MLP, in two layers; no head"


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft", "kto", "vlm"])
def test_a_quantized_run_goes_on_with_other_processes_and_another_stage(
    task: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    recipe = str(quantized_recipe(tmp_path, task, one))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=SETS)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=SETS, crash_at=5)
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=[*SETS, "ds_config=zero1"], crash_at=9)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=[*SETS, "ds_config=zero0"])
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.slow
def test_a_run_goes_on_in_shards_and_out_of_them(tmp_path: Path, one: Workers, two: Workers) -> None:
    recipe = str(quantized_recipe(tmp_path, "sft", one))
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=SETS)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=[*SETS, "ds_config=zero3"], crash_at=5)
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=SETS, crash_at=9)
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "moved"), sets=[*SETS, "ds_config=zero3"])
    np.testing.assert_allclose(losses(tmp_path / "moved"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quantize", "precision", "dora", "preset"),
    [SLOW("nf4", "fp32", False, "zero2"), SLOW("nf4", "bf16", False, "zero2"), SLOW("int8", "fp32", False, "zero2"),
     SLOW("nf4", "fp32", True, "zero2"), ("nf4", "fp32", True, "zero3"), SLOW("nf4", "bf16", False, "zero3")],
)  # fmt: skip
def test_the_export_is_the_adapters_or_one_dequantized_model(
    quantize: str, precision: str, dora: bool, preset: str, tmp_path: Path, one: Workers, two: Workers
) -> None:
    changes = {"precision": precision, "ds_config": preset}
    recipe, run_dir = quantized_recipe(tmp_path, "sft", one, quantize, **changes), tmp_path / "run"
    two(RUN, recipe=str(recipe), run_dir=str(run_dir), sets=[*SHORT, f"model.lora.dora={json.dumps(dora)}"])
    adapters = one(CASES + "export", run=str(run_dir), to=str(tmp_path / "adapters"), merge=False)[0]
    merged = one(CASES + "export", run=str(run_dir), to=str(tmp_path / "merged"), merge=True)[0]
    assert "adapter_model.safetensors" in adapters["files"]
    assert "model.safetensors" in merged["files"]
    assert not any("adapter" in name for name in merged["files"])
    assert "quantization_config" not in json.loads((tmp_path / "merged/config.json").read_text())
    assert merged["difference"] <= (1e-5 if precision == "fp32" else 1e-2)
    data = str(tmp_path / "eval.jsonl")
    found = [
        json.loads(invoke("evaluate", folder, "--data", data, "--json").output)["loss"]
        for folder in (run_dir, tmp_path / "adapters", tmp_path / "merged")
    ]
    assert found[0] == found[1], "the exported adapters are put on the quantized base again"
    # int8 also rounds activations, in evaluations of the quantized model only.
    tolerance = {"nf4, fp32": 1e-5, "nf4, bf16": 1e-2, "int8, fp32": 3e-2}[f"{quantize}, {precision}"]
    np.testing.assert_allclose(found[2], found[0], rtol=tolerance)


@pytest.mark.slow
def test_an_evaluation_in_between_does_not_change_the_training(tmp_path: Path, one: Workers) -> None:
    """bitsandbytes repacks 4-bit weights in evaluation mode on some CPUs, and computes in bf16 from then on."""
    recipe = str(quantized_recipe(tmp_path, "sft", one))
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "with"), sets=[*SHORT, "eval.every=1"])
    one(RUN, recipe=recipe, run_dir=str(tmp_path / "without"), sets=[*SHORT, "eval.every=100"])
    assert losses(tmp_path / "with") == losses(tmp_path / "without")


def test_quantized_runs_that_cannot_work_are_refused(tmp_path: Path, one: Workers) -> None:
    recipe = str(quantized_recipe(tmp_path, "sft", one))
    run = {"recipe": recipe, "run_dir": str(tmp_path / "run")}
    with pytest.raises(WorkerError, match=r"model\.quantize: zero3 is of ZeRO stage 3, which shards weights of 4 bits"):
        one(RUN, **run, sets=["ds_config=zero3", "model.quantize=int8"])
    with pytest.raises(WorkerError, match=r"model\.quantize: is nf4, but quantized weights cannot be trained"):
        one(RUN, **run, sets=["model.lora=null"])
    one(RUN, **run, sets=SETS, crash_at=6)
    with pytest.raises(WorkerError, match=r"model\.quantize: is None, but the run was started with 'nf4'"):
        one(RUN, **run, sets=[*SETS, "model.quantize=null"])
    config = tmp_path / "base/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(WorkerError, match=r"its weights are already quantized .* quant_method gptq"):
        one(RUN, recipe=recipe, run_dir=str(tmp_path / "other"), sets=SETS)
