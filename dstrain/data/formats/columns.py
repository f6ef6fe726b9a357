"""Columns of records that no parser reads: what they look like, refusals, and counts for each file."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, TypeVar

from dstrain.data.formats.messages import is_transcript
from dstrain.data.records import BadRecord, Record, as_record

ParsedT = TypeVar("ParsedT")

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".svg")
MEDIA_SUFFIXES = (*IMAGE_SUFFIXES, ".mp4", ".avi", ".mov", ".mkv", ".webm", ".wav", ".mp3", ".flac", ".ogg")
_IMAGE_WORDS = ("image", "img", "picture", "pic", "photo", "media", "screenshot", "video", "audio", "pixel", "frame")
_IMAGE_ENDS = ("", "s", "path", "paths", "file", "files", "filename", "filenames", "url", "urls", "uri", "bytes", "list",
               "values", "data", "base64", "b64")  # fmt: skip
IMAGE_NAMES = {word + end for word in _IMAGE_WORDS for end in _IMAGE_ENDS}
"""Names of columns that hold images, video or audio, without case and separators; `image_id` is none of them."""
QUESTION_NAMES = {
    "prompt", "prompts", "question", "questions", "query", "queries", "instruction", "instructions", "input", "inputs",
    "problem", "post", "context", "history", "system", "systemprompt", "systemmessage", "userprompt", "human",
    "userinput", "usermessage", "request", "document", "passage", "article", "choices", "dialog",
    "dialogue", "conversation", "conversations", "messages", "contextmessages", "turns", "chat", "tools", "functions",
}  # fmt: skip
"""Names of columns that hold a part of the prompt."""
ANSWER_NAMES = {
    "answer", "answers", "response", "responses", "output", "outputs", "completion", "completions", "reply", "target",
    "targets", "caption", "captions", "assistant", "chosen", "rejected", "better", "worse", "positive", "negative",
    "preferred", "dispreferred", "gpt", "bot", "response0", "response1", "response2", "preferredoutput",
    "nonpreferredoutput", "rejectedresponse", "rejectedmessages",
}  # fmt: skip
"""Names of columns that hold an answer."""
FLAG_NAMES = {
    "weight", "weights", "loss", "lossscale", "lossweight", "lossmask", "sampleweight", "train", "training",
    "trainable", "traindetail", "trainingdetail", "chattemplatekwargs", "betterresponseid", "overallresponse",
    "preference", "winner", "ktotag", "label", "labels",
}  # fmt: skip
"""Names of columns that say whether, how much or with which sign something is trained on."""
ID_ENDS = ("id", "ids", "idx", "index", "uuid", "source", "key")
"""Ends of the names of columns that identify a record, with a path perhaps."""
LABELS = {"label", "labels", "preference", "winner", "ktotag", "betterresponseid", "overallresponse"}
KEEP_OUT = "to leave it out, set data.columns to {%s: null}"
MESSAGE_KEYS = {
    "role", "content", "from", "value", "name", "tool_calls", "tool_call_id", "function_call", "reasoning_content",
    "reasoning", "thinking", "weight", "loss", "loss_scale", "loss_weight", "train", "training", "trainable",
    "train_detail", "training_detail", "human", "assistant", "system",
}  # fmt: skip
"""Keys of a message that are read, or refused where they are read."""


def plain_name(name: str) -> str:
    """Return the name in lower case without separators: `imageUrl` and `image_url` are one name."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


def is_empty(value: Any) -> bool:
    """Return whether a column has nothing in this record."""
    if isinstance(value, str | list | tuple | dict | bytes):
        return not value
    return value is None or (isinstance(value, float) and math.isnan(value))


def is_image(value: Any) -> bool:
    """Return whether a value is the path or the content of an image, a video or a sound, or a list of them."""
    if isinstance(value, list | tuple):
        return bool(value) and all(is_image(item) for item in value)
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes) or is_image(value.get("path") or value.get("url"))
    if isinstance(value, bytes):
        return True
    if not isinstance(value, str) or len(value) > 4096 or "\n" in value:
        return False
    return value.startswith("data:image/") or value.lower().split("?")[0].endswith(MEDIA_SUFFIXES)


def parse_record(parse: Callable[[Any], ParsedT], record: Mapping[str, Any], is_prompt: bool = False) -> ParsedT:
    """Return `parse(record)`. Raises BadRecord also for a column that looks needed and was not read.

    `is_prompt`: only the prompt of the record is wanted, so that its answers and labels need not be read.
    """
    tracked = as_record(record)
    parsed = parse(tracked)
    check_unused(tracked, is_prompt)
    return parsed


def check_unused(record: Record, is_prompt: bool = False) -> None:
    """Raise BadRecord for a column that looks like a question, an answer, an image or a flag and was not read."""
    for name, value in find_unused(record).items():
        if kind := _describe_unused(record, name, value, is_prompt):
            raise BadRecord(
                f"'{name}' {kind}, and the task does not read it; {_fix(record, name)}, or {KEEP_OUT % name}"
            )


def find_unused(record: Record) -> dict[str, Any]:
    """Return the columns with a value that were not read, and unread keys of messages as `messages[].key`."""
    unused = {name: value for name, value in record.columns.items() if name not in record.used and not is_empty(value)}
    for name in record.used:
        value = record.columns.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping) and ("role" in item or "from" in item):
                unused |= {
                    f"{name}[].{key}": one for key, one in item.items() if key not in MESSAGE_KEYS and not is_empty(one)
                }
    return unused


def _describe_unused(record: Record, column: str, value: Any, is_prompt: bool) -> str:
    """Return what an unread column looks like; empty if it may be left out."""
    name = plain_name(column.rpartition(".")[2])
    is_name = name.endswith(ID_ENDS)  # such as the file that a record was made from
    if (name in IMAGE_NAMES and isinstance(value, str | list | Mapping | bytes)) or (is_image(value) and not is_name):
        return "looks like an image, video or audio"
    if name in FLAG_NAMES:
        # A label beside a complete pair, or of a task that learns from texts alone, is information on the record.
        is_information = name in LABELS or value is True or value == 1
        return "" if is_prompt or is_information else "looks like a flag or weight of the training"
    keys = {plain_name(key) for key in record.used.values()}
    if not is_prompt and _is_alone(record, keys) and isinstance(value, str) and len(value.split()) > 1:
        return "may be the question, since the record has no prompt"
    if not keys & (QUESTION_NAMES | ANSWER_NAMES | {"text"}):
        return ""  # the task learns from other things than texts
    is_pair = "chosen" in keys
    is_answer = name in ANSWER_NAMES and not is_pair and not is_prompt
    if not (name in QUESTION_NAMES or is_answer):
        return ""
    texts = [text.strip() for text in iter_strings(value) if text.strip()]
    read = "\n".join(text for name in record.used for text in iter_strings(record.columns.get(name)))
    if not texts or all(text in read for text in texts):
        return ""  # written twice, such as `prompt` next to `messages` that contain it
    return "looks like an answer" if name in ANSWER_NAMES else "looks like a part of the prompt"


def _is_alone(record: Record, keys: set[str]) -> bool:
    """Return whether two plain texts are all that was read: they may hold their prompt, or lack it."""
    answers = [record.columns.get(column) for column, key in record.used.items() if key in ("chosen", "rejected")]
    plain = len(answers) == 2 and all(isinstance(one, str) and not is_transcript(one) for one in answers)
    return plain and not keys & QUESTION_NAMES


def _fix(record: Record, column: str) -> str:
    name = plain_name(column.rpartition(".")[2])
    if "[]" in column:
        return "move it into a column of the record"
    if name in IMAGE_NAMES or is_image(record.columns[column]):
        return f"rename it with data.columns {{{column}: image}}"
    return "rename it with data.columns"


def iter_strings(value: Any) -> Iterator[str]:
    """Yield all texts of a value, those of nested lists and objects too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from iter_strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from iter_strings(item)


@dataclass
class ColumnReport:
    """The columns of one file: which were read as what, and which were not read."""

    records: int = 0
    used: Counter[str] = field(default_factory=Counter)
    """`column`, or `column as key` where it was read under another name -> records."""
    unused: Counter[str] = field(default_factory=Counter)
    """Column -> records in which it has a value and was not read."""
    images: int = 0
    without_image: int = 0
    """Records without an image."""

    def add(self, record: Mapping[str, Any], num_images: int) -> None:
        """Count a record after it was parsed."""
        tracked = as_record(record)
        self.records += 1
        self.images += num_images
        self.without_image += not num_images
        for column, key in tracked.used.items():
            if column in tracked.columns and not is_empty(tracked.columns[column]):
                self.used[column if column == key else f"{column} as {key}"] += 1
        self.unused.update([*find_unused(tracked)])

    def merge(self, other: ColumnReport) -> None:
        self.records += other.records
        self.images += other.images
        self.without_image += other.without_image
        self.used.update(other.used)
        self.unused.update(other.unused)

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, for a cache or an event."""
        counts = {"images": self.images, "records_without_image": self.without_image}
        return {"records": self.records, **counts, "used": dict(self.used), "unused": dict(self.unused)}


def describe_columns(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each file on its images and columns, from `ColumnReport.to_json` by file."""
    lines = []
    for file, report in reports.items():
        records = report["records"]
        parts = [f"{records} record{'s' * (records != 1)}"]
        if images := report.get("images"):
            without = report["records_without_image"]
            parts.append(f"{images} image{'s' * (images != 1)}, {without} record{'s' * (without != 1)} without one")
        parts.append(f"read: {_list_columns(report['used'], records) or 'no column'}")
        if report["unused"]:
            parts.append(f"not used: {_list_columns(report['unused'], records)}")
        lines.append(f"{file}: {'; '.join(parts)}")
    return lines


NO_IMAGE = "no record of it has an image; is a column named otherwise? The task then learns from text alone"


def warn_without_images(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning for each file without any image, for a task whose records are expected to have them."""
    return [f"{file}: {NO_IMAGE}" for file, report in reports.items() if report["records"] and not report["images"]]


def _list_columns(counts: Mapping[str, int], records: int) -> str:
    """Return the columns, each with its number of records where not all have it."""
    return ", ".join(name if count == records else f"{name} ({count})" for name, count in counts.items())


def add_record(reports: dict[str, ColumnReport], location: str, record: Mapping[str, Any], num_images: int = 0) -> None:
    """Count a record, once it was parsed, for the file of its location; files of a folder count as one."""
    file = re.sub(r"(:\d+|\[\d+\])$", "", location)
    name = file if file != location else str(PurePath(location).parent)
    reports.setdefault(name, ColumnReport()).add(record, num_images)


def merge_reports(reports: dict[str, ColumnReport], others: Mapping[str, ColumnReport]) -> None:
    """Add the counts of other records to those of the same files."""
    for file, report in others.items():
        reports.setdefault(file, ColumnReport()).merge(report)
