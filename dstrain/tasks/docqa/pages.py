"""Pages of a PDF or image: rendered, their text, and the search for those that answer a question."""

from __future__ import annotations

import builtins
import contextlib
import csv
import io
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from dstrain.cache import get_or_build, read_cached_json
from dstrain.data.limited_process import ResourceLimits, SubprocessResult, run_limited
from dstrain.data.vision.images import decode_image, read_content
from dstrain.files import atomic_write, display_path, open_regular_file
from dstrain.patching import installed_version
from dstrain.task import BadRecord, DataError, file_digest

MAX_PAGE_PIXELS = 20_000_000
"""Pixels of a rendered page; a larger one is rendered at a lower resolution. A4 at 300 dpi has 8.7 million."""
MAX_PAGE_CHARS, MAX_DOCUMENT_CHARS = 100_000, 20_000_000
"""Characters of text that are read of a page and of a document."""
LIMITS = ResourceLimits(2 << 30, cpu_seconds=60, wall_seconds=300)
"""Limits of one call: opening a file, reading the text of all its pages, or rendering one page."""
POINTS_PER_INCH = 72
EOF_MARK, EOF_SEARCH_BYTES = b"%%EOF", 1024
"""Mark at the end of a PDF, and where it is looked for, as Acrobat does."""


def count_pages(path: Path) -> int:
    """Return the number of pages, one or more. Raises BadRecord."""
    return int(call_pdfium(partial(_count_pages, path), path, "opening it"))


def read_texts(path: Path) -> list[str]:
    """Return the text layer of every page. Raises BadRecord."""
    texts: list[str] = call_pdfium(partial(_read_texts, path), path, "reading its text")
    return texts


def render_page(path: Path, target: Path, page: int, dpi: int) -> None:
    """Write a page, from 1, as a PNG, filled forms included. Raises BadRecord."""
    call_pdfium(partial(_render_page, path, target, page, dpi), path, f"rendering page {page}")


def call_pdfium(function: Callable[[], Any], path: Path, operation: str) -> Any:
    """Return the result of a function that calls PDFium, run in a forked process.

    A damaged or hostile file may take any time or memory, or end the process, and PDFium is not thread-safe.
    """
    _import_pdfium(path)
    result = run_limited(function, LIMITS)
    if result.status == "done":
        return result.value
    raise _to_error(result, display_path(path), operation)


def _to_error(result: SubprocessResult, name: str, operation: str) -> BadRecord | DataError:
    if result.status == "raised":
        kind, text = result.value
        if kind == BadRecord.__name__:
            return BadRecord(text)
        if isinstance(error := getattr(builtins, kind, None), type) and issubclass(error, OSError):
            return DataError(f"pages of {name} cannot be written into the cache: {text}; set DSTRAIN_CACHE to another")
        return BadRecord(f"{name} is damaged: {operation} failed ({text}); save it again with another program")
    problem = LIMITS.describe_exceeded(result.status, "PDFium")
    return BadRecord(f"{name}: {operation} {problem}; save it again with another program, or remove the record")


def _import_pdfium(path: Path) -> None:
    """Import the libraries here: a process that is forked during another thread's import could wait for ever."""
    try:
        import PIL.Image
        import pypdfium2  # noqa: F401
    except ImportError as fault:
        needs = "pypdfium2 and pillow"
        raise DataError(f'{display_path(path)} is a PDF and needs {needs}; run pip install "dstrain[docqa]"') from fault
    PIL.Image.init()


def _count_pages(path: Path) -> int:
    return len(_open(path))


def _read_texts(path: Path) -> list[str]:
    import pypdfium2

    document, texts, left = _open(path), list[str](), MAX_DOCUMENT_CHARS
    for index in range(len(document)):
        try:
            layer = document[index].get_textpage()
            text = layer.get_text_range(0, min(layer.count_chars(), MAX_PAGE_CHARS, left)) if left else ""
        except pypdfium2.PdfiumError:
            text = ""  # reported when the page is rendered
        left = max(left - len(text), 0)
        texts.append(text)
    return texts


def _render_page(path: Path, target: Path, page: int, dpi: int) -> None:
    import pypdfium2

    name = display_path(path)
    document = _open(path)
    with contextlib.suppress(pypdfium2.PdfiumError):  # a kind of form that this build does not draw
        document.init_forms()
    try:
        loaded = document[page - 1]
        width, height = loaded.get_size()
        scale = page_scale(width, height, dpi)
        if scale is None:
            raise BadRecord(f"page {page} of {name} has no area, or one that cannot be drawn; remove the record")
        image = loaded.render(scale=scale).to_pil().convert("RGB")
    except pypdfium2.PdfiumError as fault:
        problem = f"page {page} of {name} is damaged and cannot be rendered ({fault})"
        raise BadRecord(f"{problem}; save the file again with another program") from fault
    atomic_write(target, lambda file: image.save(file, "PNG", compress_level=1))


def page_scale(width: float, height: float, dpi: int) -> float | None:
    """Return pixels per point for a page of this size in points; None if it cannot be drawn."""
    area = width * height
    if not (math.isfinite(area) and area > 0 and width > 0):
        return None
    scale = min(dpi / POINTS_PER_INCH, math.sqrt(MAX_PAGE_PIXELS / area))
    sides = math.ceil(width * scale), math.ceil(height * scale)
    # An image has two pixels or more per side. Rounded up, a page of a hundredth of a point by a kilometre has more
    # pixels than its area says.
    return scale if min(sides) > 1 and math.prod(sides) <= 2 * MAX_PAGE_PIXELS else None


def _open(path: Path) -> Any:
    """Return the document, with one page or more. Raises BadRecord."""
    import pypdfium2

    name, raw = display_path(path), pypdfium2.raw
    if not _has_end_mark(path):
        raise BadRecord(f"{name} is truncated: it has no {EOF_MARK.decode()} at its end; download it again")
    try:
        return pypdfium2.PdfDocument(path)
    except pypdfium2.PdfiumError as fault:
        if fault.err_code == raw.FPDF_ERR_PASSWORD:
            reason = "is encrypted with a password; save it without one, such as with `qpdf --decrypt`"
        elif fault.err_code == raw.FPDF_ERR_SECURITY:
            reason = "is encrypted in a way that is not known; save it without encryption"
        elif _has_no_pages(path):
            reason = "has no pages; replace it, or remove the record"
        else:
            reason = f"is a damaged PDF ({fault}); download it again"
        raise BadRecord(f"{name} {reason}") from fault


def _has_end_mark(path: Path) -> bool:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - EOF_SEARCH_BYTES))
        return EOF_MARK in file.read()


def _has_no_pages(path: Path) -> bool:
    """Return whether the file opens and has no page, which `PdfDocument` reports as a damaged file."""
    from pypdfium2 import raw

    document = raw.FPDF_LoadDocument(str(path).encode("utf-8", "surrogateescape"), None)
    return bool(document) and raw.FPDF_GetPageCount(document) == 0


SIDECAR_SUFFIXES = (".txt", ".csv")
"""Suffixes of the files beside NAME.jpg that are looked for, in this order: NAME.txt, NAME.csv."""
TEXT_COLUMNS = ("text", "transcript", "word", "content")
"""Names of the column with the text, in a csv whose first line names its columns."""
MAX_SIDECAR_BYTES = 16 << 20
_SROIE_LINE = re.compile(r"(?:-?\d+\s*,\s*){8}(.*)")
"""Eight coordinates of a box, then the text with its own commas, as in SROIE and ICDAR 2015."""


def sidecar_files(image: Path) -> list[Path]:
    """Return the files that may hold the text of an image."""
    return [image.with_suffix(suffix) for suffix in SIDECAR_SUFFIXES]


def read_sidecar(image: Path) -> str:
    """Return the text of an image from the first readable file beside it; empty if there is none."""
    for path in sidecar_files(image):
        try:
            with open_regular_file(path) as file:
                text = file.read(MAX_SIDECAR_BYTES).decode("utf-8-sig", "replace")
        except (OSError, ValueError):
            continue
        return text if path.suffix == ".txt" else read_boxes(text)
    return ""


def read_boxes(content: str) -> str:
    """Return the texts of a csv of boxes, one per line.

    The csv has a column with one of the names TEXT_COLUMNS, or lines of eight coordinates and a text.
    """
    lines = content.splitlines()
    header = [name.strip().lower() for name in next(csv.reader(lines[:1]), [])]
    column = next((header.index(name) for name in TEXT_COLUMNS if name in header), None)
    if column is not None:
        rows = csv.reader(io.StringIO(content, newline=""))
        next(rows)
        return "\n".join(row[column] for row in rows if len(row) > column)
    return "\n".join(found[1] for line in lines if (found := _SROIE_LINE.fullmatch(line.strip())))


SCORE_DIGITS = 5
"""Digits after the point to which scores are compared: float32 sums differ in those behind."""
_SCRIPTS_WITHOUT_SPACES = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
"""Thai, Lao, Burmese, Khmer, Japanese and Chinese: each character is a token."""
_TOKEN = re.compile(rf"[{_SCRIPTS_WITHOUT_SPACES}]|[^\W_{_SCRIPTS_WITHOUT_SPACES}]+")


def tokenize_words(text: str) -> list[str]:
    """Return the words and numbers of a text in lower case."""
    return _TOKEN.findall(text.casefold())


class PageIndex:
    """An index over the pages of one document.

    Scores are Lucene's variant of BM25 with k1 = 1.5 and b = 0.75 (Kamphuis et al., ECIR 2020), whose weights are
    positive also for a word on every page.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        """Take the text of each page."""
        self._tokens = [tokenize_words(text) for text in texts]
        self._words = {word for tokens in self._tokens for word in tokens}

    @property
    def has_text(self) -> bool:
        return bool(self._words)

    def rank(self, question: str) -> list[int]:
        """Return the pages, from 1, that share a word with the question, the best first; equal ones by number."""
        # Sorted, so that sums do not depend on the order of a set.
        known = sorted(self._words & {*tokenize_words(question)})
        if not known:
            return []
        scores = [round(float(score), SCORE_DIGITS) for score in self._bm25.get_scores(known)]
        pages = [page for page, score in enumerate(scores, 1) if score > 0]
        return sorted(pages, key=lambda page: (-scores[page - 1], page))

    @cached_property
    def _bm25(self) -> Any:
        try:
            import bm25s
        except ImportError as fault:
            raise DataError('selecting pages by their text needs bm25s; run pip install "dstrain[docqa]"') from fault
        index = bm25s.BM25(method="lucene", k1=1.5, b=0.75)
        index.index(self._tokens, show_progress=False)
        return index


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

    def load_json(self, name: str, read: Callable[[Path], Any]) -> Any:
        """Return what `read(document)` does, from a JSON file of the cache. Raises BadRecord."""
        file = self.get_file(name, lambda document, target: atomic_write(target, json.dumps(read(document))))
        return read_cached_json(file)

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
        self.unread = ""
        """A clause on the files of its folder that are not read; empty if there are none."""

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
        self._cache = DocumentCache.of_file(path, f"pypdfium2-{installed_version('pypdfium2')}")
        count = self._cache.load_json("pages.json", count_pages)
        pages = [
            CachedPage(self._cache, f"{dpi}dpi/{page:05}.png", partial(render_page, page=page, dpi=dpi))
            for page in range(1, count + 1)
        ]
        super().__init__(name, pages)

    def read_texts(self) -> list[str]:
        return list(self._cache.load_json("text.json", read_texts))


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


def _write_frame(path: Path, target: Path, page: int) -> None:
    content, name = read_content(path)
    image = decode_image(content, f"page {page} of {name}", page - 1)
    atomic_write(target, lambda file: image.save(file, "PNG", compress_level=1))
