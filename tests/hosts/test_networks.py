"""Two hosts without IPv4 addresses, or with latency and loss, train as one host does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hosts.lab import Lab
from tests.hosts.networks import train
from tests.hosts.running import Run

pytestmark = [pytest.mark.hosts, pytest.mark.slow]


@pytest.mark.parametrize(("style", "seconds", "loss"), [("ipv6", 0.0, 0.0), ("plain", 0.02, 0.01)])
def test_the_losses_are_the_same_over_another_network(
    style: str, seconds: float, loss: float, make_lab: Callable[..., Lab], tmp_path: Path, unbroken: Run
) -> None:
    lab = make_lab(style=style)
    if seconds:
        lab.slow_down(seconds, loss)
    assert train(style, lab, tmp_path / "job", unbroken.losses()).wrong == ()
