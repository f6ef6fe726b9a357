"""dstrain data check: every bad record of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dstrain.config import read_recipe
from dstrain.data.cache.bad_record_summary import EACH, show_rows
from dstrain.data.cache.check import Checked
from dstrain.data.cache.check import check_file as check_records
from dstrain.data.encoding.truncation import show_cuts
from dstrain.data.sources.open import BadRow, Joined, open_source
from dstrain.errors import TaskError
from dstrain.launch.threads import cores_here
from dstrain.tasks import make_task
from dstrain.tasks.common.text import TextTask

NO_TOKENIZER = (
    "what data.max_length cuts depends on the tokenizer: `dstrain prepare` prints it, and so does this command with "
    "`--set model.path=FOLDER`"
)


def check_file(file: str, task: str, sets: Sequence[str]) -> tuple[Checked, str]:
    """What the file holds, and in a sentence what is cut of it. Raises TaskError for a task that reads records by itself."""
    config = read_recipe(None, sets, task).config
    made = make_task(config)
    convert = getattr(made, "convert", None)
    if convert is None:
        raise TaskError(f"--task {task}: reads its records by itself, so there is no format to check them against")
    found = check_records(file, config.data.columns, convert, cores_here())
    if not isinstance(made, TextTask):
        return found, ""
    if config.model.path is None:
        return found, NO_TOKENIZER
    return found, _cuts(file, make_task(read_recipe(None, [*sets, "data.on_error=skip"], task).config), found)


def _cuts(file: str, task: Any, found: Checked) -> str:
    """What is cut of the good records, as the model's tokenizer counts; those that do not fit join the bad ones."""
    known = {row.where for row in found.bad}
    if not found.good:
        return ""
    report = task.tokens(Joined([open_source(file, task.recipe.data.columns)])).report
    found.bad += [row for row in report.bad if row.where not in known]
    return show_cuts({"kept": report.kept, "cuts": report.cuts})


def show_checked(found: Checked, every: bool = False) -> tuple[str, str]:
    """(a line for each bad record and each note, the sum of them); without `every` the first ten of each kind."""
    each = None if every else EACH
    notes = [BadRow(row.where, f"note: {row.reason}") for row in found.unusual]
    lines = [*show_rows(found.bad, each, None), *show_rows(notes, each, None)]
    if len(lines) < len(found.bad) + len(notes):
        lines.append("`--all` lists every one")
    told = f", {len(notes)} note{'s' * (len(notes) != 1)} on records that can be used" if notes else ""
    return "\n".join(lines), f"{found.good} good records, {found.read - found.good} bad{told}"
