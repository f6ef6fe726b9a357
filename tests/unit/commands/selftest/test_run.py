"""LaunchSequence of the selftest: how many processes, what a dead launch costs, and what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from dstrain.commands import selftest
from dstrain.commands.selftest import (
    CHECKS,
    CheckResult,
    LaunchSequence,
    Phase,
    Processes,
    error_path,
    plan_processes,
    result_path,
    run_selftest,
    work_folder,
    write_results,
)
from dstrain.errors import UsageError
from tests.vocabulary import invoke

ALONE = Processes(1, True)


def good(folder: Path, phase: Phase, preset: str) -> None:
    results = [CheckResult(preset=preset, check=check, state="ok") for check in CHECKS[phase]]
    write_results(result_path(folder, phase, preset), results)


class FakeLaunch:
    """Stands for child processes: `broken` presets end them, all presets before it write good results."""

    def __init__(self, folder: Path, *broken: str) -> None:
        self.folder, self.broken, self.calls = folder, broken, list[list[str]]()

    def __call__(self, command: Sequence[str], env: dict[str, str], output: int) -> int:
        presets = [command[at + 1] for at, word in enumerate(command) if word == "--preset"]
        phase: Phase = "stop" if "stop" in command else "resume"
        self.calls.append([phase, *presets])
        for preset in presets:
            if preset in self.broken:
                os.write(output, b"started\nSegmentation fault\n\n")
                return -11
            good(self.folder, phase, preset)
        return 0


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


def test_two_launches_do_for_all_presets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_child", launch := FakeLaunch(tmp_path))
    report = run_selftest(["zero0", "zero3"], tmp_path, lambda line: None)
    assert launch.calls == [["stop", "zero0", "zero3"], ["resume", "zero0", "zero3"]]
    assert report.passed
    assert len(report.results) == 12


def test_a_launch_that_dies_costs_one_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_child", launch := FakeLaunch(tmp_path, "zero1"))
    report = run_selftest(["zero0", "zero1", "zero2"], tmp_path, lambda line: None)
    assert launch.calls == [["stop", "zero0", "zero1", "zero2"], ["stop", "zero2"], ["resume", "zero0", "zero2"]]
    states = {(row.preset, row.check): row.state for row in report.results}
    assert states["zero1", "train"] == "failed"
    assert {state for (preset, _), state in states.items() if preset != "zero1"} == {"ok"}
    failed = next(row for row in report.results if row.state == "failed")
    assert failed.detail == "the processes ended with exit code -11: Segmentation fault"
    assert "`dstrain train demo-rm --ds-config zero1` shows this preset alone" in failed.fix
    assert [row.preset for row in report.results] == ["zero0"] * 6 + ["zero1"] * 6 + ["zero2"] * 6


def test_the_reason_is_the_last_error_in_the_output() -> None:
    log = "x\ndstrain: rank 0 failed with code 1: no memory\nmore\ndstrain: the logs of the processes are kept in /tmp/x\n"
    assert selftest.find_reason(log) == "dstrain: rank 0 failed with code 1: no memory"
    assert selftest.find_reason("a\nSegmentation fault\n\n") == "Segmentation fault"
    assert selftest.find_reason("") == "they have printed nothing"


def test_the_error_of_a_rank_is_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "run_child", FakeLaunch(tmp_path, "zero1"))
    (path := error_path(tmp_path, "stop", "zero1", 0)).parent.mkdir()
    path.write_text("the disk is full")
    assert LaunchSequence("stop", ALONE, tmp_path, 8).run(["zero1"], lambda line: None)[0].detail == "the disk is full"


def test_a_launch_that_never_ends_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "LAUNCH_TIMEOUT_SECONDS", 0.2)
    with (tmp_path / "log").open("wb") as log:
        start = time.monotonic()
        assert (
            selftest.run_child([sys.executable, "-c", "import time; time.sleep(60)"], dict(os.environ), log.fileno())
            is None
        )
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
        selftest.run_child([sys.executable, "-c", code], dict(os.environ), log.fileno())
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


def test_it_starts_no_processes_inside_a_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    assert "zero1, train: the processes ended with exit code 1: they have printed nothing" in done.stdout


def test_the_environment_needs_no_torch(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from dstrain.commands.selftest import collect_lines; "
    code += "collect_lines(Path('.')); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
