"""A worker that the kernel kills because the memory of its cgroup is full: the launch says so, with the fixes."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.launch.test_supervise import WORKER
from tests.workers import ROOT

LIMIT = 300 * 2**20
"""Bytes of all processes of the launch, more than they need without the fault."""

MAIN = """
import os, sys
from pathlib import Path
Path(sys.argv[1], "cgroup.procs").write_text(str(os.getpid()))
from dstrain.launch.plan import Launch
from dstrain.launch.spawn import LocalWorkerGroup
from dstrain.launch.supervise import supervise
launch = Launch(argv=[sys.executable, "worker.py"], environment=os.environ, ranks=range(2), world_size=2)
sys.exit(supervise(LocalWorkerGroup(launch, Path("run"))))
"""

FILL_MEMORY = """
Path(f"ready-{rank}").write_text("")
while len(list(Path().glob("ready-*"))) < 2:
    time.sleep(0.01)
time.sleep(0.5)  # for the supervisor to have seen both
blocks = [b"x" * 2**20 for _ in range(2000)] if rank == 1 else None
work()
"""


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A cgroup with LIMIT, of version 1 or 2."""
    root = Path("/sys/fs/cgroup")
    is_v1 = (root / "memory").is_dir()
    group = root / ("memory" if is_v1 else "") / f"dstrain-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    try:
        (group / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(LIMIT))
        swap, most = ("memory.memsw.limit_in_bytes", LIMIT) if is_v1 else ("memory.swap.max", 0)
        if (group / swap).exists():
            (group / swap).write_text(str(most))
        yield group
    except OSError as error:
        pytest.skip(f"no limit of memory can be set here: {error}")
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    """Remove a cgroup; one is busy for a moment after its last process has ended."""
    until = time.monotonic() + 20
    while group.exists():
        try:
            group.rmdir()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.02)


def test_a_worker_that_the_kernel_killed_for_memory_is_named_as_such(cgroup: Path, tmp_path: Path) -> None:
    for name, text in (
        ("main.py", MAIN),
        ("worker.py", WORKER + textwrap.dedent(FILL_MEMORY)),
    ):
        (tmp_path / name).write_text(text)
    done = subprocess.run(
        [sys.executable, "main.py", str(cgroup)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "rank 1 was killed by SIGKILL: the kernel killed " in done.stderr
    assert "memory was full" in done.stderr
    assert "lower data.workers and data.prefetch" in done.stderr
