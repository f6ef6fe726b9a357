"""Record source for Hugging Face Hub datasets, downloaded once and memory-mapped."""

from __future__ import annotations

import hashlib
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dstrain.data.sources.base import BaseSource, Columns, drop_added_nulls
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
    """Return whether the text may be `org/name`; names with a common file extension are not."""
    is_file = file_extension(text).endswith(_FILE_EXTENSIONS)
    matches = bool(_HUB_NAME_PATTERN.fullmatch(text))
    return len(text) <= _MAX_NAME_LENGTH and matches and not is_file and ".." not in text


@dataclass(frozen=True)
class HubSplit:
    """A split of a configuration of a dataset."""

    dataset: str
    """`org/name`."""
    split: str = "train"
    config_name: str | None = None
    """Configuration; None if the dataset has only one."""

    def __str__(self) -> str:
        """Return `org/name`, `org/name:test` or `org/name:test:configuration`.

        `parse_hub_split` is the inverse.
        """
        if self.config_name is not None:
            return f"{self.dataset}:{self.split}:{self.config_name}"
        return self.dataset if self.split == "train" else f"{self.dataset}:{self.split}"


def parse_hub_split(text: str) -> HubSplit | None:
    """Return the split named `org/name[:split[:configuration]]`; None for other texts."""
    dataset, *rest = text.split(":", 2)
    if not is_hub_name(dataset) or "" in rest:
        return None
    return HubSplit(dataset, *rest)


class HubSource(BaseSource):
    """The rows of a split, memory-mapped from the cache of the `datasets` library. Thread-safe.

    HF_ENDPOINT, HF_HOME, HF_TOKEN, HF_HUB_OFFLINE and HF_DATASETS_OFFLINE have the library's
    meaning. A dataset's own Python code is never run. Several processes may read the same dataset:
    the library locks its cache.
    """

    def __init__(self, hub_split: HubSplit, columns: Columns) -> None:
        super().__init__(str(hub_split), Path(), columns)
        split = _load_split(hub_split)
        if not len(split):
            raise DataError(f"{self.name} has no records; take another split")
        self._table = split.with_format("arrow")  # stored values: images are not decoded
        # The library's fingerprint identifies dataset, configuration, revision and split.
        content = f"hub {split._fingerprint} {len(split)} {split.column_names}"
        self._set_digest(hashlib.sha256(content.encode()).hexdigest(), set(split.column_names))

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename_columns(drop_added_nulls(self._table[index].to_pylist()[0]))


@cache
def _load_split(hub_split: HubSplit) -> Any:
    """Return the split as a `datasets.Dataset`, the same object throughout the process.

    A tokenizer is therefore trained on the same revision as the model. Raises DataError with the
    error of the Hub or the library.
    """
    try:
        import datasets
    except ImportError as fault:
        problem = (
            f"{hub_split.dataset} is not a local file, and reading it from the hub requires the library `datasets`"
        )
        raise DataError(f'{problem}; run pip install "dstrain[hub]"') from fault
    from dstrain.process_setup import log_stderr

    revision = None
    if not _is_offline():
        endpoint = datasets.config.HF_ENDPOINT
        revision = _fetch_revision(hub_split.dataset, endpoint)
        log_stderr(f"reading {hub_split} from {endpoint}; it is cached in {datasets.config.HF_DATASETS_CACHE}")
    # In a log file every update of a progress bar would be a line.
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
    """Return the Hub's current revision, by one request with HF_HUB_ETAG_TIMEOUT (10 seconds).

    The library alone would send six requests in half a minute before it reports that there is no
    answer, and then silently use what its cache has.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    try:
        return HfApi(endpoint=endpoint).dataset_info(dataset, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha
    except GatedRepoError as fault:
        fix = f"ask for access at {endpoint}/datasets/{dataset} and set HF_TOKEN"
        raise DataError(f"{dataset} is a gated dataset; {fix}") from fault
    except RepositoryNotFoundError as fault:
        fix = "check the name, or set HF_TOKEN if it is private"
        raise DataError(f"{dataset} is neither a local file nor a dataset on {endpoint}; {fix}") from fault
    except Exception as fault:
        answered = isinstance(fault, HfHubHTTPError) and getattr(fault, "response", None) is not None
        problem = "answers with an error" if answered else "cannot be reached"
        fix = "check the network and HF_ENDPOINT, or set HF_DATASETS_OFFLINE=1 if it was read on this host before"
        raise DataError(
            f"{dataset} is not a local file, and the hub {endpoint} {problem} ({_first_line(fault)}); {fix}"
        ) from fault


def _load_error_message(hub_split: HubSplit, error: Exception, config: Any) -> str:
    first_line = _first_line(error)
    if _is_offline() and isinstance(error, OSError):
        cache = config.HF_DATASETS_CACHE
        return (
            f"{hub_split.dataset} is not a local file, the hub is switched off (HF_HUB_OFFLINE or "
            f"HF_DATASETS_OFFLINE), and {cache} does not contain it; read it once with the hub switched on, "
            "or name a file"
        )
    # The library lists the configurations in the text of its ValueError.
    if isinstance(error, ValueError) and (listed := re.search(r"\[('.*?')\]", str(error))):
        problem = (
            "has several configurations"
            if hub_split.config_name is None
            else f"has no configuration '{hub_split.config_name}'"
        )
        return (
            f"{hub_split.dataset} {problem}, it has {listed[1]}; write {{path: {hub_split.dataset}, name: ONE_OF_THEM}}"
        )
    if "scripts are no longer supported" in first_line:
        return (
            f"{hub_split.dataset} needs a Python script of its own, which is never run; use a copy in parquet or jsonl"
        )
    return (
        f"{hub_split.dataset} cannot be read from the hub ({first_line}); fix that, or download it and name its files"
    )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
