"""Trained tokenizers: which letters they know, and which of them are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dstrain.config.schema import DatasetConfig
from dstrain.data.encoding.tokenization import load_or_train_tokenizer, train_tokenizer
from dstrain.data.sources.base import ConcatSource
from dstrain.data.sources.open import open_source
from dstrain.errors import DataError


def test_a_tokenizer_of_the_datas_letters_knows_no_others() -> None:
    sums = ["3 + 4 = 7", "12 + 9 = 21"]
    small = train_tokenizer(sums, 24, "data")
    assert len(small) <= 24
    assert train_tokenizer(iter(sums), 24, "data").get_vocab() == small.get_vocab()
    for text in (*sums, "9 = 1"):
        assert small.decode(small(text)["input_ids"]) == text
    unknown = small.unk_token_id
    assert small("abc 7x")["input_ids"].count(unknown) == 2
    assert small.decode(small("abc 7x")["input_ids"]) == "<unk> 7<unk>"
    assert unknown not in small("".join(sums))["input_ids"]
    with pytest.raises(DataError, match=r"take \d+ entries, and vocab_size is 8; raise it"):
        train_tokenizer(sums, 8, "data")


def test_tokenizers_of_two_alphabets_are_kept_apart(tmp_path: Path) -> None:
    path = tmp_path / "sums.jsonl"
    path.write_text('{"text": "3 + 4 = 7"}\n{"text": "12 + 9 = 21"}\n')
    source = ConcatSource([open_source(DatasetConfig(path=str(path)), {})])

    def texts(record: dict[str, Any]) -> list[str]:
        return [record["text"]]

    whole = load_or_train_tokenizer(source, texts, "texts", 270, root=tmp_path)
    small = load_or_train_tokenizer(source, texts, "texts", 270, "data", tmp_path)
    assert len(whole) > 256 > len(small)
    assert load_or_train_tokenizer(source, texts, "texts", 270, "data", tmp_path).get_vocab() == small.get_vocab()
    for size, alphabet, wanted in ((257, "bytes", "at least 258"), (15, "data", "a trained tokenizer has at least 16")):
        with pytest.raises(DataError, match=wanted):
            load_or_train_tokenizer(source, texts, "texts", size, alphabet, tmp_path)


def one_record(tmp_path: Path) -> ConcatSource:
    (tmp_path / "x.jsonl").write_text('{"text": "3 + 4 = 7"}\n')
    return ConcatSource([open_source(DatasetConfig(path=str(tmp_path / "x.jsonl")), {})])


def texts(record: dict[str, Any]) -> list[str]:
    return [record["text"]]


def test_a_full_cache_is_named_and_nothing_is_left_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizers library raises a bare Exception."""

    def full(tokenizer: Any, folder: str) -> None:
        (Path(folder) / "tokenizer.json").write_text("{")
        raise Exception("No space left on device (os error 28)")

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", full)
    with pytest.raises(DataError, match=r"cannot be written into the cache: .*No space left.*set DSTRAIN_CACHE"):
        load_or_train_tokenizer(one_record(tmp_path), texts, "texts", 270, root=tmp_path / "cache")
    assert not [*(tmp_path / "cache/tokenizers").iterdir()]
