"""Splits: what is held out is never trained on, and mixtures keep their weights."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dstrain.config.schema import RunConfig
from dstrain.data.loading.loader import StepSampler
from dstrain.data.prepare import ImageRecordEncoder, PreparePolicy, align_store, choose_held_out, prepare, split_dataset
from dstrain.data.sources.open import open_source
from dstrain.data.token_store import GROUP, BuildReport, TokenizedDataset, TokenStore, load_or_build_store
from dstrain.data.vision.images import decode_image
from dstrain.errors import DataError
from dstrain.tasks import make_task
from dstrain.tasks.common.task import as_dataset
from dstrain.tasks.common.text import TextTask
from tests.tiny import tiny_recipe
from tests.vision_recipes import picture
from tests.vocabulary import write_jsonl


def store(count: int, bad: tuple[int, ...] = ()) -> TokenStore:
    def build(report: BuildReport):  # type: ignore[no-untyped-def]
        yield [{"ids": [index] * (index % 3 + 1), "sample": index} for index in range(count) if index not in bad]

    return load_or_build_store({"count": count, "bad": list(bad)}, build)


def split_examples(
    store: TokenStore, source_sizes: tuple[int, ...], weights: tuple[float, ...], eval_fraction: float, seed: int
) -> tuple[TokenizedDataset, TokenizedDataset | None]:
    """(training, held-out) examples of a store."""
    sizes = store.count_per_source(source_sizes)
    dataset = TokenizedDataset(store, np.arange(len(store)), sizes, weights)
    if not eval_fraction:
        return dataset, None
    return split_dataset(dataset, choose_held_out(store.record_indices, store.groups, sizes, eval_fraction, seed))


def test_held_out_samples_are_never_trained_on() -> None:
    train, test = split_examples(store(50, bad=(3, 30)), (20, 30), (1.0, 1.0), 0.2, seed=1)
    assert test is not None
    of_train, of_test = ({examples[i]["sample"] for i in range(len(examples))} for examples in (train, test))
    assert not of_train & of_test
    assert of_train | of_test == set(range(50)) - {3, 30}
    assert test.sizes == (4, 6), "a share of each source"
    assert sum(train.sizes) == len(train) == 38


def test_the_split_depends_on_the_seed_alone() -> None:
    splits = [split_examples(store(40), (40,), (1.0,), 0.25, seed)[1] for seed in (1, 1, 2)]
    samples = [{examples[i]["sample"] for i in range(len(examples))} for examples in splits if examples is not None]
    assert samples[0] == samples[1] != samples[2]


def test_an_epoch_shows_each_source_by_its_weight() -> None:
    train, _ = split_examples(store(30), (10, 20), (2.0, 0.5), 0.0, seed=0)
    plan = StepSampler(
        sizes=train.sizes, weights=train.weights, seed=0, samples_per_step=30, world_size=1, accumulate=1
    )
    assert plan.samples_per_epoch == 30
    shown = Counter(train[int(index)]["sample"] for index in plan.step_ids(0))
    assert all(shown[sample] == 2 for sample in range(10))
    assert sum(shown[sample] for sample in range(10, 30)) == 10


@pytest.mark.parametrize(("sizes", "held_out"), [((4,), 0.9999), ((4,), 0.9), ((9, 1), 0.1)])
def test_a_source_of_which_nothing_is_left_to_learn_from_is_refused(sizes: tuple[int, ...], held_out: float) -> None:
    with pytest.raises(DataError, match=r"^data\.eval_fraction .* holds out all \d records of source \d .*; lower it"):
        split_examples(store(sum(sizes)), sizes, (1.0,) * len(sizes), held_out, 0)


def test_lengths_are_those_of_the_longest_sequence_of_each_example() -> None:
    chunk = [
        {"chosen": [1] * (i + 1), "rejected": [2] * (5 - i), "images": list(range(9)), "margin": 0.0, "sample": i}
        for i in range(5)
    ]
    store = load_or_build_store(
        {"what": "lengths", "token_columns": {"names": ["chosen", "rejected"]}}, lambda report: [chunk]
    )
    examples = TokenizedDataset(store, np.array([4, 0, 3, 2]), (4,), (1.0,))
    assert examples.sequence_lengths is not None
    assert examples.sequence_lengths(np.array([0, 1, 2, 3])).sequences.tolist() == [[5], [5], [4], [3]]
    assert examples.sequence_lengths(np.array([1, 3])).sequences.tolist() == [[5], [3]]
    assert examples.sequence_lengths(np.zeros(0, dtype=np.int64)).sequences.tolist() == []


def test_the_rows_of_another_encoding_are_those_of_the_same_records() -> None:
    first, other = store(12, bad=(0, 5)), store(12, bad=(2, 3, 11))
    aligned, missing = align_store(first, other)
    assert missing.tolist() == [2, 3, 11]
    known = [row for row in range(len(first)) if first[row]["sample"] not in missing]
    assert [other[int(aligned.rows[row])]["sample"] for row in known] == [first[row]["sample"] for row in known]
    assert len(aligned.rows) == len(first)


def test_an_example_has_the_outputs_of_its_row() -> None:
    kept = store(5)
    examples = TokenizedDataset(kept, np.array([4, 0]), (2,), (1.0,), output_columns={"score": np.arange(5) / 2})
    assert [examples[index]["score"] for index in range(2)] == [2.0, 0.0]
    assert examples.column("score").tolist() == [2.0, 0.0]


def grouped(groups: dict[int, list[int]], answers: int = 1) -> TokenStore:
    """Return a store of records 0, 1, ..., each with so many examples; `groups`: group -> its records."""
    of = {record: group for group, records in groups.items() for record in records}
    rows = [{"ids": [record], "sample": record, GROUP: of[record]} for record in sorted(of) for _ in range(answers)]
    return load_or_build_store({"groups": sorted(of.items()), "answers": answers}, lambda report: [rows])


def records(examples: TokenizedDataset | None) -> set[int]:
    assert examples is not None
    return {examples[index]["sample"] for index in range(len(examples))}


def test_the_examples_of_a_record_are_on_one_side() -> None:
    rows = [{"ids": [at], "sample": at // 3} for at in range(90)]
    store = load_or_build_store({"what": "answers"}, lambda report: [rows])
    train, test = split_examples(store, (30,), (1.0,), 0.2, seed=4)
    assert not records(train) & records(test)
    assert (len(records(test)), len(test or ()), train.sizes) == (6, 18, (72,))


def test_records_of_one_group_are_on_one_side_in_all_sources() -> None:
    groups = {group: [group, 40 + group, 80 + group] for group in range(40)}
    train, test = split_examples(grouped(groups), (40, 80), (1.0, 1.0), 0.25, seed=1)
    assert not {at % 40 for at in records(train)} & {at % 40 for at in records(test)}
    assert test is not None
    assert test.sizes == (10, 20)


def test_records_that_stand_alone_are_held_out_as_without_groups() -> None:
    alone = {-1 - record: [record] for record in range(50)}
    with_groups = split_examples(grouped(alone), (20, 30), (1.0, 1.0), 0.2, seed=1)
    without = split_examples(store(50), (20, 30), (1.0, 1.0), 0.2, seed=1)
    assert [records(split) for split in with_groups] == [records(split) for split in without]


def test_a_group_above_the_fraction_is_trained_on_and_the_smallest_is_held_out_where_all_are() -> None:
    train, test = split_examples(grouped({1: [*range(30)], 2: [*range(30, 40)]}), (40,), (1.0,), 0.1, seed=0)
    assert (records(test), len(train)) == (set(range(30, 40)), 30)
    with pytest.raises(
        DataError, match=r"all 40 records of source 1 of data.train, which belong together \(equal prompts\)"
    ):
        split_examples(grouped({1: [*range(40)]}), (40,), (1.0,), 0.1, seed=0)


@pytest.mark.parametrize("seed", range(4))
def test_half_of_three_records_leaves_one_to_train_on(seed: int) -> None:
    train, test = split_examples(store(3), (3,), (1.0,), 0.5, seed)
    assert (len(train), len(records(test))) == (1, 2)


# What a task gives as examples, as a dataset.


def test_a_token_store_is_a_dataset_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    store = prepare(open_source(file), lambda rows: [{"ids": [1]} for _ in rows], {}, PreparePolicy(task="own"))
    dataset = as_dataset(store)
    assert (dataset.sizes, dataset.weights, dataset.report) == ((2,), None, None)
    assert dataset.summarize() == {"samples": 2}


# Records with images become the same examples however many threads look at them.


@pytest.fixture
def task(tmp_path: Path) -> TextTask:
    """A task on forty records, some without an image, some bad, some with an image that others have too."""
    recipe = tiny_recipe("vlm", tmp_path)
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
    real = decode_image

    def slowly(content: bytes, name: str) -> Image.Image:
        decoded.append(threading.current_thread().name)
        time.sleep(random.random() / 50)  # so that they are not done in the order in which they were begun
        return real(content, name)

    with monkeypatch.context() as patch:
        patch.setattr("dstrain.data.vision.images.decode_image", slowly)
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
        return ImageRecordEncoder.create(sight, 2).index_writer._cache_dir

    before = place()
    sight.hf_processor.tokenizer.add_tokens(["a_new_one"])
    assert place() == before
    monkeypatch.setattr("dstrain.data.prepare.version", lambda name: "99.0.1")
    newer = place()
    monkeypatch.setattr("dstrain.data.prepare.version", lambda name: "99.0.2")
    assert before != newer == place()
    sight.hf_processor.image_processor.do_center_crop = not sight.hf_processor.image_processor.do_center_crop
    assert place() != newer


def test_the_same_records_in_another_folder_show_that_folders_images(tmp_path: Path) -> None:
    found = []
    for name, colour in (("a", "red"), ("b", "blue")):
        (tmp_path / name).mkdir()
        recipe = tiny_recipe("vlm", tmp_path / name)
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Yes."}]
        (tmp_path / name / "train.jsonl").write_text(json.dumps({"messages": turns, "image": "x.png"}))
        Image.new("RGB", (16, 16), colour).save(tmp_path / name / "x.png")
        examples = make_task(RunConfig.model_validate(recipe)).examples("train")
        found.append(examples[0]["images"][0].load().getpixel((0, 0)))
    assert found == [(255, 0, 0), (0, 0, 255)]


@pytest.mark.parametrize("harm", ["missing", "no image", "too wide"])
def test_an_image_that_was_mended_is_used(harm: str, tmp_path: Path) -> None:
    """Though neither the data file nor a setting changed, what was refused before is read again."""
    recipe = tiny_recipe("vlm", tmp_path)
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
    recipe = tiny_recipe("vlm", tmp_path)
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


@pytest.mark.usefixtures("fresh_cache")
def test_messages_name_the_file_that_was_asked_for(tmp_path: Path) -> None:
    """A copy of a file is served from the cache of the first one; its bad records were named by the first one's path."""
    for folder in ("first", "second"):
        (tmp_path / folder).mkdir()
        records = [{"prompt": f"mend {number}?", "completion": "open it"} for number in range(3)]
        write_jsonl(tmp_path / folder / "x.jsonl", [*records, {"prompt": "mend it?", "completion": ""}])
        values = tiny_recipe("sft", tmp_path) | {
            "data": {"train": str(tmp_path / folder / "x.jsonl"), "on_error": "skip"}
        }
        report: Any = as_dataset(make_task(RunConfig.model_validate(values)).examples("train")).report
        assert [line.partition(": ")[0] for line in report["skipped_records"]] == [f"{tmp_path}/{folder}/x.jsonl:4"]
        assert [*report["columns"]] == [f"{tmp_path}/{folder}/x.jsonl"]
