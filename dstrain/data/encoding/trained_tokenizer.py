"""A byte-level tokenizer trained on the data, where a recipe brings none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrain.cache import get_or_build
from dstrain.config.schema import MIN_VOCAB_SIZE
from dstrain.data.sources.base import Source
from dstrain.errors import BadRecord, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


MAX_TRAINING_RECORDS = 200_000
Alphabet = Literal["bytes", "data"]
"""Base vocabulary: all 256 bytes, or only those that occur in the texts."""


def load_or_train_tokenizer(
    source: Source,
    extract_texts: Callable[[dict[str, Any]], Iterable[str]],
    texts_name: str,
    vocab_size: int,
    alphabet: Alphabet = "bytes",
) -> Any:
    """Return a byte-level BPE of the source's texts, from the cache if it was trained before.

    `texts_name`: what `extract_texts` is in the key; `alphabet`: as in model.tokenizer. Raises DataError
    if vocab_size is too small.
    """
    from transformers import PreTrainedTokenizerFast

    # Special tokens and the base alphabet are always in the vocabulary.
    least = MIN_VOCAB_SIZE[alphabet]
    if vocab_size < least:
        kind = "byte-level" if alphabet == "bytes" else "trained"
        raise DataError(f"a {kind} tokenizer has at least {least} entries, not {vocab_size}; raise vocab_size")
    key = {"data": source.digest, "texts": texts_name, "vocab_size": vocab_size, "alphabet": alphabet, "format": 2}

    def build(folder: Path) -> None:
        tokenizer = train_tokenizer(_iter_texts(source, extract_texts), vocab_size, alphabet)
        try:
            tokenizer.save_pretrained(str(folder))
        except Exception as fault:  # the tokenizers library raises a bare Exception for a full disk
            raise OSError(str(fault)) from fault

    return get_or_build("tokenizers", key, build, lambda folder: PreTrainedTokenizerFast.from_pretrained(str(folder)))


def train_tokenizer(texts: Iterable[str], vocab_size: int, alphabet: Alphabet = "bytes") -> PreTrainedTokenizerFast:
    """Return a byte-level BPE of these texts, with `<pad>` and the EOS `</s>`. Deterministic.

    With the alphabet `data`, bytes that occur in no text are unknown: each run of them becomes one
    `<unk>`. Raises DataError if the texts have more different bytes than vocab_size.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    all_bytes = alphabet == "bytes"
    unknown = None if all_bytes else "<unk>"
    tokenizer = Tokenizer(models.BPE(unk_token=unknown, fuse_unk=not all_bytes))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<pad>", "</s>", *([unknown] if unknown else [])],
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()) if all_bytes else [],
    )
    tokenizer.train_from_iterator(texts, trainer)
    size = tokenizer.get_vocab_size()
    if size > vocab_size:
        raise DataError(
            f"the letters of the training texts and {unknown} take {size} entries, and vocab_size "
            f"is {vocab_size}; raise it"
        )
    named = {"pad_token": "<pad>", "eos_token": "</s>", **({"unk_token": unknown} if unknown else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def _iter_texts(source: Source, extract_texts: Callable[[dict[str, Any]], Iterable[str]]) -> Iterator[str]:
    for index in range(min(len(source), MAX_TRAINING_RECORDS)):
        try:
            yield from extract_texts(source[index])
        except BadRecord:
            continue  # reported when the examples are encoded
