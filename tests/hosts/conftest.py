"""Hosts for the tests of this folder; the tests are skipped if none can be created."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.hosts.lab import Lab, missing
from tests.hosts.running import Run
from tests.hosts.running import unbroken as run_unbroken


@pytest.fixture(scope="session")
def can_make_hosts() -> None:
    if reason := missing():
        pytest.skip(reason)


@pytest.fixture
def make_lab(can_make_hosts: None, tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """`make_lab(hosts=3, style="debian")` -> a Lab that is up; it is gone after the test."""
    with ExitStack() as stack:
        yield lambda **how: stack.enter_context(Lab(tmp_path / "lab", **how))


@pytest.fixture
def lab(make_lab: Callable[..., Lab]) -> Lab:
    """Two hosts."""
    return make_lab()


@pytest.fixture(scope="session")
def unbroken(can_make_hosts: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing happened to, on this machine alone."""
    return run_unbroken(tmp_path_factory.mktemp("unbroken") / "job")
