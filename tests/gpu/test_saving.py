"""Checkpoints on GPUs: behind training from pinned memory, and on with another stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.test_run import RUN, written
from tests.gpu.workers import GpuWorkers
from tests.resume.test_background import hashes
from tests.resume.test_elastic import close
from tests.resume.test_resume import events, rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("preset", ["zero2", "zero3", "zero2_offload"])
def test_what_is_written_behind_training_is_what_training_would_have_waited_for(
    preset: str, gpus: GpuWorkers, tmp_path: Path
) -> None:
    recipe = written(
        tmp_path, deterministic=True, steps=6, batch={"total": 6, "micro": 2}, save={"every": 2, "keep": 9}
    )
    sets = [f"ds_config={preset}", "precision=bf16"]
    for name, background in (("waits", "false"), ("behind", "true")):
        gpus(RUN, recipe=recipe, run_dir=str(tmp_path / name), sets=[*sets, f"save.background={background}"])
    for step in (2, 4, 6):
        one, other = (hashes(tmp_path / name / f"checkpoints/step-{step:08d}") for name in ("waits", "behind"))
        del one["state/about.json"], other["state/about.json"]
        assert "state/rank-00000-000.safetensors" in one
        assert one == other
    assert not events(tmp_path / "behind", "async_save_unavailable")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_run_goes_on_at_every_stage_and_with_offloading(precision: str, gpus: GpuWorkers, tmp_path: Path) -> None:
    recipe = written(
        tmp_path, steps=12, batch={"total": 6, "micro": 2}, save={"every": 2, "keep": 9}, precision=precision
    )
    gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=["ds_config=zero2"])
    for preset, crash in (
        ("zero3", 3),
        ("zero2", 5),
        ("zero0", 7),
        ("zero1", 9),
        ("zero2_offload", 11),
        ("zero3", None),
    ):
        sets = [f"ds_config={preset}"]
        gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, crash_at=crash)
    assert [event["step"] for event in events(tmp_path / "run", "resharded")] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in rows(tmp_path / "run") if row["split"] == "train"] == list(range(1, 13))
    close(rows(tmp_path / "run"), rows(tmp_path / "whole"), 2e-2 if precision == "bf16" else 1e-4)


def test_the_search_for_a_loss_scale_goes_on_where_it_stood(gpus: GpuWorkers, only_gpu: None, tmp_path: Path) -> None:
    recipe = written(
        tmp_path, deterministic=True, steps=8, batch={"total": 6, "micro": 2}, save={"every": 3, "keep": 9}
    )
    sets = ["ds_config=zero2", "precision=fp16"]
    gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "whole"), sets=sets)
    gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets, crash_at=5)
    gpus(RUN, recipe=recipe, run_dir=str(tmp_path / "broken"), sets=sets)
    assert rows(tmp_path / "broken") == rows(tmp_path / "whole"), "bit for bit"
