"""From a file, or bytes, to an RGB image that stands upright. What an image says of itself is never believed."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrain.data.formats.messages import BadRecord, json_type_name
from dstrain.data.sources.base import NOT_REGULAR, display_path, open_regular_file
from dstrain.data.vision.file_type import describe_content
from dstrain.data.vision.patches import truncated_images_refused
from dstrain.errors import DataError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 89_478_485
"""Pillow's own bound for an image that nobody vouches for: 256 MiB of RGB."""
MAX_FILE_BYTES = 1 << 30
"""Of a file; one with so many pixels has fewer."""
IMAGE_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""What is decoded. Pillow knows more, some of which run a program (EPS) or have no mark of their own (TGA)."""
_FORMAT_NAMES = ", ".join(name for name in IMAGE_FORMATS if name not in ("DIB", "MPO"))

_EXIF_ORIENTATION_TAG = 0x0112
_UPRIGHT_TRANSPOSE = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF's orientation -> the Transpose that undoes it (Pillow's numbers)."""
_ROTATION_NAMES = {3: "rotated by 180°", 6: "rotated by 90°", 8: "rotated by 270°"}

_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_PNG_SIGNATURE = b"\x89PNG"


def read_image(source: Path | bytes) -> Image:
    """The image as RGB, upright, the first frame of an animated one, on white where it is transparent.

    Raises BadRecord, with the file's name, for what is missing, no image, damaged, too large or too small.
    """
    content, name = read_content(source)
    return decode_image(content, name)


def read_content(source: Path | bytes) -> tuple[bytes, str]:
    """The file's bytes and its name for messages. Raises BadRecord."""
    if isinstance(source, bytes):
        return source, f"an image of {len(source)} bytes"
    name = display_path(source)
    try:
        with open_regular_file(source) as file:
            size = os.fstat(file.fileno()).st_size
            if size > MAX_FILE_BYTES:
                raise BadRecord(
                    f"{name} has {size} bytes, more than the {MAX_FILE_BYTES} that are read; make it smaller"
                )
            # Files of /proc have no size and may never end.
            return file.read(MAX_FILE_BYTES) if size else b"", name
    except IsADirectoryError as fault:
        raise BadRecord(f"{name} is a folder, not an image; name a file in it") from fault
    except FileNotFoundError as fault:
        raise BadRecord(f"image not found: {name} (paths are relative to the data file); check the path") from fault
    except (OSError, ValueError) as fault:  # ValueError: a path with a zero byte in it
        if isinstance(fault, BadRecord):
            raise
        if fault.args == (NOT_REGULAR,):
            raise BadRecord(f"{name} is no regular file; name an image's file") from fault
        cause = getattr(fault, "strerror", None) or fault
        raise BadRecord(f"{name} cannot be read ({cause}); check the path and its permissions") from fault


def decode_image(content: bytes, name: str) -> Image:
    """What `read_image` does, for bytes in hand; `name` is for messages. Raises BadRecord."""
    image, _ = _decode_frame(content, name)
    if _has_unknown_range(image):
        problem = f"{name} has pixels of a kind (Pillow's {image.mode}) in which white is not known"
        raise BadRecord(f"{problem}; save it with 8 or 16 bits a colour")
    with _raise_as_bad_record(name):
        return _to_rgb(_apply_exif_rotation(image))


def describe_conversions(source: Path | bytes) -> list[str]:
    """What is unusual in an image and yet can be used, a sentence each. Raises BadRecord as `read_image` does."""
    content, name = read_content(source)
    image, orientation = _decode_frame(content, name)
    found = []
    if orientation in _UPRIGHT_TRANSPOSE:
        found.append(f"its EXIF says it is {_ROTATION_NAMES.get(orientation, 'mirrored')}: it is turned upright")
    if image.mode == "CMYK":
        found.append("CMYK: it is converted to RGB")
    if image.mode.startswith("I") or (image.format == "PNG" and content[24:25] == b"\x10"):
        found.append("16 bits a colour: it is scaled to 8")
    if image.has_transparency_data and _has_transparency(image):
        found.append("transparent in places: it is laid on white")
    if (frames := _count_frames(content, name)) > 1:
        many = f"{frames} pages" if image.format == "TIFF" else f"animated, {frames} frames"
        found.append(f"{many}: the first alone is used")
    return found


def resolve_image(value: Any, folder: Path) -> Path | bytes:
    """The file, or the bytes, that a record's value names.

    A path is relative to `folder`, the data file's; {"bytes", "path"} is how datasets and parquet hold an image; one
    that was decoded already becomes a PNG. Raises BadRecord.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return resolve_image(value["bytes"], folder)
        if value.get("path") is None:
            raise BadRecord('an image is an object without "path" and "bytes"; write the path of its file')
        value = value["path"]
    if isinstance(value, str | Path):
        return folder / _check_path(str(value))
    if (pillow := sys.modules.get("PIL.Image")) and isinstance(value, pillow.Image):
        return _encode_png(value)
    raise BadRecord(f"an image is {json_type_name(value)}, not the path of a file; write the path")


def _check_path(value: str) -> str:
    if not value.strip():
        raise BadRecord("an image's path is empty; write one, or remove the key")
    if value[:5].lower() == "data:":
        raise BadRecord(f"an image is a data: URI ({value[:30]}…); write it to a file and name that")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise BadRecord(f"an image is the address {value}; fetch it first and write the path of the file")
    return value


def _encode_png(image: Image) -> bytes:
    """A PNG of an image that somebody else decoded: the same image gives the same bytes."""
    if _has_unknown_range(image):
        raise BadRecord(f"a decoded image is of Pillow's kind {image.mode}, in which white is not known; make it RGB")
    with _raise_as_bad_record("a decoded image"):
        upright, file = _apply_exif_rotation(image), io.BytesIO()
        kept = upright.copy() if upright.mode in _PNG_MODES else _to_rgb(upright)
        kept.info = {
            key: value for key, value in kept.info.items() if key == "transparency"
        }  # EXIF would turn it again
        kept.save(file, "PNG", compress_level=1)
        return file.getvalue()


def _decode_frame(content: bytes, name: str) -> tuple[Image, int]:
    """The image as its file holds it, the first frame decoded whole, and EXIF's number for how it lies."""
    _require_pillow(name)
    if not content:
        raise BadRecord(f"{name} is empty; download it again")
    with truncated_images_refused():
        if content.startswith(_PNG_SIGNATURE):
            with _raise_as_bad_record(name):
                _open_image(content, name).verify()  # checksums, which decoding leaves alone
        image = _open_image(content, name)
        width, height = image.size
        if min(width, height) < 2:
            problem = f"{name} is {width}x{height} pixels, and an image has two or more either way"
            raise BadRecord(f"{problem}; replace it, or remove the record")
        turned = _get_exif_rotation(image) if image.format == "TIFF" else 0  # which Pillow turns upright as it decodes
        with _raise_as_bad_record(name):
            image.load()
    return image, turned or _get_exif_rotation(image)


def _require_pillow(name: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as fault:
        raise DataError(f'{name} needs pillow; run pip install "dstrain[vision]"') from fault


def _open_image(content: bytes, name: str) -> Image:
    """The image with its header read and no pixel decoded. Raises BadRecord."""
    from PIL import Image, UnidentifiedImageError

    Image.init()
    known = [form for form in IMAGE_FORMATS if form in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(content), formats=known)
        pixels = image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
        pixels = max(map(int, re.findall(r"\d+", str(fault))), default=MAX_PIXELS + 1)
    except UnidentifiedImageError as fault:
        if any(accept and accept(content[:16]) for accept in (Image.OPEN[form][1] for form in known)):
            raise BadRecord(f"{name} is damaged or cut off in its first bytes; download it again") from fault
        problem = f"{name} is no image that is known here ({describe_content(content)}; known: {_FORMAT_NAMES})"
        raise BadRecord(f"{problem}; save it as PNG or JPEG") from fault
    except MemoryError:
        raise
    except Exception as fault:
        raise _bad_image_error(name, fault) from fault
    if pixels > MAX_PIXELS:
        raise BadRecord(f"{name} has {pixels} pixels, more than the {MAX_PIXELS} that are decoded; make it smaller")
    return image


@contextmanager
def _raise_as_bad_record(name: str) -> Iterator[None]:
    """Whatever Pillow trips over in a file, and it is of many kinds, is the file's fault; too little memory is not."""
    try:
        yield
    except (BadRecord, DataError, MemoryError):
        raise
    except Exception as fault:
        raise _bad_image_error(name, fault) from fault


def _bad_image_error(name: str, fault: Exception) -> BadRecord:
    return BadRecord(f"{name} is damaged or cut off ({str(fault) or type(fault).__name__}); download it again")


def _get_exif_rotation(image: Image) -> int:
    """1 where EXIF says nothing, or cannot be read: it is no part of the picture."""
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION_TAG, 1))
    except Exception:
        return 1


def _apply_exif_rotation(image: Image) -> Image:
    from PIL.Image import Transpose

    turn = _UPRIGHT_TRANSPOSE.get(_get_exif_rotation(image))
    return image if turn is None else image.transpose(Transpose(turn))


def _has_unknown_range(image: Image) -> bool:
    """Whether nothing says which of its numbers is white: floats, 32-bit integers, and LAB, which needs a profile."""
    return image.mode in ("F", "LAB") or (image.mode == "I" and image.format not in ("PNG", "PPM"))


def _to_rgb(image: Image) -> Image:
    from PIL import Image

    if image.mode.startswith("I"):
        image = _scale_to_8_bits(image)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    made = image.convert("RGB")
    made.info = {}
    return made


def _scale_to_8_bits(image: Image) -> Image:
    """Grey of 0..65535 as 0..255, which convert("L") would cut off at 255."""
    import numpy as np
    from PIL import Image

    deep = np.asarray(image).astype(np.uint32)
    grey = ((deep * 255 + 32767) // 65535).astype(np.uint8)
    if (clear := image.info.get("transparency")) is not None:
        grey[deep == clear] = 255
    return Image.fromarray(grey)


def _has_transparency(image: Image) -> bool:
    if image.mode.startswith("I"):
        return True
    return any(image.convert("RGBA").getchannel("A").histogram()[:255])


def _count_frames(content: bytes, name: str) -> int:
    """1 for a photograph with a second picture hidden behind it, and where what follows the first is damaged."""
    image = _open_image(content, name)
    try:
        return 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
    except Exception:
        return 1
