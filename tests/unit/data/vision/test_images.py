from __future__ import annotations

import builtins
import io
import os
import re
import struct
import sys
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from PIL import Image, ImageFile

from dstrain.data.prepare import describe_conversions
from dstrain.data.vision.images import MAX_PIXELS, decode_image, raise_on_truncated_images, read_image, resolve_image
from dstrain.errors import BadRecord, DataError

RNG = np.random.RandomState(0)
NOISE = Image.fromarray(RNG.randint(0, 256, (40, 60, 3), dtype=np.uint8))
HALVES = Image.new("RGB", (20, 10), "red")
HALVES.paste("blue", (10, 0, 20, 10))


def save(path: Path, image: Image.Image = NOISE, **settings) -> Path:
    image.save(path, **settings)
    return path


def png(width: int, height: int, depth: int = 8) -> bytes:
    """A header that promises so many pixels, and none behind it."""

    def part(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, depth, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + part(b"IHDR", header) + part(b"IDAT", zlib.compress(b"")) + part(b"IEND", b"")


def colours(image: Image.Image) -> list[tuple[int, ...]]:
    """Left and right, or top and bottom, of what was HALVES."""
    assert (image.mode, image.info) == ("RGB", {})
    return [image.getpixel((1, 1)), image.getpixel((image.width - 2, image.height - 2))]


RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)


def test_an_ordinary_image_is_read_as_it_is_from_a_file_and_from_bytes(tmp_path):
    path = save(tmp_path / "a.png")
    for source in (path, path.read_bytes()):
        assert np.array_equal(np.asarray(read_image(source)), np.asarray(NOISE))
        assert describe_conversions(source) == []


@pytest.mark.parametrize("form", ["BMP", "GIF", "JPEG", "PPM", "TIFF", "WEBP"])
def test_usual_formats_are_known_whatever_the_file_is_called(tmp_path, form):
    path = save(tmp_path / "image.png", HALVES, format=form)
    assert np.abs(np.array(colours(read_image(path))) - [RED, BLUE]).max() < 12
    assert describe_conversions(path) == []


def saved(form: str) -> bytes:
    file = io.BytesIO()
    NOISE.save(file, form)
    return file.getvalue()


JPEG, PNG, WEBP = saved("JPEG"), saved("PNG"), saved("WEBP")
MIDDLE = len(PNG) // 2
HARMED = {
    "missing.png": (None, "image not found: .*missing.png .*; check the path"),
    "cut.jpg": (JPEG[: len(JPEG) // 2], "cut.jpg is damaged or truncated .*truncated.*; download it again"),
    "unended.jpg": (JPEG[:-2], "unended.jpg is damaged or truncated"),
    "cut.png": (PNG[:MIDDLE], "cut.png is damaged or truncated .*; download it again"),
    "unended.png": (PNG[:-12], "unended.png is damaged or truncated"),
    "flipped.png": (
        PNG[:MIDDLE] + bytes([PNG[MIDDLE] ^ 255]) + PNG[MIDDLE + 1 :],
        "flipped.png is damaged or truncated",
    ),
    "cut.webp": (WEBP[: len(WEBP) // 2], "cut.webp is damaged or truncated"),
    "byte.png": (b"\0", "byte.png is not an image in a known format"),
    "head.png": (PNG[:12], "head.png is damaged or truncated in its first bytes"),
    "head.jpg": (JPEG[:20], "head.jpg is damaged or truncated"),
    "bomb.png": (png(30000, 30000), "bomb.png has 900000000 pixels, more than the 89478485 .*; make it smaller"),
    "warned.png": (png(10000, 10000), "warned.png has 100000000 pixels, more than the 89478485"),
    "text.png": (
        b"<html>404</html>",
        "text.png is not an image in a known format .it is HTML, SVG or XML; .*; save it as PNG",
    ),
    "paper.jpg": (
        b"%PDF-1.7\n",
        "paper.jpg is not an image in a known format .it is a PDF; .*; save its pages as PNG or JPEG, or use task docqa",
    ),
    "program.png": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "program.png is not an image in a known"),
    "empty.png": (b"", "empty.png is empty; download it again"),
    "dot.png": (png(1, 1), "dot.png is 1x1 pixels; width and height must be two or more"),
    "line.png": (png(300, 1), "line.png is 300x1 pixels"),
}


@pytest.mark.filterwarnings("default::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", HARMED)
@pytest.mark.parametrize("trusting", [False, True])
def test_what_cannot_be_used_is_refused_by_name_with_its_own_reason(tmp_path, monkeypatch, name, trusting):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", trusting)
    content, said = HARMED[name]
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for use in (read_image, describe_conversions):
        with pytest.raises(BadRecord, match=said):
            use(tmp_path / name)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is trusting


def test_warnings_that_are_errors_and_another_bound_of_pillow_change_nothing(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(BadRecord, match="100000000 pixels"):
            read_image(png(10000, 10000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    with pytest.raises(BadRecord, match=f"900000000 pixels, more than the {MAX_PIXELS}"):
        read_image(png(30000, 30000))


def test_threads_that_read_at_once_leave_pillows_trust_as_it_was(monkeypatch):
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    found = []

    def read() -> None:
        for _ in range(20):
            with pytest.raises(BadRecord):
                read_image(JPEG[: len(JPEG) // 2])
            found.append(read_image(JPEG).size)

    threads = [threading.Thread(target=read) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == [(60, 40)] * 80
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


def test_a_folder_and_what_is_no_regular_file_are_refused_at_once(tmp_path):
    with pytest.raises(BadRecord, match=f"{tmp_path.name} is a folder"):
        read_image(tmp_path)
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(BadRecord, match=r"pipe\.png is not a regular file"):
        read_image(tmp_path / "pipe.png")
    for name in ("zero\0byte.png", "a" * 300 + ".png"):
        with pytest.raises(BadRecord, match="cannot be read"):
            read_image(tmp_path / name)


ORIENTED = [
    (1, None), (2, "mirrored"), (3, "rotated by 180°"), (4, "mirrored"), (5, "mirrored"), (6, "rotated by 90°"),
    (7, "mirrored"), (8, "rotated by 270°"),
]  # fmt: skip


@pytest.mark.parametrize("form", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize(("orientation", "said"), ORIENTED)
def test_an_image_is_turned_upright_as_its_exif_says(tmp_path, form, orientation, said):
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    lossless = {"lossless": True} if form == "WEBP" else {}
    path = save(tmp_path / "a", HALVES, format=form, exif=exif, **lossless)
    upright = ImageOps.exif_transpose(Image.open(path)).convert("RGB")
    image = read_image(path)
    assert np.array_equal(np.asarray(image), np.asarray(upright))
    assert image.size == ((10, 20) if orientation > 4 else (20, 10))
    assert describe_conversions(path) == ([f"{said} according to EXIF: it is turned upright"] if said else [])


def test_damaged_exif_does_not_spoil_the_picture(tmp_path):
    path = save(tmp_path / "a.jpg", NOISE, exif=b"Exif\0\0MM\0*\xff\xff\xff\xff" + bytes(9))
    assert read_image(path).size == (60, 40)


def test_cmyk_becomes_rgb(tmp_path):
    path = save(tmp_path / "a.jpg", Image.new("CMYK", (8, 8), (0, 255, 255, 0)), quality=100)
    assert colours(read_image(path))[0] == RED
    assert describe_conversions(path) == ["CMYK: it is converted to RGB"]


@pytest.mark.parametrize("form", ["PNG", "TIFF", "PPM"])
def test_sixteen_bits_of_grey_are_scaled_not_cut_off(tmp_path, form):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    path = save(tmp_path / "a", Image.fromarray(ramp), format=form)
    grey = np.asarray(read_image(path))[..., 0]
    assert np.abs(grey - ramp / 257).max() <= 0.5
    assert describe_conversions(path) == ["16 bits per channel: it is scaled to 8"]


def tiff_of_12_bits(values: list[int]) -> bytes:
    """A TIFF file of one row of grey values with 12 bits each, which Pillow reads but does not write."""
    row = int("".join(f"{value:012b}" for value in values * 2), 2).to_bytes(3 * len(values), "big")
    data, width = row * 2, 2 * len(values)
    entries = [
        (256, 3, width),
        (257, 3, 2),
        (258, 3, 12),
        (259, 3, 1),
        (262, 3, 1),
        (273, 4, 8),
        (277, 3, 1),
        (278, 3, 2),
    ]
    entries.append((279, 4, len(data)))
    fields = b"".join(
        struct.pack("<HHI", tag, kind, 1) + (struct.pack("<HH", value, 0) if kind == 3 else struct.pack("<I", value))
        for tag, kind, value in entries
    )
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(entries)) + fields + bytes(4)


def test_twelve_bits_of_grey_are_scaled_from_4095():
    """formats.md B7: white was 16 of 255."""
    content = tiff_of_12_bits([0, 1365, 2730, 4095])
    assert np.asarray(decode_image(content, "a.tif"))[0, :4, 0].tolist() == [0, 85, 170, 255]
    assert describe_conversions(content) == ["12 bits per channel: it is scaled to 8"]


def test_an_image_that_becomes_black_is_noted(tmp_path):
    path = save(tmp_path / "a.png", Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8)))
    assert describe_conversions(path)[1] == "almost no contrast: its grey values are 0 to 0 of 255 after scaling"


def test_a_variant_that_pillow_lacks_is_not_called_damaged(tmp_path):
    content = b"BM" + struct.pack("<IHHI", 100, 0, 0, 54) + struct.pack("<I", 99) + bytes(96)
    with pytest.raises(BadRecord, match=r"of a variant that Pillow does not read \(Unsupported BMP .*; save it as PNG"):
        decode_image(content, "a.bmp")


@pytest.mark.parametrize("number", ["F", "I"])
def test_numbers_of_which_none_is_known_to_be_white_are_refused(tmp_path, number):
    path = save(tmp_path / "depth.tiff", Image.new(number, (8, 8), 3))
    with pytest.raises(BadRecord, match=f"depth.tiff has pixels of Pillow's mode {number}, .*; save it with 8 or 16"):
        read_image(path)


TRANSPARENT = {
    "RGBA": Image.new("RGBA", (8, 8), (255, 0, 0, 0)),
    "LA": Image.new("LA", (8, 8), (0, 0)),
    "half": Image.new("RGBA", (8, 8), (0, 0, 255, 128)),
}


def test_what_is_transparent_lies_on_white(tmp_path):
    for name, image in TRANSPARENT.items():
        path = save(tmp_path / f"{name}.png", image)
        assert colours(read_image(path))[0] == ((127, 127, 255) if name == "half" else WHITE)
        assert describe_conversions(path) == ["partly transparent: the background becomes white"]
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([255, 0, 0, 0, 0, 255])
    path = save(tmp_path / "palette.png", palette, transparency=1)
    assert colours(read_image(path))[0] == WHITE
    deep = Image.fromarray(np.full((8, 8), 9, np.uint16))
    path = save(tmp_path / "deep.png", deep, transparency=9)
    assert colours(read_image(path))[0] in (WHITE, (0, 0, 0))  # older pillow does not write the mark
    path = save(tmp_path / "solid.png", Image.new("RGBA", (8, 8), (255, 0, 0, 255)))
    assert (colours(read_image(path))[0], describe_conversions(path)) == (RED, [])


@pytest.mark.parametrize("mode", ["1", "L", "P", "YCbCr"])
def test_grey_palettes_and_other_colours_are_ordinary(tmp_path, mode):
    path = save(tmp_path / ("a.jpg" if mode == "YCbCr" else "a.png"), Image.new("RGB", (8, 8), "white").convert(mode))
    assert (colours(read_image(path))[0], describe_conversions(path)) == (WHITE, [])


@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP"])
def test_of_an_animated_image_the_first_frame_is_seen(tmp_path, form):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "white")]
    settings = {"lossless": True} if form == "WEBP" else {}
    path = save(tmp_path / "a", frames[0], format=form, save_all=True, append_images=frames[1:], **settings)
    assert colours(read_image(path))[0] == RED
    assert describe_conversions(path) == ["animated, 3 frames: only the first is used"]
    pages = save(tmp_path / "pages.tiff", frames[0], save_all=True, append_images=frames[1:])
    assert describe_conversions(pages) == ["3 pages: only the first is used"]


def test_a_record_names_a_file_from_the_data_files_folder(tmp_path):
    assert resolve_image("images/a.png", tmp_path) == tmp_path / "images/a.png"
    assert resolve_image("/b/a.png", tmp_path) == Path("/b/a.png")
    assert resolve_image("~/a.png", tmp_path) == tmp_path / "~/a.png"
    assert resolve_image({"bytes": None, "path": "a.png"}, tmp_path) == tmp_path / "a.png"
    assert resolve_image({"bytes": b"x", "path": "a.png"}, tmp_path) == b"x"
    assert resolve_image({"bytes": b""}, tmp_path) == b""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("https://a.b/c.png", "the URL https://a.b/c.png; download it first"),
        ("file:///c.png", "the URL file"),
        ("data:image/png;base64,iVBORw0KGgo", "a data: URI"),
        ("  ", "an image's path is empty"),
        ({"bytes": None, "path": None}, 'an object without "path" and "bytes"'),
        ({"path": "s3://a/b.png"}, "download it first"),
        (7, "an image is a number, not the path of a file"),
        (None, "an image is null"),
        (["a.png"], "an image is a list"),
    ],
)
def test_what_names_no_file_is_refused(tmp_path, value, said):
    with pytest.raises(BadRecord, match=said):
        resolve_image(value, tmp_path)


def test_an_image_that_was_decoded_already_is_the_same_image(tmp_path):
    for image in (NOISE, NOISE.convert("L"), NOISE.convert("CMYK"), NOISE.convert("P"), TRANSPARENT["half"]):
        content = resolve_image(image, tmp_path)
        assert content == resolve_image(image.copy(), tmp_path)
        again = save(tmp_path / "a.tiff", image)
        assert np.array_equal(np.asarray(read_image(content)), np.asarray(read_image(again)))
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = Image.open(save(tmp_path / "turned.png", HALVES, exif=exif))
    assert colours(read_image(resolve_image(turned, tmp_path))) == [RED, BLUE]
    assert read_image(resolve_image(turned, tmp_path)).size == (10, 20)
    with pytest.raises(BadRecord, match="Pillow's mode F"):
        resolve_image(Image.new("F", (4, 4)), tmp_path)
    (tmp_path / "cut.jpg").write_bytes(JPEG[: len(JPEG) // 2])
    with pytest.raises(BadRecord, match="a decoded image is damaged"):
        resolve_image(Image.open(tmp_path / "cut.jpg"), tmp_path)


def test_without_pillow_the_mend_is_told(tmp_path, monkeypatch):
    path, real = save(tmp_path / "a.png"), builtins.__import__

    def without(name, *rest):
        if name.split(".")[0] == "PIL":
            raise ImportError(name)
        return real(name, *rest)

    for name in [name for name in sys.modules if name.split(".")[0] == "PIL"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match=r'a.png needs pillow; run pip install "dstrain\[vision\]"'):
        read_image(path)


def test_real_images_are_ordinary(real_data):
    for folder in ("easyvqa", "emoji_captions", "mathv"):
        paths = [path for path in sorted((real_data / "mm" / folder).rglob("*")) if path.suffix in (".png", ".jpg")]
        assert paths
        for path in paths[:10]:
            assert read_image(path).mode == "RGB"


def test_a_page_of_a_tiff_is_decoded_by_its_number(tmp_path, monkeypatch):
    pages = [Image.new("RGB", (8 + at, 8), colour) for at, colour in enumerate(("red", "blue", "white"))]
    content = save(tmp_path / "a.tiff", pages[0], save_all=True, append_images=pages[1:]).read_bytes()
    found = [decode_image(content, "a.tiff", frame) for frame in range(3)]
    assert [(page.size, page.getpixel((0, 0))) for page in found] == [((8, 8), RED), ((9, 8), BLUE), ((10, 8), WHITE)]
    with pytest.raises(BadRecord, match=r"page 4 is damaged or truncated"):
        decode_image(content, "page 4", 3)
    monkeypatch.setattr("dstrain.data.vision.images.MAX_PIXELS", 70)
    assert decode_image(content, "a.tiff", 0).size == (8, 8)
    with pytest.raises(BadRecord, match=r"page 2 has 72 pixels, more than the 70"):
        decode_image(content, "page 2", 1)


def test_an_image_without_a_file_yet_is_written_when_it_is_resolved(tmp_path):
    class Deferred:
        def get_file(self) -> Path:
            return save(tmp_path / "made.png")

    assert not (tmp_path / "made.png").exists()
    assert resolve_image(Deferred(), tmp_path / "elsewhere") == tmp_path / "made.png"
    assert (tmp_path / "made.png").exists()


def make_jpeg() -> tuple[bytes, bytes]:
    """Return a progressive JPEG without its end, and its last scan."""
    buffer = io.BytesIO()
    Image.new("L", (64, 64), 128).save(buffer, "JPEG", progressive=True)
    content = buffer.getvalue()[:-2]
    return content, content[content.rindex(b"\xff\xc4") :]


@pytest.mark.parametrize(
    ("before", "between"),
    [
        (b"", b""),
        (b"", b"\xff"),  # a fill byte
        (b"", b"\xff\x01\xff\xff"),  # markers without a length, which would hide what follows
        (b"", b"\xff\xd0\xff\xff"),
        (b"\xff\xd8\xff\xd9", b""),  # tables alone, then the image
    ],
)
def test_a_jpeg_that_repeats_its_scans_is_refused_before_it_is_decoded(before: bytes, between: bytes) -> None:
    content, scan = make_jpeg()
    decode_image(before + content + b"\xff\xd9", "normal.jpg")
    with pytest.raises(BadRecord, match=r"scans\.jpg has more than 100 scans, which take long to decode"):
        decode_image(before + content + (between + scan) * 200 + b"\xff\xd9", "scans.jpg")


def test_bytes_of_metadata_and_videos_are_no_scans_of_a_jpeg() -> None:
    content, _ = make_jpeg()
    segment = b"\xff\xeb" + (2002).to_bytes(2) + b"\xff\xda" * 1000
    pixels = decode_image(content + b"\xff\xd9", "normal.jpg").tobytes()
    metadata = decode_image(content[:2] + segment + content[2:] + b"\xff\xd9", "metadata.jpg")
    motion_photo = decode_image(content + b"\xff\xd9" + b"\xff\xda" * 1000, "motion_photo.jpg")
    assert metadata.tobytes() == motion_photo.tobytes() == pixels


def test_an_icon_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = io.BytesIO()
    Image.new("RGBA", (64, 64)).save(buffer, "ICO", sizes=[(64, 64)])
    decode_image(buffer.getvalue(), "normal.ico")
    monkeypatch.setattr("PIL.Image.open", lambda *_, **__: pytest.fail("it is decoded"))
    size = re.compile(b"IHDR.{8}", re.DOTALL)
    content = size.sub(b"IHDR" + (13000).to_bytes(4) * 2, buffer.getvalue())
    with pytest.raises(BadRecord, match=r"large\.ico has 169000000 pixels, more than the 89478485 that are decoded"):
        decode_image(content, "large.ico")


# Pillow's switch for truncated images, which other packages turn on.


def truncated() -> bytes:
    file = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(file, "PNG")
    return file.getvalue()[:-1500]


def load() -> None:
    Image.open(io.BytesIO(truncated())).load()


def test_pillow_fills_truncated_images_where_another_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails once Pillow has no such switch: then the patch can go."""
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    load()
    with raise_on_truncated_images(), pytest.raises(OSError, match=r"truncated|broken"):
        load()
    load()


def test_the_switch_is_restored_by_the_last_of_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    together = Barrier(4)

    def read(index: int) -> bool:
        with raise_on_truncated_images():
            together.wait(10)
            return bool(ImageFile.LOAD_TRUNCATED_IMAGES)

    with ThreadPoolExecutor(4) as pool:
        assert [*pool.map(read, range(4))] == [False] * 4
    assert ImageFile.LOAD_TRUNCATED_IMAGES
