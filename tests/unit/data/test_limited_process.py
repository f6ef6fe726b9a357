"""Work in a process of its own under limits: what it answers, however it and its parent are set up."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dstrain import host_limits
from dstrain.data.limited_process import ResourceLimits, run_limited
from tests.workers import ROOT

SOME = ResourceLimits(1 << 30, 10, 30.0)


class TwoWords(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def fail(error: BaseException) -> None:
    raise error


def test_an_exception_is_its_name_and_its_text() -> None:
    """Of any kind: one that takes two arguments cannot be unpickled."""
    tried = run_limited(lambda: fail(TwoWords("this", "that")), SOME)
    assert (tried.status, tried.value) == ("raised", ["TwoWords", "this and that"])


def test_an_answer_is_what_json_holds() -> None:
    assert run_limited(lambda: {"names": ["a", "\udcff"], "count": 3}, SOME).value == {
        "names": ["a", "\udcff"],
        "count": 3,
    }
    tried = run_limited(lambda: {1, 2}, SOME)
    assert (tried.status, tried.value[0]) == ("raised", "TypeError")


def run(script: str, *words: str) -> str:
    """What a process prints that is started with SIGCHLD ignored, as some supervisors start theirs."""
    ignoring = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    argv = [sys.executable, "-c", ignoring, "-c", textwrap.dedent(script), *words]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0, told.stderr
    return told.stdout.strip()


@pytest.mark.slow
def test_an_ignored_sigchld_loses_no_answer() -> None:
    script = """
        import time
        from dstrain.data.limited_process import ResourceLimits, run_limited
        limits = ResourceLimits(1 << 30, 10, 3.0)
        for work in (lambda: "fine", lambda: 1 / 0, lambda: bytearray(1 << 40), lambda: time.sleep(60)):
            print(run_limited(work, limits).status)
    """
    assert run(script).split() == ["done", "raised", "memory", "lost"]


def test_the_command_line_waits_for_its_children_again() -> None:
    """subprocess takes a child that it cannot wait for as one that ended well."""
    script = """
        import subprocess, sys
        from dstrain import cli
        cli.main.invoke = lambda context: print(subprocess.call([sys.executable, "-c", "raise SystemExit(3)"]))
        cli.main.main(["tasks"], standalone_mode=False)
    """
    assert run(script) == "3"


@pytest.mark.parametrize("code", [0, 1, 9])
def test_a_child_that_says_nothing_is_lost(code: int) -> None:
    assert run_limited(lambda: os._exit(code), SOME).status == "lost"


@pytest.mark.parametrize(
    ("lines", "free"),
    [
        ("0::/job/step\n", 600),
        ("5:memory:/job\n4:cpu:/job\n", 300),
        ("0::/elsewhere\n", 900),
        ("0::/../..\n", 900),
        ("", None),
    ],
)
def test_memory_of_a_cgroup_is_free_below_its_limit(
    lines: str, free: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").write_text(lines)
    held = {
        "memory.max": "1000", "memory.current": "100", "job/memory.max": "1000", "job/memory.current": "400",
        "job/step/memory.max": "max", "job/step/memory.current": "10",
        "memory/job/memory.limit_in_bytes": "500", "memory/job/memory.usage_in_bytes": "200",
    }  # fmt: skip
    for name, text in held.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    monkeypatch.setattr(host_limits, "CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(host_limits, "OWN_CGROUP_FILE", tmp_path / "own")
    assert (host_limits.get_available_memory() < 1 << 20) == (free is not None)
    assert min(host_limits._iter_available(host_limits.find_cgroup_limits()), default=None) == free
