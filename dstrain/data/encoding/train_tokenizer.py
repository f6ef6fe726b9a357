"""A tokenizer trained on the data, kept in the cache."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from dstrain.cache_dir import key_name, partial_path, remove_abandoned
from dstrain.config.rules import SMALLEST_VOCABULARY
from dstrain.data.encoding.text import Alphabet, train_tokenizer
from dstrain.data.formats.preferences import BadRecord
from dstrain.data.sources.open import Source
from dstrain.errors import DataError

MOST_RECORDS = 200_000


def trained_tokenizer(
    source: Source,
    texts: Callable[[dict[str, Any]], Iterable[str]],
    vocab_size: int,
    cache: Path,
    alphabet: Alphabet = "bytes",
) -> Any:
    """A byte-level BPE of the source's texts; from the cache where the same one was trained before.

    `alphabet`: as model.tokenizer has it. Several processes may train it side by side: it is the same, and the first to
    finish gives it its name. Raises DataError where vocab_size is too small.
    """
    from transformers import PreTrainedTokenizerFast

    if vocab_size < (least := SMALLEST_VOCABULARY[alphabet]):
        kind = "byte-level" if alphabet == "bytes" else "trained"
        raise DataError(f"a {kind} tokenizer has at least {least} entries, not {vocab_size}; raise vocab_size")
    key = {"data": source.digest, "texts": getattr(texts, "__qualname__", ""), "vocab_size": vocab_size, "format": 1}
    key |= {} if alphabet == "bytes" else {"alphabet": alphabet}
    place = cache / "tokenizers" / key_name(key)
    if not _is_there(place):
        _keep(train_tokenizer(_texts(source, texts), vocab_size, alphabet), place)
    return PreTrainedTokenizerFast.from_pretrained(str(place))


def _is_there(place: Path) -> bool:
    """Whether the cache has it. Raises DataError where it cannot be read, such as one that another user keeps for himself."""
    try:
        with (place / "tokenizer.json").open("rb"):
            return True
    except FileNotFoundError:
        return False
    except OSError as fault:
        mend = "let its owner make it readable, or set DSTRAIN_CACHE to another folder"
        raise DataError(f"the tokenizer in the cache ({place}) cannot be read ({fault.strerror}); {mend}") from fault


def _keep(tokenizer: Any, place: Path) -> None:
    """Write it under its name, whole or not at all. Raises DataError where the cache cannot be written."""
    partial = partial_path(place)
    try:
        remove_abandoned(place)
        partial.mkdir(parents=True)
        tokenizer.save_pretrained(str(partial))
        _publish(partial, place)
    except Exception as fault:  # the tokenizers library raises a bare Exception for a full disk
        mend = "where that folder is full or read-only, set DSTRAIN_CACHE to another"
        raise DataError(f"the tokenizer cannot be written into the cache ({place}): {fault}; {mend}") from fault
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _publish(partial: Path, place: Path) -> None:
    """Give it its name, where no other process was sooner: that one's is the same."""
    try:
        partial.rename(place)
    except OSError as fault:
        if fault.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _texts(source: Source, texts: Callable[[dict[str, Any]], Iterable[str]]) -> Iterator[str]:
    for index in range(min(len(source), MOST_RECORDS)):
        try:
            yield from texts(source[index])
        except BadRecord:
            continue  # judged where the tokens are made
