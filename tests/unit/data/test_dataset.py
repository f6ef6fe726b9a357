"""What a task gives as examples, as a dataset."""

from __future__ import annotations

from pathlib import Path

from dstrain.data.dataset import as_dataset
from dstrain.data.prepare import PreparePolicy, prepare
from dstrain.data.sources.open import open_source


def test_a_token_store_is_a_dataset_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "a"}\n{"text": "b"}\n')
    store = prepare(
        open_source(file), lambda rows: [{"ids": [1]} for _ in rows], {}, PreparePolicy(task="own"), tmp_path / "cache"
    )
    dataset = as_dataset(store)
    assert (dataset.sizes, dataset.weights, dataset.report) == ((2,), None, None)
    assert dataset.summarize() == {"samples": 2}
