"""Every and the learning rate."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest

from dstrain.errors import RecipeError
from dstrain.schedule import (
    SCHEDULE_NAMES,
    Due,
    Every,
    LRSchedule,
    StepSchedule,
    compute_lr,
    scale_lr,
    warmup_steps,
)


def test_every_is_due_at_its_multiples_and_never_before_the_first_step() -> None:
    assert [step for step in range(10) if Every(3).is_due(step)] == [3, 6, 9]


def test_every_none_is_never_due() -> None:
    assert not any(Every(None).is_due(step) for step in range(100))


def test_warmup_below_one_is_a_share_and_from_one_on_it_is_steps() -> None:
    assert (warmup_steps(1000, 0.03), warmup_steps(10, 0.01), warmup_steps(1000, 0), warmup_steps(1000, 1)) == (
        30,
        1,
        0,
        1,
    )


def test_a_share_is_not_rounded_up_for_a_rounding_error() -> None:
    assert 100 * 0.07 > 7
    assert warmup_steps(100, 0.07) == 7


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
@pytest.mark.parametrize("warmup", [0, 0.1, 5])
def test_every_step_of_every_schedule_learns_and_none_passes_the_peak(schedule: str, warmup: float) -> None:
    rates = [LRSchedule(2.0, schedule, 50, warmup)(step) for step in range(50)]
    assert all(0 < rate <= 2.0 for rate in rates)
    assert max(rates) == 2.0


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_the_first_step_already_learns_and_the_warmup_ends_at_the_peak(schedule: str) -> None:
    rate = LRSchedule(1.0, schedule, 100, 4)
    assert [rate(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine", "wsd"])
def test_the_rate_would_be_zero_one_step_after_the_last_and_stays_there(schedule: str) -> None:
    rate = LRSchedule(1.0, schedule, 40, 0.1)
    assert rate(39) > 0
    assert rate(40) == rate(55) == pytest.approx(0.0, abs=1e-15)


def test_wsd_decays_in_the_last_tenth_only() -> None:
    rates = [LRSchedule(1.0, "wsd", 100, 5)(step) for step in range(100)]
    assert set(rates[5:91]) == {1.0}
    assert rates[90:] == pytest.approx([1 - i / 10 for i in range(10)])


@pytest.mark.parametrize(
    ("schedule", "first", "middle", "last"),
    [
        ("constant", 2.0, 2.0, 2.0),
        ("linear", 2.0, 1.0, 2.0 / 100),
        ("cosine", 2.0, 1.0, 1.0 - math.cos(math.pi / 100)),
        ("wsd", 2.0, 2.0, 2.0 / 10),
    ],
)
def test_a_schedule_has_these_first_middle_and_last_rates(
    schedule: str, first: float, middle: float, last: float
) -> None:
    rate = LRSchedule(2.0, schedule, 100)
    assert [rate(0), rate(50), rate(99)] == pytest.approx([first, middle, last])


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_share_and_its_steps_are_the_same_warmup(schedule: str) -> None:
    of_steps, of_share = LRSchedule(1.0, schedule, 200, 10), LRSchedule(1.0, schedule, 200, 0.05)
    assert [of_steps(step) for step in range(200)] == [of_share(step) for step in range(200)]
    assert of_steps(9) == 1.0 > of_steps(8)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_a_resumed_run_has_the_rates_of_the_unbroken_one(schedule: str) -> None:
    made = lambda: LRSchedule(3e-4, schedule, 50, 0.03)  # noqa: E731
    assert [made()(step) for step in range(50)] == [*map(made(), range(20)), *map(made(), range(20, 50))]


def test_a_warmup_over_the_whole_run_does_not_divide_by_zero() -> None:
    for schedule in SCHEDULE_NAMES:
        assert compute_lr(9, schedule=schedule, steps=10, warmup=10, peak=1.0) == 1.0
        assert math.isfinite(compute_lr(10, schedule=schedule, steps=10, warmup=10, peak=1.0))


def test_an_unknown_schedule_is_refused_with_its_neighbour() -> None:
    with pytest.raises(RecipeError, match="did you mean 'cosine'"):
        compute_lr(0, schedule="cosin", steps=1, warmup=0, peak=1.0)


@pytest.mark.parametrize(
    ("rule", "base", "peaks"),
    [
        ("none", 1, (1.0, 1.0, 1.0)),
        ("linear", 1, (1.0, 4.0, 8.0)),
        ("sqrt", 1, (1.0, 2.0, math.sqrt(8))),
        ("linear", 4, (0.25, 1.0, 2.0)),
        ("sqrt", 4, (0.5, 1.0, math.sqrt(2))),
    ],
)
def test_the_peak_scales_as_asked_with_1_4_and_8_samples_per_step(
    rule: Any, base: int, peaks: tuple[float, ...]
) -> None:
    assert [scale_lr(1.0, rule, samples, base) for samples in (1, 4, 8)] == pytest.approx(peaks)


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_shape_is_that_of_transformers_after_the_warmup(schedule: str) -> None:
    torch = pytest.importorskip("torch")
    optimization = pytest.importorskip("transformers.optimization")
    make = getattr(optimization, f"get_{schedule}_schedule_with_warmup")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3.0)
    theirs = make(optimizer, num_warmup_steps=6, num_training_steps=60).lr_lambdas[0]
    ours = LRSchedule(3.0, schedule, 60, 6)
    assert [ours(step) for step in range(6, 61)] == pytest.approx([3.0 * theirs(step) for step in range(6, 61)])
    assert [ours(step) for step in range(5)] == pytest.approx([3.0 * theirs(step + 1) for step in range(5)])


def test_an_interval_of_epochs_follows_their_ends() -> None:
    """Ten epochs of 10 samples in steps of 8: the first step that reaches the end of each one."""
    assert [step for step in range(14) if Every(Fraction(10, 8)).is_due(step)] == [2, 3, 4, 5, 7, 8, 9, 10, 12, 13]


def test_a_run_that_stops_early_is_logged_and_saved_but_not_evaluated() -> None:
    schedule = StepSchedule(
        total_steps=4,
        lr=LRSchedule(1.0, "constant", 4),
        log_every=Every(None),
        eval_every=Every(2),
        save_every=Every(None),
    )
    assert schedule.due_after(1, stop=False) == Due(log=False, eval=False, save=False, is_last=False)
    assert schedule.due_after(2, stop=False) == Due(log=False, eval=True, save=False, is_last=False)
    assert schedule.due_after(2, stop=True) == Due(log=True, eval=False, save=True, is_last=True)
    assert schedule.due_after(4, stop=True) == Due(log=True, eval=True, save=True, is_last=True)
