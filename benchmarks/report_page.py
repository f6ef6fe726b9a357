"""Time and size of the report page of a long run: `python -m benchmarks.report_page [ROWS]`."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from pathlib import Path

from dstrain.report.run_history import RunHistory
from dstrain.training.run_report import REPORT_FILE, describe_run, write_page
from tests.run_folders import event, started, train_row, write_run

COLUMNS = (
    "accuracy", "tokens_per_second", "samples_per_second", "data_wait_seconds", "peak_memory_gib", "allocated_memory_gib",
    "reserved_memory_gib", "pinned_memory_gib", "host_memory_gib", "resident_memory_gib", "available_memory_gib",
    "gpu_utilization", "padding",
)  # fmt: skip


def main(count: int) -> None:
    """Print the seconds for reading and writing, of a first page and of the next one, and the sizes."""
    draw = random.Random(0)
    rows = [train_row(step, **{name: draw.random() for name in COLUMNS}) for step in range(1, count + 1)]
    events = [started(count), *(event("saved", step=step) for step in range(0, count, 500))]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = write_run(Path(folder), rows, events)
        del rows
        history = RunHistory(run_dir)
        for name in ("first page", "next page"):
            start = time.process_time()
            history.refresh()
            read = time.process_time()
            write_page([describe_run(history, "running")], run_dir / REPORT_FILE)
            print(f"{name}: {read - start:.2f} s to read, {time.process_time() - read:.2f} s to write")
        sizes = [os.path.getsize(run_dir / file) / 1e6 for file in ("metrics.jsonl", REPORT_FILE)]
        print(f"metrics.jsonl {sizes[0]:.1f} MB, {REPORT_FILE} {sizes[1]:.2f} MB")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 100_000)
