"""A run's sinks: what only shows or sends rows never ends the run, metrics.jsonl does."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dstrain.batch import Progress
from dstrain.errors import RunError
from dstrain.report import observe
from dstrain.report.run_log import RunLog, read_rows
from dstrain.training.run import Run
from dstrain.training.run_dir import collect_environment


class BrokenSink:
    """A sink of which every call fails."""

    def write(self, row: object) -> None:
        raise RuntimeError("the server refuses")

    def close(self, exit_code: int = 0) -> None:
        raise OSError(28, "No space left on device")


class ListSink:
    def __init__(self) -> None:
        self.steps: list[int] = []
        self.exit_code: int | None = None

    def write(self, row: Any) -> None:
        self.steps.append(row["step"])

    def close(self, exit_code: int = 0) -> None:
        self.exit_code = exit_code


@pytest.fixture(autouse=True)
def _nothing_reported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_reported", set())


def make_run(run_log: RunLog, sinks: list[Any]) -> Run:
    return cast("Run", SimpleNamespace(run_log=run_log, sinks=sinks, loader=SimpleNamespace(epoch_at=lambda _: 0.5)))


def test_a_sink_that_fails_ends_neither_the_run_nor_other_sinks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = ListSink()
    run = make_run(RunLog(tmp_path), [BrokenSink(), last])
    for step in (1, 2):
        Run._write_row(run, Progress(step=step, samples=8 * step), {"split": "train", "loss": 1.0})
    Run.close(run, 75)
    assert (last.steps, last.exit_code) == ([1, 2], 75)
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [1, 2]
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "BrokenSink.write failed", "BrokenSink.close failed",
    ]  # fmt: skip


def test_a_row_that_metrics_jsonl_cannot_take_ends_the_run(tmp_path: Path) -> None:
    """A resumed run cuts the file at the checkpoint's step, so that no row may be missing."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    run_log = RunLog(tmp_path)
    with full.open("ab", buffering=0) as run_log._metrics._file, pytest.raises(RunError, match="free some"):
        Run._write_row(make_run(run_log, []), Progress(step=1, samples=8), {"split": "train", "loss": 1.0})


def test_a_gpu_without_a_name_does_not_end_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(index: int) -> str:
        raise RuntimeError("GPU is lost")

    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", fail)
    assert collect_environment()["gpus"] == []
