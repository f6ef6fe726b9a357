"""Memory rows."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dstrain.distributed.world import SingleProcessWorld
from dstrain.report import memory, observe
from dstrain.report.memory import PeakBytes, gpu_utilization, host_memory_gib, measure_peak, memory_metrics
from dstrain.report.observe import Observation


class Ranks(SingleProcessWorld):
    def gather(self, value: object) -> list[object]:
        return [
            {"peak_memory_gib": 1.5, "host_memory_gib": 2.0, "available_memory_gib": 8.0},
            {"peak_memory_gib": 3.5, "host_memory_gib": 1.0, "available_memory_gib": 9.0, "gpu_utilization": 40.0},
            {"peak_memory_gib": 0.5, "host_memory_gib": 1.0, "available_memory_gib": 3.0, "gpu_utilization": 80.0},
        ]


def test_on_a_cpu_only_host_memory_is_told() -> None:
    row = memory_metrics(SingleProcessWorld())
    assert list(row) == ["host_memory_gib", "resident_memory_gib", "available_memory_gib"]
    assert 0.001 < row["resident_memory_gib"] <= row["host_memory_gib"] * 1.01
    assert 0 < row["available_memory_gib"] < 100_000
    assert 0.001 < host_memory_gib() < 1000


def test_peaks_are_of_the_rank_with_most_and_utilization_is_the_mean_of_who_tells() -> None:
    assert memory_metrics(Ranks()) == {
        "peak_memory_gib": 3.5,
        "host_memory_gib": 2.0,
        "available_memory_gib": 3.0,  # of the host with least
        "gpu_utilization": 60.0,
    }


class FakeCuda:
    """torch.cuda with numbers of a GPU."""

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        sizes = {"allocated_bytes.all.current": 3, "allocated_bytes.all.peak": 4, "reserved_bytes.all.current": 5}
        return {name: size * 2**30 for name, size in sizes.items()}

    def host_memory_stats(self) -> dict[str, int]:
        return {"allocated_bytes.current": 2**29}

    def utilization(self, device: torch.device) -> int:
        return 70


def test_a_gpu_tells_what_is_allocated_reserved_and_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.torch, "cuda", FakeCuda())
    row = memory_metrics(SingleProcessWorld(torch.device("cuda", 0)))
    assert (row["allocated_memory_gib"], row["peak_memory_gib"], row["reserved_memory_gib"]) == (3.0, 4.0, 5.0)
    assert (row["pinned_memory_gib"], row["gpu_utilization"]) == (0.5, 70.0)


@pytest.fixture(autouse=True)
def _nothing_reported_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_reported", set())
    monkeypatch.setattr(memory, "_utilization", Observation("gpu_utilization", memory._lacks_utilization))


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (ModuleNotFoundError("nvidia-ml-py"), logging.DEBUG),
        (type("NVMLError_NotSupported", (Exception,), {})(), logging.DEBUG),
        (type("NVMLError_Unknown", (Exception,), {})("Unknown Error"), logging.WARNING),
        (type("NVMLError_LibRmVersionMismatch", (Exception,), {})(), logging.WARNING),
        (RuntimeError("device 0 is not visible (CUDA_VISIBLE_DEVICES=[])"), logging.WARNING),
    ],
)
def test_a_gpu_that_does_not_tell_how_busy_it_is_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, level: int
) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(memory.torch.cuda, "utilization", refuse)
    with caplog.at_level(logging.DEBUG):
        assert [gpu_utilization(torch.device("cuda")) for _ in range(4)] == [None] * 4
    assert [record.levelno for record in caplog.records] == [level, logging.DEBUG]


class BrokenCuda:
    """torch.cuda where each question fails."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"torch.cuda.{name}: GPU is lost")


def test_columns_that_cannot_be_read_are_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("not enough values to unpack")  # of a line in /proc that has another form

    monkeypatch.setattr(memory.torch, "cuda", BrokenCuda())
    monkeypatch.setattr(memory, "get_available_memory", fail)
    world = SingleProcessWorld(torch.device("cuda", 0))
    assert list(memory_metrics(world)) == ["host_memory_gib", "resident_memory_gib"]
    warnings = len(caplog.records)
    assert list(memory_metrics(world)) == ["host_memory_gib", "resident_memory_gib"]
    assert len(caplog.records) == warnings == 4, "each is said once"
    assert measure_peak(world.device) == PeakBytes(None, None)


def test_the_peak_of_a_gpu_has_tensors_alone_and_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    cuda = SimpleNamespace(
        max_memory_allocated=lambda device: 4 * gib, max_memory_reserved=lambda device: 6 * gib,
        memory_reserved=lambda device: 5 * gib, mem_get_info=lambda device: (10 * gib, 16 * gib),
    )  # fmt: skip
    monkeypatch.setattr(memory.torch, "cuda", cuda)
    assert measure_peak(torch.device("cuda", 0)) == PeakBytes(4 * gib, 7 * gib)
    peak = measure_peak(torch.device("cpu"))
    assert peak.tensors is None
    assert peak.total is not None
    assert peak.total > 2**20
