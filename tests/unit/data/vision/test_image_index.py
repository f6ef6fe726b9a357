from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dstrain.data.prepare import PreparePolicy, prepare
from dstrain.data.records import BadRecord
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import load_or_build_store
from dstrain.data.vision import image_index
from dstrain.data.vision.image_index import ImageIndex, ImageIndexWriter
from dstrain.data.vision.image_io import resolve_image
from dstrain.errors import DataError


def picture(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode == "RGB" and np.array_equal(np.asarray(one), np.asarray(other))


@pytest.fixture
def images(tmp_path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for seed in range(6):
        picture(seed).save(folder / f"{seed}.png")
    picture(9, (10, 10)).save(folder / "small.png")
    (folder / "bad.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def decoded(monkeypatch) -> list[str]:
    """Names of what was decoded by a writer, in order."""
    names, real = [], image_index.decode_image
    monkeypatch.setattr(
        image_index, "decode_image", lambda content, name: names.append(Path(name).name) or real(content, name)
    )
    return names


def add(writer: ImageIndexWriter, value: object, folder: Path) -> int:
    return writer.assign_position(writer.get_entry(value, folder))


def written(tmp_path, images, values) -> tuple[ImageIndex, ImageIndexWriter, list[int]]:
    writer = ImageIndexWriter(tmp_path / "cache")
    numbers = [add(writer, value, images) for value in values]
    writer.write(tmp_path)
    return ImageIndex(tmp_path), writer, numbers


def test_an_image_is_in_the_album_once_for_each_name_and_a_link_is_followed(tmp_path, images):
    (images / "link.png").symlink_to("1.png")
    content = (images / "2.png").read_bytes()
    values = ["0.png", "1.png", "../images/0.png", str(images / "1.png"), "link.png", {"bytes": content}, content]
    album, _, numbers = written(tmp_path, images, values)
    assert numbers == [0, 1, 2, 1, 3, 4, 4]
    assert [same(album[index].load(), picture(shown)) for index, shown in enumerate((0, 1, 0, 1, 2))] == [True] * 5
    assert album.find_change() is None
    (images / "link.png").unlink()
    (images / "link.png").symlink_to("3.png")
    assert "link.png has changed" in album.find_change()


def test_an_image_that_stands_in_the_data_is_kept_byte_for_byte(tmp_path, images):
    content = (images / "3.png").read_bytes()
    album, _, _ = written(tmp_path, images, ["0.png", "small.png", content])
    shown = [picture(0), picture(9, (10, 10)), picture(3)]
    assert all(same(album[at].load(), image) for at, image in enumerate(shown))
    assert [album[at].is_cached for at in range(3)] == [False, False, True]
    rows = json.loads((tmp_path / "images.json").read_text())["images"]
    assert [(row["width"], row["height"]) for row in rows] == [(24, 16), (10, 10), (24, 16)]
    assert [Path(row["path"]).name for row in rows] == ["0.png", "small.png", rows[2]["sha256"]]
    assert Path(rows[2]["path"]).read_bytes() == content


def test_an_image_is_decoded_once_however_many_records_show_it_at_the_same_time(tmp_path, images, decoded):
    writer = ImageIndexWriter(tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: writer.get_entry(f"{at % 6}.png", images), range(300)))
    assert sorted(decoded) == [f"{seed}.png" for seed in range(6)]
    assert [writer.assign_position(picture) for picture in found] == [at % 6 for at in range(300)]


def test_a_fault_of_ours_reaches_all_that_wait_for_the_image(tmp_path, images, monkeypatch):
    def decode(content: bytes, name: str) -> None:
        raise DataError("the disk is full; make room")

    monkeypatch.setattr(image_index, "decode_image", decode)
    writer = ImageIndexWriter(tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(writer.get_entry, "0.png", images) for _ in range(20)]
    assert [str(one.exception()) for one in asked] == ["the disk is full; make room"] * 20


def test_a_bad_image_is_decoded_once_and_refused_each_time(tmp_path, images, decoded):
    writer = ImageIndexWriter(tmp_path / "cache")
    for _ in range(3):
        with pytest.raises(BadRecord, match=r"bad\.png is not an image"):
            writer.get_entry("bad.png", images)
        with pytest.raises(BadRecord, match=r"image not found: .*gone\.png"):
            writer.get_entry("gone.png", images)
        with pytest.raises(BadRecord, match="cannot be read"):
            writer.get_entry("zero\0.png", images)
        with pytest.raises(BadRecord, match="download it first"):
            writer.get_entry("http://a/b.png", images)
    assert decoded == ["bad.png"]
    assert add(writer, "0.png", images) == 0


def test_a_copy_that_is_there_is_left_and_a_damaged_one_is_made_anew(tmp_path, images):
    content = (images / "0.png").read_bytes()
    first, _, _ = written(tmp_path, images, [content])
    kept = Path(first[0].path)
    before = kept.stat().st_mtime_ns
    written(tmp_path, images, [content])
    assert kept.stat().st_mtime_ns == before
    os.truncate(kept, 50)
    assert "copy of" in first.find_change()
    with pytest.raises(DataError, match=r"the copy of an image of .* is gone or damaged; run `dstrain prepare` again"):
        first[0].load()
    again, _, _ = written(tmp_path, images, [content])
    assert same(again[0].load(), picture(0))
    assert first.find_change() is None
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("harm", ["gone", "other", "touched"])
def test_an_image_that_changed_is_found(tmp_path, images, harm):
    album, _, _ = written(tmp_path, images, ["0.png", "1.png"])
    path = images / "1.png"
    if harm == "gone":
        path.unlink()
    elif harm == "other":
        picture(77).save(path)
    else:
        os.utime(path, ns=(1, 1))
    reason = album.find_change()
    assert "1.png is gone" in reason if harm == "gone" else "1.png has changed" in reason
    if harm == "touched":
        assert same(album[1].load(), picture(1))
        return
    with pytest.raises(DataError, match=r"1.png (is|has) .*; run `dstrain prepare` again"):
        album[1].load()
    assert album[0].load().mode == "RGB"


@pytest.mark.parametrize("name", ["bad.png", "gone.png", "good.png"])
def test_a_file_that_could_not_be_used_is_looked_at_again_once_it_is_mended(tmp_path, images, name):
    writer = ImageIndexWriter(tmp_path / "cache")
    add(writer, "0.png", images)
    picture(5).save(images / "good.png")
    if name == "good.png":  # the image is good, and its record was refused
        writer.get_entry(name, images)
    else:
        with pytest.raises(BadRecord):
            writer.get_entry(name, images)
    writer.write(tmp_path)
    album = ImageIndex(tmp_path)
    assert len(album) == 1
    assert album.find_change() is None
    picture(3).save(images / name)
    assert f"{name} has changed" in album.find_change()


def test_a_digest_follows_images_and_order_not_their_names(tmp_path, images):
    def digest(*values):
        return written(tmp_path, images, values)[0].digest

    (images / "other.png").write_bytes((images / "0.png").read_bytes())
    assert digest("0.png", "1.png") == digest("other.png", "1.png")
    assert len({digest("0.png", "1.png"), digest("1.png", "0.png"), digest("0.png"), digest()}) == 4


def test_many_threads_load_at_once(tmp_path, images):
    album, _, _ = written(tmp_path, images, [f"{seed}.png" for seed in range(6)])
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda shown: shown.load(), [album[at % 6] for at in range(60)]))
    assert all(same(image, picture(index % 6)) for index, image in enumerate(loaded))


def build(tmp_path, images, names, built=None):
    writer = ImageIndexWriter(tmp_path / "kept")

    def make(report):
        if built is not None:
            built.append(1)
        for sample, group in enumerate(names):
            yield [{"images": [add(writer, name, images) for name in group], "sample": sample}]

    return make, writer.write


NAMES = [["0.png"], [], ["1.png", "0.png"]]


def test_a_store_gives_the_images_of_an_example(tmp_path, images):
    for _ in range(2):
        store = load_or_build_store(tmp_path, {"n": 1}, *build(tmp_path, images, NAMES))
        assert len(store.image_index) == 2
        found = [[shown.load() for shown in store[index]["images"]] for index in range(3)]
        assert [len(group) for group in found] == [1, 0, 2]
        assert same(found[2][0], picture(1))
        assert same(found[2][1], picture(0))
        assert store.column_lengths("images").tolist() == [1, 0, 2]
    plain = load_or_build_store(tmp_path, {"n": 2}, lambda report: [[{"images": [3], "sample": 0}]])
    assert plain.image_index is None
    assert plain[0]["images"].tolist() == [3]


@pytest.mark.parametrize("harm", ["nothing", "list", "image"])
def test_a_store_whose_images_changed_is_built_again(tmp_path, images, harm):
    built, lines = [], []
    store = load_or_build_store(tmp_path, {"n": 1}, *build(tmp_path, images, NAMES, built))
    if harm == "list":
        os.truncate(store.folder / "images.json", 30)
    elif harm == "image":
        picture(50).save(images / "0.png")
    store = load_or_build_store(tmp_path, {"n": 1}, *build(tmp_path, images, NAMES, built), echo=lines.append)
    assert len(built) == (1 if harm == "nothing" else 2)
    assert same(store[0]["images"][0].load(), picture(50 if harm == "image" else 0))
    told = {"nothing": [], "list": ["images.json is not what was written"], "image": ["0.png has changed"]}[harm]
    assert [line.rpartition("is built again: ")[2].rpartition("/")[2] for line in lines] == told


def test_prepare_leaves_an_encoders_files_in_the_store(write_lines, tmp_path, images):
    source = open_source(write_lines([{"image": "images/0.png"}, {"image": "images/bad.png"}]))
    writer = ImageIndexWriter(tmp_path / "kept")

    def encode(rows):
        found = []
        for index, record in rows:
            try:
                found.append({"images": [add(writer, record["image"], source.get_base_dir(index))]})
            except BadRecord as fault:
                found.append(fault)
        return found

    policy = PreparePolicy(task="vlm", on_error="skip")
    store = prepare(source, encode, {}, policy, tmp_path / "cache", write_extra=writer.write)
    assert (len(store), len(store.image_index)) == (1, 1)
    assert store.report.bad[0].location == "train.jsonl:2"
    assert "bad.png is not an image" in store.report.bad[0].reason


def test_a_decoded_image_and_its_bytes_are_one(tmp_path, images):
    image = picture(3)
    album, _, numbers = written(tmp_path, images, [image, image.copy(), resolve_image(image, images)])
    assert numbers == [0, 0, 0]
    assert same(album[0].load(), image)
