"""Images of records: files and bytes as pixels, and the index of a store's images with copies of large ones."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import copy as shallow_copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, runtime_checkable

import numpy as np

from dstrain.cache import read_cached_json
from dstrain.data.formats.messages import json_type_name
from dstrain.errors import BadRecord, DataError
from dstrain.files import (
    NOT_REGULAR,
    WatchedFile,
    atomic_write,
    display_path,
    not_file_reason,
    open_regular_file,
    stat_or_none,
)
from dstrain.patching import check_version

if TYPE_CHECKING:
    from PIL.Image import Image


_FILE_SIGNATURES = (
    (b"version https://git-lfs", "it is a Git LFS pointer, `git lfs pull` fetches the image"),
    (b"%PDF", "it is a PDF"),
    (b"PK\x03\x04", "it is a zip archive"),
    (b"\x1f\x8b", "it is a gzip file"),
    (b"%!PS", "it is PostScript"),
    (b"icns", "it is an Apple icon"),
    (b"<", "it is HTML, SVG or XML"),
    (b"\xd0\xcf\x11\xe0", "it is a .doc, .xls or .ppt file of Office"),
    (b"{\\rtf", "it is rich text"),
    (b"AT&TFORM", "it is DjVu"),
    (b"8BPS", "it is a Photoshop file"),
    (b"DDS ", "it is a DDS texture"),
    (b"\x01\xda", "it is an SGI image"),
    (b"\x76\x2f\x31\x01", "it is OpenEXR"),
    (b"\xff\x0a", "it is JPEG XL"),
    (b"\0\0\0\x0cJXL ", "it is JPEG XL"),
    (b"BZh", "it is a bzip2 file"),
    (b"\xfd7zXZ", "it is an xz file"),
    (b"7z\xbc\xaf", "it is a 7z archive"),
)
_PCX = re.compile(rb"\x0a[\x00\x02-\x05]\x01[\x01\x02\x04\x08]")
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
_AVIF_BRANDS = (b"avif", b"avis")
_TGA_END, _TGA_END_BYTES = b"TRUEVISION-XFILE.\0", 18
_HEIC_FIX = "save it as JPEG or PNG, such as with `heif-convert IN.heic OUT.jpg`, or `sips -s format jpeg` on a Mac"
_PDF_FIX = "save its pages as PNG or JPEG, or use task docqa, which reads PDFs"
UNKNOWN_CONTENT = "its first bytes are unknown"


def describe_content(content: bytes) -> str:
    """Return what kind of file it is, without quoting its content: it may be any file of this host."""
    start = _strip_start(content)
    known = next((kind for signature, kind in _FILE_SIGNATURES if start.startswith(signature)), None)
    known = known or _describe_binary(content)
    text = start.decode("ascii", "replace").expandtabs().replace("\n", " ").replace("\r", " ").isprintable()
    return known or ("it is text" if text and start.isascii() else UNKNOWN_CONTENT)


def _describe_binary(content: bytes) -> str | None:
    """Return the format of a file that has its mark elsewhere than at its start; None if it is not known.

    AVIF is none of them, because most versions of Pillow read it.
    """
    if content[4:8] == b"ftyp" and content[8:12] not in _AVIF_BRANDS:
        is_heic = content[8:12] in _HEIC_BRANDS and not any(brand in content[16:64] for brand in _AVIF_BRANDS)
        return "it is HEIC, as of an iPhone" if is_heic else "it is a video or sound (MP4)"
    if content[128:132] == b"DICM":
        return "it is DICOM"
    if _PCX.match(content):
        return "it is PCX"
    return "it is TGA" if content[-_TGA_END_BYTES:] == _TGA_END else None


def suggest_fix(content: bytes) -> str:
    """Return what to do with a file that is no image."""
    if content[4:8] == b"ftyp" and content[8:12] in _HEIC_BRANDS:
        return _HEIC_FIX
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


MAX_PIXELS = 89_478_485
"""Pillow's own limit for untrusted images (Image.MAX_IMAGE_PIXELS): 256 MiB of RGB."""
MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file; one with MAX_PIXELS is smaller."""
IMAGE_FORMATS = ("AVIF", "BMP", "DIB", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
"""Formats that are decoded. Of the others, EPS runs a program and TGA has no signature."""
_FORMAT_NAMES = ", ".join(name for name in IMAGE_FORMATS if name not in ("DIB", "MPO"))

_EXIF_ORIENTATION_TAG = 0x0112
UPRIGHT_TRANSPOSE = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""EXIF orientation -> the Pillow Transpose that reverses it."""
_PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I", "I;16")
_PNG_SIGNATURE, _JPEG_SIGNATURE = b"\x89PNG", b"\xff\xd8\xff"
_JPEG_START, _JPEG_END, _JPEG_SCAN = b"\xff\xd8", b"\xff\xd9", b"\xff\xda"
_JPEG_MARKER = re.compile(rb"\xff[\xc0-\xcf\xd8-\xfe]")
"""Every marker that libjpeg acts on, except restarts, which are parts of a scan."""
MAX_JPEG_SCANS = 100
"""Maximum number of SOS markers in an image; a normal one has about 10."""
_ICO_SIGNATURE = b"\0\0\1\0"
_PNG_SIZE = re.compile(rb"\x89PNG\r\n\x1a\n....IHDR(.{4})(.{4})", re.DOTALL)
_UNSUPPORTED = re.compile(r"unsupported|not supported|too large|bitfields|cannot handle|not available", re.I)
"""Words of Pillow's errors for whole files of a form that it cannot decode."""
_TIFF_BITS_PER_SAMPLE_TAG = 258
TESTED_PILLOW = ("10", "14")
"""First version of Pillow tested, and the first one not tested."""
_switch_lock, _num_readers, _value_before = threading.Lock(), 0, False


@runtime_checkable
class DeferredImage(Protocol):
    """An image of a record without a file yet, such as a page of a PDF."""

    def get_file(self) -> Path:
        """Return the image's file, written first where it is missing. Thread-safe. Raises BadRecord."""


def read_image(source: Path | bytes) -> Image:
    """Return the image as RGB: upright, the first frame, transparent parts white.

    Raises BadRecord, with the file's name, if it is missing, not an image, damaged, too large or small.
    """
    content, name = read_content(source)
    return decode_image(content, name)


def read_content(source: Path | bytes) -> tuple[bytes, str]:
    """Return the file's bytes and its name for messages. Raises BadRecord."""
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
            # Files of /proc have size 0 and may be endless.
            return file.read(MAX_FILE_BYTES) if size else b"", name
    except IsADirectoryError as fault:
        raise BadRecord(f"{name} is a folder, not an image; name a file in it") from fault
    except FileNotFoundError as fault:
        if source.is_symlink():
            link = Path(display_path(source.parent)) / source.name
            raise BadRecord(f"image not found: {link} {not_file_reason(source)}; correct the link") from fault
        raise BadRecord(f"image not found: {name} (paths are relative to the data file); check the path") from fault
    except (OSError, ValueError) as fault:  # ValueError: a null byte in the path
        if isinstance(fault, BadRecord):
            raise
        if fault.args == (NOT_REGULAR,):
            raise BadRecord(f"{name} is not a regular file; name an image's file") from fault
        cause = getattr(fault, "strerror", None) or fault
        raise BadRecord(f"{name} cannot be read ({cause}); check the path and its permissions") from fault


def decode_image(content: bytes, name: str, frame: int = 0) -> Image:
    """Return the image in `content` as `read_image` does; `name` is for messages. Raises BadRecord."""
    image, _ = decode_frame(content, name, frame)
    if _has_unknown_range(image):
        problem = f"{name} has pixels of Pillow's mode {image.mode}, in which the value of white is unknown"
        raise BadRecord(f"{problem}; save it with 8 or 16 bits per channel")
    with _raise_as_bad_record(name):
        return _to_rgb(_apply_exif_rotation(image), count_bits(image))


def resolve_image(value: Any, folder: Path) -> Path | bytes:
    """Return the file or the bytes of an image in a record.

    A path is relative to `folder`, the data file's; {"bytes", "path"} is the form of `datasets` and
    parquet; an image that is already decoded becomes a PNG. Raises BadRecord.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, DeferredImage):
        return value.get_file()
    if isinstance(value, Mapping):
        if value.get("bytes") is not None:
            return resolve_image(value["bytes"], folder)
        if value.get("path") is None:
            raise BadRecord('an image is an object without "path" and "bytes"; write the path of its file')
        value = value["path"]
    if isinstance(value, str | Path):
        return folder / _check_path(str(value))
    if _is_decoded(value):
        return _encode_png(value)
    raise BadRecord(f"an image is {json_type_name(value)}, not the path of a file; write the path")


def _is_decoded(value: Any) -> TypeGuard[Image]:
    """Return whether a value is an image of Pillow. By its classes: another thread may be importing Pillow just now."""
    return any((kind.__module__, kind.__name__) == ("PIL.Image", "Image") for kind in type(value).__mro__)


def _check_path(value: str) -> str:
    if not value.strip():
        raise BadRecord("an image's path is empty; write one, or remove the key")
    # Refused explicitly: as paths they would be reported as missing files.
    if value[:5].lower() == "data:":
        raise BadRecord(f"an image is a data: URI ({value[:30]}…); write it to a file and name that")
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", value):
        raise BadRecord(f"an image is the URL {value}; download it first and write the path of the file")
    return value


def _encode_png(image: Image) -> bytes:
    """Return a PNG of a decoded image: equal images give equal bytes."""
    if _has_unknown_range(image):
        raise BadRecord(
            f"a decoded image has Pillow's mode {image.mode}, in which the value of white is unknown; make it RGB"
        )
    with _raise_as_bad_record("a decoded image"):
        upright, file = _apply_exif_rotation(image), io.BytesIO()
        kept = upright.copy() if upright.mode in _PNG_MODES else _to_rgb(upright)
        # Without EXIF, which would turn the image a second time when the PNG is read.
        kept.info = {key: value for key, value in kept.info.items() if key == "transparency"}
        kept.save(file, "PNG", compress_level=1)
        return file.getvalue()


def decode_frame(content: bytes, name: str, frame: int = 0) -> tuple[Image, int]:
    """Return a frame, decoded, in the file's mode and rotation, and its EXIF orientation."""
    _require_pillow(name)
    if not content:
        raise BadRecord(f"{name} is empty; download it again")
    if content.startswith(_JPEG_SIGNATURE) and _has_many_scans(content):
        # Each scan of a progressive file goes over all pixels, and takes only some bytes.
        raise BadRecord(f"{name} has more than {MAX_JPEG_SCANS} scans, which take long to decode; save it again")
    if content.startswith(_ICO_SIGNATURE):  # Pillow decodes it when it is opened
        for width, height in _PNG_SIZE.findall(content):
            _check_pixels(int.from_bytes(width) * int.from_bytes(height), name)
    with raise_on_truncated_images():
        if content.startswith(_PNG_SIGNATURE):
            with _raise_as_bad_record(name):
                # verify() leaves the image unusable, so it is opened again below.
                _open_image(content, name).verify()  # checks the checksums, which decoding does not
        image = _open_image(content, name)
        if frame:
            with _raise_as_bad_record(name):
                image.seek(frame)
            _check_pixels(image.width * image.height, name)
        width, height = image.size
        if min(width, height) < 2:
            problem = f"{name} is {width}x{height} pixels; width and height must be two or more"
            raise BadRecord(f"{problem}; replace it, or remove the record")
        # Read before decoding: Pillow turns TIFF images upright on load and drops the EXIF entry.
        turned = _get_exif_rotation(image) if image.format == "TIFF" else 0
        with _raise_as_bad_record(name):
            image.load()
    return image, turned or _get_exif_rotation(image)


def _has_many_scans(content: bytes) -> bool:
    """Return whether a JPEG file's image has more than MAX_JPEG_SCANS scans.

    Markers are found as libjpeg finds them: metadata, and what follows the image, such as the video of a motion photo,
    may hold the same bytes.
    """
    if content.count(_JPEG_SCAN) <= MAX_JPEG_SCANS:
        return False
    scans, at = 0, 0
    while scans <= MAX_JPEG_SCANS and (found := _JPEG_MARKER.search(content, at)):
        if scans and found[0] == _JPEG_END:  # before the first scan: tables alone, and Pillow reads on
            return False
        scans += found[0] == _JPEG_SCAN
        at = found.end()
        if found[0] not in (_JPEG_START, _JPEG_END):
            at += int.from_bytes(content[at : at + 2])  # the segment's length
    return scans > MAX_JPEG_SCANS


@contextmanager
def raise_on_truncated_images() -> Iterator[None]:
    """Have Pillow raise OSError for a truncated image inside, in any number of threads.

    Where LOAD_TRUNCATED_IMAGES is set, as datasets and some training scripts do, Pillow fills the rest with grey. The
    setting is global, so the first reader saves it and the last one restores it.
    """
    global _num_readers, _value_before
    from PIL import ImageFile

    check_version("pillow", *TESTED_PILLOW)
    with _switch_lock:
        if not _num_readers:
            _value_before = ImageFile.LOAD_TRUNCATED_IMAGES
        _num_readers += 1
        ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        yield
    finally:
        with _switch_lock:
            _num_readers -= 1
            if not _num_readers:
                ImageFile.LOAD_TRUNCATED_IMAGES = _value_before


def _require_pillow(name: str) -> None:
    try:
        import PIL.Image  # noqa: F401
    except ImportError as fault:
        raise DataError(f'{name} needs pillow; run pip install "dstrain[vision]"') from fault


def _open_image(content: bytes, name: str) -> Image:
    """Return the image with its header read and no pixel decoded. Raises BadRecord."""
    from PIL import Image, UnidentifiedImageError

    _silence_pillow(Image.DecompressionBombWarning)
    # Registers all formats; until then Pillow knows only the common ones.
    Image.init()
    known = [form for form in IMAGE_FORMATS if form in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(content), formats=known)
        pixels = image.width * image.height
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as fault:
        # Pillow's error is the only source of the size: the image was not opened.
        pixels = max(map(int, re.findall(r"\d+", str(fault))), default=MAX_PIXELS + 1)
    except UnidentifiedImageError as fault:
        # The signature is known, so the file is an image with a damaged header.
        is_known = any(accepts_signature(Image.OPEN[form][1], content[:16]) for form in known)
        # AVIF and HEIC share a brand, mif1.
        if is_known and _describe_binary(content) is None:
            variant = _describe_tiff(content)
            if variant:
                raise _bad_image_error(name, ValueError(f"{variant} is not supported")) from fault
            raise BadRecord(f"{name} is damaged or truncated in its first bytes; download it again") from fault
        kind = "it is AVIF, which this Pillow does not read" if _is_avif(content) else describe_content(content)
        problem = f"{name} is not an image in a known format ({kind}; known: {_FORMAT_NAMES})"
        raise BadRecord(f"{problem}; {suggest_fix(content)}") from fault
    except MemoryError:
        raise
    except Exception as fault:
        raise _bad_image_error(name, fault) from fault
    # From the header: a small file may unpack to gigabytes.
    _check_pixels(pixels, name)
    return image


def _silence_pillow(bomb_warning: type[Warning]) -> None:
    """Have Pillow's warnings on images not printed: what they say of pixels and damage, messages here say by name."""
    silenced = ((UserWarning, r"PIL\."), (bomb_warning, ""))
    entries = [("ignore", None, category, re.compile(module) if module else None, 0) for category, module in silenced]
    # Entered only where others have come in front: a change has every other warning of the process printed again.
    if [*warnings.filters[: len(entries)]] != entries:
        for category, module in reversed(silenced):
            warnings.filterwarnings("ignore", category=category, module=module)


def _is_avif(content: bytes) -> bool:
    return content[4:8] == b"ftyp" and content[8:12] in _AVIF_BRANDS


def _describe_tiff(content: bytes) -> str:
    """Return the form of the pixels of a TIFF file with a whole header; empty for another one."""
    from PIL.TiffImagePlugin import ImageFileDirectory_v2

    try:
        size = 16 if content[2:4] in (b"\x2b\0", b"\0\x2b") else 8
        directory, file = ImageFileDirectory_v2(content[:size]), io.BytesIO(content)
        file.seek(directory.next)
        directory.load(file)
        width, height, bits = directory[256], directory[257], directory[_TIFF_BITS_PER_SAMPLE_TAG]
    except Exception:  # of a damaged file: whatever its numbers lead to
        return ""
    kind = {1: "integers", 2: "signed integers", 3: "floats"}.get(directory.get(339, (1,))[0], "values")
    planes = ", each channel in a plane of its own" if directory.get(284) == 2 else ""
    return f"TIFF of {width}x{height} pixels with {kind} of {bits[0]} bits{planes}"


def _check_pixels(count: int, name: str) -> None:
    if count > MAX_PIXELS:
        raise BadRecord(f"{name} has {count} pixels, more than the {MAX_PIXELS} that are decoded; make it smaller")


@contextmanager
def _raise_as_bad_record(name: str) -> Iterator[None]:
    """Raise every error of Pillow, whatever its type, as BadRecord; a lack of memory stays MemoryError."""
    try:
        yield
    except (BadRecord, DataError, MemoryError):
        raise
    except Exception as fault:
        raise _bad_image_error(name, fault) from fault


def _bad_image_error(name: str, fault: Exception) -> BadRecord:
    reason = str(fault) or type(fault).__name__
    if _UNSUPPORTED.search(reason):
        return BadRecord(f"{name} is of a variant that Pillow does not read ({reason}); save it as PNG")
    return BadRecord(f"{name} is damaged or truncated ({reason}); download it again")


def _get_exif_rotation(image: Image) -> int:
    """Return the EXIF orientation; 1, upright, if there is none or it cannot be read."""
    try:
        return int(image.getexif().get(_EXIF_ORIENTATION_TAG, 1))
    except Exception:
        return 1


def _apply_exif_rotation(image: Image) -> Image:
    from PIL.Image import Transpose

    transpose = UPRIGHT_TRANSPOSE.get(_get_exif_rotation(image))
    return image if transpose is None else image.transpose(Transpose(transpose))


def _has_unknown_range(image: Image) -> bool:
    """Return whether the value of white is unknown: floats, 32-bit integers, LAB without a profile."""
    return image.mode in ("F", "LAB") or (image.mode == "I" and image.format not in ("PNG", "PPM"))


def count_bits(image: Image) -> int:
    """Return the bits of a grey value: Pillow keeps the values of a TIFF file of 12 bits in 16, up to 4095."""
    bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS_PER_SAMPLE_TAG, (16,)) if image.format == "TIFF" else (16,)
    return min(int(bits[0]), 16) if image.mode.startswith("I") else 8


def _to_rgb(image: Image, bits: int = 16) -> Image:
    """Return the image as RGB; `bits`: those of the grey values of a mode with more than 8."""
    from PIL import Image

    if image.mode.startswith("I"):
        image = scale_to_8_bits(image, bits)
    elif image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        # Most images are shown on white; convert("RGB") alone would show the hidden colour.
        image = Image.alpha_composite(white, image.convert("RGBA"))
    made = image.convert("RGB")
    made.info = {}
    return made


def scale_to_8_bits(image: Image, bits: int = 16) -> Image:
    """Return grey values of 0 to 2^bits - 1 as 0 to 255; convert("L") would clip them at 255."""
    from PIL import Image

    values, most = np.asarray(image).astype(np.uint32), (1 << bits) - 1
    grey = ((np.minimum(values, most) * 255 + most // 2) // most).astype(np.uint8)
    if (transparent := image.info.get("transparency")) is not None:
        grey[values == transparent] = 255
    return Image.fromarray(grey)


def count_frames(content: bytes, name: str) -> int:
    """Return the number of frames.

    1 for MPO, a photograph with a hidden second image, and if the frames after the first are damaged.
    """
    image = _open_image(content, name)
    try:
        return 1 if image.format == "MPO" else int(getattr(image, "n_frames", 1))
    except Exception:
        return 1


# ---- the images of a store

# STORE/images.json       a row for each image, in the order of their positions, for each file that a
#                         record names but no example uses, and for each document that records were read from
# CACHE/ab/abcd…-0123….png    the copy of the image whose file has a sha256 that begins with abcd…; the sha256 of the copy
#                            begins with 0123…; each processor has its own CACHE


IMAGE_INDEX_FILE = "images.json"
RERUN_PREPARE = "run `dstrain prepare` again"
_CHECK_THREADS, _CHECK_CHUNK_SIZE = 16, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageEntry:
    """An image of a sample, a row of images.json. It is decoded by `load`."""

    path: str | None
    """Its file; None if its bytes are in the data, so that only the copy is a file."""
    bytes: int
    """Size of the file, or of the bytes."""
    mtime_ns: int
    sha256: str
    """Hash of the file's bytes."""
    width: int
    """Pixels of the image that `load` returns: of the copy if there is one."""
    height: int
    copy: str | None
    """The PNG in the cache that is loaded instead."""
    copy_bytes: int
    copy_sha256: str

    @property
    def size(self) -> tuple[int, int]:
        return self.width, self.height

    @property
    def has_copy(self) -> bool:
        """True if the image is loaded from the cache: smaller, or because it has no file outside of it."""
        return self.copy is not None

    @property
    def name(self) -> str:
        """The image's name in messages."""
        return display_path(Path(self.path)) if self.path else f"an image of {self.bytes} bytes within the data"

    def find_change(self) -> str | None:
        """Return what has changed, from the files' sizes and times, as a clause without the fix."""
        if self.path:
            state = size_and_mtime(Path(self.path))
            if state is None and self.copy is None:  # with a copy, the original may be deleted
                return f"{self.name} is gone"
            if state not in (None, (self.bytes, self.mtime_ns)):
                return f"{self.name} has changed"
        if self.copy:
            copy_state = size_and_mtime(Path(self.copy))
            if copy_state is None or copy_state[0] != self.copy_bytes:
                return f"the copy of {self.name}, {self.copy}, is gone or damaged"
        return None

    def load(self, downscale: Callable[[Image], Image | None] | None = None) -> Image:
        """Return the image as RGB: from its copy, or from its file where the copy is not what was written.

        `downscale`: the function that made the copy. Raises DataError if neither holds the bytes that were prepared.
        """
        if self.copy:
            content = read_if_unchanged(Path(self.copy), self.copy_sha256, is_copy=True)
            if content is not None:
                return decode_image(content, self.name)
        content = read_if_unchanged(Path(self.path), self.sha256) if self.path else None
        if content is not None:
            image = decode_image(content, self.name)
            if image.size == self.size:
                return image
            smaller = downscale(image) if downscale is not None else None
            if smaller is not None and smaller.size == self.size:
                return smaller
        reason = self.find_change() or f"{self.copy or self.name} cannot be read, or is not what was prepared"
        raise DataError(f"{reason}; {RERUN_PREPARE}")


def read_if_unchanged(path: Path, sha256: str, *, is_copy: bool = False) -> bytes | None:
    """Return the bytes of a file; None if they have another hash, or cannot be read.

    `sha256`: their hash, or its first 32 digits. A copy with another hash is removed: the next start makes it again.
    """
    with contextlib.suppress(BadRecord):
        content, _ = read_content(path)
        if hashlib.sha256(content).hexdigest()[:32] == sha256[:32]:
            return content
        if is_copy:
            with contextlib.suppress(OSError):
                path.unlink()
    return None


def size_and_mtime(path: Path) -> tuple[int, int] | None:
    """Return the size and mtime of a file; None if it does not exist."""
    status = stat_or_none(path)
    return None if status is None else (status.st_size, status.st_mtime_ns)


class ImageIndex:
    """The images of a store, read-only. Thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Read what `ImageIndexWriter` wrote.

        Raises OSError, ValueError, KeyError or TypeError if it is incomplete.
        """
        rows = read_cached_json(folder / IMAGE_INDEX_FILE)
        self._entries = [ImageEntry(**row) for row in rows["images"]]
        self._rejected = [WatchedFile(**row) for row in rows["unused"]]
        self._watched = [WatchedFile(**row) for row in rows.get("watched", ())]
        self.digest = hashlib.sha256(" ".join(entry.sha256 for entry in self._entries).encode()).hexdigest()
        """Equal for equal images in the same order."""

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, position: int) -> ImageEntry:
        return self._entries[position]

    def find_change(self) -> str | None:
        """Return the first image that is gone or has changed, as a clause without the fix.

        The original of a copy may be gone. Rejected images count too, since they may have been fixed, and
        the documents that images were made from.
        """
        files = [*self._entries, *self._rejected, *self._watched]
        parts = [files[start : start + _CHECK_CHUNK_SIZE] for start in range(0, len(files), _CHECK_CHUNK_SIZE)]
        with ThreadPoolExecutor(_CHECK_THREADS) as pool:  # a file server answers many requests at once
            changes = pool.map(lambda part: next(filter(None, (file.find_change() for file in part)), None), parts)
            return next(filter(None, changes), None)


_RESIZE_METHODS = ("resize", "center_crop")
"""Methods of transformers' image processors that reduce an image before its values are normalized."""


class ImageIndexWriter:
    """Reads images as records name them, each once, and caches downscaled copies."""

    def __init__(self, downscale: Callable[[Image], Image | None], cache_dir: Path) -> None:
        """Take a function that returns an equivalent smaller image or None, and a folder for its results only."""
        self._downscale, self._cache_dir = downscale, cache_dir
        self._entries: dict[str, ImageEntry | str] = {}
        """Absolute path, or hash of the bytes -> entry, or reason of a BadRecord."""
        self._locks: dict[str, threading.Lock] = {}
        self._copies: dict[Path, dict[str, str]] = {}
        """Folder of copies -> beginning of the image's hash -> name of its copy, as they were at first use."""
        self._lock = threading.Lock()
        self._positions: dict[ImageEntry, int] = {}
        self._rejected: dict[str, WatchedFile] = {}

    def get_entry(self, value: Any, folder: Path) -> ImageEntry:
        """Return the entry of an image in a record; decode, downscale and hash it if it is new.

        `folder`: where relative paths start. Thread-safe. Raises BadRecord.
        """
        source = resolve_image(value, folder)
        # Links are not resolved in the key: one that later leads to another file gives another image.
        key = hashlib.sha256(source).hexdigest() if isinstance(source, bytes) else str(source.absolute())
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:  # other threads decode other images meanwhile
            if key not in self._entries:
                try:
                    self._entries[key] = self._build_entry(source, key, isinstance(value, DeferredImage))
                except BadRecord as fault:
                    # Not the exception itself, whose traceback would keep the file's content in memory.
                    self._entries[key] = fault.reason
        known = self._entries[key]
        if isinstance(known, str):
            raise BadRecord(known)
        return known

    def assign_position(self, entry: ImageEntry) -> int:
        """Return the entry's position in the index, assigned in the order of calls. Not thread-safe."""
        return self._positions.setdefault(entry, len(self._positions))

    def write(self, folder: Path, watched: Iterable[WatchedFile] = ()) -> None:
        """Write the images that have a position into a store's folder, and other files that the examples depend on."""
        used = {entry.path for entry in self._positions}
        unused = [asdict(self._rejected[path]) for path in sorted(self._rejected) if path not in used]
        lists = {"images": [asdict(entry) for entry in self._positions], "unused": unused}
        lists["watched"] = [asdict(file) for file in sorted(watched, key=lambda file: file.path)]
        (folder / IMAGE_INDEX_FILE).write_text(json.dumps(lists), encoding="utf-8")

    def _build_entry(self, source: Path | bytes, key: str, is_cached: bool) -> ImageEntry:
        """Return the entry of an image. `is_cached`: its file is in the cache, such as a page of a document."""
        path = None if isinstance(source, bytes) or is_cached else Path(key)
        state = None
        if path:  # before the file is read, so that a change in between is noticed later
            self._rejected[key], state = WatchedFile.from_path(path), size_and_mtime(path)
        content, name = read_content(source)
        sha256 = hashlib.sha256(content).hexdigest()
        copy, png = self._find_copy(sha256)
        image = decode_image(png, str(copy)) if png else None
        if image is None:
            image = original = decode_image(content, name)
            downscaled = self._try_downscale(original, name)
            # Bytes inside the data have no file to be loaded from later: they get a copy too.
            if downscaled is not None or isinstance(source, bytes):
                image = downscaled or original
                copy, png = self._write_copy(image, sha256)
            elif is_cached:
                copy, png = Path(key), content
        return ImageEntry(
            path=str(path) if path else None,
            bytes=len(content),
            mtime_ns=state[1] if state else 0,
            sha256=sha256,
            width=image.width,
            height=image.height,
            copy=str(copy.absolute()) if copy else None,
            copy_bytes=len(png),
            copy_sha256=hashlib.sha256(png).hexdigest() if copy else "",
        )

    def _find_copy(self, sha256: str) -> tuple[Path | None, bytes]:
        """Return the copy of an earlier preparation and its bytes; (None, b"") if there is none that is as written."""
        folder = self._cache_dir / sha256[:2]
        with self._lock:
            if folder not in self._copies:
                copies = [path.name for path in folder.glob("*.png")]
                self._copies[folder] = {copy.partition("-")[0]: copy for copy in copies}
        name = self._copies[folder].get(sha256[:32])
        png = read_if_unchanged(folder / name, Path(name).stem.partition("-")[2], is_copy=True) if name else None
        return (None, b"") if png is None else (folder / str(name), png)

    def _write_copy(self, image: Image, sha256: str) -> tuple[Path, bytes]:
        """Write the PNG atomically; return its path and its bytes."""
        buffer = io.BytesIO()
        image.save(buffer, "PNG", compress_level=1)
        png = buffer.getvalue()
        copy = self._cache_dir / sha256[:2] / f"{sha256[:32]}-{hashlib.sha256(png).hexdigest()[:32]}.png"
        copy.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(copy, png)
        return copy, png

    def _try_downscale(self, image: Image, name: str) -> Image | None:
        try:
            return self._downscale(image)
        except (MemoryError, DataError):
            raise
        except Exception as fault:
            cause = f"{type(fault).__name__}: {fault}"
            problem = f"the model's image processor cannot use {name}, {image.width}x{image.height} pixels ({cause})"
            raise BadRecord(f"{problem}; change the image, or remove the record") from fault


def downscale_if_equivalent(image: Image, image_processor: Any) -> Image | None:
    """Return the RGB image after the processor's own resize or crop, if that is equivalent.

    It has fewer pixels, and every tensor that the processor makes of it is bit-equal to that of
    `image`, so that decoding and scaling are done once, when data is prepared. None if there is no
    such image. Raises the processor's errors for `image`.
    """
    from PIL.Image import fromarray

    recording, recorded = shallow_copy(image_processor), dict[str, np.ndarray]()
    for name in dir(type(image_processor)):
        if name.startswith("return_") and getattr(recording, name, None) is False:
            setattr(recording, name, True)  # such as rows and columns of tiles, which must be equal too

    def record(name: str, method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        pixels = None if name in recorded else _to_pixels(result)
        if pixels is not None:
            recorded[name] = pixels
        return result

    for name in _RESIZE_METHODS:
        method = getattr(recording, name, None)
        if callable(method):
            setattr(recording, name, partial(record, name, method))
    expected = recording(image)
    # The smallest equivalent image saves most disk space and decoding time.
    for pixels in sorted(recorded.values(), key=lambda pixels: pixels.shape[0] * pixels.shape[1]):
        # An image of one row or column would be refused when the copy is read.
        if pixels.shape[0] * pixels.shape[1] < image.width * image.height and min(pixels.shape[:2]) > 1:
            downscaled = fromarray(np.ascontiguousarray(pixels))
            with contextlib.suppress(Exception):  # the image is too small for it, or of a shape that it rejects
                if _is_equal(recording(downscaled), expected):
                    return downscaled
    return None


def _to_pixels(output: Any) -> np.ndarray | None:
    """Return a processor's image as (H, W, 3) uint8; None if the value is not a single RGB image."""
    pixels = np.asarray(output)
    if pixels.ndim == 4 and len(pixels) == 1:  # a batch of one
        pixels = pixels[0]
    if pixels.ndim != 3 or pixels.dtype != np.uint8:
        return None
    if pixels.shape[0] == 3:
        # Some processors put channels first.
        pixels = pixels.transpose(1, 2, 0)
    return pixels.copy() if pixels.shape[2] == 3 else None


def _is_equal(actual: Any, expected: Any) -> bool:
    """Return whether both have the same values, bit by bit, in the same shapes and types."""
    if isinstance(expected, Mapping):  # includes transformers' BatchFeature
        return {*actual} == {*expected} and all(_is_equal(actual[key], value) for key, value in expected.items())
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(_is_equal(*pair) for pair in zip(actual, expected, strict=True))
    left, right = np.asarray(actual), np.asarray(expected)
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
