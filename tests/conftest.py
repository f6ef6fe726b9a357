"""What all tests share."""

from __future__ import annotations

import gc
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers import ROOT, Workers

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin take the cores of the tests beside them
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


MANY = 1000
"""Tests of a run that is about everything."""


REPEATED_CELLS = ROOT / "tests" / "repeated_cells.txt"
"""Node ids of tests that only `make test-all` runs, each with the tests that make its claim in `make test`."""


@pytest.hookimpl(tryfirst=True)  # before -m is applied
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark repeated cells as slow, and sort by folder, so that kernels compile while unit tests run."""
    lines = REPEATED_CELLS.read_text(encoding="utf-8").splitlines()
    repeated = {line.partition(" | ")[0] for line in lines if not line.startswith("#")}

    def place(item: pytest.Item) -> int:
        folder = item.path.relative_to(ROOT / "tests").parts[0]
        return ORDER.index(folder) if folder in ORDER else len(ORDER)

    for item in items:
        if item.nodeid in repeated:
            item.add_marker(pytest.mark.slow)
    # Of the files that were collected: a run of some folders knows nothing of the others.
    files = {item.nodeid.partition("::")[0] for item in items}
    named = {cell for cell in repeated if cell.partition("::")[0] in files}
    if len(items) > MANY and (unknown := named - {item.nodeid for item in items}):
        raise pytest.UsageError(f"{REPEATED_CELLS.name}: no such tests: {', '.join(sorted(unknown))}")
    items.sort(key=place)


def pytest_collection_finish() -> None:
    """Take what is imported and collected out of garbage collection, which goes through all of it again and again."""
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


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data; tests are skipped where it is not."""
    folder = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"no real data at {folder}; DSTRAIN_DATA names another place")
    return folder


@pytest.fixture(scope="session")
def one(own_cache: None) -> Iterator[Workers]:
    """One worker process, shared."""
    workers = Workers(1)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def two(own_cache: None) -> Iterator[Workers]:
    """Two worker processes, shared."""
    workers = Workers(2)
    yield workers
    workers.close()


@pytest.fixture(scope="session")
def three(own_cache: None) -> Iterator[Workers]:
    """Three worker processes, shared."""
    workers = Workers(3)
    yield workers
    workers.close()
