"""Pages of documents in the cache: page counts, texts and rendered images, each written when it is first needed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest, get_or_build
from dstrain.data.records import BadRecord
from dstrain.files import display_path

Write = Callable[[Path, Path], object]
"""(document, file of the cache): writes that file. Raises BadRecord."""
_faults: dict[tuple[Path, str], str] = {}
"""Reasons of failed writes of this process: a page that runs into a time limit is tried once, not per question."""


def digest_document(path: Path) -> str:
    """Return the SHA-256 of a document. Raises BadRecord if the file cannot be read."""
    try:
        return file_digest(path)
    except OSError as fault:
        cause = fault.strerror or fault
        raise BadRecord(f"{display_path(path)} cannot be read ({cause}); check the path and its permissions") from fault


@dataclass(frozen=True)
class DocumentCache:
    """What a reader makes of a document's present content."""

    document: Path
    digest: str
    reader: str
    """Library with its version."""

    @classmethod
    def of_file(cls, path: Path, reader: str) -> DocumentCache:
        """Return the cache for a file. Raises BadRecord if the file cannot be read."""
        return cls(path, digest_document(path), reader)

    def load_json(self, name: str, write: Write) -> Any:
        """Return the value of a JSON file, which `write` writes first where it is not cached. Raises BadRecord."""
        return json.loads(self._get_file(name, write).read_text(encoding="utf-8"))

    def get_page(self, name: str, write: Write) -> CachedPage:
        """Return the page whose PNG `write` writes when it is first needed."""
        return CachedPage(self, name, write)

    def _get_file(self, name: str, write: Write) -> Path:
        if (self.document, name) in _faults:
            raise BadRecord(_faults[self.document, name])
        key = {"document": self.digest, "reader": self.reader, "name": name}
        file_name = Path(name).name
        try:
            build = partial(_write_file, self.document, file_name, write)
            return get_or_build("documents", key, build, lambda folder: folder / file_name)
        except BadRecord as fault:
            _faults[self.document, name] = fault.reason
            raise


@dataclass(frozen=True)
class CachedPage:
    """A page that becomes an image file of the cache when it is first needed, a `DeferredImage`."""

    cache: DocumentCache
    name: str
    """`144dpi/00001.png`."""
    write: Write

    def get_file(self) -> Path:
        """Return the page's PNG, written first where it is not cached. Thread-safe. Raises BadRecord."""
        return self.cache._get_file(self.name, self.write)


def _write_file(document: Path, name: str, write: Write, folder: Path) -> None:
    write(document, folder / name)
