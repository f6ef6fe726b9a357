"""Fixtures of tests on emulated CUDA devices; without torch's CUDA build they are skipped and the reason is printed once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.workers import ROOT
from tools.cuda_emulator.build import CannotBuild
from tools.cuda_emulator.environment import emulated_environment

HERE = Path(__file__).parent
EmulatedRun = Callable[..., subprocess.CompletedProcess[str]]


@cache
def find_obstacle() -> str:
    """Return why there is no emulated device here; "" where there is one. Builds the emulator."""
    try:
        emulated_environment(os.environ)
    except CannotBuild as error:
        return str(error)
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = [item for item in items if HERE in item.path.parents and item.get_closest_marker("cuda_emulated")]
    for item in here:
        if find_obstacle():
            item.add_marker(pytest.mark.skip(reason=find_obstacle()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if "tests/emulated/" in report.nodeid]
    if skipped:
        terminalreporter.write_line(f"{len(skipped)} tests on an emulated device skipped: {find_obstacle()}")


@pytest.fixture
def emulated_run() -> EmulatedRun:
    """Run a command of this Python with emulated devices: `emulated_run(["-m", "dstrain", ...], EMU_GPUS="2")`.

    Returns the completed process, whose standard error is in its standard output.
    """

    def run(arguments: Sequence[str], timeout: float = 240, **switches: str) -> subprocess.CompletedProcess[str]:
        environment = emulated_environment(os.environ, **switches)
        for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):  # of the tests on a CPU
            if name not in switches:
                environment.pop(name, None)
        return subprocess.run(
            [sys.executable, *arguments],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
