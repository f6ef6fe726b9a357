"""Memory rows."""

from __future__ import annotations

import pytest
import torch

from dstrain.distributed.world import SingleProcessWorld
from dstrain.report import memory as module
from dstrain.report.memory import gpu_utilization, host_memory_gib, memory_metrics


class Ranks(SingleProcessWorld):
    def gather(self, value: object) -> list[object]:
        return [(1.5, 2.0, None), (3.5, 1.0, 40.0), (0.5, 1.0, 80.0)]


def test_on_a_cpu_only_host_memory_is_told() -> None:
    assert list(memory_metrics(SingleProcessWorld())) == ["host_memory_gib"]
    assert 0.001 < host_memory_gib() < 1000


def test_peaks_are_of_the_rank_with_most_and_utilization_is_the_mean_of_who_tells() -> None:
    assert memory_metrics(Ranks()) == {"peak_memory_gib": 3.5, "host_memory_gib": 2.0, "gpu_utilization": 60.0}


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("nvidia-ml-py"), type("NVMLError_NotSupported", (Exception,), {})()]
)
def test_a_gpu_that_does_not_tell_how_busy_it_is_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def refuse(device: torch.device) -> int:
        raise error

    monkeypatch.setattr(module.torch.cuda, "utilization", refuse)
    assert gpu_utilization(torch.device("cuda")) is None


def test_any_other_error_of_the_driver_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> int:
        raise RuntimeError("cuda driver can't be loaded")

    monkeypatch.setattr(module.torch.cuda, "utilization", fail)
    with pytest.raises(RuntimeError, match="driver"):
        gpu_utilization(torch.device("cuda"))
