"""Each rule speaks where its numbers ask for it, and is silent where they do not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dstrain.report.page.render import evaluate_rules
from dstrain.report.page.verdicts import RunSummary
from dstrain.report.progress import State
from dstrain.report.run_history import open_run
from tests.run_folders import RECIPE, eval_row, event, finished_run, started, train_row, write_run

Read = Callable[..., list[str]]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """Return the verdicts of a run with these rows and events, each with its level in front."""

    def verdicts(
        rows: list[dict[str, Any]], *events: dict[str, Any], state: State = "finished", **recipe: Any
    ) -> list[str]:
        folder = write_run(tmp_path / "run", rows, [started(), *events], RECIPE | recipe)
        return [
            f"{one.level}: {one.text} {one.advice}".strip()
            for one in evaluate_rules(RunSummary(open_run(folder), state))
        ]

    return verdicts


def rows_of(count: int = 20, **columns: Callable[[int], Any]) -> list[dict[str, Any]]:
    return [train_row(step, **{name: value(step) for name, value in columns.items()}) for step in range(1, count + 1)]


def says(verdicts: list[str], *words: str) -> bool:
    return any(all(word in verdict for word in words) for verdict in verdicts)


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    found = evaluate_rules(RunSummary(open_run(finished_run(tmp_path / "run")), "finished"))
    assert {one.level for one in found} <= {"good", "info"}, found
    assert found[0].text.startswith("Finished: step 100 of 100 in 3 m 2")


def test_warnings_of_the_data_are_verdicts_once(read: Read) -> None:
    warned = event("warning", what="the held-out data have 1 sample: say little", about="data")
    found = read(rows_of(40), warned, warned, event("warning", what="another"))
    assert [line for line in found if "held-out" in line] == ["warning: The held-out data have 1 sample: say little."]
    assert not says(found, "Another")
    assert not says(read(rows_of(40), warned, started(step=40)), "held-out"), "of an earlier start"


def test_a_loss_that_rises_diverges(read: Read) -> None:
    found = read(rows_of(40, loss=lambda step: 2 - step / 10 if step < 15 else step / 10))
    assert says(found, "bad: The training loss rises", "optim.lr (now 0.001)")
    assert not says(read(rows_of(40)), "rises")


def test_a_loss_that_stands_still_is_named(read: Read) -> None:
    assert says(
        read(rows_of(40, loss=lambda step: 0.69 + 0.001 * (step % 3))), "warning: The training loss has not fallen"
    )


def test_a_negative_loss_that_falls_is_good(read: Read) -> None:
    assert says(read(rows_of(40, loss=lambda step: -step / 10)), "good: The training loss fell")


def evaluations(values: list[float], name: str = "accuracy") -> list[dict[str, Any]]:
    return [*rows_of(), *(eval_row(10 * k, **{name: value}) for k, value in enumerate(values, 1))]


def test_a_metric_that_still_rises_is_reported(read: Read) -> None:
    assert says(
        read(evaluations([0.5, 0.6, 0.7, 0.75, 0.79])),
        "info: Eval accuracy is still rising: best 0.79 at step 50",
        "More steps",
    )
    ended = [
        row | {"lr": 1e-3 * (1 - row["step"] / 20.001)} if row["split"] == "train" else row
        for row in evaluations([0.5, 0.6, 0.7])
    ]
    assert says(read(ended), "still rising", "learning rate has reached its end")
    assert not says(read(evaluations([0.5, 0.6, 0.7]), state="running"), "More steps")


def test_a_metric_that_has_levelled_off_is_reported(read: Read) -> None:
    assert says(
        read(evaluations([0.5, 0.78, 0.8, 0.799, 0.8, 0.8])),
        "good: Eval accuracy has levelled off: best 0.8 at step 30",
    )


def test_a_metric_that_was_better_before_is_reported(read: Read) -> None:
    assert says(
        read(evaluations([0.5, 0.8, 0.7, 0.7])), "warning: Eval accuracy was best with 0.8 at step 20, and is 0.7 now"
    )
    assert says(read(evaluations([0.8, 0.7, 0.6, 0.5])), "never better than at the first")


def test_a_change_below_chance_is_no_progress(tmp_path: Path) -> None:
    rows = evaluations([0.80, 0.805, 0.81])
    run = open_run(write_run(tmp_path / "run", rows, [started(eval_samples=200)]))
    assert says(
        [one.text for one in evaluate_rules(RunSummary(run, "finished"))],
        "has not changed beyond chance",
        "standard error 0.0277",
    )


def test_overfitting_needs_a_training_loss_that_falls(read: Read) -> None:
    recipe = {"eval": {"metric": "loss", "best": "min"}}
    rising = evaluations([0.6, 0.4, 0.45, 0.5], "loss")
    found = read(rising, **recipe)
    assert says(found, "warning: Overfitting: eval loss was lowest at step 20 (0.4) and is 0.5 now", "--step best")
    assert not says(found, "levelled off")
    flat = [row | {"loss": 1.0} if row["split"] == "train" else row for row in rising]
    assert not says(read(flat, **recipe), "Overfitting")


def test_no_evaluation_is_said(read: Read) -> None:
    assert says(read(rows_of()), "no evaluation", "data.eval")
    assert not says(read(rows_of(), state="running"), "no evaluation")


def test_large_gradients_are_reported(read: Read) -> None:
    assert says(read(rows_of(grad_norm=lambda step: 3.0)), "above optim.clip (1) in 100 % of the rows")
    assert says(read(rows_of(grad_norm=lambda step: 50.0 if step == 7 else 0.4)), "jumped", "at step 7.")
    assert not says(read(rows_of()), "gradient norm")


def test_skipped_steps_are_reported(read: Read) -> None:
    skipped = [event("step_skipped", step=3, why="loss not finite")]
    assert says(read(rows_of(), *skipped), "warning: 1 of 20 steps were skipped")
    assert says(read(rows_of(), *skipped * 3), "bad: 3 of 20 steps were skipped")


def test_waiting_for_data_is_a_share_of_the_steps(read: Read) -> None:
    found = read(rows_of(data_wait_seconds=lambda step: 0.24))
    assert says(found, "warning: 12 % of the time of the steps was spent waiting for data", "data.workers (now 4)")
    assert not says(read(rows_of(data_wait_seconds=lambda step: 0.01)), "waiting for data")


def test_long_checkpoints_and_evaluations_are_reported(read: Read) -> None:
    assert says(read(rows_of(save_stall_seconds=lambda step: 1.0)), "went into checkpoints", "save.background")
    long = [row for step in range(1, 21) for row in (train_row(step, time=event("", 10 * step)["time"]), eval_row(step, time=event("", 10 * step + 6)["time"]))]  # fmt: skip
    assert says(read(long), "went into evaluations", "eval.every")


def test_a_run_that_became_slower_is_reported(read: Read) -> None:
    assert says(
        read(rows_of(40, tokens_per_second=lambda step: 1000 if step < 25 else 500)),
        "became slower: 1000 tokens/s at best, 500",
    )
    assert not says(read(rows_of(40, tokens_per_second=lambda step: 1000 - step)), "slower")


def test_padding_and_idle_gpus_are_reported(read: Read) -> None:
    found = read(rows_of(padding=lambda step: 0.4, gpu_utilization=lambda step: 30.0))
    assert says(found, "40 % of the computed tokens were padding", "batch.packing")
    assert says(found, "GPUs were busy 30 %")


def test_memory_is_reported(read: Read) -> None:
    gib = 2**30
    assert says(
        read(rows_of(), event("memory", predicted_host_bytes=0, predicted_bytes=2 * gib, measured_bytes=gib)),
        "info: Memory of tensors of a process: predicted 2.0 GiB, measured 1.0 GiB",
    )
    assert says(
        read(rows_of(), event("memory", predicted_host_bytes=0, predicted_bytes=gib, measured_bytes=2 * gib)),
        "warning: Memory of tensors of a process",
    )
    on_cpu = read(rows_of(), event("memory", predicted_bytes=2 * gib, measured_bytes=gib))
    assert says(on_cpu, "info: Memory of a process: measured 1.0 GiB after two steps")
    assert says(read(rows_of(available_memory_gib=lambda step: 1.5)), "Only 1.5 GiB of host memory")
    assert says(read(rows_of(40, resident_memory_gib=lambda step: 2.0 + step / 10)), "grew from 3.5 to")


def test_events_are_counted(read: Read) -> None:
    happened = [
        event("started", step=5, world_size=4), event("resumed", step=5), event("out_of_memory", step=6), event("stalled"),
        event("micro_batch_reduced", change="batch.micro 8 -> 4"), event("warning", what="x"), event("warning", what="y"),
    ]  # fmt: skip
    found = read(rows_of(), *happened)
    for words in (
        "Resumed once, with 2 then 4",
        "Ran out of memory once",
        "batch.micro 8 -> 4",
        "stood still once",
        "2 warnings",
    ):
        assert says(found, words.replace("2 then", "2, then")), words


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("running", "info: Running: step 20 of 100, about 2 m 40 s left"),
        ("stopped", "info: Stopped by SIGTERM at step 20 of 100"),
        ("failed", "bad: Failed at step 20 of 100: rank 1 died"),
        ("killed", "bad: Ended without a word at step 20 of 100"),
        ("unknown", "info: At step 20 of 100"),
    ],
)
def test_the_first_verdict_is_how_the_run_ended(read: Read, state: State, words: str) -> None:
    assert read(rows_of(), event("stopped", signal="SIGTERM"), event("failed", what="rank 1 died"), state=state)[
        0
    ].startswith(words)


@pytest.mark.parametrize("value", [math.nan, None, "x", 0.0, -1e299, 1e299])
def test_no_number_breaks_a_rule(read: Read, value: Any) -> None:
    names = ("loss", "grad_norm", "lr", "step_seconds", "data_wait_seconds", "tokens_per_second", "padding", "resident_memory_gib", "available_memory_gib", "save_stall_seconds")  # fmt: skip
    rows = rows_of(40, **{name: lambda step: value for name in names})
    rows += [eval_row(step, accuracy=value, loss=value) for step in (10, 20, 30, 40)]
    assert read(
        rows,
        event("memory", predicted_host_bytes=0, predicted_bytes=value, measured_bytes=value),
        event("stopped", signal=value),
    )
