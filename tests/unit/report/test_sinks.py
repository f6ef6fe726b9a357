"""Where rows go."""

from __future__ import annotations

import importlib.util
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dstrain.errors import UsageError
from dstrain.report import sinks
from dstrain.report.run_log import RunLog
from dstrain.report.sinks import MLflowSink, QueuedSink, TensorBoardSink, check_tensorboard
from tests.run_folders import ROW


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


class Kept:
    """A user's sink that keeps its calls; `fault` names the method that fails, `error` how."""

    def __init__(self, fault: str = "", error: BaseException | None = None) -> None:
        self.calls: list[Any] = []
        self.fault, self.error = fault, error or ValueError("no")
        self._take("init")

    def _take(self, method: str, *values: Any) -> None:
        if method == self.fault:
            raise self.error
        self.calls.append((method, *values))

    def write(self, row: Mapping[str, Any]) -> None:
        self._take("write", row["step"])

    def log_event(self, event: Mapping[str, Any]) -> None:
        self._take("event", event["event"])

    def close(self, exit_code: int = 0) -> None:
        self._take("close", exit_code)


def test_a_queued_sink_gets_rows_events_and_the_exit_code_in_order(tmp_path: Path) -> None:
    journal, kept = RunLog(tmp_path), Kept()
    journal.log_event("started")
    sink = QueuedSink("Kept", lambda: kept)
    journal.add_listener(sink.log_event)
    sink.write(ROW)
    journal.log_event("saved")
    sink.close(75)
    sink.write(ROW)  # after the end: nothing happens
    assert kept.calls == [("init",), ("event", "started"), ("write", 120), ("event", "saved"), ("close", 75)]


@pytest.mark.parametrize("fault", ["init", "write", "event", "close"])
@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), KeyboardInterrupt()], ids=["error", "exit", "ctrl-c"]
)
def test_a_sink_that_fails_is_left_out_with_a_warning(
    fault: str, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    sink = QueuedSink("mine.Kept", lambda: Kept(fault, error))
    for _ in range(3):
        sink.write(ROW)
        sink.log_event({"event": "saved"})
    sink.close()
    (warning,) = caplog.messages
    assert warning.startswith(f"sink mine.Kept failed ({type(error).__name__}")
    assert warning.endswith("this run continues without it")


@pytest.mark.parametrize("fault", ["init", "write", "close"])
def test_a_sink_that_hangs_holds_nothing_up(
    fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sinks, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(sinks, "MAX_QUEUED", 4)
    released = threading.Event()

    class Hanging(Kept):
        def _take(self, method: str, *values: Any) -> None:
            if method == fault:
                released.wait(30)

    start = time.monotonic()
    sink = QueuedSink("Hanging", Hanging)
    for _ in range(10):
        sink.write(ROW)
        time.sleep(0.001)
    sink.close()
    assert time.monotonic() - start < 5
    told = ["sink Hanging does not end, and may not have the last rows"]
    assert caplog.messages[-1:] == told
    assert ("sink Hanging is too slow: 4 rows wait, and later ones are dropped" in caplog.messages) == (
        fault != "close"
    )
    released.set()


def test_a_missing_mlflow_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"MLflowSink, but mlflow is not installed; run `pip install 'dstrain\[mlflow\]'`"
    ):
        MLflowSink.check()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow, whose store is a folder."""
    mlflow = pytest.importorskip("mlflow")
    for name in ("MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "store").as_uri())
    return mlflow.MlflowClient()


@pytest.mark.parametrize(("code", "status"), [(0, "FINISHED"), (75, "KILLED"), (1, "FAILED")])
def test_mlflow_holds_the_rows_of_one_run_across_resumes(code: int, status: str, client: Any, tmp_path: Path) -> None:
    recipe = {"task": "sft", "optim": {"lr": 0.1, "name": None}, "long": "x" * 9000}
    for step, end in ((1, 75), (2, code)):
        sink = QueuedSink("MLflowSink", lambda: MLflowSink(tmp_path / "one", recipe | {"steps": step}))  # noqa: B023
        sink.write({"step": step, "split": "train", "loss": 0.5 / step, "samples": 4, "word": "x", "none": None})
        sink.write({"step": step, "split": "eval", "loss": 0.25, "accuracy": float("nan")})
        sink.close(end)
    (found,) = client.search_runs([client.get_experiment_by_name("Default").experiment_id])
    assert found.info.run_id == (tmp_path / "one/mlflow/id").read_text()
    assert (found.info.status, found.info.run_name) == (status, "one")
    history = client.get_metric_history(found.info.run_id, "train/loss")
    assert [(metric.step, metric.value) for metric in history] == [(1, 0.5), (2, 0.25)]
    assert found.data.params["optim.lr"] == "0.1"
    assert found.data.params["steps"] == "1"
    assert "train/word" not in found.data.metrics


def test_mlflow_without_a_server_stops_nothing(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    sink = QueuedSink("MLflowSink", lambda: MLflowSink(tmp_path, {}))
    sink.write(ROW)
    sink.close()
    assert any("sink MLflowSink failed (MlflowException" in message for message in caplog.messages)
    assert not (tmp_path / "mlflow/id").exists()
