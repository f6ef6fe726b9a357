"""A run that `dstrain.train` starts in a Python script stops with the script, and the script stops with the run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.processes import Role, find_processes, find_role
from tests.unit.launch.test_supervise import WORKER
from tests.vocabulary import wait_until
from tests.workers import ROOT

LAUNCHER = """
import os, sys
from pathlib import Path
from dstrain.process_setup import prepare_process
prepare_process()
from dstrain.launch.plan import Launch
from dstrain.launch.spawn import LocalWorkerGroup
from dstrain.launch.supervise import supervise
launch = Launch(argv=[sys.executable, "worker.py"], environment=os.environ, ranks=range(2), world_size=2)
sys.exit(supervise(LocalWorkerGroup(launch, Path("run"))))
"""
"""In place of `dstrain train`, which would import torch."""
SCRIPT = """
import os, signal, sys, threading
from pathlib import Path
import dstrain
from dstrain.commands import notebook
notebook.rank_command = lambda arguments: [sys.executable, "launcher.py"]
def train(**options):
    Path("begun").touch()
    return dstrain.train("demo-rm", run_dir="run", **options)
"""
SAVING_WORKER = """
work()
Path(f"saved-{rank}").write_text(str([signal.Signals(number).name for number in asked]))
time.sleep(0.7)  # longer than a repeated signal counts as one
end(75)
"""


class Script:
    """A script that trains, in a process of its own."""

    def __init__(self, folder: Path, script: str, worker: str) -> None:
        self.folder = folder
        (folder / "worker.py").write_text(WORKER + textwrap.dedent(worker))
        (folder / "launcher.py").write_text(LAUNCHER)
        (folder / "script.py").write_text(SCRIPT + textwrap.dedent(script))
        self.process = subprocess.Popen(
            [sys.executable, "script.py"], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "MARK": str(folder)},
        )  # fmt: skip

    def wait_for(self, name: str) -> None:
        """Wait until both ranks have written the file `NAME-RANK`."""
        wait_until(lambda: all((self.folder / f"{name}-{rank}").exists() for rank in (0, 1)))

    def end(self) -> tuple[int, str]:
        """Return the exit code and the output."""
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output

    def list_processes(self) -> list[int]:
        """Return the processes of the script and its run that live."""
        return list(find_processes(str(self.folder)))

    def send(self, number: int, role: Role) -> None:
        """Send a signal to a process of the run."""
        process = find_role(find_processes(str(self.folder)), self.process.pid, role)
        assert process is not None
        process.send_signal(number)


StartScript = Callable[..., Script]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[StartScript]:
    """`start(script, worker)`: both are the rest of a program."""
    scripts: list[Script] = []

    def begin(script: str, worker: str = SAVING_WORKER) -> Script:
        scripts.append(Script(tmp_path, script, worker))
        return scripts[-1]

    yield begin
    for script in scripts:
        for pid in script.list_processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        script.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_script_saves_and_ends_it_with_75(number: signal.Signals, start: StartScript) -> None:
    script = start("train(); print('exports what is half trained')")
    script.wait_for("ready")
    script.process.send_signal(number)
    code, output = script.end()
    assert code == 75, output
    assert "exports" not in output
    assert "Traceback" not in output
    assert (script.folder / "saved-1").read_text() == f"['{number.name}']"
    assert script.list_processes() == []


def test_the_run_saves_and_stops_when_its_script_was_killed(start: StartScript) -> None:
    script = start("train()")
    script.wait_for("ready")
    script.process.kill()
    script.process.wait()
    script.wait_for("saved")
    assert (script.folder / "saved-0").read_text() == "['SIGHUP']"
    wait_until(lambda: not script.list_processes(), 20)


@pytest.mark.slow
def test_a_script_that_is_killed_while_its_run_saves_does_not_end_the_save(start: StartScript) -> None:
    """A scheduler sends SIGTERM, and SIGKILL to what has not ended in time."""
    script = start("train()", "work(); tell('asked'); time.sleep(2.0); tell('saved'); end(75)")
    script.wait_for("ready")
    script.process.terminate()
    script.wait_for("asked")
    time.sleep(0.6)  # more than DUPLICATE_SIGNAL_SECONDS
    script.process.kill()
    script.process.wait()
    script.wait_for("saved")
    wait_until(lambda: not script.list_processes(), 20)
    assert (script.folder / "saved-0").exists(), "the save was not ended"


def test_a_stopped_run_is_caught_or_returned_and_the_handlers_are_restored(start: StartScript) -> None:
    script = start("""
        signal.signal(signal.SIGTERM, lambda *_: print("own handler"))
        try:
            train()
        except Exception:
            print("an Exception")
        except dstrain.RunStopped as stop:
            print("stopped:", stop.code, stop.run.is_stopped, stop)
        signal.raise_signal(signal.SIGTERM)
        for path in Path().glob("ready-*"):
            path.unlink()
        run = train(raise_if_stopped=False)
        print("returned:", run.is_stopped)
    """)
    script.wait_for("ready")
    script.process.terminate()
    script.wait_for("saved")
    wait_until(lambda: not list(script.folder.glob("ready-*")))
    script.wait_for("ready")
    script.process.terminate()
    code, output = script.end()
    assert code == 0, output
    told = [line for line in output.splitlines() if not line.startswith("dstrain: ")]
    stopped = f"stopped: 75 True a signal stopped the run in {script.folder}/run after a checkpoint; the same call continues it"
    assert told == [stopped, "own handler", "returned: True"]


def test_a_signal_with_nothing_to_save_has_its_usual_effect(start: StartScript) -> None:
    script = start(
        """
        try:
            train()
        except KeyboardInterrupt:
            print("interrupted")
        (Path("ready-0").unlink(), Path("ready-1").unlink())
        train()
        """,
        "work(); end(1, 'stopped before the first step')",
    )
    script.wait_for("ready")
    script.process.send_signal(signal.SIGINT)
    wait_until(lambda: not list(script.folder.glob("ready-*")))
    script.wait_for("ready")
    script.process.terminate()
    code, output = script.end()
    assert code == -signal.SIGTERM, output
    assert "interrupted" in output


@pytest.mark.slow
def test_another_error_of_the_script_stops_the_run_first(start: StartScript) -> None:
    script = start("""
        def raise_timeout(signum, frame):
            raise TimeoutError("of the script")
        signal.signal(signal.SIGALRM, raise_timeout)
        train()
    """)
    script.wait_for("ready")
    script.process.send_signal(signal.SIGALRM)
    code, output = script.end()
    assert code == 1
    assert "TimeoutError: of the script" in output
    assert (script.folder / "saved-1").exists()
    assert script.list_processes() == []


@pytest.mark.slow
def test_a_script_that_trains_in_a_thread_is_ended_by_the_signal_and_its_run_stops(start: StartScript) -> None:
    script = start("thread = threading.Thread(target=train); thread.start(); thread.join()")
    script.wait_for("ready")
    script.process.terminate()
    assert script.process.wait(20) == -signal.SIGTERM
    script.wait_for("saved")
    wait_until(lambda: not script.list_processes(), 20)


LOGGING_WORKER = """
redirect_output(run / "logs" / f"rank-{rank:05d}.log", copy_to_terminal=rank == 0)
work()
end(75)
"""


@pytest.mark.parametrize("role", ["supervisor", "rank 0", pytest.param("rank 1", marks=pytest.mark.slow)])
def test_nothing_is_left_when_a_process_of_the_run_is_killed(role: Role, start: StartScript) -> None:
    script = start("train()", LOGGING_WORKER)
    script.wait_for("ready")
    script.send(signal.SIGKILL, role)
    code, output = script.end()
    assert code == 1
    subject = f"the launch of the run in {script.folder}/run" if role == "supervisor" else role
    assert f"RunError: {subject} was killed by SIGKILL" in output
    assert script.list_processes() == []


def test_a_log_copier_that_is_stopped_holds_nothing_up(start: StartScript) -> None:
    script = start("train()", LOGGING_WORKER)
    script.wait_for("ready")
    script.send(signal.SIGSTOP, "log copier")
    script.process.terminate()
    assert script.process.wait(30) == 75
    assert script.list_processes() == []
