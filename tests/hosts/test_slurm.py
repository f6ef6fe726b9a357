"""Jobs on a real Slurm of two hosts: requeued, resumed, or ended for good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.running import Run
from tests.hosts.slurm import ROWS, Row, SlurmLab, missing_slurm

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


@pytest.mark.parametrize("make", ROWS)
def test_a_job_ends_as_documented(make: Callable[..., Row], tmp_path: Path, unbroken: Run) -> None:
    if reason := missing_slurm():
        pytest.skip(reason)
    with SlurmLab(tmp_path / "lab") as lab:
        assert make(lab, tmp_path / "job", unbroken.losses()).wrong == ()
