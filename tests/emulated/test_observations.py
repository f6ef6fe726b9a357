"""On an emulated CUDA device: what only observes a run does not end it, and a card that fails is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.report.run_log import read_rows
from tests.emulated.conftest import EmulatedRun
from tests.vocabulary import read_events

NVML_ERROR_UNKNOWN = "999"
CUDA_ERROR_ECC = "214"

pytestmark = pytest.mark.cuda_emulated


def train_args(run_dir: Path, **settings: object) -> list[str]:
    """Return the arguments of a short run of demo-rm on one GPU."""
    changes = {"steps": 3, "log.every": 1, "eval.every": 100, "log.tensorboard": "false"} | settings
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    return ["-m", "dstrain", "train", "demo-rm", "--num-gpus", "1", "--run-dir", str(run_dir), *words]


@pytest.mark.parametrize("device", ["GPU-00000001-0000", "MIG-4f6a1c1e-0000-0000-0000-000000000000"])
def test_a_device_by_uuid_and_an_nvml_that_fails_end_no_run(
    device: str, emulated_run: EmulatedRun, tmp_path: Path
) -> None:
    """DeepSpeed took the name for a number, and each error of NVML ended the run at its first row."""
    switches = {"CUDA_VISIBLE_DEVICES": device, "EMU_NVML_UTIL": NVML_ERROR_UNKNOWN}
    done = emulated_run(train_args(tmp_path / "run"), **switches)
    assert done.returncode == 0, done.stdout
    rows = [row for row in read_rows(tmp_path / "run" / "metrics.jsonl") if row["split"] == "train"]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all("gpu_utilization" not in row and row["peak_memory_gib"] > 0 for row in rows)
    log = (tmp_path / "run" / "logs" / "rank-00000.log").read_text()
    assert log.count("gpu_utilization failed (") == 1
    (event,) = read_events(tmp_path / "run", "memory")
    peak = rows[1]["peak_memory_gib"] * 2**30
    assert event["measured_bytes"] == pytest.approx(peak, abs=2**10), "tensors beside tensors"
    assert event["measured_total_bytes"] > event["measured_bytes"]
    assert event["predicted_total_bytes"] > event["predicted_bytes"]


def test_a_card_that_fails_is_named_and_the_same_command_goes_on(emulated_run: EmulatedRun, tmp_path: Path) -> None:
    args = train_args(tmp_path / "run", **{"steps": 8, "save.every": 2})
    failed = emulated_run(args, EMU_FAIL_AT="6000", EMU_FAIL_CODE=CUDA_ERROR_ECC)
    assert failed.returncode == 1, failed.stdout
    assert "the card failed: uncorrectable ECC error encountered on " in failed.stdout
    assert "cuda:0 (NVIDIA H200, CUDA_VISIBLE_DEVICES 0, GPU-" in failed.stdout
    (event,) = read_events(tmp_path / "run", "failed")
    assert "the card failed" in event["what"]
    assert emulated_run(args).returncode == 0
    (resumed,) = read_events(tmp_path / "run", "resumed")
    assert resumed["step"] in (2, 4, 6)
