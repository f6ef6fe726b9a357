"""Every bad record of a file, and every image that is unusual, by file and line."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrain.data.cache.build import attempt
from dstrain.data.formats.image_placeholders import KEYS, Seen, null_image
from dstrain.data.formats.messages import BadRecord
from dstrain.data.sources.open import BadRow, open_source
from dstrain.data.vision.image_io import locate_image, read_image, remarks

ALONE = "the record is used as text alone"
AT_ONCE = 256
"""Images that wait to be looked at."""
Verdict = tuple[str | None, list[str]]
"""What is wrong with an image, and what is unusual in it."""


@dataclass
class Checked:
    """What a file holds."""

    read: int = 0
    """Records, those that do not decode among them."""
    bad: list[BadRow] = field(default_factory=list)
    """What is wrong, in the file's order; a record with two bad images comes twice."""
    unusual: list[BadRow] = field(default_factory=list)
    """Images that can be used, and how they are changed for it."""

    @property
    def good(self) -> int:
        return self.read - len({row.where for row in self.bad})


def check_file(
    path: str | Path, columns: Mapping[str, str] | None, convert: Callable[[dict[str, Any]], Any], threads: int = 1
) -> Checked:
    """Read every record with `convert`, which raises BadRecord for a bad one, and every image of a `Seen`.

    A record with a null in the place of an image is noted: it teaches as text alone.
    """
    source = open_source(path, columns)
    found = Checked(len(source) + len(source.bad), [*source.bad])
    shown: list[tuple[str, Future[Verdict]]] = []
    known: dict[Path | str, Future[Verdict]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for index in range(len(source)):
            record = source[index]
            where, item = source.where(index), attempt(convert, record)
            if isinstance(item, BadRecord):
                found.bad.append(BadRow(where, item.reason))
            elif isinstance(item, Seen) and not item.images:
                found.unusual += [BadRow(where, f"'{key}' is null: {ALONE}") for key in KEYS if null_image(record, key)]
            for value in item.images if isinstance(item, Seen) else ():
                shown.append((where, _ask(pool, value, source.folder_of(index), known)))
                if not len(shown) % AT_ONCE:
                    shown[-1][1].result()  # those before it are done too, or nearly: what waits takes memory
        for where, asked in shown:
            fault, notes = asked.result()
            found.bad += [BadRow(where, fault)] if fault else []
            found.unusual += [BadRow(where, note) for note in notes]
    found.bad.sort(key=lambda row: int(re.findall(r"\d+", row.where)[-1]))
    return found


def _ask(
    pool: ThreadPoolExecutor, value: Any, folder: Path, known: dict[Path | str, Future[Verdict]]
) -> Future[Verdict]:
    """What will be known of an image; one that many records show is read once."""
    try:
        source = locate_image(value, folder)
    except BadRecord as fault:
        told = Future[Verdict]()
        told.set_result((fault.reason, []))
        return told
    key = source if isinstance(source, Path) else hashlib.sha256(source).hexdigest()
    if key not in known:
        known[key] = pool.submit(_look, source)
    return known[key]


def _look(source: Path | bytes) -> Verdict:
    try:
        read_image(source)
        name = source.name if isinstance(source, Path) else "an image"
        return None, [f"{name}: {note}" for note in remarks(source)]
    except BadRecord as fault:
        return fault.reason, []
