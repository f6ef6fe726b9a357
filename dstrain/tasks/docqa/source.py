"""Records about documents: their options, questions, files and the pages that are shown."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dstrain.data.formats.messages import json_type_name, read_system
from dstrain.data.records import as_record
from dstrain.data.sources.base import WrappedSource
from dstrain.data.vision.images import UNKNOWN_CONTENT, count_frames, describe_content, read_content
from dstrain.errors import UsageError
from dstrain.files import (
    NOT_REGULAR,
    WatchedFile,
    check_path_encoding,
    describe_unread,
    display_path,
    open_regular_file,
)
from dstrain.patching import installed_version
from dstrain.task import BadRecord, Source, resolve_image
from dstrain.tasks.docqa.pages import Document, PdfDocument, TiffDocument, sidecar_files

MIN_DPI, MAX_DPI = 18, 1200


@dataclass(frozen=True, kw_only=True)
class DocumentOptions:
    """How pages of documents are selected and rendered."""

    max_pages: int = 4
    """Largest number of pages of a question, k."""
    dpi: int = 144
    """Resolution of rendered PDF pages, in pixels per inch; a page of more than 20 million pixels gets less."""
    use_evidence_pages: bool = True
    """Use the record's `evidence_pages`. False: retrieve pages for every question, as where they are unknown."""
    unanswerable_answer: str | None = "unanswerable"
    """Answer that a question without an answer is trained on. None: such records are refused."""
    with_answers: bool = True
    """Read the answers. False: records need none and `answers` is empty, for prompts of a generation."""

    def __post_init__(self) -> None:
        if self.max_pages < 1:
            raise ValueError(f"max_pages is {self.max_pages}, but a question needs at least 1 page")
        if not MIN_DPI <= self.dpi <= MAX_DPI:
            raise ValueError(f"dpi is {self.dpi}, but a resolution is between {MIN_DPI} and {MAX_DPI}")
        if self.unanswerable_answer is not None and not self.unanswerable_answer.strip():
            raise ValueError("unanswerable_answer is blank; write a text, or null to refuse such records")


DOCUMENTS_DIR = "documents"
"""Folder beside the data file in which a document's name is looked up."""
IMAGE_SUFFIXES = (
    ".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".jp2", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""Suffixes of the page images in a folder, in lower or upper case."""
PDF_SIGNATURE, SIGNATURE_BYTES = b"%PDF-", 1024
"""Start of a PDF, and where it is looked for: some programs write other bytes in front."""
TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


@dataclass(frozen=True)
class DocumentReader:
    """Opens documents, and tells which files they consist of."""

    dpi: int
    watch: Callable[[Path], None]
    """Called with every file and folder that a document depends on, before it is read; it need not exist."""

    def open(self, value: str, folder: Path) -> Document:
        """Open the document that a record names. `folder`: the data file's. Raises BadRecord."""
        # Absolute: a page is an image of a record, whose relative path would start from the data file's folder again.
        path = self._find(value, folder.absolute())
        name = display_path(path)
        if path.is_dir():
            pages, unread = self._list_pages(path, name)
            document = self._open_pages(name, pages)
            document.unread = describe_unread(unread)
            return document
        head = _read_head(path, name)
        if PDF_SIGNATURE in head:
            return PdfDocument(path, name, self.dpi)
        if not head.startswith(TIFF_SIGNATURES):
            _check_kind(head, name)
        return self._open_image(path)

    def open_images(self, images: Sequence[Any], folder: Path) -> Document:
        """Return a document of page images that a record names. Raises BadRecord for paths that are none."""
        pages = [resolve_image(image, folder.absolute()) for image in images]
        if len(pages) == 1 and isinstance(pages[0], Path):
            return self._open_image(pages[0])
        return self._open_pages(f"a document of {len(pages)} image{'s' * (len(pages) != 1)}", pages)

    def _open_image(self, path: Path) -> Document:
        """Return an image as a document of one page, or of several if it is a TIFF of several frames."""
        count, name = _count_tiff_pages(path), display_path(path)
        if count == 1:
            return self._open_pages(name, [path])
        self.watch(path)  # its pages are files of the cache; an image itself is in the image index
        self._watch_page_texts([path])
        return TiffDocument(path, name, count)

    def _open_pages(self, name: str, pages: Sequence[Any]) -> Document:
        self._watch_page_texts([page for page in pages if isinstance(page, Path)] if len(pages) > 1 else [])
        return Document(name, pages)

    def _watch_page_texts(self, images: Sequence[Path]) -> None:
        for image in images:
            for file in sidecar_files(image):
                self.watch(file)

    def _find(self, value: str, folder: Path) -> Path:
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
            raise BadRecord(f"'document' is the URL {value}; download it first and write the path of the file")
        places = [folder / value, folder / DOCUMENTS_DIR / value]
        for path in places:
            self.watch(path)
            if _exists(path):
                return path
        found = [
            path
            for suffix in (".pdf", ".PDF", *IMAGE_SUFFIXES)
            if _exists(path := places[1].with_name(places[1].name + suffix))
        ]
        if len(found) == 1:
            self.watch(found[0])
            return found[0]
        if found:
            names = " and ".join(path.name for path in found[:2])
            raise BadRecord(f"'document' is '{value}', which may be {names}; write the name with its suffix")
        problem = f"document not found: {value} (looked in {display_path(folder)} and its folder {DOCUMENTS_DIR})"
        raise BadRecord(f"{problem}; check the path")

    def _list_pages(self, path: Path, name: str) -> tuple[list[Path], list[str]]:
        """Return the page images of a folder in natural order, page2 before page10, and the names that are not read."""
        try:
            names = os.listdir(path)
        except OSError as fault:
            raise BadRecord(f"{name} cannot be listed ({fault.strerror}); check its permissions") from fault
        pages = [one for one in names if one.lower().endswith(IMAGE_SUFFIXES) and not one.startswith(".")]
        if not pages:
            raise BadRecord(f"the folder {name} has no page images; put them there, or name a PDF or an image file")
        for page_name in pages:
            try:
                check_path_encoding(page_name)
            except UsageError as fault:
                raise BadRecord(f"in the folder {name}: {fault}") from fault
        ordered = [path / one for one in sorted(pages, key=_natural_key)]
        texts = {file.name for page in ordered for file in sidecar_files(page)}
        return ordered, [one for one in names if not one.startswith(".") and one not in {*pages, *texts}]


def _natural_key(name: str) -> tuple[list[Any], str]:
    parts = re.split(r"(\d+)", name.casefold())  # texts and numbers alternate, so that equal places compare
    return [int(part) if at % 2 else part for at, part in enumerate(parts)], name


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that is too long, or has a null byte
        return False


def _read_head(path: Path, name: str) -> bytes:
    try:
        with open_regular_file(path) as file:
            return file.read(SIGNATURE_BYTES)
    except OSError as fault:
        if fault.args == (NOT_REGULAR,):
            raise BadRecord(f"{name} {NOT_REGULAR}; name a PDF, an image or a folder of images") from fault
        cause = os.strerror(fault.errno or errno.EIO)
        raise BadRecord(f"{name} cannot be read ({cause}); check the path and its permissions") from fault


def _check_kind(head: bytes, name: str) -> None:
    """Raise BadRecord for a file that is no image for certain; a damaged image is found when it is decoded."""
    if not head:
        raise BadRecord(f"{name} is empty; download it again")
    kind = describe_content(head)
    if kind != UNKNOWN_CONTENT and not re.match(rb"P[1-7]\s", head):  # PPM images may be text
        problem = f"{name} is not a document of a known kind ({kind}; known: PDF, images, a folder of images)"
        raise BadRecord(f"{problem}; save it as a PDF")


def _count_tiff_pages(path: Path) -> int:
    """Return the pages of a TIFF; 1 for other files, and for one that cannot be read, which is reported later."""
    try:
        with open_regular_file(path) as file:
            is_tiff = file.read(4) in TIFF_SIGNATURES
        return count_frames(*read_content(path)) if is_tiff else 1
    except (OSError, ValueError):
        return 1


UNANSWERABLE_KEYS = ("unanswerable", "is_impossible")
"""Keys whose true value says that the document does not hold an answer; the second one is SQuAD 2.0's."""
DOCUMENT_KEYS = ("document", "image", "images")


@dataclass(frozen=True, kw_only=True)
class DocumentQuestion:
    """A parsed record."""

    question: str
    answers: tuple[str, ...]
    """Accepted answers, without duplicates. Empty: the document does not hold an answer."""
    document: str | None
    """Path or name of a document; None if the pages are `images`."""
    images: tuple[Any, ...] = ()
    """Page images as the record gives them: paths, or mappings with bytes."""
    evidence_pages: tuple[int, ...] = ()
    """Pages that hold the answer, from 1, in increasing order. Empty: unknown."""


def read_question(record: Mapping[str, Any], with_answers: bool = True) -> DocumentQuestion:
    """Parse a record; without `with_answers` its answers are not read and may be missing. Raises BadRecord."""
    document, images = _read_document(record)
    return DocumentQuestion(
        question=_read_text(record, "question"),
        answers=_read_answers(record) if with_answers else (),
        document=document,
        images=images,
        evidence_pages=_read_evidence(record.get("evidence_pages")),
    )


def _read_text(record: Mapping[str, Any], key: str) -> str:
    value = record.get(key)
    if key not in record:
        raise BadRecord(f"the key '{key}' is missing; add it, or rename a column with data.columns")
    if not isinstance(value, str):
        raise BadRecord(f"'{key}' is {json_type_name(value)}, not text; write a string")
    if not value.strip():
        raise BadRecord(f"'{key}' is empty; write a text, or remove the record")
    return value


def _read_document(record: Mapping[str, Any]) -> tuple[str | None, tuple[Any, ...]]:
    given = [key for key in DOCUMENT_KEYS if record.get(key) not in (None, [])]
    if not given:
        raise BadRecord("the record names no document; write its path under 'document', or page images under 'images'")
    if len(given) > 1:
        raise BadRecord(f"both '{given[0]}' and '{given[1]}' are set; keep one of them")
    if given[0] == "document":
        return _read_text(record, "document"), ()
    value = record[given[0]]
    images = tuple(value) if isinstance(value, list) else (value,)
    if any(image is None or image == "" for image in images):
        raise BadRecord(f"'{given[0]}' has an empty path; write the path, or remove the record")
    return None, images


def _read_answers(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the accepted answers; empty if the record says that there is none."""
    keys = [key for key in ("answer", "answers") if key in record]
    said = _is_marked_unanswerable(record)
    if not keys and not said:
        raise BadRecord("the keys 'answer' and 'answers' are missing; add one, empty if the document holds no answer")
    if len(keys) > 1 and all(record[key] not in (None, "", []) for key in keys):
        raise BadRecord("both 'answer' and 'answers' are set; keep one of them")
    found = [text for key in keys for text in _answer_texts(record[key], key)]
    answers = tuple(dict.fromkeys(text.strip() for text in found if text.strip()))
    if said and answers:
        raise BadRecord(
            f"the record is marked as unanswerable and has the answer '{answers[0][:40]}'; keep one of them"
        )
    return answers


def _answer_texts(value: Any, key: str) -> list[str]:
    if isinstance(value, Mapping) and isinstance(value.get("text"), list):  # SQuAD: {"text": […], "answer_start": […]}
        value = value["text"]
    values = value if isinstance(value, list) else [] if value is None else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | int | float | None):
            raise BadRecord(f"'{key}' holds {json_type_name(one)}, not text; write a string or a list of strings")
    return [str(one) for one in values if one is not None]


def _is_marked_unanswerable(record: Mapping[str, Any]) -> bool:
    for key in UNANSWERABLE_KEYS:
        value = record.get(key)
        if value is not None and not isinstance(value, bool):
            raise BadRecord(f"'{key}' is {json_type_name(value)}, not true or false; correct it")
    return any(record.get(key) for key in UNANSWERABLE_KEYS)


def _read_evidence(value: Any) -> tuple[int, ...]:
    """Return the pages, each once, in increasing order; null and an empty list mean that they are unknown."""
    values = value if isinstance(value, list) else [] if value is None else [value]
    for page in values:
        if isinstance(page, float) and page.is_integer():  # parquet and pandas turn integers with nulls into floats
            continue
        if isinstance(page, bool) or not isinstance(page, int):
            raise BadRecord(
                f"'evidence_pages' holds {json_type_name(page)}, not a page number; write a list of integers"
            )
    pages = sorted({int(page) for page in values})
    if pages and pages[0] < 1:
        raise BadRecord(f"'evidence_pages' has page {pages[0]}; pages are counted from 1")
    return tuple(pages)


Rule = Literal["evidence", "all", "retrieved", "no_match", "no_text"]
"""How the pages of a question were selected: the evidence pages of the record; all pages of a small document; those
that rank highest; the first pages, because no page shares a word with the question, or none has text."""


@dataclass(frozen=True)
class PageSelection:
    """Pages of a question, from 1, in the order of the document, and the rule that selected them."""

    pages: tuple[int, ...]
    rule: Rule
    dropped: int = 0
    """Evidence pages beyond the largest number of pages."""


def select_pages(
    document: Document, query: DocumentQuestion, max_pages: int, use_evidence: bool = True
) -> PageSelection:
    """Return the evidence pages if the record gives them, else the pages that rank highest for the question.

    Raises BadRecord for an evidence page that the document does not have.
    """
    if query.evidence_pages and (last := query.evidence_pages[-1]) > document.num_pages:
        has = f"{document.num_pages} page{'s' * (document.num_pages != 1)}"
        raise BadRecord(f"'evidence_pages' has page {last}, and {document.name} has {has} (counted from 1); correct it")
    if query.evidence_pages and use_evidence:
        kept = query.evidence_pages[:max_pages]
        return PageSelection(kept, "evidence", len(query.evidence_pages) - len(kept))
    return retrieve_pages(document, query.question, max_pages)


def retrieve_pages(document: Document, question: str, max_pages: int) -> PageSelection:
    """Return all pages, or the `max_pages` that rank highest for the question; equal ones by number.

    Pages that share no word with the question follow the others; without any text the first pages are taken.
    """
    count = document.num_pages
    if count <= max_pages:
        return PageSelection(tuple(range(1, count + 1)), "all")
    if not document.page_index.has_text:
        return PageSelection(tuple(range(1, max_pages + 1)), "no_text")
    ranked = document.page_index.rank(question)
    others = (page for page in range(1, count + 1) if page not in set(ranked))
    chosen = [*ranked, *others][:max_pages]
    return PageSelection(tuple(sorted(chosen)), "retrieved" if ranked else "no_match")


@dataclass
class RetrievalRecall:
    """Evidence pages among the retrieved ones, over documents of more than `max_pages` pages."""

    max_pages: int
    questions: int = 0
    evidence: int = 0
    """Evidence pages of these questions."""
    found: int = 0
    """Those among the retrieved pages."""

    def add(self, document: Document, query: DocumentQuestion) -> None:
        """Count a question with evidence pages; others and small documents are left out."""
        if query.evidence_pages and document.num_pages > self.max_pages:
            retrieved = retrieve_pages(document, query.question, self.max_pages).pages
            self.questions += 1
            self.evidence += len(query.evidence_pages)
            self.found += len({*query.evidence_pages} & {*retrieved})

    @property
    def recall(self) -> float:
        """Share of the evidence pages that are retrieved; nan without any."""
        return self.found / self.evidence if self.evidence else float("nan")

    def __str__(self) -> str:
        pages = f"{self.max_pages} page{'s' * (self.max_pages != 1)}"
        where = f"{self.found} of {self.evidence}, {self.questions} questions on documents of more than {pages}"
        return f"evidence found in {pages} by retrieval: {self.recall:.0%} ({where})"


SOURCE_VERSION = 1
"""Increase it when the same documents give other pages, so that old token caches are ignored."""
MAX_LISTED_FOLDERS = 5
"""Folders of pages whose files that are not read are named."""
MAX_OPEN_DOCUMENTS = 16
"""Documents whose texts are kept in memory; questions about one document usually follow each other."""


class DocumentSource(WrappedSource):
    """A source whose records have page images instead of a document.

    Its records have the keys question, answers (one or more), images, pages (their numbers, from 1), unanswerable,
    and system where it is given. PDF pages are rendered when their image is first needed. Thread-safe.
    """

    def __init__(self, source: Source, options: DocumentOptions) -> None:
        """Take a source of records as in docs/tasks/docqa.md; no record is read yet."""
        self._source, self.options = source, options
        settings = [SOURCE_VERSION, asdict(options), installed_version("pypdfium2"), installed_version("bm25s")]
        content = f"{source.digest} documents {json.dumps(settings)}"
        super().__init__([source], hashlib.sha256(content.encode()).hexdigest())
        self._reader = DocumentReader(options.dpi, self._watch)
        self._watched: dict[str, WatchedFile] = {}
        self._documents: OrderedDict[tuple[str, Path], Document] = OrderedDict()
        self._lock = threading.RLock()
        self._labels: dict[int, tuple[str, ...]] = {}
        self._unread: dict[int, str] = {}

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return a question with its answers and page images.

        Raises BadRecord if the record or its document cannot be used; a page that cannot be rendered is
        reported when its image is read.
        """
        record = as_record(self._source[index])
        query = read_question(record, self.options.with_answers)
        is_unanswerable = self.options.with_answers and not query.answers
        answers = self._unanswerable() if is_unanswerable else query.answers
        document, selection = self._select(query, index)
        self._unread[index] = f"{document.name}: {document.unread}" if document.unread else ""
        found = {selection.rule: True, "dropped": selection.dropped > 0, "unanswerable": is_unanswerable}
        self._labels[index] = tuple(label for label, applies in found.items() if applies)
        made = {
            "question": query.question,
            "answers": list(answers),
            "images": [document.get_image(page) for page in selection.pages],
            "pages": list(selection.pages),
            "unanswerable": is_unanswerable,
        }
        system = read_system(record)
        return record.derive(made | ({"system": system[0]["content"]} if system else {}))

    def _unanswerable(self) -> tuple[str, ...]:
        if self.options.unanswerable_answer is None:
            problem = "the record has no answer, and the option unanswerable_answer is null"
            raise BadRecord(f"{problem}; write an answer, set the option to a text, or remove the record")
        return (self.options.unanswerable_answer,)

    def _select(self, query: DocumentQuestion, index: int) -> tuple[Document, PageSelection]:
        with self._lock:
            document = self._open(query, self.get_base_dir(index))
            return document, select_pages(document, query, self.options.max_pages, self.options.use_evidence_pages)

    def _open(self, query: DocumentQuestion, folder: Path) -> Document:
        """Return the document of a question, from memory if it was used recently. Raises BadRecord."""
        if query.document is None:
            return self._reader.open_images(query.images, folder)
        key = query.document, folder
        if key not in self._documents:
            self._documents[key] = self._reader.open(query.document, folder)
            while len(self._documents) > MAX_OPEN_DOCUMENTS:
                self._documents.popitem(last=False)
        self._documents.move_to_end(key)
        return self._documents[key]

    def _watch(self, path: Path) -> None:
        self._watched.setdefault(str(path.absolute()), WatchedFile.from_path(path.absolute()))

    def watched_files(self) -> Iterable[WatchedFile]:
        """Return the documents and text files that the records read so far depend on."""
        return [*self._watched.values()]

    def summarize(self) -> list[str]:
        """Return sentences on the records read so far: how pages were selected, and questions without an answer."""
        counts = Counter(label for labels in [*self._labels.values()] for label in labels)
        sentences = [
            f"{counts[label]} question{'s' * (counts[label] != 1)} {text}"
            for label, text in _SUMMARIES.items()
            if counts[label]
        ]
        folders = sorted(set(filter(None, [*self._unread.values()])))
        more = [f"… and {len(folders) - MAX_LISTED_FOLDERS} more folders with files that are not read"]
        return [*sentences, *folders[:MAX_LISTED_FOLDERS], *more * (len(folders) > MAX_LISTED_FOLDERS)]

    def measure_recall(self) -> RetrievalRecall:
        """Return how many of the evidence pages retrieval finds, over all records that can be read."""
        found = RetrievalRecall(self.options.max_pages)
        for index in range(len(self)):
            try:
                query = read_question(self._source[index])
                if query.evidence_pages:
                    with self._lock:
                        found.add(self._open(query, self.get_base_dir(index)), query)
            except BadRecord:
                continue  # listed by `dstrain data check`
        return found

    def describe_check(self) -> list[str]:
        """Return `summarize`, and how many of the evidence pages that records name are found."""
        recall = self.measure_recall()
        return [*self.summarize(), *[str(recall)] * (recall.questions > 0)]

    def get_notes(self, index: int) -> list[str]:
        """Return what `dstrain data check` notes on a usable record that has been read."""
        return [_NOTES[label].format(**asdict(self.options)) for label in self._labels[index] if label in _NOTES]


_SUMMARIES = {
    "evidence": "with given evidence pages",
    "all": "with all pages of the document",
    "retrieved": "with retrieved pages",
    "no_match": "with the first pages, because no page shares a word with the question",
    "no_text": "with the first pages, because the document has no text to search",
    "dropped": "with more evidence pages than max_pages, of which the last ones are left out",
    "unanswerable": "without an answer",
}
"""Label of a record -> what `summarize` says after the number of such questions."""
_NOTES = {
    "no_match": "no page shares a word with the question: the first {max_pages} pages are used",
    "no_text": "the document has no text to search: its first {max_pages} pages are used",
    "dropped": "it has more evidence pages than max_pages: only the first {max_pages} are used",
    "unanswerable": "it has no answer: '{unanswerable_answer}' is trained on",
}
