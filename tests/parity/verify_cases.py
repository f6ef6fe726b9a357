"""Worker function of test_verify.py."""

from __future__ import annotations

from pathlib import Path

from dstrain.verify.zero import write_updates
from tests.workers import worker_world


def write_updates_of_worker(work: Path) -> None:
    """Collective."""
    write_updates(work, worker_world())
