"""`dstrain doctor --hostfile` names each of many faults on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hosts.doctor import SEEDS, Seed, examine
from tests.hosts.lab import Lab

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_a_fault_is_named(seed: Seed, lab: Lab, tmp_path: Path) -> None:
    examine(seed, lab, tmp_path / "runs")
