"""Datasets of the Hugging Face hub, read through the `datasets` library: downloaded once, then mapped from disk.

HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_DATASETS_OFFLINE mean what they mean there. A dataset's own Python
is never run. Several processes may read the same one at the same time: the library locks its cache.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.data.sources.base import Rows
from dstrain.data.sources.files import ending
from dstrain.errors import DataError

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_LONGEST = 96 + 1 + 96
_FILES = (
    ".jsonl",
    ".json",
    ".parquet",
    ".csv",
    ".tsv",
    ".txt",
    ".ts",
    ".yaml",
    ".yml",
    ".arrow",
    ".zip",
    ".gz",
    ".zst",
)


def is_hub_name(text: str) -> bool:
    """True for `org/name`, which a file with one of the usual endings never is."""
    usual = ending(text).endswith(_FILES)
    return len(text) <= _LONGEST and bool(_NAME.fullmatch(text)) and not usual and ".." not in text


@dataclass(frozen=True)
class Part:
    """One split of one configuration of a dataset."""

    dataset: str
    """`org/name`."""
    split: str = "train"
    name: str | None = None
    """The configuration; None where the dataset has only one."""

    def __str__(self) -> str:
        """`org/name`, `org/name:test` or `org/name:test:configuration`; `parse_part` reads it back."""
        if self.name is not None:
            return f"{self.dataset}:{self.split}:{self.name}"
        return self.dataset if self.split == "train" else f"{self.dataset}:{self.split}"


def parse_part(text: str) -> Part | None:
    """The part that `org/name:split:configuration` means; the last two may be left out. None for other texts."""
    dataset, *rest = text.split(":", 2)
    if not is_hub_name(dataset) or "" in rest:
        return None
    return Part(dataset, *rest)


class HubRows(Rows):
    """The rows of one split, mapped from the library's cache: nothing but the index stays in memory. Thread-safe."""

    def __init__(self, part: Part, columns: Mapping[str, str]) -> None:
        super().__init__(str(part), Path(), columns)
        split = _load(part)
        if not len(split):
            raise DataError(f"{self.name} has no records; take another split")
        self._table = split.with_format("arrow")  # values as they are stored: no picture is decoded
        # The library's fingerprint says dataset, configuration, revision and split.
        content = f"hub {split._fingerprint} {len(split)} {split.column_names}"
        self._settle(hashlib.sha256(content.encode()).hexdigest(), set(split.column_names))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename(self._table[index].to_pylist()[0])

    def where(self, index: int) -> str:
        """`org/name:test[12]`: the row, from 0."""
        return f"{self.name}[{index}]"


@cache
def _load(part: Part) -> Any:
    """The split as a `datasets.Dataset`, the same for as long as the process lives: a tokenizer is trained on the very
    records that are then learnt. Raises DataError with what the hub or the library said.
    """
    try:
        import datasets
    except ImportError as fault:
        problem = f"{part.dataset} is no file here, and to read it from the hub the library `datasets` is needed"
        raise DataError(f'{problem}; run pip install "dstrain[hub]"') from fault
    from dstrain.data.cache.token_store import say

    revision = None
    if not _offline():
        endpoint = datasets.config.HF_ENDPOINT
        revision = _ask(part.dataset, endpoint)
        say(f"reading {part} from {endpoint}; it is kept in {datasets.config.HF_DATASETS_CACHE}")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(part.dataset, part.name, revision=revision)
    except Exception as fault:
        raise DataError(_refusal(part, fault, datasets.config)) from fault
    if part.split not in splits:
        raise DataError(f"{part.dataset} has no split '{part.split}'; it has {', '.join(splits)}")
    return splits[part.split]


def _offline() -> bool:
    import datasets
    import huggingface_hub

    return datasets.config.HF_HUB_OFFLINE or huggingface_hub.constants.HF_HUB_OFFLINE


def _ask(dataset: str, endpoint: str) -> str | None:
    """The revision that the hub has now. It is asked once, and waited for as HF_HUB_ETAG_TIMEOUT says (10 seconds).

    The library would ask six times over half a minute before it says that nobody answers, and then take what its cache
    has without being told to.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return HfApi(endpoint=endpoint).dataset_info(dataset, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    except GatedRepoError as fault:
        mend = f"ask for access at {endpoint}/datasets/{dataset} and set HF_TOKEN"
        raise DataError(f"{dataset} is given only to those who were let in; {mend}") from fault
    except RepositoryNotFoundError as fault:
        mend = "check the name, or set HF_TOKEN where it is private"
        raise DataError(f"{dataset} is no file here and no dataset on {endpoint}; {mend}") from fault
    except Exception as fault:
        answered = isinstance(fault, HfHubHTTPError) and getattr(fault, "response", None) is not None
        problem = "answers with an error" if answered else "cannot be reached"
        mend = "check the network and HF_ENDPOINT, or set HF_DATASETS_OFFLINE=1 where it was read here before"
        raise DataError(
            f"{dataset} is no file here, and the hub {endpoint} {problem} ({_first_line(fault)}); {mend}"
        ) from fault


def _refusal(part: Part, fault: Exception, config: Any) -> str:
    said = _first_line(fault)
    if _offline() and isinstance(fault, OSError):
        cache = config.HF_DATASETS_CACHE
        return (
            f"{part.dataset} is no file here, the hub is switched off (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE), and "
            f"{cache} does not hold it; read it once with the hub switched on, or name a file"
        )
    if isinstance(fault, ValueError) and (listed := re.search(r"\[('.*?')\]", str(fault))):
        problem = "has several configurations" if part.name is None else f"has no configuration '{part.name}'"
        return f"{part.dataset} {problem}, it has {listed[1]}; write {{path: {part.dataset}, name: ONE_OF_THEM}}"
    if "scripts are no longer supported" in said:
        return (
            f"{part.dataset} is read by a Python file of its own, which is never run; take a copy in parquet or jsonl"
        )
    return f"{part.dataset} cannot be read from the hub ({said}); fix that, or download it and name its files"


def _first_line(fault: Exception) -> str:
    lines = str(fault).strip().splitlines()
    return f"{type(fault).__name__}: {lines[0].rstrip('.')}" if lines else type(fault).__name__
