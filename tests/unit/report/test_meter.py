"""One sum, one division."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dstrain.batch import StepResult
from dstrain.distributed.world import SingleProcessWorld
from dstrain.report.meter import FinishMetrics, Meter
from dstrain.tasks import find_task
from tests.unit.distributed.thread_world import on_ranks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def step(loss: float, weight: float, **more: Any) -> StepResult:
    return StepResult(loss=torch.tensor(loss), weight=weight, **more)


def metric(total: float, weight: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(total), torch.tensor(weight)


def test_a_mean_over_uneven_ranks_and_steps_is_one_sum_over_one_weight() -> None:
    def act(world: Any) -> dict[str, float]:
        meter = Meter(world)
        for total, weight in [[(2.0, 1.0), (10.0, 5.0)], [(30.0, 2.0), (0.0, 0.0)]][world.rank]:
            meter.add(step(total, weight, metrics={"accuracy": metric(total / 4, 2 * weight)}))
        return meter.drain()

    rows = on_ranks(2, act)
    assert [row["loss"] for row in rows] == [42 / 8] * 2
    assert [row["accuracy"] for row in rows] == [42 / 4 / 16] * 2


def test_a_metric_that_one_rank_never_saw_is_the_mean_of_the_others() -> None:
    def act(world: Any) -> dict[str, float]:
        meter = Meter(world)
        meter.add(step(1.0, 1.0, metrics={"of_images": metric(3.0, 4.0)} if world.rank else {}))
        return meter.drain()

    assert [row["of_images"] for row in on_ranks(3, act)] == [0.75] * 3


def get_finish() -> FinishMetrics:
    return find_task("protein").finish_metrics.__get__(object())


def test_a_perplexity_is_exp_of_the_mean_over_all_ranks() -> None:
    def act(world: Any) -> dict[str, float]:
        meter = Meter(world, get_finish())
        total, weight = ((3.0, 1.0), (1.0, 3.0))[world.rank]
        meter.add(step(1.0, 1.0, metrics={"perplexity": metric(total, weight)}))
        return meter.drain()

    assert [row["perplexity"] for row in on_ranks(2, act)] == [pytest.approx(2.718281828)] * 2


def test_a_perplexity_beyond_float64_is_large_and_finite() -> None:
    meter = Meter(SingleProcessWorld(), get_finish())
    meter.add(step(1.0, 1.0, metrics={"perplexity": metric(1e5, 1.0)}))
    assert 1e300 < meter.drain()["perplexity"] < float("inf")


def test_a_state_is_finished_once_and_not_reported() -> None:
    def finish(sums: Any) -> dict[str, float]:
        return {"ratio": sums["_right"][0] / sums["_all"][0]} if "_all" in sums else {}

    def act(world: Any) -> dict[str, float]:
        meter = Meter(world, finish)
        right, every = ((1.0, 2.0), (5.0, 6.0))[world.rank]
        meter.add(step(1.0, 1.0, metrics={"_right": metric(right, 1.0), "_all": metric(every, 1.0)}))
        return meter.drain()

    for row in on_ranks(2, act):
        assert row["ratio"] == 0.75
        assert not [name for name in row if name.startswith("_")]


def test_nothing_is_divided_by_a_zero_weight() -> None:
    meter = Meter(SingleProcessWorld())
    meter.add(step(0.0, 0.0, metrics={"accuracy": metric(0.0, 0.0)}))
    assert not {"loss", "accuracy"} & set(meter.drain())


def test_small_sums_do_not_drown_in_a_large_one() -> None:
    meter = Meter(SingleProcessWorld())
    meter.add(step(2.0**24, 1.0))
    for _ in range(100):
        meter.add(step(1.0, 0.0))
    assert meter.drain()["loss"] == 2.0**24 + 100


def test_rates_count_all_ranks_and_leave_pauses_out() -> None:
    def act(world: Any) -> dict[str, float]:
        clock = Clock()
        meter = Meter(world, clock=clock)
        for _ in range(4):
            meter.add(step(1.0, 1.0, samples=3, tokens=50))
            clock.now += 0.5
        with meter.pause():
            clock.now += 1000
        return meter.drain(data_wait_seconds=0.2 + 0.2 * world.rank)

    for row in on_ranks(2, act):
        assert row["tokens_per_second"] == pytest.approx(2 * 4 * 50 / 2.0)
        assert row["samples_per_second"] == pytest.approx(2 * 4 * 3 / 2.0)
        assert row["step_seconds"] == pytest.approx(0.5)
        assert row["data_wait_seconds"] == pytest.approx(0.3 / 4)


def test_a_task_without_tokens_has_no_rate_of_tokens() -> None:
    clock = Clock()
    meter = Meter(SingleProcessWorld(), clock=clock)
    meter.add(step(1.0, 1.0, samples=3, tokens=0))
    clock.now += 0.5
    row = meter.drain()
    assert "tokens_per_second" not in row
    assert row["samples_per_second"] == pytest.approx(6.0)


def test_the_last_gradient_norm_and_the_skipped_steps_are_told() -> None:
    meter = Meter(SingleProcessWorld())
    for norm, applied in [(1.0, True), (float("inf"), False), (3.0, True)]:
        meter.add(step(1.0, 1.0, grad_norm=norm, applied=applied))
    row = meter.drain()
    assert (row["grad_norm"], row["skipped"]) == (3.0, 1)
    meter.add(step(1.0, 1.0))
    assert not {"grad_norm", "skipped"} & set(meter.drain())


def test_draining_starts_anew_and_an_empty_meter_says_nothing() -> None:
    meter = Meter(SingleProcessWorld())
    meter.add(step(5.0, 1.0))
    meter.drain()
    assert meter.drain() == {}
    meter.add(step(7.0, 1.0))
    assert meter.drain()["loss"] == 7.0


def test_adding_keeps_no_graph() -> None:
    meter = Meter(SingleProcessWorld())
    loss = torch.ones((), requires_grad=True) * 2
    meter.add(StepResult(loss=loss, weight=1.0, metrics={"x": (loss, loss)}))
    assert meter.drain()["x"] == 1.0


def test_weights_that_the_host_knows_stay_there_and_mean_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, copies = [], []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda values: (copies.append(len(values)), tolist(values))[1])
    for on_device in (True, False):
        meter = Meter(SingleProcessWorld(), clock=Clock())
        for total, weight in ((0.1, 3.0), (2e7, 2.0**24), (0.7, 1.0)):
            seen = torch.tensor(total), torch.tensor(weight) if on_device else weight
            meter.add(step(total, weight, metrics={"accuracy": seen, "exact": metric(total, 7.0)}))
        copies.clear()
        rows.append(meter.drain())
        assert len(copies) == 1, "one copy for a drain"
    assert rows[0] == rows[1]
    assert copies == [4], "the loss, a sum, and another with its weight"


def test_the_share_of_padding_is_one_sum_over_one_sum() -> None:
    def act(world: Any) -> dict[str, float]:
        meter = Meter(world)
        meter.add(step(1.0, 1.0, tokens=70, computed_tokens=100, padding_tokens=30))
        meter.add(step(1.0, 1.0, computed_tokens=100 * world.rank, padding_tokens=100 * world.rank))
        return meter.drain()

    assert [row["padding"] for row in on_ranks(2, act)] == [160 / 300] * 2
    assert "padding" not in Meter(SingleProcessWorld()).drain()
