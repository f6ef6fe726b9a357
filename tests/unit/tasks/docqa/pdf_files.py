"""Small PDF files for tests: with text, encrypted, without pages, or written byte by byte."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path

import fpdf
import pytest

PAGES = (
    "the lease begins in March",
    "the rent is nine hundred a month",
    "pets are not allowed in the house",
    "heating costs are paid by the tenant",
    "the tenant gives notice in March",
)
"""Texts of the pages of a made-up contract; `March` is on pages 1 and 5, `rent` on page 2."""


def write_pdf(path: Path, texts: Sequence[str] = PAGES, password: str = "") -> Path:
    """Write a PDF with a page of text each; return its path."""
    pdf = fpdf.FPDF(unit="pt", format=(200, 100))
    pdf.set_font("Helvetica", size=10)
    for text in texts:
        pdf.add_page()
        pdf.cell(text=text)
    if password:
        pdf.set_encryption(owner_password="owner", user_password=password)
    pdf.output(str(path))
    return path


def write_objects(path: Path, objects: Sequence[bytes]) -> Path:
    """Write a PDF of these objects, numbered from 1; the first one is the catalog."""
    out, offsets = b"%PDF-1.5\n", []
    for number, content in enumerate(objects, 1):
        offsets.append(len(out))
        out += b"%d 0 obj\n%b\nendobj\n" % (number, content)
    table = b"".join(b"%010d 00000 n \n" % offset for offset in offsets)
    trailer = b"trailer\n<</Root 1 0 R/Size %d>>\nstartxref\n%d\n%%%%EOF\n" % (len(objects) + 1, len(out))
    path.write_bytes(out + b"xref\n0 %d\n0000000000 65535 f \n" % (len(objects) + 1) + table + trailer)
    return path


def write_one_page(path: Path, box: bytes = b"0 0 100 100", content: bytes = b"") -> Path:
    """Write a PDF whose page has this box, in points, and this content stream."""
    packed = zlib.compress(content)
    page = b"<</Type/Page/Parent 2 0 R/MediaBox[%b]/Contents 4 0 R/Resources<<>>>>" % box
    stream = b"<</Filter/FlateDecode/Length %d>>\nstream\n%b\nendstream" % (len(packed), packed)
    pages = b"<</Type/Pages/Kids[3 0 R]/Count 1>>"
    return write_objects(path, [b"<</Type/Catalog/Pages 2 0 R>>", pages, page, stream])


def write_empty_pdf(path: Path) -> Path:
    """Write a PDF without pages."""
    return write_objects(path, [b"<</Type/Catalog/Pages 2 0 R>>", b"<</Type/Pages/Kids[]/Count 0>>"])


def count_calls(monkeypatch: pytest.MonkeyPatch, module: object, name: str) -> list[tuple[object, ...]]:
    """Return a list that grows by the arguments of each call of a module's function."""
    calls, real = [], getattr(module, name)

    def counted(*args: object, **kwargs: object) -> object:
        calls.append((*args, *kwargs.values()))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls
