"""A start whose tokens are in the cache opens no data file, and images are looked at once on a host."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from dstrain import cache
from dstrain.cache import check_once
from dstrain.config import RunConfig
from dstrain.data.sources import open, parquet
from dstrain.data.sources.base import LazySource
from dstrain.data.sources.open import open_source
from dstrain.data.vision.images import ImageIndex
from dstrain.errors import DataError
from dstrain.tasks import make_task
from tests.vision_recipes import named_recipe

ROWS = [{"prompt": f"What is {n}?", "completion": f"It is {n}."} for n in range(12)]


@pytest.fixture(autouse=True)
def settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and files that need not be two seconds old to be known again."""
    monkeypatch.setenv("DSTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "RACY_WINDOW_NS", -1_000_000_000_000)


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, opening a data file is an error."""

    def no_more() -> None:
        def refuse(path: Path, columns: Any) -> Any:
            raise AssertionError(f"{path} was opened")

        monkeypatch.setattr(open, "SOURCE_TYPES", dict.fromkeys(open.SOURCE_TYPES, refuse))

    return no_more


def write(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=5)
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else "\n".join(map(json.dumps, rows)))
    return path


def recipe(folder: Path, *names: str, **more: Any) -> RunConfig:
    files = [str(write(folder / name)) for name in names]
    model = {"config": {"model_type": "gpt2", "n_embd": 8, "n_layer": 1, "n_head": 1, "vocab_size": 400}}
    data = {"train": [{"path": path} for path in files], "max_length": 64, **more}
    return RunConfig.model_validate({"task": "sft", "model": model, "data": data})


def shown(examples: Any) -> list[list[int]]:
    return [next(value.tolist() for value in example.values() if hasattr(value, "tolist")) for example in examples]


@pytest.mark.parametrize(
    "more", [{}, {"max_samples": 7}, {"eval_fraction": 0.25}, {"columns": {"prompt": "prompt"}}], ids=str
)
def test_a_whole_store_opens_no_source(more: dict[str, Any], tmp_path: Path, closed: Callable[[], None]) -> None:
    config = recipe(tmp_path, "a.jsonl", "b.json", "c.parquet", **more)
    first = [make_task(config).examples(split) for split in ("train", "eval")]
    closed()
    again = [make_task(config).examples(split) for split in ("train", "eval")]
    for one, other in zip(first, again, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert shown(one) == shown(other)
            assert (one.sizes, one.report) == (other.sizes, other.report)


def test_a_file_that_changed_is_read_again(tmp_path: Path, closed: Callable[[], None]) -> None:
    config = recipe(tmp_path, "a.jsonl")
    first = make_task(config).examples("train")
    (tmp_path / "new").write_text((tmp_path / "a.jsonl").read_text().replace("It is 3.", "It is 4."))
    times = (tmp_path / "a.jsonl").stat()
    os.replace(tmp_path / "new", tmp_path / "a.jsonl")
    os.utime(tmp_path / "a.jsonl", ns=(times.st_atime_ns, times.st_mtime_ns))
    second = make_task(config).examples("train")
    assert first is not None
    assert second is not None
    assert first.store.folder != second.store.folder
    closed()
    os.truncate(tmp_path / "a.jsonl", 100)
    with pytest.raises(AssertionError, match="was opened"):
        make_task(config).examples("train")


def test_questions_about_one_image_are_grouped_without_reading_them_again(
    tmp_path: Path, closed: Callable[[], None]
) -> None:
    _, values = named_recipe("vlm", tmp_path)
    config = RunConfig.model_validate(values)
    first = make_task(config).examples("train")
    closed()
    again = make_task(config).examples("train")
    assert first is not None
    assert again is not None
    assert shown(first) == shown(again)
    assert first.sizes == again.sizes


def test_what_is_wrong_with_a_file_is_said_at_every_start(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl")
    assert not isinstance(open_source(path), LazySource)
    assert isinstance(open_source(path), LazySource)
    for _ in range(2):
        with pytest.raises(DataError, match=r"no record of .* has the column 'promt'"):
            open_source(path, {"promt": "question"})
    path.write_text("\n \n")
    for _ in range(2):
        with pytest.raises(DataError, match="only blank lines"):
            open_source(path)


def test_a_deferred_source_is_the_source(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\nbad\n{"n": 2}\n')
    whole, deferred = open_source(path, {"n": "m"}), open_source(path, {"n": "m"})
    assert isinstance(deferred, LazySource)
    assert (len(deferred), deferred.digest, deferred.get_base_dir(0)) == (2, whole.digest, whole.get_base_dir(0))
    assert [*map(deferred.__getitem__, range(2))] == [{"m": 1}, {"m": 2}]
    assert (deferred.location(1), deferred.bad_rows) == (whole.location(1), whole.bad_rows)
    another = open_source(path, {"n": "m"})
    path.write_text('{"n": 1}\nbad\n{"n": 3}\n')
    with pytest.raises(DataError, match="was changed while it was in use; start again"):
        another[0]


def table(count: int) -> pyarrow.Table:
    texts = [None if n % 7 == 0 else "word " * (n % 50) for n in range(count)]
    nested = [[{"role": "user", "content": str(n)}] * (n % 3) for n in range(count)]
    return pyarrow.table(
        {"n": list(range(count)), "text": texts, "nested": nested, "raw": [b"\xff" * (n % 5) for n in range(count)]}
    )


@pytest.mark.parametrize("row_group_size", [1, 64, 10_000])
def test_parquet_rows_are_those_of_the_table_in_any_order(
    row_group_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 13)
    pyarrow.parquet.write_table(table(300), tmp_path / "a.parquet", row_group_size=row_group_size)
    rows, read = table(300).to_pylist(), open_source(tmp_path / "a.parquet")
    assert [read[index] for index in range(300)] == rows
    order = random.Random(0).sample(range(300), 300)
    assert [read[index] for index in order] == [rows[index] for index in order]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(read.__getitem__, order)) == [rows[index] for index in order]


def test_reading_parquet_in_order_decodes_each_row_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_ROWS", 10)
    pyarrow.parquet.write_table(table(200), tmp_path / "a.parquet", row_group_size=100)
    read, decoded = parquet.ParquetSource(tmp_path / "a.parquet", {}), []
    decode = read._iter_batches

    def count(group: int) -> Any:
        for start, batch in decode(group):
            decoded.append(start)
            yield start, batch

    monkeypatch.setattr(read, "_iter_batches", count)
    assert [read[index]["n"] for index in range(200)] == list(range(200))
    assert decoded == list(range(0, 200, 10))
    assert len(read._cached_batches) == parquet.MAX_CACHED_BATCHES


def test_a_parquet_file_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    twice = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    pyarrow.parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(DataError, match="it has two columns 'a'"):
        open_source(tmp_path / "a.parquet")


def test_the_images_of_a_store_are_looked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, values = named_recipe("vlm", tmp_path)
    config = RunConfig.model_validate(values)
    make_task(config).examples("train")
    looks, changed = [], ImageIndex.find_change
    monkeypatch.setattr(ImageIndex, "find_change", lambda album: looks.append(1) or changed(album))
    for _ in range(2):
        make_task(config).examples("train")
    assert len(looks) == 2, "each time where nobody says that it is one start"
    with check_once() as checked:
        for _ in range(2):
            make_task(config).examples("train")
    assert len(looks) == 3
    with check_once(checked):  # another process of the host, which is told
        make_task(config).examples("train")
    assert len(looks) == 3
    image = next(path for path in tmp_path.iterdir() if path.suffix == ".png")
    image.write_bytes(image.read_bytes() + b" ")
    with check_once() as checked:
        make_task(config).examples("train")
    assert len(looks) == 4
