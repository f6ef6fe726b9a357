"""Content of structure files, unpacked and checked for faults that gemmi reads over."""

from __future__ import annotations

import codecs
import gzip
import zlib
from pathlib import Path

from dstrain.data.records import BadRecord
from dstrain.errors import one_line

_GZIP_MAGIC = b"\x1f\x8b"
_COORDINATE_COLUMNS = (30, 38, 46)
"""Where x, y and z begin in a line of a PDB file; each has 8 characters."""
_LINE_LENGTH = 54
"""Characters of a line up to z. gemmi refuses shorter ones."""


def read_content(path: Path) -> bytes:
    """Return the content of a file without a byte order mark, unpacked if it is a gzip file. Raises BadRecord."""
    try:
        content = path.read_bytes()
        # gemmi reads what it can unpack of a truncated file, and reports nothing.
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except (EOFError, zlib.error, gzip.BadGzipFile) as fault:
        raise BadRecord(f"it cannot be unpacked ({one_line(str(fault))}); download it again") from fault
    except OSError as fault:
        raise BadRecord(f"it cannot be read ({fault.strerror}); check its permissions") from fault
    # gemmi would not recognize the first line behind it.
    content = content.removeprefix(codecs.BOM_UTF8)
    if not content.strip():
        raise BadRecord("it is empty; download it again, or remove it")
    return content


def check_pdb_coordinates(content: bytes) -> None:
    """Raise BadRecord where a coordinate of a PDB file is not a number, such as `********`; gemmi reads it as 0."""
    for number, line in enumerate(content.split(b"\n"), 1):
        kind = line[:6].upper()
        if kind.rstrip() == b"END":
            return
        if kind[:4] in (b"ATOM", b"HETA") and len(line) >= _LINE_LENGTH:
            for start in _COORDINATE_COLUMNS:
                _check_number(line[start : start + 8], number)


def _check_number(text: bytes, number: int) -> None:
    try:
        float(text)
    except ValueError:
        written = text.decode("ascii", "replace").strip()
        raise BadRecord(f"line {number}: the coordinate '{written}' is not a number; correct it") from None
