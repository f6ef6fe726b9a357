"""Where rows go."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from dstrain.errors import UsageError
from dstrain.report.run_log import RunLog
from dstrain.report.sinks import RunLogSink, TensorBoardSink, check_tensorboard
from tests.run_folders import ROW


def test_jsonl_writes_to_the_journal_and_leaves_it_open_for_events(tmp_path: Path) -> None:
    journal = RunLog(tmp_path)
    sink = RunLogSink(journal)
    sink.write(ROW)
    sink.close()
    journal.log_event("finished")
    assert '"step": 120' in (tmp_path / "metrics.jsonl").read_text()


def test_tensorboard_holds_the_numbers_and_a_resume_purges_what_comes_again(tmp_path: Path) -> None:
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for resumed_at in (0, 1):
        sink = TensorBoardSink(tmp_path, resumed_at)
        for step in range(resumed_at + 1, 4):
            sink.write({"time": "now", "step": step, "split": "train", "loss": step + 10.0 * resumed_at, "x": None})
        sink.close()
    events = loader.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1.0), (2, 12.0), (3, 13.0)]
    assert events.Tags()["scalars"] == ["train/loss"]


def test_a_missing_tensorboard_is_refused_with_its_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        check_tensorboard()
