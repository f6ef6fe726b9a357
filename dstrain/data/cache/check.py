"""Validation of a data file: every bad record, and every image that needs conversion."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from dstrain.data.documents.source import DocumentSource
from dstrain.data.formats.columns import ColumnReport, add_record, parse_record
from dstrain.data.formats.image_placeholders import RecordWithImages, has_null_image
from dstrain.data.formats.messages import IMAGE_KEYS
from dstrain.data.records import BadRecord, BadRow, as_record, try_parse
from dstrain.data.sources.base import Source
from dstrain.data.sources.open import open_source
from dstrain.data.vision.image_io import (
    UPRIGHT_TRANSPOSE,
    DeferredImage,
    count_bits,
    count_frames,
    decode_frame,
    read_content,
    read_image,
    resolve_image,
    scale_to_8_bits,
)

if TYPE_CHECKING:
    from PIL.Image import Image

TEXT_ONLY_NOTE = "the record is used as text alone"
MIN_CONTRAST = 8
"""Grey levels of 255 below which an image of more than 8 bits is shown as black or grey, which its owner may not know."""
MAX_PENDING_IMAGES = 256
"""Images that wait to be checked."""
_ROTATION_NAMES = {3: "rotated by 180°", 6: "rotated by 90°", 8: "rotated by 270°"}
ImageCheck = tuple[str | None, list[str]]
"""The fault of an image or None, and notes on conversions that it needs."""


@dataclass
class ValidationReport:
    """Result of checking a file."""

    read: int = 0
    """Number of records, including those that do not decode."""
    bad: list[BadRow] = field(default_factory=list)
    """Bad records in the file's order; a record with two bad images is listed twice."""
    warnings: list[BadRow] = field(default_factory=list)
    """Notes on images that are usable after a conversion."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> `ColumnReport.to_json` of its good records."""

    @property
    def num_valid(self) -> int:
        return self.read - len({row.location for row in self.bad})


def check_file(
    path: str | Path, columns: Mapping[str, str] | None, parse: Callable[[dict[str, Any]], Any], threads: int = 1
) -> ValidationReport:
    """Parse every record, and check every image of a `RecordWithImages`.

    `parse` raises BadRecord for a bad record. A record whose image is null gets a note: it is used as text only.
    """
    return check_source(open_source(path, columns), parse, threads)


def check_source(
    source: Source,
    parse: Callable[[dict[str, Any]], Any],
    threads: int = 1,
    show_progress: Callable[[int, int], None] = lambda done, total: None,
) -> ValidationReport:
    """Check the records of a source as `check_file` does those of a file.

    `show_progress(done, total)` is called for each record.
    """
    found = ValidationReport(len(source) + len(source.bad_rows), [*source.bad_rows])
    shown: list[tuple[str, Future[ImageCheck]]] = []
    columns: dict[str, ColumnReport] = {}
    known: dict[Path | str | DeferredImage, Future[ImageCheck]] = {}
    with ThreadPoolExecutor(threads) as pool:
        for index in range(len(source)):
            show_progress(index, len(source))
            found_record, where = try_parse(source.__getitem__, index), source.location(index)
            record = found_record if isinstance(found_record, BadRecord) else as_record(found_record)
            item = record if isinstance(record, BadRecord) else try_parse(parse_record, parse, record)
            if isinstance(item, BadRecord) or isinstance(record, BadRecord):
                found.bad.append(BadRow(where, item.reason))
                continue
            if isinstance(source, DocumentSource):
                found.warnings += [BadRow(where, note) for note in source.get_notes(index)]
            if isinstance(item, RecordWithImages) and not item.images:
                found.warnings += [
                    BadRow(where, f"'{key}' is null: {TEXT_ONLY_NOTE}")
                    for key in IMAGE_KEYS
                    if has_null_image(record, key)
                ]
            add_record(columns, where, record, len(item.images) if isinstance(item, RecordWithImages) else 0)
            for value in item.images if isinstance(item, RecordWithImages) else ():
                shown.append((where, _submit_image(pool, value, source.get_base_dir(index), known)))
                if not len(shown) % MAX_PENDING_IMAGES:
                    shown[-1][1].result()  # bounds memory: earlier images are done by now, or nearly
        for where, asked in shown:
            fault, notes = asked.result()
            found.bad += [BadRow(where, fault)] if fault else []
            found.warnings += [BadRow(where, note) for note in notes]
    found.columns = {file: one.to_json() for file, one in columns.items()}
    # Faults of images came after those of all records. Files of a folder have no number and no images.
    found.bad.sort(key=lambda row: int((re.findall(r"[:\[](\d+)\]?$", row.location) or [0])[-1]))
    return found


def _submit_image(
    pool: ThreadPoolExecutor, value: Any, folder: Path, submitted: dict[Path | str | DeferredImage, Future[ImageCheck]]
) -> Future[ImageCheck]:
    """Return the future check of an image; an image that many records name is read once."""
    try:
        source = value if isinstance(value, DeferredImage) else resolve_image(value, folder)
    except BadRecord as fault:
        told = Future[ImageCheck]()
        told.set_result((fault.reason, []))
        return told
    # Bytes in the record have no name: their hash is one.
    key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else source
    if key not in submitted:
        submitted[key] = pool.submit(_check_image, source)
    return submitted[key]


def _check_image(image: Path | bytes | DeferredImage) -> ImageCheck:
    try:
        source = image.get_file() if isinstance(image, DeferredImage) else image
        read_image(source)
        name = source.name if isinstance(source, Path) else "an image"
        return None, [f"{name}: {note}" for note in describe_conversions(source)]
    except BadRecord as fault:
        return fault.reason, []


def describe_conversions(source: Path | bytes) -> list[str]:
    """Return a sentence for each conversion that an image needs. Raises BadRecord as `read_image`."""
    content, name = read_content(source)
    image, orientation = decode_frame(content, name)
    found = []
    if orientation in UPRIGHT_TRANSPOSE:
        found.append(f"{_ROTATION_NAMES.get(orientation, 'mirrored')} according to EXIF: it is turned upright")
    if image.mode == "CMYK":
        found.append("CMYK: it is converted to RGB")
    if image.mode.startswith("I") or (image.format == "PNG" and content[24:25] == b"\x10"):
        bits = count_bits(image) if image.mode.startswith("I") else 16
        found.append(f"{bits} bits per channel: it is scaled to 8")
        if image.mode.startswith("I"):
            low, high = cast("tuple[int, int]", scale_to_8_bits(image, bits).getextrema())
            if high - low < MIN_CONTRAST:
                found.append(f"almost no contrast: its grey values are {low} to {high} of 255 after scaling")
    if image.has_transparency_data and _has_alpha(image):
        found.append("partly transparent: the background becomes white")
    if (frames := count_frames(content, name)) > 1:
        many = f"{frames} pages" if image.format == "TIFF" else f"animated, {frames} frames"
        found.append(f"{many}: only the first is used")
    return found


def _has_alpha(image: Image) -> bool:
    if image.mode.startswith("I"):
        return True
    return any(image.convert("RGBA").getchannel("A").histogram()[:255])
