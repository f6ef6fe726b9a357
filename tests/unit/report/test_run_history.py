"""Reading run folders: rows as columns, also of damaged and growing files."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from pathlib import Path

import pytest

from dstrain.errors import UsageError
from dstrain.report.run_history import MAX_COLUMNS, open_run, parse_time
from tests.run_folders import event, finished_run, started, train_row, write_run

BOMB = "a0: &a0 [1, 1]\n" + "".join(f"a{k}: &a{k} [*a{k - 1}, *a{k - 1}]\n" for k in range(1, 40))
"""A recipe of a few lines and 2^40 values."""


def test_rows_become_columns_with_nan_where_a_row_lacks_a_number(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [train_row(1), train_row(2, accuracy=0.5), train_row(3, loss=None)]))
    assert list(run.train.columns["step"]) == [1, 2, 3]
    assert math.isnan(run.train.columns["accuracy"][0])
    assert run.train.columns["accuracy"][1] == 0.5
    assert math.isnan(run.train.columns["loss"][2])
    assert run.train.last_row["step"] == 3
    assert len(run.eval) == 0


def test_columns_keep_the_order_of_the_file(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path / "run", [train_row(1, zebra=1, apple=2, mango=3)]))
    assert list(run.train.columns)[-3:] == ["zebra", "apple", "mango"]


def test_a_growing_file_is_read_on_and_a_line_that_is_being_written_waits(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)])
    run = open_run(folder)
    line = json.dumps(train_row(2)).encode() + b"\n"
    with (folder / "metrics.jsonl").open("ab", buffering=0) as file:
        file.write(line[:30])
        run.refresh()
        assert len(run.train) == 1
        assert run.damaged_lines == 0
        file.write(line[30:])
        run.refresh()
    assert list(run.train.columns["step"]) == [1, 2]


@pytest.mark.parametrize(
    "line",
    [
        b'{"step": 3, "loss"',
        b"\0" * 50,
        b"[1, 2]",
        b'{"step": "three", "split": "train"}',
        b'{"step": 1e400, "split": "train"}',
        b"\xff\xfe{}",
        b"[" * 100_000,
    ],
)
def test_a_damaged_line_is_counted_and_left_out(tmp_path: Path, line: bytes) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)], [started()])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (folder / name).open("ab") as file:
            file.write(line + b"\n")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(json.dumps(train_row(4)).encode() + b"\n")
    run = open_run(folder)
    assert list(run.train.columns["step"]) == [1, 4]
    assert [one["event"] for one in run.events] == ["started"]
    assert run.damaged_lines == 2


def test_rows_are_not_collected_while_they_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [train_row(1)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(train_row(step, text="x" * 5000)) + "\n" for step in range(2, 5000))
    tracemalloc.start()
    try:
        assert len(open_run(folder).train) == 4999
        assert tracemalloc.get_traced_memory()[1] < 12 << 20
    finally:
        tracemalloc.stop()


def test_odd_values_in_whole_rows_do_no_harm(tmp_path: Path) -> None:
    odd = {"flag": True, "text": "x", "list": [1], "big": 10**400, "none": None}
    run = open_run(write_run(tmp_path / "run", [train_row(1, time=5, epoch="x", **odd)], [event("saved", step="x")]))
    assert math.isnan(run.train.columns["time"][0])
    assert math.isnan(run.train.columns["epoch"][0])
    assert not {"flag", "text", "list", "big"} & run.train.columns.keys()


def test_a_task_that_invents_names_fills_no_memory(tmp_path: Path) -> None:
    rows = [train_row(step, **{f"metric-{step}-{k}": 1.0 for k in range(100)}) for step in range(10)]
    assert len(open_run(write_run(tmp_path / "run", rows)).train.columns) == MAX_COLUMNS


def test_passwords_in_addresses_are_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", recipe={"data": {"train": "https://me:secret@host/data.jsonl"}})
    assert "secret" not in open_run(folder).texts["recipe.yaml"]


@pytest.mark.parametrize(
    "text", ["a: [", "- 1\n- 2\n", "!!python/object/apply:os.system [id]", "\0", "&a {b: *a}", "!!int {}", BOMB]
)
def test_a_damaged_recipe_is_an_empty_one(tmp_path: Path, text: str) -> None:
    folder = finished_run(tmp_path / "run")
    (folder / "recipe.yaml").write_text(text)
    (folder / "environment.json").write_text("[")
    run = open_run(folder)
    assert run.recipe == {}
    assert run.parse_json("environment.json") == {}
    assert run.get_setting("optim.lr", 7) == 7


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("task: rm")
    (tmp_path / "file").write_text("")
    for path, problem in ((tmp_path, "is not a run folder"), (tmp_path / "no", "does not exist"), (tmp_path / "file", "is not a folder")):  # fmt: skip
        with pytest.raises(UsageError, match=problem) as refused:
            open_run(path)
        assert str(path) in str(refused.value)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], [started()])
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    assert len(open_run(folder).train) == 0


def test_times_without_sense_are_nan() -> None:
    assert parse_time("1970-01-01T00:00:10.000Z") == 10
    assert all(math.isnan(parse_time(text)) for text in ("yesterday", None, 5, ""))
