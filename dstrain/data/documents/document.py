"""Documents by kind: PDF, image, multi-page TIFF, folder of page images; what is read of them is cached."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest, get_or_build
from dstrain.data.documents.pdfium import count_pages, pdfium_version, render_page, write_texts
from dstrain.data.documents.retrieval import PageIndex
from dstrain.data.documents.sidecar_text import read_sidecar
from dstrain.data.records import BadRecord
from dstrain.data.vision.image_io import decode_image, read_content
from dstrain.files import atomic_write, display_path

Write = Callable[[Path, Path], object]
"""(document, file of the cache): writes that file. Raises BadRecord."""
_faults: dict[tuple[Path, str], str] = {}
"""Reasons of failed writes of this process: a page that runs into a time limit is tried once, not per question."""


@dataclass(frozen=True)
class DocumentCache:
    """What a reader makes of a document's present content."""

    document: Path = field(repr=False)  # the repr of a page is in the group of its record, wherever the file is
    digest: str
    reader: str = field(repr=False)
    """Library with its version."""

    @classmethod
    def of_file(cls, path: Path, reader: str) -> DocumentCache:
        """Return the cache for a file. Raises BadRecord if the file cannot be read."""
        try:
            return cls(path, file_digest(path), reader)
        except OSError as fault:
            problem = f"{display_path(path)} cannot be read ({fault.strerror or fault})"
            raise BadRecord(f"{problem}; check the path and its permissions") from fault

    def load_json(self, name: str, write: Write) -> Any:
        """Return the value of a JSON file, which `write` writes first where it is not cached. Raises BadRecord."""
        return json.loads(self.get_file(name, write).read_text(encoding="utf-8"))

    def get_file(self, name: str, write: Write) -> Path:
        if (self.document, name) in _faults:
            raise BadRecord(_faults[self.document, name])
        key = {"document": self.digest, "reader": self.reader, "name": name}
        file_name = Path(name).name
        try:
            return get_or_build(
                "documents",
                key,
                lambda folder: write(self.document, folder / file_name),
                lambda folder: folder / file_name,
            )
        except BadRecord as fault:
            _faults[self.document, name] = fault.reason
            raise


@dataclass(frozen=True)
class CachedPage:
    """A page that becomes an image file of the cache when it is first needed, a `DeferredImage`."""

    cache: DocumentCache
    name: str
    """`144dpi/00001.png`."""
    write: Write = field(repr=False)

    def get_file(self) -> Path:
        """Return the page's PNG, written first where it is not cached. Thread-safe. Raises BadRecord."""
        return self.cache.get_file(self.name, self.write)


class Document:
    """Page images, and the texts of the pages. Base class, and the pages of one or several image files."""

    def __init__(self, name: str, pages: Sequence[Any]) -> None:
        """Take the name for messages, and an image of each page: a path, or a mapping with bytes."""
        self.name = name
        self._pages = pages

    @property
    def num_pages(self) -> int:
        return len(self._pages)

    def get_image(self, page: int) -> Any:
        """Return the image of a page, from 1, as a record holds it."""
        return self._pages[page - 1]

    def read_texts(self) -> list[str]:
        """Return the text of each page, empty where it is not known. Raises BadRecord."""
        return [read_sidecar(page) if isinstance(page, Path) else "" for page in self._pages]

    @cached_property
    def page_index(self) -> PageIndex:
        return PageIndex(self.read_texts())


class PdfDocument(Document):
    """A PDF file, whose pages are rendered when they are used."""

    def __init__(self, path: Path, name: str, dpi: int) -> None:
        """Count the pages. Raises BadRecord if the file cannot be opened or has none."""
        self._cache = DocumentCache.of_file(path, f"pypdfium2-{pdfium_version()}")
        count = self._cache.load_json("pages.json", _write_page_count)
        pages = [
            CachedPage(self._cache, f"{dpi}dpi/{page:05}.png", partial(render_page, page=page, dpi=dpi))
            for page in range(1, count + 1)
        ]
        super().__init__(name, pages)

    def read_texts(self) -> list[str]:
        return [str(text) for text in self._cache.load_json("text.json", write_texts)]


class TiffDocument(Document):
    """A TIFF file of several pages, which are decoded when they are used."""

    def __init__(self, path: Path, name: str, count: int) -> None:
        from PIL import __version__

        self._path = path
        cache = DocumentCache.of_file(path, f"pillow-{__version__}")
        pages = [CachedPage(cache, f"{page:05}.png", partial(_write_frame, page=page)) for page in range(1, count + 1)]
        super().__init__(name, pages)

    def read_texts(self) -> list[str]:
        """Return the parts of the text beside the file; a form feed separates them, as OCR programs write it."""
        texts = read_sidecar(self._path).split("\f")[: self.num_pages]
        return texts + [""] * (self.num_pages - len(texts))


def _write_page_count(path: Path, target: Path) -> None:
    atomic_write(target, str(count_pages(path)))


def _write_frame(path: Path, target: Path, page: int) -> None:
    content, name = read_content(path)
    image = decode_image(content, f"page {page} of {name}", page - 1)
    atomic_write(target, lambda file: image.save(file, "PNG", compress_level=1))
