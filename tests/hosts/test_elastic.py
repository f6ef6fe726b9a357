"""torchrun on one to two hosts: harm, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.elastic import ROWS, Row, worker_killed_c10d
from tests.hosts.lab import Lab
from tests.hosts.running import Run

pytestmark = pytest.mark.hosts


@pytest.mark.parametrize(
    "make", [pytest.param(row, marks=[] if row is worker_killed_c10d else pytest.mark.slow) for row in ROWS]
)
def test_a_run_goes_on_as_documented(make: Callable[..., Row], lab: Lab, tmp_path: Path, unbroken: Run) -> None:
    assert make(lab, tmp_path / "job", unbroken.losses()).wrong == ()
