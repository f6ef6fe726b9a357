"""Types shared by the data pipeline: records, bad records, examples and encoders."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dstrain.errors import TaskError, one_line

ParsedT = TypeVar("ParsedT")
EncodedT = TypeVar("EncodedT")
Example = Mapping[str, Any]
"""A row of the token cache: sequences of token ids, numbers, and `sample`, the index of its record."""


LABEL_NAMES = frozenset(
    {"class", "classes", "classlabel", "class_label", "target", "targets", "labels", "category", "y"}
)
"""Names under which other programs write the label."""


class BadRecord(ValueError):
    """A record that cannot be used. `reason`, one line, names the key and the fix."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = one_line(reason)


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
        self.content: dict[str, int] = {} if parent is None else parent.content
        """What the record holds, as its task counts it (`dstrain.data.content`)."""
        self.parsed: Any = None
        """What its task made of it (`dstrain.data.formats.columns.parse_record`)."""

    def note_content(self, counts: Mapping[str, int]) -> None:
        """Note what the record holds, in place of what was noted before: a record may be parsed twice."""
        self.content.clear()
        self.content.update(counts)

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        self.used[self.origins.get(key, key)] = key
        return value

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401  # reads the column

    def read(self, *keys: str) -> list[Any]:
        """Return the value of each key, None for one that the record lacks."""
        self.used.update({self.origins.get(key, key): key for key in keys if key in self})
        values: dict[str, Any] = dict(self.items())
        return [values.get(key) for key in keys]

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
    found = as_record(record)
    missing = {key for key, value in found.items() if isinstance(value, float) and value != value and key != "margin"}
    return found.derive({key: None if key in missing else value for key, value in found.items()}) if missing else found


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
    found = list(encode(valid))
    if len(found) != len(valid):
        problem = f"the task's encoder returned {len(found)} results for {len(valid)} records"
        raise TaskError(f"{problem}; return an example, a list of examples or a BadRecord for each record")
    encoded = iter(found)
    return [item if isinstance(item, BadRecord) else next(encoded) for item in items]
