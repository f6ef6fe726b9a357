"""Forecast of a run's memory by the planner, and its comparison with measured memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dstrain.config import RunConfig
from dstrain.planner.cluster import Cluster
from dstrain.planner.fixes import suggest_fixes
from dstrain.planner.memory import plan_memory
from dstrain.preset import Preset
from dstrain.units import format_bytes

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MemoryForecast:
    """Predicted memory of one rank. On a CPU the device is the process's own host memory."""

    device_bytes: int
    host_bytes_per_node: int
    lines: tuple[tuple[str, str, int], ...]
    """(name, place, bytes) of each part; the place is gpu, host or nvme."""
    fixes: tuple[str, ...]
    """Changes of the recipe that save device memory, the cheapest in speed first."""


def make_forecast(config: RunConfig, preset: Preset, cluster: Mapping[str, Any]) -> MemoryForecast | None:
    """Return the planner's forecast; None where it cannot read the shape of the model. `cluster`: fields of Cluster."""
    where = Cluster(**cluster)
    try:
        plan = plan_memory(config, preset, where)
        fixes = [fix.describe() for fix in suggest_fixes(config, preset, where)]
    except Exception as error:  # a forecast that fails must not stop a run
        log.info("no forecast of the memory: %s: %s", type(error).__name__, error)
        return None
    return MemoryForecast(
        # torch's allocator does not see what is outside of it; on a CPU the whole process is measured.
        device_bytes=plan.tensor_bytes if where.kind == "cuda" else plan.gpu_bytes,
        host_bytes_per_node=plan.host_bytes_per_node,
        lines=tuple((line.name, line.place, line.num_bytes) for line in plan.lines),
        fixes=tuple(fixes),
    )


def describe_forecast(forecast: MemoryForecast | None, measured_bytes: int, device_type: str = "cuda") -> str:
    """Return `memory: predicted 11.2 GiB, measured 10.8 GiB`, of the rank with most.

    On a CPU only the measured value: there the prediction is mostly a reserve for libraries, and buffers whose pages a
    small model never touches.
    """
    predicted = "" if forecast is None or device_type == "cpu" else f"predicted {format_bytes(forecast.device_bytes)}, "
    return f"memory: {predicted}measured {format_bytes(measured_bytes)}"
