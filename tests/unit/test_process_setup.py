"""A command repairs its streams and signals, and keeps freed memory on a CPU."""

from __future__ import annotations

import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from dstrain import process_setup
from dstrain.process_setup import (
    discard_closed_output,
    escape_unsupported_characters,
    keep_freed_memory,
    log_if_slow,
    log_stderr,
    open_closed_streams,
    reset_signals,
)

PROGRAM = """
import resource, sys
from dstrain.process_setup import keep_freed_memory

def touch():
    page = bytearray(64 * 2**20)
    return len(page)

if sys.argv[1] == "keep" and not keep_freed_memory():
    sys.exit(7)
touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(kind: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, kind], capture_output=True, text=True)
    if done.returncode == 7:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_freed_memory_is_used_again_without_new_pages() -> None:
    assert faults("keep") < 100, "the pages of the first allocation serve the others"


def test_without_the_setting_each_large_allocation_gets_new_pages() -> None:
    assert faults("no") > 4 * 100


def test_only_slow_work_is_announced(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    timers: list[threading.Timer] = []

    def make_timer(seconds: float, *how: Any) -> threading.Timer:
        timers.append(threading.Timer(0.05 if len(timers) != 1 else 600, *how))
        assert seconds == process_setup.SLOW_SECONDS
        return timers[-1]

    monkeypatch.setattr(process_setup, "threading", SimpleNamespace(Timer=make_timer))
    with log_if_slow("hashing"):
        timers[0].join()
    with log_if_slow("fast work"):  # its timer would end in ten minutes
        pass
    timers[1].join(20)
    assert not timers[1].is_alive(), "the end of the work ends its timer"
    with log_if_slow("work of another rank", enabled=False):
        time.sleep(0.1)
    assert capfd.readouterr().err == "hashing ...\n"


class FakeDescriptors:
    """Stands for `os` where descriptor 1 is closed; records what is done instead."""

    devnull, O_RDWR, O_WRONLY = os.devnull, os.O_RDWR, os.O_WRONLY

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def fstat(self, descriptor: int) -> None:
        if descriptor == 1:
            raise OSError

    def open(self, path: str, flags: int) -> int:
        return 9

    def __getattr__(self, name: str) -> Any:
        return lambda *words, **options: self.calls.append((name, *words)) or io.StringIO()


def test_a_closed_stream_is_opened_on_the_null_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setup, "os", fake := FakeDescriptors())
    monkeypatch.setattr(sys, "stdout", None)
    open_closed_streams()
    assert fake.calls == [("dup2", 9, 1), ("close", 9), ("set_inheritable", 1, True), ("fdopen", 1, "w")]
    assert sys.stdout is not None


def test_a_letter_that_the_terminal_lacks_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(stored := io.BytesIO(), encoding="ascii"))
    escape_unsupported_characters()
    print("\xfc", end="", flush=True)
    assert stored.getvalue() == b"\\xfc"


def test_an_ignored_sigchld_is_reset() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        reset_signals()
        assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_sigusr1_does_not_end_a_process_that_starts() -> None:
    """torchrun's and srun's ranks import for seconds before they can save."""
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)"
    for setup, code in (("", -signal.SIGUSR1), ("from dstrain.process_setup import prepare_process as p; p()", 0)):
        assert subprocess.run([sys.executable, "-c", f"{setup}\n{kill}"]).returncode == code


@pytest.mark.parametrize(
    ("events", "closed"), [([(1, select.POLLERR)], True), ([(1, select.POLLOUT)], False), ([], False)]
)
def test_output_without_a_reader_goes_to_the_null_device(
    events: list[tuple[int, int]], closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll = SimpleNamespace(register=lambda *_: None, poll=lambda _: events)
    monkeypatch.setattr(process_setup.select, "poll", lambda: poll)
    monkeypatch.setattr(process_setup, "os", fake := FakeDescriptors())
    assert discard_closed_output() is closed
    assert fake.calls == ([("dup2", 9, 1), ("close", 9)] if closed else [])


def test_a_c_library_without_the_setting_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_setup.ctypes, "CDLL", lambda _: SimpleNamespace())
    assert keep_freed_memory() is False
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(
        process_setup.ctypes, "CDLL", lambda _: SimpleNamespace(mallopt=lambda *words: calls.append(words) or 1)
    )
    assert keep_freed_memory() is (sys.platform == "linux")


def test_a_message_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log_stderr("hello")
    assert capsys.readouterr() == ("", "hello\n")


def test_a_command_may_open_as_many_files_as_the_hard_limit_allows() -> None:
    script = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (100, 300))\n"
        "from dstrain.process_setup import prepare_process; prepare_process()\n"
        "print(r.getrlimit(r.RLIMIT_NOFILE)[0])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "300\n"
