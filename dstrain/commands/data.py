"""dstrain data check: every bad record of a file."""

from __future__ import annotations

from collections.abc import Sequence

from dstrain.config import read_recipe
from dstrain.data.checking import Checked
from dstrain.data.checking import check_file as check_records
from dstrain.errors import TaskError
from dstrain.launch.threads import cores_here
from dstrain.tasks import make_task


def check_file(file: str, task: str, sets: Sequence[str]) -> Checked:
    """Raises TaskError for a task that reads its records by itself."""
    config = read_recipe(None, sets, task).config
    convert = getattr(make_task(config), "convert", None)
    if convert is None:
        raise TaskError(f"--task {task}: reads its records by itself, so there is no format to check them against")
    return check_records(file, config.data.columns, convert, cores_here())


def show_checked(found: Checked) -> tuple[str, str]:
    """(a line for each bad record and each unusual image, the sum of them)."""
    lines = [f"{row.where}: {row.reason}" for row in found.bad]
    lines += [f"{row.where}: note: {row.reason}" for row in found.unusual]
    notes = f", {len(found.unusual)} notes on images that can be used" if found.unusual else ""
    return "\n".join(lines), f"{found.good} good records, {found.read - found.good} bad{notes}"
