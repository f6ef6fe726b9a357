"""Commands of the selftest: how many processes, what a dead command costs, and what is left."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dstrain.commands import selftest
from dstrain.commands.environment import EnvironmentLine, show_environment
from dstrain.commands.selftest import (
    CHECKS,
    TOLERANCE,
    CheckResult,
    SelftestReport,
    compare_losses,
    plan_processes,
    report_as_json,
    run_name,
    run_selftest,
    show_report,
    work_folder,
)
from dstrain.errors import EXIT_STOPPED, UsageError
from tests.vocabulary import invoke


class FakeCommands:
    """Stands for child processes: `broken` presets end their first command, all others do what is expected of them."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.calls = broken, list[tuple[str, str]]()

    def __call__(
        self, command: Sequence[str], env: dict[str, str], output: int, errors: int,
        signal_when: Callable[[], bool] | None = None,
    ) -> int:  # fmt: skip
        words = list(command)[list(command).index("dstrain.cli") + 1 :]
        if words[0] == "evaluate":
            os.write(output, b'{"loss": 0.5}')
        if words[0] != "train":
            self.calls.append((words[0], Path(words[1]).name))
            return 0
        preset, run_dir = words[words.index("--ds-config") + 1], Path(words[words.index("--run-dir") + 1])
        self.calls.append(("stop" if signal_when else "train", run_dir.name))
        if preset in self.broken:
            os.write(errors, b"started\nSegmentation fault\n\n")
            return -11
        run_dir.mkdir(exist_ok=True)
        rows = [{"split": split, "step": 1, "loss": 0.5} for split in ("train", "eval")]
        (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return EXIT_STOPPED if signal_when else 0


@pytest.mark.parametrize(
    ("gpus", "first", "second"),
    [
        (0, "2 processes on the CPU", "1 process on the CPU"),
        (1, "1 process on GPUs", "2 processes on the CPU"),
        (8, "8 processes on GPUs", "4 processes on GPUs"),
    ],
)
def test_a_run_is_resumed_by_another_number_of_processes(gpus: int, first: str, second: str) -> None:
    assert [str(each) for each in plan_processes(gpus)] == [first, second]


def test_each_preset_trains_until_a_signal_resumes_exports_and_evaluates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selftest, "run_child", commands := FakeCommands())
    report = run_selftest(["zero3"], tmp_path, lambda line: None)
    assert commands.calls == [
        ("train", "zero0-unbroken"), ("stop", "zero3-stopped"), ("train", "zero3-stopped"),
        ("export", "zero3-stopped"), ("evaluate", "zero3-export"),
    ]  # fmt: skip
    assert report.passed
    assert [row.check for row in report.results] == list(CHECKS)


def test_a_command_that_dies_costs_one_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_child", FakeCommands("zero1"))
    report = run_selftest(["zero0", "zero1", "zero2"], tmp_path, lambda line: None)
    states = {(row.preset, row.check): row.state for row in report.results}
    assert states["zero1", "train"] == "failed"
    assert {state for (preset, _), state in states.items() if preset != "zero1"} == {"ok"}
    failed = next(row for row in report.results if row.state == "failed")
    assert failed.detail == "`dstrain train` ended with exit code -11 instead of 75: Segmentation fault"
    assert "`dstrain train demo-rm --ds-config zero1` shows this preset alone" in failed.fix
    assert [row.preset for row in report.results] == ["zero0"] * 5 + ["zero1"] * 5 + ["zero2"] * 5


def test_without_losses_to_compare_with_nothing_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_child", FakeCommands("zero0"))
    report = run_selftest(["zero2"], tmp_path, lambda line: None)
    assert not report.passed
    losses = next(row for row in report.results if row.check == "losses")
    assert (losses.state, losses.detail) == (
        "failed",
        "the run without a break with zero0 failed: `dstrain train` ended with exit code -11 instead of 0: "
        "Segmentation fault",
    )


def test_the_reason_is_the_last_error_in_the_output() -> None:
    log = "x\ndstrain: rank 0 failed with code 1: no memory\nmore\ndstrain: the logs of the processes are kept in /tmp/x\n"
    assert selftest.find_reason(log) == "dstrain: rank 0 failed with code 1: no memory"
    assert selftest.find_reason("a\nSegmentation fault\n\n") == "Segmentation fault"
    assert selftest.find_reason("") == "it printed nothing"


def test_a_command_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "TIMEOUT_SECONDS", 0.2)
    with (tmp_path / "log").open("wb") as log:
        start = time.monotonic()
        command = [sys.executable, "-c", "import time; time.sleep(60)"]
        assert selftest.run_child(command, dict(os.environ), log.fileno(), log.fileno()) is None
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_child_and_removes_the_folder(number: signal.Signals, tmp_path: Path) -> None:
    seen: list[int] = []

    def strike() -> None:
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        seen.append(int((tmp_path / "pid").read_text()))
        os.kill(os.getpid(), number)

    code = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    thread = threading.Thread(target=strike)
    thread.start()
    with (tmp_path / "log").open("wb") as log, pytest.raises(KeyboardInterrupt), work_folder(None) as folder:
        selftest.run_child([sys.executable, "-c", code], dict(os.environ), log.fileno(), log.fileno())
    thread.join()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_a_folder_to_keep_is_new_or_empty(tmp_path: Path) -> None:
    with work_folder(tmp_path / "new") as folder:
        (folder / "x").write_text("")
    assert (tmp_path / "new" / "x").is_file()
    with pytest.raises(UsageError, match=r"--keep .*new: is not empty; choose another folder"), work_folder(folder):
        pass
    with pytest.raises(UsageError, match=r"--keep .*x: cannot be used"), work_folder(folder / "x"):
        pass


def test_a_selftest_inside_a_launch_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=r"torchrun has started this one; start it alone"):
        run_selftest(["zero0"], tmp_path, lambda line: None)


def test_a_preset_given_twice_is_refused() -> None:
    done = invoke("selftest", "--preset", "zero1", "--preset", "zero1")
    assert done.exit_code == 2
    assert "--preset zero1: is given twice; remove one" in done.stderr


def test_a_preset_that_does_not_exist_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(selftest, "run_child", lambda *words: started.append(words) or 1)
    done = invoke("selftest", "--preset", "zero9")
    assert (done.exit_code, started) == (2, [])
    assert "there is no such preset in" in done.stderr


def test_the_environment_comes_first_and_a_failure_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def dead(*words: object) -> int:
        return 1

    monkeypatch.setattr(selftest, "run_child", dead)
    done = invoke("selftest", "--preset", "zero1")
    assert done.exit_code == 1
    assert done.stdout.splitlines()[0].startswith("system ")
    assert "zero1, train: `dstrain train` ended with exit code 1 instead of 75: it printed nothing" in done.stdout


# Losses are compared row by row, and what differs is named.


def rows(*losses: float | None) -> list[dict[str, Any]]:
    return [{"split": "train", "step": step, "loss": loss} for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("found", "unbroken", "worst", "problem"),
    [
        ((0.7, 0.6), (0.7, 0.6), 0.0, ""),
        ((0.7, 0.6 * (1 + TOLERANCE / 2)), (0.7, 0.6), TOLERANCE / 2, ""),
        (
            (0.7, 0.61, 0.5),
            (0.7, 0.6, 0.5),
            1 / 60,
            "train loss of step 2 is 0.61, but 0.6 in the unbroken run: a relative difference of 0.017",
        ),
        ((0.7, None), (0.7, 0.6), float("nan"), "step 2 is nan"),
        ((0.7,), (0.7, 0.6), float("inf"), "its rows are train 1, but the unbroken run has train 1, train 2"),
        ((), (), float("inf"), "its rows are"),  # two empty runs prove nothing
    ],
    ids=["equal", "rounding", "a step", "nan", "a missing row", "no rows"],
)
def test_losses_are_compared_and_the_step_that_differs_most_is_named(
    found: tuple[float | None, ...], unbroken: tuple[float, ...], worst: float, problem: str
) -> None:
    difference, told = compare_losses(rows(*found), rows(*unbroken))
    assert difference == pytest.approx(worst, rel=1e-3, nan_ok=True)
    assert problem in told
    assert bool(told) == bool(problem)


def test_a_json_file_is_named_without_its_folder() -> None:
    assert run_name("presets/mine.json") == "mine"
    assert run_name("zero2") == "zero2"


# The table has a row per preset, and a failure says why and what to do.


def passed(preset: str, *checks: str) -> list[CheckResult]:
    detail = {"losses": "1.2e-07", "evaluate": "0.0e+00"}
    return [CheckResult(preset=preset, check=check, state="ok", detail=detail.get(check, "")) for check in checks]


def report(*results: CheckResult) -> SelftestReport:
    return SelftestReport(
        environment=[EnvironmentLine("ports", "unusable", "no loopback; fix it")],
        processes=("2 processes on the CPU", "1 process on the CPU"), results=results, seconds=61.4,
    )  # fmt: skip


BROKEN = [
    *passed("zero0", *CHECKS),
    *passed("zero2", "train"),
    CheckResult(preset="zero2", check="resume", state="failed", detail="first line\nsecond line", fix="check the disk"),
    *(
        CheckResult(preset="zero2", check=check, state="skipped", detail="resume failed")
        for check in ("losses", "export", "evaluate")
    ),
]


def test_every_preset_is_a_row_and_every_check_a_column() -> None:
    lines = show_report(report(*passed("zero0", *CHECKS), *passed("zero3", *CHECKS))).splitlines()
    assert lines[0].split() == ["preset", "train", "resume", "losses", "export", "evaluate"]
    assert lines[1].split() == ["zero0", "ok", "ok", "1.2e-07", "ok", "0.0e+00"]
    assert lines[-1] == "selftest: passed in 61 s"
    assert "trained with 2 processes on the CPU, resumed with 1 process on the CPU" in lines[-2]


def test_a_failure_is_explained_with_what_to_do() -> None:
    text = show_report(report(*BROKEN))
    assert "zero2   ok        FAILED    -         -         -" in text
    assert "zero2, resume: first line second line\n  what to do: check the disk" in text
    assert text.endswith("selftest: 1 check failed in 61 s")
    assert not report(*BROKEN).passed


def test_nothing_tested_is_not_passed() -> None:
    assert not report().passed


def test_the_json_holds_all_that_the_table_shows() -> None:
    values = json.loads(report_as_json(report(*BROKEN)))
    assert values["passed"] is False
    assert [row["detail"] for row in values["results"] if row["state"] == "skipped"] == ["resume failed"] * 3
    assert {row["fix"] for row in values["results"] if row["state"] == "failed"} == {"check the disk"}
    assert values["environment"] == [
        {"name": "ports", "value": "unusable", "warning": "no loopback; fix it", "is_fault": False}
    ]


def test_a_warning_stands_below_its_line() -> None:
    lines = show_environment([EnvironmentLine("free disk", "9 GiB"), *report().environment]).splitlines()
    assert lines[0] == "free disk      9 GiB"
    assert lines[2].strip() == "warning: no loopback; fix it"
