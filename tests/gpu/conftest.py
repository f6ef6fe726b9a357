"""Fixtures of tests that need a GPU; without one they are skipped and the reason is printed once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.workers import REHEARSAL, GpuWorkers

HERE = Path(__file__).parent


@cache
def why_not() -> str:
    """Return why the tests cannot run here, or an empty string. Torch is imported only if there is a driver."""
    if REHEARSAL:
        return ""
    if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
        return "no NVIDIA driver here: neither /dev/nvidiactl nor nvidia-smi"
    import torch

    if not torch.cuda.is_available():
        return f"there is an NVIDIA driver, but torch {torch.__version__} sees no CUDA device"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if ours and why_not():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason=why_not()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/gpu/" in report.nodeid]
    if skipped and why_not():
        terminalreporter.write_line(f"{len(skipped)} GPU tests skipped: {why_not()}")
    elif REHEARSAL:
        terminalreporter.write_line("GPU tests rehearsed on a CPU (DSTRAIN_GPU_REHEARSAL): no claim about a GPU")


@pytest.fixture(scope="session")
def gpus(own_cache: None) -> Iterator[GpuWorkers]:
    """One worker per GPU, at most two."""
    import torch

    workers = GpuWorkers(2 if REHEARSAL else min(2, torch.cuda.device_count()))
    yield workers
    workers.close()


@pytest.fixture
def only_gpu() -> None:
    """Skip in the rehearsal on a CPU."""
    if REHEARSAL:
        pytest.skip("a CPU cannot rehearse this")
