"""`pytest -m hosts` is no success where no test of hosts could run: on a tiny suite under the tests' own conftest.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.workers import ROOT

SUITE = """
import pytest

pytestmark = pytest.mark.hosts

@pytest.mark.parametrize("lacks", {lacks})
def test_a_launch(lacks):
    if lacks:
        pytest.skip(f"no {{lacks}} here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lacks", "code", "said"),
    [
        (["sshd", "netns", "sshd"], 1, "No test of several hosts could run: no netns here; no sshd here."),
        (["sshd", ""], 0, "1 passed, 1 skipped"),
    ],
    ids=["all skipped", "one ran"],
)
def test_a_run_of_hosts_fails_where_every_test_was_skipped(
    lacks: list[str], code: int, said: str, tmp_path: Path
) -> None:
    (tmp_path / "tests/hosts").mkdir(parents=True)
    (tmp_path / "tests/hosts/test_it.py").write_text(SUITE.format(lacks=lacks))
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = hosts\n")
    for name in ("__init__", "conftest", "workers", "forked"):
        (tmp_path / f"tests/{name}.py").symlink_to(ROOT / f"tests/{name}.py")
    command = [sys.executable, "-m", "pytest", "-m", "hosts", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
