"""Every collective of a training step is counted, whoever calls it; and every group has the recipe's timeout."""

from __future__ import annotations

import pytest

from tests.workers import Workers


@pytest.mark.parametrize(
    "kind",
    ["zero2", "zero3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zero0", "zero1", "zero3_offload"))],
)
def test_what_deepspeed_calls_is_what_is_counted(kind: str, two: Workers) -> None:
    """Torch counts by itself how often a group was used, and knows neither names nor whether the process is in it."""
    told = two("tests.faults.counted_cases:step", kind=kind)
    assert told[0] == told[1], "the ranks' counts can be compared"
    used = {group: both for group, both in told[0]["counts"].items() if both[1]}
    assert len(used) >= 2, "DeepSpeed's group and ours"
    assert all(ours == torchs for ours, torchs in used.values()), (told[0]["names"], used)
    assert not any(told[0]["inside"])


def test_a_broadcast_gives_rank_0s_value_to_all(two: Workers) -> None:
    """What the others give is never sent: it need not even be picklable."""
    told = two("tests.faults.counted_cases:broadcast")
    assert told[0] == told[1]
    assert told[0]["got"] == {"of": 0, "rows": list(range(1000))}
    assert told[0]["names"] == ["broadcast"]


@pytest.mark.parametrize("kind", ["zero3", pytest.param("zero1", marks=pytest.mark.slow)])
def test_every_group_gets_the_timeout_when_it_is_made(kind: str, two: Workers) -> None:
    """DeepSpeed's clone of the world, which it makes without one, and one made later."""
    for timeouts in two("tests.faults.counted_cases:timeouts", kind=kind, seconds=77.0):
        assert timeouts == [77.0, 77.0]
