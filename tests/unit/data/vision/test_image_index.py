from __future__ import annotations

import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from dstrain.data.prepare import PreparePolicy, prepare
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import load_or_build_store
from dstrain.data.vision.images import (
    ImageIndex,
    ImageIndexWriter,
    decode_image,
    downscale_if_equivalent,
    resolve_image,
)
from dstrain.errors import BadRecord, DataError


def picture(seed: int, size: tuple[int, int] = (24, 16)) -> Image.Image:
    return Image.fromarray(np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def same(one: Image.Image, other: Image.Image) -> bool:
    return one.mode == other.mode == "RGB" and np.array_equal(np.asarray(one), np.asarray(other))


def halve(image: Image.Image) -> Image.Image | None:
    return image.resize((image.width // 2, image.height // 2)) if image.width > 20 else None


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
    names, real = [], decode_image
    monkeypatch.setattr(
        "dstrain.data.vision.images.decode_image",
        lambda content, name: names.append(Path(name).name) or real(content, name),
    )
    return names


def add(writer: ImageIndexWriter, value: object, folder: Path) -> int:
    return writer.assign_position(writer.get_entry(value, folder))


def written(tmp_path, images, values, settle=lambda image: None) -> tuple[ImageIndex, ImageIndexWriter, list[int]]:
    writer = ImageIndexWriter(settle, tmp_path / "cache")
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


def test_a_smaller_image_is_kept_and_one_that_stands_in_the_data_is_kept_whole(tmp_path, images):
    values = ["0.png", "small.png", (images / "small.png").read_bytes(), (images / "3.png").read_bytes()]
    album, _, _ = written(tmp_path, images, values, halve)
    small = picture(9, (10, 10))
    kept = [halve(picture(0)), small, small, halve(picture(3))]
    assert [same(album[index].load(), image) for index, image in enumerate(kept)] == [True] * 4
    assert [shown.has_copy for shown in (album[at] for at in range(4))] == [True, False, True, True]
    rows = json.loads((tmp_path / "images.json").read_text())["images"]
    assert [row["copy"] is not None for row in rows] == [True, False, True, True]
    assert [row["path"] is None for row in rows] == [False, False, True, True]
    assert [(row["width"], row["height"]) for row in rows] == [image.size for image in kept]
    for row in rows:
        if row["copy"]:
            assert Path(row["copy"]).stem == f"{row['sha256'][:32]}-{row['copy_sha256'][:32]}"


def test_an_image_is_decoded_once_however_many_records_show_it_at_the_same_time(tmp_path, images, decoded):
    writer = ImageIndexWriter(lambda image: None, tmp_path / "cache")
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda at: writer.get_entry(f"{at % 6}.png", images), range(300)))
    assert sorted(decoded) == [f"{seed}.png" for seed in range(6)]
    assert [writer.assign_position(picture) for picture in found] == [at % 6 for at in range(300)]


def test_a_fault_of_ours_reaches_all_that_wait_for_the_image(tmp_path, images):
    def settle(image: Image.Image) -> None:
        raise DataError("the disk is full; make room")

    writer = ImageIndexWriter(settle, tmp_path / "cache")
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(writer.get_entry, "0.png", images) for _ in range(20)]
    assert [str(one.exception()) for one in asked] == ["the disk is full; make room"] * 20


def test_a_bad_image_is_decoded_once_and_refused_each_time(tmp_path, images, decoded):
    writer = ImageIndexWriter(lambda image: None, tmp_path / "cache")
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


def test_an_image_that_the_processor_refuses_is_a_bad_record(tmp_path, images):
    def refuse(image: Image.Image) -> None:
        raise ValueError("the aspect ratio must be below 200")

    writer = ImageIndexWriter(refuse, tmp_path / "cache")
    with pytest.raises(BadRecord, match=r"processor cannot use .*0.png, 24x16 pixels \(ValueError: the aspect ratio"):
        writer.get_entry("0.png", images)


def test_a_copy_that_is_there_is_used_and_a_damaged_one_is_made_anew(tmp_path, images, decoded):
    first, _, _ = written(tmp_path, images, ["0.png"], halve)
    kept = next((tmp_path / "cache").rglob("*.png"))
    written(tmp_path, images, ["0.png"], lambda image: pytest.fail("settled again"))
    assert decoded == ["0.png", kept.name]
    os.truncate(kept, 50)
    assert "copy of" in first.find_change()
    with pytest.raises(DataError, match=r"the copy of .*0\.png, .* is gone or damaged; run `dstrain prepare` again"):
        first[0].load()
    again, _, _ = written(tmp_path, images, ["0.png"], halve)
    assert same(again[0].load(), halve(picture(0)))
    assert first.find_change() is None
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("harm", ["gone", "other", "touched"])
@pytest.mark.parametrize("copies", [False, True])
def test_an_image_that_changed_is_found(tmp_path, images, harm, copies):
    album, _, _ = written(tmp_path, images, ["0.png", "1.png"], halve if copies else lambda image: None)
    path = images / "1.png"
    if harm == "gone":
        path.unlink()
    elif harm == "other":
        picture(77).save(path)
    else:
        os.utime(path, ns=(1, 1))
    reason = album.find_change()
    if copies:  # what is trained on is there still; that it is no more what it stands for is known all the same
        assert (reason is None) == (harm == "gone")
        assert same(album[1].load(), halve(picture(1)))
    else:
        assert "1.png is gone" in reason if harm == "gone" else "1.png has changed" in reason
        if harm == "touched":
            assert same(album[1].load(), picture(1))
            return
        with pytest.raises(DataError, match=r"1.png (is|has) .*; run `dstrain prepare` again"):
            album[1].load()
    assert album[0].load().mode == "RGB"


@pytest.mark.parametrize("name", ["bad.png", "gone.png", "good.png"])
def test_a_file_that_could_not_be_used_is_looked_at_again_once_it_is_mended(tmp_path, images, name):
    writer = ImageIndexWriter(lambda image: None, tmp_path / "cache")
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
    album, _, _ = written(tmp_path, images, [f"{seed}.png" for seed in range(6)], halve)
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda shown: shown.load(), [album[at % 6] for at in range(60)]))
    assert all(same(image, halve(picture(index % 6))) for index, image in enumerate(loaded))


def build(tmp_path, images, names, built=None):
    writer = ImageIndexWriter(lambda image: None, tmp_path / "kept")

    def make(report):
        if built is not None:
            built.append(1)
        for sample, group in enumerate(names):
            yield [{"images": [add(writer, name, images) for name in group], "sample": sample}]

    return make, writer.write


NAMES = [["0.png"], [], ["1.png", "0.png"]]


def test_a_store_gives_the_images_of_an_example(tmp_path, images):
    for _ in range(2):
        store = load_or_build_store({"n": 1}, *build(tmp_path, images, NAMES))
        assert len(store.image_index) == 2
        found = [[shown.load() for shown in store[index]["images"]] for index in range(3)]
        assert [len(group) for group in found] == [1, 0, 2]
        assert same(found[2][0], picture(1))
        assert same(found[2][1], picture(0))
        assert store.column_lengths("images").tolist() == [1, 0, 2]
    plain = load_or_build_store({"n": 2}, lambda report: [[{"images": [3], "sample": 0}]])
    assert plain.image_index is None
    assert plain[0]["images"].tolist() == [3]


@pytest.mark.parametrize("harm", ["nothing", "list", "image"])
def test_a_store_whose_images_changed_is_built_again(tmp_path, images, monkeypatch, harm):
    built, lines = [], []
    monkeypatch.setattr("dstrain.cache.log_stderr", lines.append)
    store = load_or_build_store({"n": 1}, *build(tmp_path, images, NAMES, built))
    if harm == "list":
        os.truncate(store.folder / "images.json", 30)
    elif harm == "image":
        picture(50).save(images / "0.png")
    store = load_or_build_store({"n": 1}, *build(tmp_path, images, NAMES, built))
    assert len(built) == (1 if harm == "nothing" else 2)
    assert same(store[0]["images"][0].load(), picture(50 if harm == "image" else 0))
    told = {"nothing": [], "list": ["images.json is not what was written"], "image": ["0.png has changed"]}[harm]
    assert [line.rpartition("is built again: ")[2].rpartition("/")[2] for line in lines] == told


def test_prepare_leaves_an_encoders_files_in_the_store(write_lines, tmp_path, images):
    source = open_source(write_lines([{"image": "images/0.png"}, {"image": "images/bad.png"}]))
    writer = ImageIndexWriter(lambda image: None, tmp_path / "kept")

    def encode(rows):
        found = []
        for index, record in rows:
            try:
                found.append({"images": [add(writer, record["image"], source.get_base_dir(index))]})
            except BadRecord as fault:
                found.append(fault)
        return found

    policy = PreparePolicy(task="vlm", on_error="skip")
    store = prepare(source, encode, {}, policy, write_extra=writer.write)
    assert (len(store), len(store.image_index)) == (1, 1)
    assert store.report.bad[0].location == "train.jsonl:2"
    assert "bad.png is not an image" in store.report.bad[0].reason


def test_a_decoded_image_and_its_bytes_are_one(tmp_path, images):
    image = picture(3)
    album, _, numbers = written(tmp_path, images, [image, image.copy(), resolve_image(image, images)])
    assert numbers == [0, 0, 0]
    assert same(album[0].load(), image)


SIZES = [(640, 480), (480, 640), (641, 479), (300, 301), (65, 64), (1000, 70)]


def noise(width: int, height: int) -> Image.Image:
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (height, width, 3), dtype=np.uint8))


def clip(**settings) -> Any:
    return CLIPImageProcessorPil(size={"shortest_edge": 64}, crop_size={"height": 64, "width": 64}, **settings)


def siglip(**settings) -> Any:
    return SiglipImageProcessorPil(size={"height": 64, "width": 64}, **settings)


def gemma(**settings) -> Any:
    return Gemma3ImageProcessorPil(size={"height": 64, "width": 64}, **settings)


def idefics(longest: int, tile: int, **settings) -> Any:
    edges = {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": tile}}
    return Idefics3ImageProcessorPil(**edges, **settings)


def flat(made: Any) -> list[np.ndarray]:
    if isinstance(made, Mapping):
        return [array for key in sorted(made) for array in flat(made[key])]
    return [array for one in made for array in flat(one)] if isinstance(made, list) else [np.asarray(made)]


def test_a_downscaled_image_is_no_larger_than_the_processor_needs():
    """640x480 at a 64-pixel processor."""
    image = noise(640, 480)
    assert downscale_if_equivalent(image, clip()).size == (64, 64)
    assert downscale_if_equivalent(image, clip(do_center_crop=False)).size == (85, 64)
    assert downscale_if_equivalent(image, siglip()).size == (64, 64)
    assert downscale_if_equivalent(image, gemma()).size == (64, 64)
    assert downscale_if_equivalent(image, idefics(128, 64)).size == (128, 96)
    assert downscale_if_equivalent(image, idefics(64, 64)).size == (64, 48)


PROCESSORS = {
    "crop": clip(),
    "plain": siglip(),
    "gemma": gemma(),
    "split": idefics(128, 64, do_image_splitting=True),
    "whole": idefics(128, 64, do_image_splitting=False),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PROCESSORS)
def test_the_processor_makes_the_very_same_of_the_smaller_image(name, size):
    processor, image = PROCESSORS[name], noise(*size)
    smaller = downscale_if_equivalent(image, processor)
    if smaller is None:
        return
    assert smaller.width * smaller.height < image.width * image.height
    settings = {"return_row_col_info": True} if name in ("split", "whole") else {}
    before, after = processor(image, **settings), processor(smaller, **settings)
    assert {*before} == {*after}
    for one, other in zip(flat(before), flat(after), strict=True):
        assert one.dtype == other.dtype
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", PROCESSORS)
def test_photographs_are_made_smaller_by_every_kind(name):
    assert all(downscale_if_equivalent(noise(*size), PROCESSORS[name]) is not None for size in SIZES[:4])


def test_nothing_is_kept_where_nothing_is_gained_or_another_image_would_be_seen():
    image = noise(60, 60)
    assert downscale_if_equivalent(image, clip()) is None
    assert downscale_if_equivalent(noise(64, 64), siglip()) is None
    assert downscale_if_equivalent(image, idefics(128, 64)) is None
    panned = gemma(
        do_pan_and_scan=True,
        pan_and_scan_min_crop_size=32,
        pan_and_scan_max_num_crops=4,
        pan_and_scan_min_ratio_to_activate=1.2,
    )
    assert downscale_if_equivalent(noise(640, 300), panned) is None
    assert downscale_if_equivalent(noise(640, 640), panned).size == (64, 64)
    tiled = LlavaNextImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}, image_grid_pinpoints=[[64, 32], [32, 64]]
    )
    assert downscale_if_equivalent(noise(640, 480), tiled) is None  # it tells the model the image's own size


def test_the_processor_is_left_as_it_was():
    processor = idefics(128, 64)
    before = dict(vars(processor))
    downscale_if_equivalent(noise(640, 480), processor)
    assert vars(processor) == before
    assert "rows" not in processor(noise(64, 64))


class Strict:
    """Takes images of one shape alone, and scales without a method of its own."""

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        if image.width < 100:
            raise ValueError("too small for me")
        return {"pixel_values": [np.asarray(self.resize(image))]}

    def resize(self, image: Image.Image) -> np.ndarray:
        return np.asarray(image.resize((32, 32)))


def test_a_processor_that_refuses_its_own_result_keeps_the_image():
    assert downscale_if_equivalent(noise(200, 100), Strict()) is None


def test_what_the_processor_says_of_the_image_itself_is_not_swallowed():
    with pytest.raises(ValueError, match="too small for me"):
        downscale_if_equivalent(noise(50, 50), Strict())
