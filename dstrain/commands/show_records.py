"""Records in a short readable form: what a task reads of series, structures and documents, without a tokenizer."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.data.formats.columns import parse_record
from dstrain.data.formats.images import RecordWithImages
from dstrain.data.records import BadRecord, as_record
from dstrain.data.sources.base import list_unread
from dstrain.errors import escape_controls
from dstrain.tasks.common.record_task import RecordTask


def show_records(task: RecordTask, limit: int) -> Iterator[str]:
    """Yield the first `limit` records of the task's training files, one text for each, then what was not read."""
    source = task.open_sources(task.training_items)
    parse = task.checks.parse_record
    assert parse is not None, "a task that describes records reads them"
    for row in source.bad_rows[:limit]:
        yield f"--- {row.location}: cannot be used: {row.reason}"
    for index in range(min(limit, len(source))):
        location = source.location(index)
        try:
            record = as_record(source[index])
            parsed = parse_record(parse, record)
            lines = task.describe_record(record, parsed.parsed if isinstance(parsed, RecordWithImages) else parsed)
        except BadRecord as fault:
            yield f"--- {location}: cannot be used: {fault.reason}"
            continue
        yield "\n".join([f"--- {location}", *map(escape_controls, lines)])
    yield from (f"--- {sentence}" for sentence in list_unread(source))
