"""dstrain data check: every bad record of a file."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.config import read_recipe
from dstrain.data.prepare import check_file as find_bad_rows
from dstrain.data.source import BadRow, open_source
from dstrain.errors import TaskError
from dstrain.tasks import make_task


def check_file(file: str, task: str, sets: Sequence[str]) -> tuple[int, list[BadRow]]:
    """(number of good records, the bad ones)."""
    config = read_recipe(None, sets, task).config
    made = make_task(config)
    convert = getattr(made, "convert", None)
    if convert is None:
        raise TaskError(f"--task {task}: reads its records by itself, so there is no format to check them against")
    bad = find_bad_rows(file, config.data.columns, convert)
    source = open_source(file, config.data.columns)
    return len(source) + len(source.bad) - len(bad), bad
