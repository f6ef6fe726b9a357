"""dstrain data check: every bad record of a file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dstrain.config import read_recipe
from dstrain.data.cache.bad_record_summary import MAX_ROWS_PER_REASON, format_bad_rows
from dstrain.data.cache.check import ValidationReport
from dstrain.data.cache.check import check_file as check_records
from dstrain.data.encoding.truncation import describe_cuts
from dstrain.data.records import BadRow
from dstrain.data.sources.open import ConcatSource, open_source
from dstrain.errors import TaskError
from dstrain.launch.threads import count_available_cores
from dstrain.tasks import make_task
from dstrain.tasks.common.text import TextTask

NO_TOKENIZER_HINT = (
    "what data.max_length cuts depends on the tokenizer: `dstrain prepare` prints it, and so does this command with "
    "`--set model.path=FOLDER`"
)


def check_file(file: str, task: str, overrides: Sequence[str]) -> tuple[ValidationReport, str]:
    """What the file holds, and in a sentence what is cut of it. Raises TaskError for a task that reads records by itself."""
    config = read_recipe(None, overrides, task).config
    made = make_task(config)
    convert = getattr(made, "parse_record", None)
    if convert is None:
        raise TaskError(f"--task {task}: reads its records by itself, so there is no format to check them against")
    found = check_records(file, config.data.columns, convert, count_available_cores())
    if not isinstance(made, TextTask):
        return found, ""
    if config.model.path is None:
        return found, NO_TOKENIZER_HINT
    return found, _describe_truncation(
        file, make_task(read_recipe(None, [*overrides, "data.on_error=skip"], task).config), found
    )


def _describe_truncation(file: str, task: Any, validation: ValidationReport) -> str:
    """What is cut of the good records, as the model's tokenizer counts; those that do not fit join the bad ones."""
    known = {row.location for row in validation.bad}
    if not validation.num_valid:
        return ""
    report = task.tokens(ConcatSource([open_source(file, task.recipe.data.columns)])).report
    validation.bad += [row for row in report.bad if row.where not in known]
    return describe_cuts({"kept": report.kept, "cuts": report.cuts})


def show_validation(validation: ValidationReport, show_all: bool = False) -> tuple[str, str]:
    """(a line for each bad record and each note, the sum of them); without `every` the first ten of each kind."""
    each = None if show_all else MAX_ROWS_PER_REASON
    notes = [BadRow(row.location, f"note: {row.reason}") for row in validation.warnings]
    lines = [*format_bad_rows(validation.bad, each, None), *format_bad_rows(notes, each, None)]
    if len(lines) < len(validation.bad) + len(notes):
        lines.append("`--all` lists every one")
    told = f", {len(notes)} note{'s' * (len(notes) != 1)} on records that can be used" if notes else ""
    return "\n".join(lines), f"{validation.num_valid} good records, {validation.read - validation.num_valid} bad{told}"
