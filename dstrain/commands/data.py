"""dstrain data check: every bad record of a file."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dstrain.config import read_recipe
from dstrain.config.schema import DatasetConfig
from dstrain.data.documents.source import DocumentSource
from dstrain.data.encoding.conversations import describe_missing_end
from dstrain.data.encoding.template_check import describe_lost
from dstrain.data.encoding.tokenization import describe_cuts
from dstrain.data.formats.columns import describe_columns, warn_without_images
from dstrain.data.prepare import MAX_ROWS_PER_REASON, ValidationReport, check_source, format_bad_rows
from dstrain.data.records import BadRow
from dstrain.data.sources.base import ConcatSource, Source, check_columns_exist
from dstrain.data.sources.open import open_source
from dstrain.errors import TaskError
from dstrain.process_setup import count_available_cores
from dstrain.tasks import make_task
from dstrain.tasks.common.record_task import RecordTask
from dstrain.tasks.common.text import TextTask

NO_TOKENIZER_HINT = (
    "truncation by data.max_length depends on the tokenizer: `dstrain prepare` prints it, and so does this command with "
    "`--set model.path=FOLDER`"
)


def check_file(
    file: str, task: str, overrides: Sequence[str], show_progress: Callable[[int, int], None] = lambda done, total: None
) -> tuple[ValidationReport, str]:
    """Return the validation report of a file, and a sentence on truncation. Raises TaskError without a format."""
    config = read_recipe(None, overrides, task).config
    made = make_task(config)
    parse = made.checks.parse_record
    if parse is None:
        raise TaskError(f"--task {task}: has no record format to check; the task reads its records itself")
    if not isinstance(made, RecordTask):
        opened = open_source(file, config.data.columns)
        return check_source(opened, parse, count_available_cores(), show_progress), ""
    item = DatasetConfig(path=file)
    opened = made.open_source(item)
    check_columns_exist([opened])
    source = made.wrap_source(opened, item)
    found = check_source(source, parse, count_available_cores(), show_progress)
    told = _describe_documents(source) if isinstance(source, DocumentSource) else []
    told += [f"warning: {line}" for line in warn_without_images(found.columns)] if made.needs_vision else []
    if not made.reads_text:
        return found, "\n".join(told)
    if config.model.path is None:
        return found, "\n".join([*told, NO_TOKENIZER_HINT])
    skipping = make_task(read_recipe(None, [*overrides, "data.on_error=skip"], task).config)
    assert isinstance(skipping, TextTask)
    told += [f"warning: {line}" for line in describe_missing_end(skipping.tokenizer)]
    return found, "\n".join(filter(None, [*told, _describe_truncation(source, skipping, found)]))


def _describe_documents(source: DocumentSource) -> list[str]:
    """Return how the pages were selected, and how many evidence pages retrieval finds where records name them."""
    recall = source.measure_recall()
    return [*source.summarize(), *[str(recall)] * (recall.questions > 0)]


def _describe_truncation(source: Source, task: TextTask, validation: ValidationReport) -> str:
    """Return how many valid records the tokenizer truncates; those that do not fit become bad records."""
    known = {row.location for row in validation.bad}
    if not validation.num_valid:
        return ""
    report = task.build_store(ConcatSource([source])).report
    validation.bad += [row for row in report.bad if row.location not in known]
    counts = {"kept": report.kept, "cuts": report.cuts}
    return "\n".join(filter(None, [describe_cuts(counts), *describe_lost(counts)]))


def show_validation(validation: ValidationReport, show_all: bool = False, is_terminal: bool = True) -> tuple[str, str]:
    """Return (a line per bad record and note, their counts).

    A terminal gets the first ten of each reason, a file or a pipe every bad record and the first ten notes of each
    reason, unless `show_all`.
    """
    each = None if show_all or not is_terminal else MAX_ROWS_PER_REASON
    notes = [BadRow(row.location, f"note: {row.reason}") for row in validation.warnings]
    lines = format_bad_rows(validation.bad, each, None)
    lines += format_bad_rows(notes, None if show_all else MAX_ROWS_PER_REASON, None)
    if len(lines) < len(validation.bad) + len(notes):
        lines.append("`--all` lists every one")
    told = f", {len(notes)} note{'s' * (len(notes) != 1)} on records that can be used" if notes else ""
    total = f"{validation.num_valid} good records, {validation.read - validation.num_valid} bad{told}"
    return "\n".join(lines), "\n".join([total, *describe_columns(validation.columns)])
