"""Position, speed, end and use of time of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from dstrain.report.progress import find_end, measure_progress, measure_time_use
from dstrain.report.run_history import open_run
from tests.run_folders import eval_row, event, started, train_row, write_run


def test_time_left_comes_from_the_clock_of_the_last_rows_of_this_start(tmp_path: Path) -> None:
    slow = [train_row(step, time=event("x", 100 * step)["time"]) for step in (1, 2)]
    fast = [train_row(step, time=event("x", 5000 + 3 * step)["time"]) for step in (3, 4, 5)]
    run = open_run(write_run(tmp_path / "run", [*slow, *fast], [started(), started(steps=25, step=2, seconds=5000)]))
    progress = measure_progress(run)
    assert (progress.step, progress.total_steps) == (5, 25)
    assert progress.seconds_per_step == pytest.approx(3)
    assert progress.seconds_left == pytest.approx(60)


def test_one_row_gives_its_own_speed_and_none_gives_none(tmp_path: Path) -> None:
    assert measure_progress(open_run(write_run(tmp_path / "a", [train_row(5)], [started()]))).seconds_left == 190
    progress = measure_progress(open_run(write_run(tmp_path / "b", [], [started(step=7)])))
    assert (progress.step, progress.seconds_left) == (7, None)
    assert measure_progress(open_run(write_run(tmp_path / "c"))).total_steps is None


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (["finished"], "finished"),
        (["stopped"], "stopped"),
        (["failed"], "failed"),
        (["out_of_memory"], "failed"),
        (["already_finished"], "finished"),
        (["stopped", "started"], None),
        (["finished", "warning"], "finished"),
        (["out_of_memory", "micro_batch_reduced"], None),
        ([], None),
    ],
)
def test_the_last_event_that_ends_a_start_says_how(tmp_path: Path, events: list[str], end: str | None) -> None:
    assert find_end(open_run(write_run(tmp_path / "run", [], [event(name) for name in ("started", *events)]))) == end


def test_the_parts_of_the_time_add_up(tmp_path: Path) -> None:
    rows = [
        train_row(10, time=event("x", 30)["time"], data_wait_seconds=0.5),
        eval_row(10, time=event("x", 34)["time"]),
        train_row(20, time=event("x", 60)["time"], data_wait_seconds=0.5, save_stall_seconds=3.0),
        train_row(30, time=event("x", 1000 + 25)["time"], data_wait_seconds=0.0),
    ]
    run = open_run(write_run(tmp_path / "run", rows, [started(), started(step=20, seconds=1000)]))
    use = measure_time_use(run)
    assert use.total == pytest.approx(60 + 25), "the pause between two starts is no time of the run"
    assert (use.data_wait, use.save_stall, use.evaluation) == (10, 3, pytest.approx(4))
    assert use.compute == pytest.approx(50)
    assert use.other == pytest.approx(85 - 50 - 10 - 3 - 4)


def test_an_empty_run_took_no_time(tmp_path: Path) -> None:
    assert measure_time_use(open_run(write_run(tmp_path / "run"))).total == 0
