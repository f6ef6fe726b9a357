"""Reader of .ts files, the format of the UCR and UEA archives of time series."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.data.sources.base import Columns
from dstrain.data.sources.files import RowsSource, read_whole_file
from dstrain.errors import one_line
from dstrain.task import DataError

_TRUE_FALSE = {"true": True, "false": False}
_HEADER_KEYS = (
    "problemname",
    "timestamps",
    "missing",
    "univariate",
    "dimension",
    "dimensions",
    "equallength",
    "serieslength",
    "classlabel",
    "targetlabel",
)


@dataclass
class TsHeader:
    """What the lines before @data say."""

    has_label: bool = False
    labels: tuple[str, ...] = ()
    num_channels: int | None = None
    """Number of channels of each series; None: not said."""
    length: int | None = None
    """Number of values of each channel; None: not said, or unequal."""
    keys: set[str] = field(default_factory=set)


class TsSource(RowsSource):
    """The series of a .ts file: {"series": [[...], ...], "label": "..."}. All in memory.

    Channels are separated by colons, values by commas; the last field is the label. A question mark is a missing value
    and becomes NaN. Timestamps are not supported. Raises DataError for a header that cannot be used; a bad line is
    a bad row.
    """

    def __init__(self, path: Path, columns: Columns) -> None:
        super().__init__(path, columns)
        content = read_whole_file(path)
        lines = self._decode(content).splitlines()
        header, start = self._read_header(lines)
        for number, line in enumerate(lines[start:], start + 1):
            if line.strip() and not line.startswith(("#", "%")):
                self._add_row(number, parse_line, line, header)
        self._set_digest(hashlib.sha256(content).hexdigest(), {name for _, row in self._rows for name in row})

    def _read_header(self, lines: Iterable[str]) -> tuple[TsHeader, int]:
        """Return the header, and the number of its lines. Raises DataError."""
        header = TsHeader()
        for number, raw in enumerate(lines, 1):
            line = raw.strip()
            if not line or line.startswith(("#", "%")):
                continue
            if line.lower() == "@data":
                return header, number
            try:
                read_header_line(line, header)
            except ValueError as fault:
                raise DataError(f"{self.name}:{number}: {one_line(str(fault))}") from fault
        raise DataError(f"{self.name} has no line @data; its series begin after one")


def read_header_line(line: str, header: TsHeader) -> None:
    """Add a line of the header, such as `@seriesLength 150`. Raises ValueError with the reason."""
    if not line.startswith("@"):
        raise ValueError("a line before @data begins with @ or #; add @data before the first series")
    key, *words = line[1:].split() or [""]
    name = key.lower()
    if name not in _HEADER_KEYS:
        raise ValueError(f"@{key} is not a key of the .ts format; remove the line")
    if name in header.keys and name != "problemname":  # files of the archive name their problem twice
        raise ValueError(f"@{key} is written twice; keep one of the lines")
    header.keys.add(name)
    if name == "timestamps" and _read_bool(key, words):
        raise ValueError("timestamps are not supported; write the values without them, and @timeStamps false")
    if name == "targetlabel" and _read_bool(key, words):
        raise ValueError("a regression target is not supported; give a file with @classLabel")
    if name == "classlabel":
        header.has_label, header.labels = _read_bool(key, words[:1]), tuple(words[1:])
        if header.has_label and not header.labels:
            raise ValueError("@classLabel true has no labels; list them after it")
    elif name == "univariate" and _read_bool(key, words):
        header.num_channels = 1
    elif name in ("dimension", "dimensions"):
        header.num_channels = _read_count(key, words)
    elif name == "serieslength":
        header.length = _read_count(key, words) or None  # 0 where lengths are unequal


def parse_line(line: str, header: TsHeader) -> dict[str, Any]:
    """Return the record of a line. Raises ValueError with the reason."""
    fields = line.strip().split(":")
    record: dict[str, Any] = {}
    if header.has_label:
        if len(fields) < 2:
            raise ValueError("has no label after the last colon; add one")
        record["label"] = fields.pop().strip()
        if record["label"] not in header.labels:
            known = ", ".join(header.labels)
            raise ValueError(f"the label '{record['label']}' is not in @classLabel ({known}); correct one of them")
    channels = [_read_channel(text, number) for number, text in enumerate(fields, 1)]
    if header.num_channels is not None and len(channels) != header.num_channels:
        raise ValueError(
            f"has {len(channels)} channels, and the header says {header.num_channels}; correct one of them"
        )
    if header.length is not None and any(len(channel) != header.length for channel in channels):
        lengths = ", ".join(str(len(channel)) for channel in channels)
        raise ValueError(f"has {lengths} values, and @seriesLength is {header.length}; correct one of them")
    return {"series": channels, **record}


def _read_channel(text: str, number: int) -> list[float]:
    if "(" in text:
        raise ValueError("has timestamps, which are not supported; write the values alone")
    values = []
    for word in text.split(","):
        try:
            values.append(float("nan") if word.strip() == "?" else float(word))
        except ValueError:
            problem = f"'{word.strip()[:20]}' in channel {number} is not a number"
            raise ValueError(f"{problem}; correct it, or write ? for a missing value") from None
    return values


def _read_bool(key: str, words: list[str]) -> bool:
    if len(words) != 1 or words[0].lower() not in _TRUE_FALSE:
        raise ValueError(f"@{key} is followed by {' '.join(words) or 'nothing'}; write true or false")
    return _TRUE_FALSE[words[0].lower()]


def _read_count(key: str, words: list[str]) -> int:
    if len(words) != 1 or not re.fullmatch(r"[0-9]{1,9}", words[0]):
        raise ValueError(f"@{key} is followed by {' '.join(words) or 'nothing'}; write a whole number")
    return int(words[0])
