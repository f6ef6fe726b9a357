"""Records of a file: which columns are read, what the others look like, counts of both, and records that cannot be used."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dstrain.data.formats.messages import (
    IMAGE_KEYS,
    MEDIA_PART_KEYS,
    MESSAGES_KEYS,
    ROLE_ALIASES,
    TRAIN_DETAILS,
    TRAIN_FLAGS,
    get_turn_pair,
    is_null_image,
    is_transcript,
)
from dstrain.errors import BadRecord, TaskError
from dstrain.files import display_path

ParsedT = TypeVar("ParsedT")
EncodedT = TypeVar("EncodedT")
Example = Mapping[str, Any]
"""A row of the token cache: sequences of token ids, numbers, and `sample`, the index of its record."""


LABEL_NAMES = frozenset(
    {"class", "classes", "classlabel", "class_label", "target", "targets", "labels", "category", "y"}
)
"""Names under which other programs write the label."""


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
    "userinput", "usermessage", "request", "document", "passage", "passages", "paragraph", "article", "choices", "options",
    "dialog", "dialogue", "conversation", "conversations", "messages", "contextmessages", "turns", "chat", "tools", "functions",
}  # fmt: skip
"""Names of columns that hold a part of the prompt."""
ANSWER_NAMES = {
    "answer", "answers", "response", "responses", "output", "outputs", "completion", "completions", "reply", "target",
    "targets", "caption", "captions", "assistant", "chosen", "rejected", "better", "worse", "positive", "negative",
    "preferred", "dispreferred", "gpt", "bot", "response0", "response1", "response2", "preferredoutput",
    "nonpreferredoutput", "rejectedresponse", "rejectedmessages",
}  # fmt: skip
"""Names of columns that hold an answer."""
CONTEXT_NAMES = {"context", "document", "passage", "article"}
"""Those of them that hold a text to which the question refers."""
FLAG_NAMES = {
    "weight", "weights", "loss", "lossscale", "lossweight", "lossmask", "sampleweight", "train", "training",
    "trainable", "traindetail", "trainingdetail", "chattemplatekwargs", "betterresponseid", "overallresponse",
    "preference", "winner", "ktotag", "label", "labels",
}  # fmt: skip
"""Names of columns that say whether, how much or with which sign something is trained on."""
ID_ENDS = ("id", "ids", "idx", "index", "uuid", "source", "key", "avatar", "avatarurl")
"""Ends of the names of columns that identify a record or its author, with a path perhaps."""
ORIGIN_ENDS = ("path", "file", "filename", "name", "url", "uri")
"""Ends of the names of columns that say where an image comes from, beside the image itself."""
MAX_BLANKS_IN_PATH = 8
"""A longer text that ends with the address of an image is a text."""
MIN_RENDERED = 20
"""Characters of a record's texts, at least, for a text that contains them all to be a rendering of the record."""
LABELS = {"label", "labels", "preference", "winner", "ktotag", "betterresponseid", "overallresponse"}
KEEP_OUT = "to leave it out, set data.columns to {%s: null}"
MESSAGE_KEYS = {
    "role", "content", "from", "value", "name", "user", "input", "output", "tool_calls", "tool_call_id", "function_call", "reasoning_content",
    "reasoning", "thinking", "weight", "loss", "loss_scale", "loss_weight", "train", "training", "trainable",
    "train_detail", "training_detail", "human", "assistant", "system",
}  # fmt: skip
"""Keys of a message that are read, or refused where they are read."""
PART_KEYS = {
    "type", "text", "value", "image", "image_url", "path", "url", "bytes", "index", *MEDIA_PART_KEYS, *TRAIN_FLAGS,
    *TRAIN_DETAILS,
}  # fmt: skip
"""Keys of a part of a message's content that are read, or refused where they are read."""


DescribeContent = Callable[[Mapping[str, int]], tuple[list[str], list[str]]]
"""Sums of what the records of a file hold -> (clauses on them, notes on what is unusual of them)."""


@dataclass
class RecordContent:
    """What a record holds that its columns do not show, such as the length of a series, and the words for it."""

    counts: Mapping[str, int] = field(default_factory=dict)
    """What -> how often."""
    describe: DescribeContent | None = None


class Record(dict[str, Any]):
    """A record that notes which columns of its file are read, so that none is dropped without a word.

    `record[key]`, `record.get(key)` and `record.read(*keys)` read columns; `key in record.present` asks for one.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        origins: Mapping[str, str] | None = None,
        parent: Record | None = None,
    ) -> None:
        """`origins`: key -> column of the file that it comes from, where the names differ.

        `parent`: the record that this one is made from; both note their reads in one place.
        """
        super().__init__(values)
        self.present = frozenset(key for key, value in self.items() if value is not None)
        """Keys with a value other than null."""
        self.origins: dict[str, str] = {**(parent.origins if parent is not None else {}), **(origins or {})}
        self.columns: dict[str, Any] = dict(values) if parent is None else parent.columns
        """The columns of the file, as they are written there."""
        self.used: dict[str, str] = {} if parent is None else parent.used
        """Column of the file -> key that it was read as."""
        self.content: RecordContent = RecordContent() if parent is None else parent.content
        """What the record holds, as its task counts it."""
        self.parsed: Any = None
        """What its task made of it (`parse_record`)."""

    def note_content(self, counts: Mapping[str, int], describe: DescribeContent) -> None:
        """Note what the record holds, in place of what was noted before: a record may be parsed twice."""
        self.content.counts, self.content.describe = counts, describe

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        self.used[self.origins.get(key, key)] = key
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  # reads the column

    def read(self, *keys: str) -> list[Any]:
        """Return the value of each key, None for one that the record lacks."""
        self.used.update({self.origins.get(key, key): key for key in keys if key in self})
        return [dict.get(self, key) for key in keys]

    def derive(self, values: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Record:
        """Return a record of other values that are made from this one's."""
        return Record(values, origins, parent=self)

    def without(self, *keys: str) -> Record:
        """Return the record without some keys, which do not count as read."""
        return self.derive({key: value for key, value in self.items() if key not in keys})


def as_record(record: Mapping[str, Any]) -> Record:
    """Return the record itself, or a plain mapping as one."""
    return record if isinstance(record, Record) else Record(record)


def nan_to_null(record: Mapping[str, Any]) -> Record:
    """Return the record with null where pandas wrote NaN for a missing value; a margin must be a number."""
    tracked = as_record(record)
    missing = {key for key, value in tracked.items() if isinstance(value, float) and value != value and key != "margin"}
    return (
        tracked.derive({key: None if key in missing else value for key, value in tracked.items()})
        if missing
        else tracked
    )


_YAML_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


def yaml_key(column: str) -> str:
    """Return the name of a column as YAML takes it for a key: `no` alone would be false."""
    return column if re.fullmatch(r"[A-Za-z_][\w.-]*", column) and column.lower() not in _YAML_WORDS else f'"{column}"'


class BadRow(NamedTuple):
    """Location and reason of a bad record, as reports list it."""

    location: str
    """`train.jsonl:12`."""
    reason: str


EncodeResult = Mapping[str, Any] | BadRecord
"""The columns of an example, or the reason why its record cannot be used."""
Encode = Callable[[list[tuple[int, dict[str, Any]]]], Sequence[EncodeResult | list[EncodeResult]]]
"""(index, record) pairs -> for each, in the same order, an example, a `BadRecord`, or a list of them."""


def try_parse(parse: Callable[..., ParsedT], *args: Any) -> ParsedT | BadRecord:
    """Return `parse(*args)`, or the BadRecord that it raises."""
    try:
        return parse(*args)
    except BadRecord as fault:
        return fault


def encode_valid(
    items: Sequence[ParsedT | BadRecord], encode: Callable[[list[ParsedT]], Sequence[EncodedT]]
) -> list[EncodedT | BadRecord]:
    """Encode all items that are not BadRecords in one call; BadRecords stay in their places.

    Raises TaskError where `encode` does not return one result for each.
    """
    valid = [item for item in items if not isinstance(item, BadRecord)]
    results = list(encode(valid))
    if len(results) != len(valid):
        problem = f"the task's encoder returned {len(results)} results for {len(valid)} records"
        raise TaskError(f"{problem}; return an example, a list of examples or a BadRecord for each record")
    encoded = iter(results)
    return [item if isinstance(item, BadRecord) else next(encoded) for item in items]


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
    if not isinstance(value, str) or len(value) > 4096 or "\n" in value or value.count(" ") > MAX_BLANKS_IN_PATH:
        return False
    return value.startswith("data:image/") or value.lower().split("?")[0].endswith(MEDIA_SUFFIXES)


def parse_record(parse: Callable[[Any], ParsedT], record: Mapping[str, Any], is_prompt: bool = False) -> ParsedT:
    """Return `parse(record)`. Raises BadRecord also for a column that looks needed and was not read.

    `is_prompt`: only the prompt of the record is wanted, so that its answers and labels need not be read.
    """
    tracked = as_record(record)
    parsed = parse(tracked)
    check_unused(tracked, is_prompt)
    tracked.parsed = parsed
    return parsed


def check_unused(record: Record, is_prompt: bool = False) -> None:
    """Raise BadRecord for a column that looks like a question, an answer, an image or a flag and was not read."""
    for name, value in find_unused(record).items():
        kind = _describe_unused(record, name, value, is_prompt)
        if kind:
            raise BadRecord(
                f"'{name}' {kind}, and the task does not read it; {_fix(record, name)}, or {KEEP_OUT % name}"
            )


def find_unused(record: Record) -> dict[str, Any]:
    """Return the columns with a value that were not read, and unread keys of messages as `messages[].key`."""
    unused = {name: value for name, value in record.columns.items() if name not in record.used and not is_empty(value)}
    for name in record.used:
        value = record.columns.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, Mapping) and ("role" in item or "from" in item or get_turn_pair(item)):
                unused |= {
                    f"{name}[].{key}": one for key, one in item.items() if key not in MESSAGE_KEYS and not is_empty(one)
                }
                parts = item.get("content", item.get("value"))
                for part in parts if isinstance(parts, list) else ():
                    unused |= {
                        f"{name}[].content[].{key}": one
                        for key, one in (part.items() if isinstance(part, Mapping) else ())
                        if key not in PART_KEYS and not is_empty(one)
                    }
    return unused


def _describe_unused(record: Record, column: str, value: Any, is_prompt: bool) -> str:
    """Return what an unread column looks like; empty if it may be left out."""
    name = plain_name(column.rpartition(".")[2])
    is_name = name.endswith(ID_ENDS)  # such as the file that a record was made from
    is_named_image = name in IMAGE_NAMES and isinstance(value, str | list | Mapping | bytes)
    if is_named_image or (is_image(value) and not is_name):
        is_origin = isinstance(value, str) and not value.startswith("data:") and name.endswith(ORIGIN_ENDS)
        return "" if is_origin and _has_image(record) else "looks like an image, video or audio"
    if name in FLAG_NAMES:
        # A label beside a complete pair, or of a task that learns from texts alone, is information on the record.
        is_information = name in LABELS or value is True or value == 1
        return "" if is_prompt or is_information else "looks like a flag or weight of the training"
    keys = {plain_name(key) for key in record.used.values()}
    if not is_prompt and _is_plain_pair(record, keys) and isinstance(value, str) and len(value.split()) > 1:
        return "may be the question, since the record has no prompt"
    if not keys & (QUESTION_NAMES | ANSWER_NAMES | {"text"}):
        return ""  # the task learns from other things than texts
    # Beside a pair, a conversation with its answer or a solution, other answers are information on it.
    is_complete = "chosen" in keys or "solution" in keys or _ends_with_answer(record)
    is_answer = name in ANSWER_NAMES and not is_complete and not is_prompt
    if not (name in QUESTION_NAMES or is_answer):
        return ""
    texts = [text.strip() for text in iter_strings(value) if text.strip()]
    read = "\n".join(text for name in record.used for text in iter_strings(record.columns.get(name)))
    if "chosen" in keys and isinstance(value, list) and value and _is_answered(value[-1]):
        texts = texts[:-1]  # a conversation whose last answer is another one than the two of the pair
    if all(text in read for text in texts):
        return ""  # written twice, such as `prompt` next to `messages` that contain it
    if name == "answers" and isinstance(value, list) and any(text in read for text in texts):
        return ""  # the references among which the answer was taken
    if _is_rendering(texts, record):
        return ""
    return "looks like an answer" if name in ANSWER_NAMES else "looks like a part of the prompt"


def _has_image(record: Record) -> bool:
    """Return whether an image, or a document, was read from a column."""
    keys = (*IMAGE_KEYS, "document")
    return any(key in keys and not is_null_image(record.columns.get(name)) for name, key in record.used.items())


def _is_answered(turn: Any) -> bool:
    """Return whether an item of a conversation is an answer, or a question with its answer."""
    role = str(turn.get("role", turn.get("from"))).lower() if isinstance(turn, Mapping) else ""
    return bool(get_turn_pair(turn)) or ROLE_ALIASES.get(role) == "assistant"


def _ends_with_answer(record: Record) -> bool:
    """Return whether a conversation that ends with an answer was read."""
    read = [record.columns.get(name) for name, key in record.used.items() if key in MESSAGES_KEYS]
    return any(isinstance(turns, list) and bool(turns) and _is_answered(turns[-1]) for turns in read)


def _is_rendering(texts: list[str], record: Record) -> bool:
    """Return whether the texts contain all that was read, as Alpaca's texts with instruction and output do."""
    written = "\n".join(texts)
    read = [text.strip() for name in record.used for text in iter_strings(record.columns.get(name))]
    return sum(map(len, read)) >= MIN_RENDERED and all(text in written for text in read)


def _is_plain_pair(record: Record, keys: set[str]) -> bool:
    """Return whether two plain texts are all that was read: they may hold their prompt, or lack it."""
    answers = [record.columns.get(column) for column, key in record.used.items() if key in ("chosen", "rejected")]
    plain = len(answers) == 2 and all(isinstance(one, str) and not is_transcript(one) for one in answers)
    return plain and not keys & QUESTION_NAMES


def _fix(record: Record, column: str) -> str:
    name = plain_name(column.rpartition(".")[2])
    if "[]" in column:
        return "move it into a column of the record"
    if name in CONTEXT_NAMES and record.used.get("question") == "question" and "document" not in record.used:
        return f"rename it and the question with data.columns {{{column}: input, question: instruction}}"
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
    content: Counter[str] = field(default_factory=Counter)
    """What the records hold, as their task counts it."""
    describe: DescribeContent | None = None
    """The task's words for it; None: it counts nothing."""

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
        self.content.update(tracked.content.counts)
        self.describe = self.describe or tracked.content.describe

    def merge(self, other: ColumnReport) -> None:
        self.records += other.records
        self.images += other.images
        self.without_image += other.without_image
        self.used.update(other.used)
        self.unused.update(other.unused)
        self.content.update(other.content)
        self.describe = self.describe or other.describe

    def to_json(self) -> dict[str, Any]:
        """Return the report as plain values, for a cache or an event."""
        counts = {"images": self.images, "records_without_image": self.without_image}
        content = {}
        if self.describe is not None and self.content:
            clauses, notes = self.describe(self.content)
            content = {"content": clauses, "notes": notes}
        return {"records": self.records, **counts, "used": dict(self.used), "unused": dict(self.unused), **content}


def describe_columns(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a line for each file on its images and columns, from `ColumnReport.to_json` by file."""
    lines = []
    for file, report in reports.items():
        records = report["records"]
        parts = [f"{records} record{'s' * (records != 1)}", *report.get("content", ())]
        images = report.get("images")
        if images:
            without = report["records_without_image"]
            parts.append(f"{images} image{'s' * (images != 1)}, {without} record{'s' * (without != 1)} without one")
        parts.append(f"read: {_list_columns(report['used'], records) or 'no column'}")
        if report["unused"]:
            parts.append(f"not used: {_list_columns(report['unused'], records)}")
        lines.append(f"{file}: {'; '.join(parts)}")
        lines += [f"{file}: note: {note}" for note in report.get("notes", ())]
    return lines


NO_IMAGE = "no record of it has an image; is a column named otherwise? The task then learns from text alone"


def warn_without_images(reports: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning for each file without any image, for a task whose records are expected to have them."""
    return [f"{file}: {NO_IMAGE}" for file, report in reports.items() if report["records"] and not report["images"]]


def _list_columns(counts: Mapping[str, int], records: int) -> str:
    """Return the columns, each with its number of records where not all have it."""
    return ", ".join(name if count == records else f"{name} ({count})" for name, count in counts.items())


def add_record(
    reports: dict[str, ColumnReport],
    location: str,
    record: Mapping[str, Any],
    num_images: int = 0,
    folder: Path | None = None,
) -> None:
    """Count a record, once it was parsed, for the file of its location; files of a folder count as one.

    `folder`: the folder of all files, where they are in subfolders.
    """
    file = re.sub(r"(:\d+|\[\d+\])$", "", location)
    name = file if file != location else display_path(folder or Path(location).parent)
    reports.setdefault(name, ColumnReport()).add(record, num_images)


def merge_reports(reports: dict[str, ColumnReport], others: Mapping[str, ColumnReport]) -> None:
    """Add the counts of other records to those of the same files."""
    for file, report in others.items():
        reports.setdefault(file, ColumnReport()).merge(report)
