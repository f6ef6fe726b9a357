"""Memory rows."""

from __future__ import annotations

import pytest
import torch

from dstrain.distributed.world import SingleProcessWorld
from dstrain.report import memory
from dstrain.report.memory import gpu_utilization, host_memory_gib, memory_metrics


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


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("nvidia-ml-py"), type("NVMLError_NotSupported", (Exception,), {})()]
)
def test_a_gpu_that_does_not_tell_how_busy_it_is_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(memory.torch.cuda, "utilization", refuse)
    assert gpu_utilization(torch.device("cuda")) is None


def test_any_other_error_of_the_driver_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise RuntimeError("cuda driver can't be loaded")

    monkeypatch.setattr(memory.torch.cuda, "utilization", fail)
    with pytest.raises(RuntimeError, match="driver"):
        gpu_utilization(torch.device("cuda"))
