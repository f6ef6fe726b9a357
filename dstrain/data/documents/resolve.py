"""Finding and opening the document that a record names."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dstrain.data.documents.document import Document, PdfDocument, TiffDocument
from dstrain.data.documents.sidecar_text import sidecar_files
from dstrain.data.records import BadRecord
from dstrain.data.vision.file_type import UNKNOWN_CONTENT, describe_content
from dstrain.data.vision.image_io import count_frames, read_content, resolve_image
from dstrain.files import NOT_REGULAR, display_path, open_regular_file

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
            return self._open_pages(name, self._list_pages(path, name))
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

    def _list_pages(self, path: Path, name: str) -> list[Path]:
        """Return the page images of a folder in natural order: page2 before page10."""
        try:
            names = os.listdir(path)
        except OSError as fault:
            raise BadRecord(f"{name} cannot be listed ({fault.strerror}); check its permissions") from fault
        pages = [one for one in names if one.lower().endswith(IMAGE_SUFFIXES) and not one.startswith(".")]
        if not pages:
            raise BadRecord(f"the folder {name} has no page images; put them there, or name a PDF or an image file")
        return [path / one for one in sorted(pages, key=_natural_key)]


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
