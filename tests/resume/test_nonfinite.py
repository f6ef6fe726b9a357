"""A loss that is not finite never reaches the weights, and the samples are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cells import SLOW
from tests.resume.test_resume import recipe  # noqa: F401  recipe is a fixture
from tests.vocabulary import RUN, metric_rows, read_events
from tests.workers import WorkerError, Workers


@pytest.mark.parametrize("preset", ["zero0", SLOW("zero1"), SLOW("zero2"), "zero3"])  # 1 and 2: one optimizer
def test_a_bad_step_is_left_out_and_its_samples_named(preset: str, recipe: str, tmp_path: Path, two: Workers) -> None:  # noqa: F811
    sets = [f"ds_config={preset}", "steps=5", "eval.every=100"]  # sample 11 is in one of these
    told = two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, poison=[11])
    assert [result["code"] for result in told] == [0, 0]
    skipped = read_events(tmp_path / "run", "step_skipped")
    assert len(skipped) == 1
    assert 11 in skipped[0]["samples"]
    assert len(skipped[0]["samples"]) <= 2, "the micro-batch, not the whole step"
    train = [row for row in metric_rows(tmp_path / "run") if row["split"] == "train"]
    assert all(row.get("loss") is not None for row in train if row["step"] != skipped[0]["step"])
    assert "loss" not in next(row for row in train if row["step"] == skipped[0]["step"])


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["zero2_offload", SLOW("zero3_offload"), SLOW("zero2")])
def test_the_steps_after_a_bad_one_are_taken(preset: str, recipe: str, tmp_path: Path, two: Workers) -> None:  # noqa: F811
    """In bf16 DeepSpeed sums gradients in fp32, and with offloading the nan stayed in the sum."""
    sets = [f"ds_config={preset}", "precision=bf16", "steps=6", "batch={total: 8, micro: 2}", "eval.every=100"]
    two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=[*sets, "on_nonfinite=skip"], poison=[11])
    skipped = [event["step"] for event in read_events(tmp_path / "run", "step_skipped")]
    rows = [row for row in metric_rows(tmp_path / "run") if row["split"] == "train"]
    assert 0 < len(skipped) < 3, "the epoch has one step with sample 11"
    assert [row["step"] for row in rows if "loss" not in row] == skipped


@pytest.mark.slow
def test_three_bad_steps_in_a_row_stop_the_run(recipe: str, tmp_path: Path, two: Workers) -> None:  # noqa: F811
    with pytest.raises(WorkerError, match=r"step 3: the loss of samples .* is not finite, 3 steps in a row"):
        two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), poison=list(range(64)))


@pytest.mark.slow
def test_skip_goes_on_however_many_there_are(recipe: str, tmp_path: Path, two: Workers) -> None:  # noqa: F811
    sets = ["on_nonfinite=skip", "steps=5"]
    with pytest.raises(WorkerError, match="none of the 5 steps changed the weights"):
        two(RUN, recipe=recipe, run_dir=str(tmp_path / "run"), sets=sets, poison=list(range(64)))
    assert len(read_events(tmp_path / "run", "step_skipped")) == 5
