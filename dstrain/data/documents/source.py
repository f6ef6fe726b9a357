"""Source wrapper that turns records of questions about documents into records of questions about page images."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.data.documents.document import Document
from dstrain.data.documents.options import DocumentOptions
from dstrain.data.documents.page_selection import (
    PageSelection,
    RetrievalRecall,
    Rule,
    select_pages,
)
from dstrain.data.documents.pdfium import pdfium_version
from dstrain.data.documents.questions import DocumentQuestion, read_question
from dstrain.data.documents.resolve import DocumentReader
from dstrain.data.documents.retrieval import bm25_version
from dstrain.data.formats.messages import read_system
from dstrain.data.records import BadRecord, BadRow, as_record
from dstrain.data.sources.base import Source
from dstrain.files import WatchedFile

SOURCE_VERSION = 1
"""Increase it when the same documents give other pages, so that old token caches are ignored."""
MAX_OPEN_DOCUMENTS = 16
"""Documents whose texts are kept in memory; questions about one document usually follow each other."""


class DocumentSource:
    """A source whose records have page images instead of a document.

    Its records have the keys question, answers (one or more), images, pages (their numbers, from 1), unanswerable,
    and system where it is given. PDF pages are rendered when their image is first needed. Thread-safe.
    """

    def __init__(self, source: Source, options: DocumentOptions) -> None:
        """Take a source of records as in docs/docqa.md; no record is read yet."""
        self._source, self.options = source, options
        settings = [SOURCE_VERSION, asdict(options), pdfium_version(), bm25_version()]
        self.digest = hashlib.sha256(f"{source.digest} documents {json.dumps(settings)}".encode()).hexdigest()
        self._reader = DocumentReader(options.dpi, self._watch)
        self._watched: dict[str, WatchedFile] = {}
        self._documents: OrderedDict[tuple[str, Path], Document] = OrderedDict()
        self._lock = threading.RLock()
        self._labels: dict[int, tuple[str, ...]] = {}

    @property
    def bad_rows(self) -> list[BadRow]:
        return self._source.bad_rows

    def __bool__(self) -> bool:
        """Return whether it has records, without reading them."""
        return bool(self._source)

    def __len__(self) -> int:
        return len(self._source)

    def location(self, index: int) -> str:
        return self._source.location(index)

    def get_base_dir(self, index: int) -> Path:
        return self._source.get_base_dir(index)

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
        self._labels[index] = _make_labels(selection.rule, selection.dropped > 0, is_unanswerable)
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
        return [
            f"{counts[label]} question{'s' * (counts[label] != 1)} {text}"
            for label, text in _SUMMARIES.items()
            if counts[label]
        ]

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


@cache
def _make_labels(rule: Rule, is_cut: bool, is_unanswerable: bool) -> tuple[str, ...]:
    return (rule, *["dropped"] * is_cut, *["unanswerable"] * is_unanswerable)
