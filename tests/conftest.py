"""What all tests share."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.workers import ROOT, Workers

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the cores of the tests beside them
if not Path("/dev/nvidiactl").exists() and shutil.which("nvidia-smi") is None:
    # On a CPU only bitsandbytes has functions compiled, which takes each process ten seconds, and dstrain none.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
if importlib.metadata.version("torch").endswith("+cpu"):
    # Triton compiles for GPUs alone. A kernel that is defined while this is set runs in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
# The commands of this environment. DeepSpeed's kernels are compiled anew, for minutes, whenever another ninja is found.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
# A script that runs `pytest &` makes it, and every command that a test starts, ignore Ctrl-C; `nohup` does so for SIGHUP.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)
if importlib.util.find_spec("hypothesis"):  # of the extra `dev`: most tests do without
    from hypothesis import settings

    settings.register_profile("house", derandomize=True, deadline=None)
    settings.load_profile("house")


ORDER = ("unit", "docs", "parity", "resume", "faults", "launching", "hosts", "benchmarks", "contract")
"""Folders of tests in the order of their run: what needs no compiled kernel first, what offloads to a disk last."""


MANY_MODULES = 100
MANY = 1000
"""Tests of a run that is about everything."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by folder, so that kernels compile while unit tests run."""

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    items.sort(key=place)


def find_missing_hosts(config: pytest.Config) -> str:
    """Return why every test of hosts was skipped; "" where one ran or none was asked for."""
    stats = config.pluginmanager.getplugin("terminalreporter").stats

    def of_hosts(state: str) -> list[pytest.TestReport]:
        return [report for report in stats.get(state, ()) if report.nodeid.startswith("tests/hosts/")]

    skipped = of_hosts("skipped")
    if not skipped or any(map(of_hosts, ("passed", "failed", "error"))):
        return ""
    return "; ".join(sorted({str(one.longrepr[2]).removeprefix("Skipped: ") for one in skipped}))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that was to launch on several hosts, and could on none, has failed."""
    if session.exitstatus == pytest.ExitCode.OK and find_missing_hosts(session.config):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if reason := find_missing_hosts(config):
        terminalreporter.write_line(
            f"No test of several hosts could run: {reason}. docs/contributing.md says what to install."
        )


def pytest_collection_finish() -> None:
    """Take what is imported and collected out of garbage collection, which goes through all of it again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def frozen_imports() -> Iterator[None]:
    """Freeze what the tests of a file have imported, too: a collection by dstrain takes 0.2 s otherwise."""
    before = len(sys.modules)
    yield
    if len(sys.modules) - before > MANY_MODULES:
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """DeepSpeed's kernels, compiled while the unit tests run; on a fresh machine that takes minutes.

    Slow tests alone offload to a disk.
    """
    if len(request.session.items) < MANY or os.environ.get("PYTEST_XDIST_WORKER", "gw0") != "gw0":
        yield
        return
    disk = ["disk"] if any(item.get_closest_marker("slow") for item in request.session.items) else []
    build = subprocess.Popen([sys.executable, "-m", "tests.kernels", *disk], cwd=ROOT, stdout=subprocess.DEVNULL)
    yield
    build.wait()  # a build that is killed has to be made again


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A token cache of the tests' own, and no hub."""
    before = dict(os.environ)
    os.environ.update(DSTRAIN_CACHE=str(tmp_path_factory.mktemp("cache")), HF_HUB_OFFLINE="1", WANDB_MODE="offline")
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """No wait for the disk: 7,000 calls take a quarter of a minute. Tests of what reaches the disk count the calls."""
    with mock.patch.object(os, "fsync", return_value=None):
        yield


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, in its temporary folder."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data; tests are skipped where it is not."""
    folder = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; DSTRAIN_DATA names another place")
    return folder


def _shared_workers(size: int, scope: Any = "session") -> Any:
    @pytest.fixture(scope=scope)
    def shared(own_cache: None) -> Iterator[Workers]:
        workers = Workers(size)
        yield workers
        workers.close()

    return shared


one, two, three = _shared_workers(1), _shared_workers(2), _shared_workers(3)
"""Worker processes that tests share."""
four = _shared_workers(4, "module")
