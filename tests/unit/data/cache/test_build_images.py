"""Records with images become the same examples however many threads look at them."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.config.schema import RunConfig
from dstrain.data import prepare
from dstrain.data.token_store import TokenizedDataset
from dstrain.data.vision import image_index
from dstrain.tasks import find_task, make_task
from dstrain.tasks.common.text import TextTask
from tests.vision_recipes import picture


@pytest.fixture
def task(tmp_path: Path) -> TextTask:
    """A task on forty records, some without an image, some bad, some with an image that others have too."""
    recipe = find_task("vlm").tiny(tmp_path)
    for number in range(12):
        picture(number, (20 + number, 30)).save(tmp_path / f"{number}.png")
    (tmp_path / "bad.png").write_bytes(b"no image")
    draw = random.Random(5)
    lines = []
    for number in range(40):
        names = [f"{draw.randrange(12)}.png" for _ in range(draw.randrange(3))]
        names += ["bad.png"] * (number % 7 == 3)
        asked = "<image>" * len(names) + f"What is {number}?" + " So long." * 40 * (number == 5)
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": f"It is {number}."}]
        lines.append(json.dumps({"messages": turns, "images": names}))
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    recipe["data"] |= {"on_error": "skip", "eval": None}
    made = make_task(RunConfig.model_validate(recipe))
    assert isinstance(made, TextTask)
    return made


def built(
    task: TextTask, cache: Path, monkeypatch: pytest.MonkeyPatch, threads: int
) -> tuple[TokenizedDataset, list[str]]:
    """The examples, made in a cache of their own, and which thread decoded each image."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(cache))
    monkeypatch.setattr("dstrain.tasks.common.record_task.count_available_cores", lambda: threads)
    decoded: list[str] = []
    real = image_index.decode_image

    def slowly(content: bytes, name: str) -> Image.Image:
        decoded.append(threading.current_thread().name)
        time.sleep(random.random() / 50)  # so that they are not done in the order in which they were begun
        return real(content, name)

    with monkeypatch.context() as patch:
        patch.setattr(image_index, "decode_image", slowly)
        found = task.examples("train")
    assert found is not None
    return found, decoded


def test_any_number_of_threads_makes_the_same_album_and_the_same_columns(
    task: TextTask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, by_one = built(task, tmp_path / "one", monkeypatch, 1)
    again, by_many = built(task, tmp_path / "many", monkeypatch, 8)
    assert len(set(by_one)) == 1
    assert len(set(by_many)) > 1
    assert len(by_one) == len(by_many) == 13, "each image once, the bad one too"
    assert first.report == again.report
    assert len(first.report["skipped_records"]) == 7
    files = sorted(file.name for file in first.store.folder.iterdir() if file.suffix == ".npy")
    assert len(files) >= 6
    for name in files:
        assert np.array_equal(np.load(first.store.folder / name), np.load(again.store.folder / name)), name
    lists = [(one.store.folder / "images.json").read_text() for one in (first, again)]
    assert lists[0].replace(str(tmp_path / "one"), "") == lists[1].replace(str(tmp_path / "many"), "")
    assert first.store.image_index is not None
    assert again.store.image_index is not None
    assert first.store.image_index.digest == again.store.image_index.digest
    shown = [image for row in range(len(first)) for image in first[row].get("images", ())]
    assert shown


def test_threads_see_what_one_sees_with_one_tokenizer_between_them(task: TextTask) -> None:
    sight = task.model_source.vision_processor
    assert sight is not None
    images = [picture(seed, (8 + seed, 30 - seed)) for seed in range(16)]

    def ask(image: Image.Image) -> Any:
        smaller = sight.downscale(image)
        return (
            sight.get_image_text(image.size),
            smaller and smaller.tobytes(),
            sight.image_inputs([image])["pixel_values"].tolist(),
        )

    alone = [ask(image) for image in images]
    owned: set[int] = set()
    with ThreadPoolExecutor(8) as pool:
        together = list(
            pool.map(lambda image: owned.add(id(sight._get_thread_processor().tokenizer)) or ask(image), images * 6)
        )
    assert together == alone * 6
    assert len(owned) == 1


def test_copies_are_kept_apart_by_what_makes_them_not_by_the_tokenizer(
    task: TextTask, monkeypatch: pytest.MonkeyPatch
) -> None:
    sight = task.model_source.vision_processor
    assert sight is not None

    def place() -> Path:
        return prepare.ImageRecordEncoder.create(sight, 2).index_writer._cache_dir

    before = place()
    sight.hf_processor.tokenizer.add_tokens(["a_new_one"])
    assert place() == before
    monkeypatch.setattr(prepare, "version", lambda name: "99.0.1")
    newer = place()
    monkeypatch.setattr(prepare, "version", lambda name: "99.0.2")
    assert before != newer == place()
    sight.hf_processor.image_processor.do_center_crop = not sight.hf_processor.image_processor.do_center_crop
    assert place() != newer


def test_the_same_records_in_another_folder_show_that_folders_images(tmp_path: Path) -> None:
    found = []
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        recipe = find_task("vlm").tiny(tmp_path / name)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"messages": turns, "image": "x.png"}))
        Image.new("RGB", (16, 16), colour).save(tmp_path / name / "x.png")
        examples = make_task(RunConfig.model_validate(recipe)).examples("train")
        found.append(examples[0]["images"][0].load().getpixel((0, 0)))
    assert found == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize("harm", ["missing", "no image", "too wide"])
def test_an_image_that_was_mended_is_used(harm: str, tmp_path: Path) -> None:
    """Though neither the data file nor a setting changed, what was refused before is read again."""
    recipe = find_task("vlm").tiny(tmp_path)
    recipe["data"] |= {"on_error": "skip", "eval": None}
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
    records = [{"messages": turns, "image": name} for name in ("good.png", "late.png")]
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, records)))
    picture(1).save(tmp_path / "good.png")
    if harm == "no image":
        (tmp_path / "late.png").write_bytes(b"nothing")
    elif harm == "too wide":
        picture(2, (4000, 2)).save(tmp_path / "late.png")
    counts = []
    for _ in range(2):
        counts.append(len(make_task(RunConfig.model_validate(recipe)).examples("train") or ()))
        picture(3).save(tmp_path / "late.png")
    assert counts == ([2, 2] if harm == "too wide" else [1, 2])


def test_colours_are_those_of_all_images_each_counted_once(tmp_path: Path) -> None:
    recipe = find_task("vlm").tiny(tmp_path)
    recipe["model"] |= {"processor": {"normalize": "data"}}
    turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes."}]
    names = ["a.png", "b.png", "a.png", "gone.png"]
    (tmp_path / "train.jsonl").write_text("\n".join(json.dumps({"messages": turns, "image": name}) for name in names))
    pixels = []
    for seed, name in enumerate(("a.png", "b.png")):
        picture(seed, (30, 20 + seed)).save(tmp_path / name)
        pixels.append(np.asarray(picture(seed, (30, 20 + seed))).reshape(-1, 3) / 255)

    def colours() -> tuple[Any, Any]:
        task = make_task(RunConfig.model_validate(recipe))
        assert isinstance(task, TextTask)
        assert task.model_source.vision_processor is not None
        processor = task.model_source.vision_processor.hf_processor.image_processor
        return processor.image_mean, processor.image_std

    mean, deviation = colours()
    assert mean == pytest.approx(np.concatenate(pixels).mean(0), abs=1e-6)
    assert deviation == pytest.approx(np.concatenate(pixels).std(0), abs=1e-6)
    Image.new("RGB", (400, 400)).save(tmp_path / "gone.png")
    assert colours()[0][0] < mean[0] / 2, "an image that came later is seen"
