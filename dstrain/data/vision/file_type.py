"""What a file is that is no image, for messages."""

from __future__ import annotations

_FILE_SIGNATURES = (
    (b"version https://git-lfs", "it is a pointer of Git LFS, `git lfs pull` fetches the image"),
    (b"%PDF", "it is a PDF"),
    (b"PK\x03\x04", "it is a zip archive"),
    (b"\x1f\x8b", "it is packed with gzip"),
    (b"%!PS", "it is PostScript"),
    (b"icns", "it is an Apple icon"),
    (b"<", "it is HTML, SVG or XML"),
)


def describe_content(content: bytes) -> str:
    """What a file is that is no image, without a word of what stands in it: it may be any file of this machine."""
    start = content[:64].lstrip(b"\xef\xbb\xbf \t\r\n")
    known = next((what for mark, what in _FILE_SIGNATURES if start.startswith(mark)), None)
    text = start.decode("ascii", "replace").expandtabs().replace("\n", " ").replace("\r", " ").isprintable()
    return known or ("it is text" if text and start.isascii() else "its first bytes are of no known kind")
