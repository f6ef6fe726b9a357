"""A tokenizer trained on the data, kept in the cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dstrain.cache_dir import hash_key
from dstrain.config.rules import MIN_VOCAB_SIZE
from dstrain.data.encoding.text import Alphabet, train_tokenizer
from dstrain.data.formats.preferences import BadRecord
from dstrain.data.sources.open import Source
from dstrain.errors import DataError
from dstrain.files import atomic_folder, is_occupied, remove_stale_partials

MAX_TRAINING_RECORDS = 200_000


def load_or_train_tokenizer(
    source: Source,
    extract_texts: Callable[[dict[str, Any]], Iterable[str]],
    vocab_size: int,
    cache_dir: Path,
    alphabet: Alphabet = "bytes",
) -> Any:
    """A byte-level BPE of the source's texts; from the cache where the same one was trained before.

    `alphabet`: as model.tokenizer has it. Several processes may train it side by side: it is the same, and the first to
    finish gives it its name. Raises DataError where vocab_size is too small.
    """
    from transformers import PreTrainedTokenizerFast

    if vocab_size < (least := MIN_VOCAB_SIZE[alphabet]):
        kind = "byte-level" if alphabet == "bytes" else "trained"
        raise DataError(f"a {kind} tokenizer has at least {least} entries, not {vocab_size}; raise vocab_size")
    key = {
        "data": source.digest,
        "texts": getattr(extract_texts, "__qualname__", ""),
        "vocab_size": vocab_size,
        "format": 1,
    }
    key |= {} if alphabet == "bytes" else {"alphabet": alphabet}
    place = cache_dir / "tokenizers" / hash_key(key)
    if not _is_cached(place):
        _save_to_cache(train_tokenizer(_iter_texts(source, extract_texts), vocab_size, alphabet), place)
    return PreTrainedTokenizerFast.from_pretrained(str(place))


def _is_cached(path: Path) -> bool:
    """Whether the cache has it. Raises DataError where it cannot be read, such as one that another user keeps for himself."""
    try:
        with (path / "tokenizer.json").open("rb"):
            return True
    except FileNotFoundError:
        return False
    except OSError as fault:
        mend = "let its owner make it readable, or set DSTRAIN_CACHE to another folder"
        raise DataError(f"the tokenizer in the cache ({path}) cannot be read ({fault.strerror}); {mend}") from fault


def _save_to_cache(tokenizer: Any, path: Path) -> None:
    """Write it under its name, whole or not at all. Raises DataError where the cache cannot be written."""
    try:
        remove_stale_partials(path, unowned=True)
        with atomic_folder(path, _rename_into_place) as partial:
            partial.mkdir(parents=True)
            tokenizer.save_pretrained(str(partial))
    except Exception as fault:  # the tokenizers library raises a bare Exception for a full disk
        mend = "where that folder is full or read-only, set DSTRAIN_CACHE to another"
        raise DataError(f"the tokenizer cannot be written into the cache ({path}): {fault}; {mend}") from fault


def _rename_into_place(partial_dir: Path, path: Path) -> None:
    """Give it its name, where no other process was sooner: that one's is the same."""
    try:
        partial_dir.rename(path)
    except OSError as fault:
        if not is_occupied(fault):
            raise


def _iter_texts(source: Source, extract_texts: Callable[[dict[str, Any]], Iterable[str]]) -> Iterator[str]:
    for index in range(min(len(source), MAX_TRAINING_RECORDS)):
        try:
            yield from extract_texts(source[index])
        except BadRecord:
            continue  # judged where the tokens are made
