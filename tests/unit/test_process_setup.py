"""On a CPU a process keeps freed memory, so that the kernel does not clear its pages again in every step."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from dstrain import process_setup
from dstrain.process_setup import notice_if_slow

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
    monkeypatch.setattr(process_setup, "SLOW_SECONDS", 0.05)
    with notice_if_slow("hashing"):
        time.sleep(0.3)
    with notice_if_slow("fast work"):
        pass
    with notice_if_slow("work of another rank", wanted=False):
        time.sleep(0.1)
    time.sleep(0.1)
    assert capfd.readouterr().err == "hashing ...\n"
