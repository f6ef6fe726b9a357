"""Descriptions of files that are not images, and what to do with them, for error messages."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

_FILE_SIGNATURES = (
    (b"version https://git-lfs", "it is a Git LFS pointer, `git lfs pull` fetches the image"),
    (b"%PDF", "it is a PDF"),
    (b"PK\x03\x04", "it is a zip archive"),
    (b"\x1f\x8b", "it is a gzip file"),
    (b"%!PS", "it is PostScript"),
    (b"icns", "it is an Apple icon"),
    (b"<", "it is HTML, SVG or XML"),
)
_PDF_FIX = "save its pages as PNG or JPEG, or use task docqa, which reads PDFs"
UNKNOWN_CONTENT = "its first bytes are unknown"


def describe_content(content: bytes) -> str:
    """Return what kind of file it is, without quoting its content: it may be any file of this host."""
    start = _strip_start(content)
    known = next((kind for signature, kind in _FILE_SIGNATURES if start.startswith(signature)), None)
    text = start.decode("ascii", "replace").expandtabs().replace("\n", " ").replace("\r", " ").isprintable()
    return known or ("it is text" if text and start.isascii() else UNKNOWN_CONTENT)


def suggest_fix(content: bytes) -> str:
    """Return what to do with a file that is no image."""
    return _PDF_FIX if _strip_start(content).startswith(b"%PDF") else "save it as PNG or JPEG"


def _strip_start(content: bytes) -> bytes:
    """Return the first bytes without a byte order mark and blanks."""
    return content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")


def accepts_signature(accept: Callable[[bytes], Any] | None, prefix: bytes) -> bool:
    """Return True if a format of Pillow knows the first bytes; some of them raise for a file of few bytes."""
    try:
        return accept is not None and bool(accept(prefix))
    except (struct.error, IndexError):
        return False
