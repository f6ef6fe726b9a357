"""Every task, reference kind and adapter trains on GPUs in each precision, with equal losses at every stage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.workers import REHEARSAL, GpuWorkers
from tests.parity.test_tasks import SERIES
from tests.resume.test_tasks import SHORT, rows
from tests.tiny import LLAVA, tiny_recipe
from tests.vision_recipes import GEMMA3, IDEFICS3
from tests.vision_recipes import recipe as vision_recipe
from tests.vocabulary import write_recipe

pytestmark = pytest.mark.gpu

RUN = "tests.gpu.cases:run"
LORA = {"lora": {"rank": 8, "alpha": 16.0}}
PROTEIN = {"hidden_dim": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 4}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "sft": ("sft", {}, {}),
    "sft, adapters": ("sft", {}, LORA),
    "dpo, a reference in memory": ("dpo", {}, {}),
    "dpo, remembered": ("dpo", {"precompute_ref_log_probs": True}, {}),
    "dpo, adapters": ("dpo", {}, LORA),
    "kto": ("kto", {}, {}),
    "rm, DoRA": ("rm", {}, {"lora": {"rank": 8, "dora": True}}),
    "vlm": ("vlm", {"horizontal_flip": 0.5}, {}),
    "vlm, a frozen tower": ("vlm", {}, {"freeze": ["vision"]}),
    "vlm, Gemma 3": ("vlm", {}, {"config": GEMMA3}),
    "vlm, Idefics 3": ("vlm", {}, {"config": IDEFICS3}),
    "docqa": ("docqa", SHORT, {}),
    "docqa, adapters, smoothed and focal": ("docqa", SHORT | {"label_smoothing": 0.1, "focal_gamma": 2.0}, LORA),
    "protein": ("protein", PROTEIN, {}),
    "protein, hidden together": ("protein", PROTEIN | {"mask": "together"}, {}),
    "temporal": ("temporal", SERIES | {"stage": "sft"}, {}),
    "temporal, align": ("temporal", SERIES | {"stage": "align"}, {}),
    "temporal, adapters": ("temporal", SERIES | {"stage": "sft"}, LORA),
    "temporal, classify": ("temporal", SERIES | {"stage": "classify"}, {}),
    "temporal, masked": ("temporal", SERIES | {"stage": "masked"}, {}),
    "rm, images": ("rm", {}, {"config": LLAVA}),
    "dpo, images, remembered": ("dpo", {"precompute_ref_log_probs": True}, {"config": LLAVA}),
}


def train(gpus: GpuWorkers, case: str, folder: Path, preset: str, precision: str, **more: Any) -> list[dict[str, Any]]:
    """The rows of a run of twelve steps."""
    task, options, model = CASES[case]
    values = vision_recipe(task, folder) if "images" in case else tiny_recipe(task, folder)
    values["data"]["max_length"] = 128
    values |= {"options": options, "steps": 12, "batch": {"total": 8, "micro": 2}, "optim": {"lr": 5e-3}}
    values |= {
        "model": values["model"] | model,
        "ds_config": preset,
        "precision": precision,
        "save": {"every": 6},
    } | more
    write_recipe(folder, values)
    told = gpus(RUN, recipe=str(folder / "recipe.yaml"), run_dir=str(folder / preset))
    assert all(result["code"] == 0 for result in told)
    return [row for row in rows(folder / preset) if row["split"] == "train"]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("preset", ["zero2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_every_task_learns_on_a_gpu(case: str, preset: str, precision: str, gpus: GpuWorkers, tmp_path: Path) -> None:
    if REHEARSAL and precision == "fp16":
        pytest.skip("no fp16 on a CPU")
    computed = train(gpus, case, tmp_path, preset, precision)
    losses = [row["loss"] for row in computed if "loss" in row]  # fp16 skips steps while it searches for its loss scale
    assert len(losses) >= 2
    few = min(4, len(losses) // 2)
    assert all(math.isfinite(loss) for loss in losses)
    assert sum(losses[-few:]) < sum(losses[:few])
    if case.startswith("dpo"):
        assert losses[0] == pytest.approx(math.log(2), abs=2e-2)


@pytest.mark.parametrize("case", CASES)
def test_fp32_losses_are_those_of_every_stage(case: str, gpus: GpuWorkers, tmp_path: Path) -> None:
    smooth = {"optim": {"lr": 5e-3, "eps": 1e-3}}  # at an eps of 1e-8 Adam turns rounding into steps
    wanted = [row["loss"] for row in train(gpus, case, tmp_path, "zero0", "fp32", **smooth)]
    for preset in ("zero1", "zero2", "zero3"):
        found = [row["loss"] for row in train(gpus, case, tmp_path, preset, "fp32", **smooth)]
        assert found == pytest.approx(wanted, rel=1e-4), preset
