"""Real data where it is to be had, and a way to write small files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data: DSTRAIN_DATA, else shared/data beside the repository."""
    folder = Path(os.environ.get("DSTRAIN_DATA") or REPOSITORY.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no real data in {folder}; set DSTRAIN_DATA")
    return folder


@pytest.fixture(autouse=True)
def cache_of_each_test(fresh_cache: Path) -> None:
    """Each test has a cache of its own: keys of stores are the same in several of them."""


@pytest.fixture
def write_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes records, or raw bytes, as the lines of a .jsonl file in the working folder."""
    monkeypatch.chdir(tmp_path)

    def write(rows: list[Any], name: str = "train.jsonl") -> Path:
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        Path(name).write_bytes(b"\n".join(lines) + b"\n")
        return Path(name)

    return write


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A small byte-level tokenizer without a template."""
    from dstrain.data.encoding.trained_tokenizer import train_tokenizer

    words = "the quick brown fox jumps over the lazy dog and answers a question about rivers"
    return train_tokenizer([words, words.title(), "Human: Assistant: yes no"], 400)
