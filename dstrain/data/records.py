"""Types shared by the data pipeline: records, bad records, examples and encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from dstrain.errors import one_line

ParsedT = TypeVar("ParsedT")
EncodedT = TypeVar("EncodedT")
Example = Mapping[str, Any]
"""A row of the token cache: sequences of token ids, numbers, and `sample`, the index of its record."""


class BadRecord(ValueError):
    """A record that cannot be used. `reason`, one line, names the key and the fix."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = one_line(reason)


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
    """Encode all items that are not BadRecords in one call; BadRecords stay in their places."""
    encoded = iter(encode([item for item in items if not isinstance(item, BadRecord)]))
    return [item if isinstance(item, BadRecord) else next(encoded) for item in items]
