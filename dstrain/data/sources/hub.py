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

from dstrain.data.sources.base import BaseSource
from dstrain.data.sources.files import file_extension
from dstrain.errors import DataError

_HUB_NAME_PATTERN = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_MAX_NAME_LENGTH = 96 + 1 + 96
_FILE_EXTENSIONS = (
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
    usual = file_extension(text).endswith(_FILE_EXTENSIONS)
    return len(text) <= _MAX_NAME_LENGTH and bool(_HUB_NAME_PATTERN.fullmatch(text)) and not usual and ".." not in text


@dataclass(frozen=True)
class HubSplit:
    """One split of one configuration of a dataset."""

    dataset: str
    """`org/name`."""
    split: str = "train"
    config_name: str | None = None
    """The configuration; None where the dataset has only one."""

    def __str__(self) -> str:
        """`org/name`, `org/name:test` or `org/name:test:configuration`; `parse_part` reads it back."""
        if self.config_name is not None:
            return f"{self.dataset}:{self.split}:{self.config_name}"
        return self.dataset if self.split == "train" else f"{self.dataset}:{self.split}"


def parse_hub_split(text: str) -> HubSplit | None:
    """The part that `org/name:split:configuration` means; the last two may be left out. None for other texts."""
    dataset, *rest = text.split(":", 2)
    if not is_hub_name(dataset) or "" in rest:
        return None
    return HubSplit(dataset, *rest)


class HubSource(BaseSource):
    """The rows of one split, mapped from the library's cache: nothing but the index stays in memory. Thread-safe."""

    def __init__(self, hub_split: HubSplit, columns: Mapping[str, str]) -> None:
        super().__init__(str(hub_split), Path(), columns)
        split = _load_split(hub_split)
        if not len(split):
            raise DataError(f"{self.name} has no records; take another split")
        self._table = split.with_format("arrow")  # values as they are stored: no picture is decoded
        # The library's fingerprint says dataset, configuration, revision and split.
        content = f"hub {split._fingerprint} {len(split)} {split.column_names}"
        self._set_digest(hashlib.sha256(content.encode()).hexdigest(), set(split.column_names))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename_columns(self._table[index].to_pylist()[0])

    def location(self, index: int) -> str:
        """`org/name:test[12]`: the row, from 0."""
        return f"{self.name}[{index}]"


@cache
def _load_split(hub_split: HubSplit) -> Any:
    """The split as a `datasets.Dataset`, the same for as long as the process lives: a tokenizer is trained on the very
    records that are then learnt. Raises DataError with what the hub or the library said.
    """
    try:
        import datasets
    except ImportError as fault:
        problem = f"{hub_split.dataset} is no file here, and to read it from the hub the library `datasets` is needed"
        raise DataError(f'{problem}; run pip install "dstrain[hub]"') from fault
    from dstrain.console import log_stderr

    revision = None
    if not _is_offline():
        endpoint = datasets.config.HF_ENDPOINT
        revision = _fetch_revision(hub_split.dataset, endpoint)
        log_stderr(f"reading {hub_split} from {endpoint}; it is kept in {datasets.config.HF_DATASETS_CACHE}")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        splits = datasets.load_dataset(hub_split.dataset, hub_split.config_name, revision=revision)
    except Exception as fault:
        raise DataError(_load_error_message(hub_split, fault, datasets.config)) from fault
    if hub_split.split not in splits:
        raise DataError(f"{hub_split.dataset} has no split '{hub_split.split}'; it has {', '.join(splits)}")
    return splits[hub_split.split]


def _is_offline() -> bool:
    import datasets
    import huggingface_hub

    return datasets.config.HF_HUB_OFFLINE or huggingface_hub.constants.HF_HUB_OFFLINE


def _fetch_revision(dataset: str, endpoint: str) -> str | None:
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


def _load_error_message(hub_split: HubSplit, error: Exception, config: Any) -> str:
    said = _first_line(error)
    if _is_offline() and isinstance(error, OSError):
        cache = config.HF_DATASETS_CACHE
        return (
            f"{hub_split.dataset} is no file here, the hub is switched off (HF_HUB_OFFLINE or HF_DATASETS_OFFLINE), and "
            f"{cache} does not hold it; read it once with the hub switched on, or name a file"
        )
    if isinstance(error, ValueError) and (listed := re.search(r"\[('.*?')\]", str(error))):
        problem = (
            "has several configurations"
            if hub_split.config_name is None
            else f"has no configuration '{hub_split.config_name}'"
        )
        return (
            f"{hub_split.dataset} {problem}, it has {listed[1]}; write {{path: {hub_split.dataset}, name: ONE_OF_THEM}}"
        )
    if "scripts are no longer supported" in said:
        return f"{hub_split.dataset} is read by a Python file of its own, which is never run; take a copy in parquet or jsonl"
    return f"{hub_split.dataset} cannot be read from the hub ({said}); fix that, or download it and name its files"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
