"""Tokenizer files of a model folder."""

from __future__ import annotations

from pathlib import Path

from dstrain.models.folder.adapter_config import read_adapter

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "sentencepiece.bpe.model", "sentencepiece.model", "tekken.json", "processor_config.json",
)  # fmt: skip
"""Every folder that transformers reads a tokenizer from holds at least one of them."""


def find_tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a folder that a tokenizer may be read from."""
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return named + [file for pattern in ("*.tiktoken", "*.spm", "tokenizer.model.v*") for file in folder.glob(pattern)]


def find_tokenizer_folder(path: str | None) -> str | None:
    """Return the folder or hub id with the tokenizer of `model.path`.

    For an adapter, that is its own folder if it holds a tokenizer, else its base model's.
    """
    adapter = read_adapter(path)
    return path if adapter is None or find_tokenizer_files(adapter.folder) else adapter.base_model
