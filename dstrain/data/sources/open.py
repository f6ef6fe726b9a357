"""Opening of record sources: files, folders of files, and datasets of the Hub."""

from __future__ import annotations

import difflib
import errno
import hashlib
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dstrain.cache import file_digest, file_state, load_file_result, save_file_result
from dstrain.config.schema import DatasetConfig
from dstrain.data.sources.base import BaseSource, Columns, ConcatSource, LazySource, Source
from dstrain.data.sources.files import SOURCE_TYPES, check_file_kind, file_extension
from dstrain.data.sources.hub import HubSource, HubSplit, is_hub_name, parse_hub_split
from dstrain.errors import DataError, Fault
from dstrain.files import check_path_encoding, describe_unread, display_path, list_entries, match_files, not_file_reason


def _list_files(folder: Path) -> list[Path]:
    """Return all files of a folder and its subfolders in the order of their relative paths, without hidden ones."""
    try:
        files = [file for file in folder.rglob("*") if file.is_file()]
    except OSError as fault:
        raise DataError(f"{display_path(folder)} cannot be read ({fault.strerror}); check its permissions") from fault
    return sorted(
        (file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)),
        key=lambda file: file.relative_to(folder).as_posix(),
    )


def ends_with(path: Path, endings: tuple[str, ...]) -> bool:
    """Return whether a file's name has one of the endings, before a .gz too."""
    return path.name.lower().removesuffix(".gz").endswith(endings)


class FolderSource(BaseSource):
    """Files as records `{"path": ...}`: those of a folder and its subfolders by relative path, or a single one.

    The digest covers their names and contents.
    """

    def __init__(self, path: Path, columns: Columns, endings: tuple[str, ...]) -> None:
        """`endings`: of the names of the files; each may be followed by .gz. Hidden files are left out.

        Raises DataError for a file or a folder that cannot be read.
        """
        folder = path if path.is_dir() else path.parent
        super().__init__(path.name, folder, columns)
        listed = _list_files(path) if path.is_dir() else [path]
        self.files = [file for file in listed if ends_with(file, endings)]
        for file in self.files:
            check_path_encoding(str(file))
        unread = describe_unread(file.name for file in listed if not ends_with(file, endings))
        self.unread = f"{display_path(path)}: {unread}" if unread else ""
        digest = hashlib.sha256()
        for file in self.files:
            try:
                digest.update(os.fsencode(f"{file.relative_to(folder).as_posix()}\0{file_digest(file)}\n"))
            except OSError as fault:
                problem = f"{display_path(file)} cannot be read ({fault.strerror})"
                raise DataError(f"{problem}; check its permissions") from fault
        self._set_digest(digest.hexdigest(), {"path"})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self._rename_columns({"path": str(self.files[index])})

    def location(self, index: int) -> str:
        return display_path(self.files[index])


_SHARD = re.compile(r"[-._]([0-9]+)[-_]of[-_]([0-9]+)(?=[-._])")


def find_shards(pattern: Path) -> list[Path]:
    """Return the files that a pattern means, by name; [] for a name without `*`.

    Raises DataError where one cannot be read, where names that count (`train-00000-of-00003.parquet`) lack a shard or
    have one twice, and where a file exists compressed too.
    """
    files, groups = match_files(pattern), dict[tuple[str, str], dict[int, list[int]]]()
    names = {file.name for file in files}
    for file in files:
        if reason := not_file_reason(file):
            raise DataError(
                Fault(display_path(file), f"{reason}, and {pattern.name} fits it", "remove it, or name the others")
            )
        if f"{file.name}.gz" in names:
            raise DataError(
                Fault(display_path(file), "exists compressed too (.gz)", f"name one of them in place of {pattern.name}")
            )
        if found := _SHARD.search(file.name):
            totals = groups.setdefault((file.name[: found.start()], file.name[found.end() :]), {})
            totals.setdefault(int(found[2]), []).append(int(found[1]))
    for (stem, _), totals in sorted(groups.items()):
        total, numbers = next(iter(totals.items()))
        first = min(1, min(numbers))
        missing = next((n for n in range(first, first + total) if n not in numbers), None)
        if len(totals) > 1:
            problem = f"holds shards of {' and of '.join(map(str, sorted(totals)))} files of {stem!r}"
        elif missing is not None:
            problem = f"the files lack shard {missing} of {total} of {stem!r}"
        elif len(numbers) != total:
            problem = f"holds {len(numbers)} files where the names of {stem!r} count {total}"
        else:
            continue
        raise DataError(
            Fault(display_path(pattern), problem, "download all of one version, or name the files one by one")
        )
    return files


READER_VERSION = 4
"""Increase it when the same file would give other records or another digest: cached results are then ignored."""

_CONVERSIONS = {
    ".csv": "; convert it: python -c \"import pandas; pandas.read_csv('IN.csv').to_json('OUT.jsonl', orient='records', lines=True)\"",
    ".tsv": "; convert it: python -c \"import pandas; pandas.read_csv('IN.tsv', sep='\\t').to_json('OUT.jsonl', orient='records', lines=True)\"",
    ".xlsx": "; convert it: python -c \"import pandas; pandas.read_excel('IN.xlsx').to_json('OUT.jsonl', orient='records', lines=True)\"",
    ".feather": "; convert it: python -c \"import pandas; pandas.read_feather('IN.feather').to_parquet('OUT.parquet')\"",
    ".txt": '; write each document as one line of a .jsonl file: {"text": …}',
}
"""File extension -> how to make a data file of it, for the error message."""
SourceTypes = Mapping[str, Callable[[Path, Columns], Source]]


def _suggest_conversion(path: Path) -> str:
    return _CONVERSIONS.get(file_extension(path.name).removesuffix(".gz"), "")


def open_source(
    path_or_config: str | Path | DatasetConfig,
    columns: Columns | None = None,
    source_types: SourceTypes | None = None,
    suggest_conversion: Callable[[Path], str] = _suggest_conversion,
) -> Source:
    """Open a .jsonl, .json (both also .gz) or .parquet file, several by a pattern (`train-*.parquet`), or a dataset of the Hub.

    `columns` renames columns of the data to keys of a known form. A recipe's DatasetConfig gives split and
    configuration, and `columns` of its own, which take the place of the argument; in a string they may follow the
    dataset's name: `org/name:test`.
    `source_types`: readers by extension, of a task that reads other files too. `suggest_conversion`: file of another
    extension -> how to make a data file of it, for the error message.
    A recipe's `media_dir` takes the place of the file's folder. Raises DataError.
    """
    if isinstance(path_or_config, DatasetConfig) and path_or_config.columns is not None:
        columns = path_or_config.columns
    known_types = SOURCE_TYPES if source_types is None else source_types
    source = _open(path_or_config, columns or {}, known_types, suggest_conversion)
    if isinstance(path_or_config, DatasetConfig) and (media_dir := path_or_config.media_dir) is not None:
        if not Path(media_dir).is_dir():
            raise DataError(Fault("media_dir", f"{media_dir} is no folder here", "name the folder of the images"))
        for part in source.sources if isinstance(source, ConcatSource) else [source]:
            assert isinstance(part, BaseSource | LazySource)
            part.base_dir = Path(media_dir)
    return source


def _open(
    path_or_config: str | Path | DatasetConfig,
    columns: Columns,
    source_types: SourceTypes,
    suggest_conversion: Callable[[Path], str],
) -> Source:
    path = Path(path_or_config.path if isinstance(path_or_config, DatasetConfig) else path_or_config)
    try:
        path = path.expanduser()
    except RuntimeError as fault:
        raise DataError(f"{path} begins with ~, and no home folder is known; write it out, or set HOME") from fault
    try:
        # A local file wins over a dataset of the same name.
        if path.is_file():
            return _open_file(path, columns, source_types, suggest_conversion)
        if files := find_shards(path):
            return ConcatSource([_open_file(file, columns, source_types, suggest_conversion) for file in files])
    except OSError as fault:
        fix = "raise `ulimit -n`" if fault.errno == errno.EMFILE else "check the path and its permissions"
        raise DataError(f"{path} cannot be read ({fault.strerror}); {fix}") from fault
    hub_split = _find_hub_split(path_or_config)
    if hub_split is None or path.is_dir():
        raise DataError(_missing_file_message(path, source_types))
    return HubSource(hub_split, columns)


def _find_hub_split(path_or_config: str | Path | DatasetConfig) -> HubSplit | None:
    """Return the named split of a dataset of the Hub; None where the name cannot be a dataset's."""
    if not isinstance(path_or_config, DatasetConfig):
        return parse_hub_split(str(path_or_config))
    config = path_or_config
    # Only a recipe can name a split in a key of its own; the default differs for train and eval.
    if is_hub_name(config.path):
        return HubSplit(config.path, config.split or config.default_split, config.name)
    return parse_hub_split(config.path)


def _open_file(
    path: Path, columns: Columns, source_types: SourceTypes, suggest_conversion: Callable[[Path], str]
) -> Source:
    kind = source_types.get(file_extension(path.name))
    if kind is None:
        ending = file_extension(path.name)
        fix = suggest_conversion(path)
        raise DataError(
            f"{display_path(path)} ends in '{ending}'; data files end in {_format_extensions(source_types)}{fix}"
        )
    if not path.stat().st_size:
        raise DataError(f"{display_path(path)} is empty; check the path or regenerate the file")
    check_file_kind(path)

    def load() -> Source:
        source = kind(path, columns)
        if not len(source) and not source.bad_rows:
            raise DataError(
                f"{display_path(path)} has no records, only blank lines; check the path or regenerate the file"
            )
        return source

    result_name = {"records": READER_VERSION, "columns": dict(columns)}
    # A start that finds its tokens in the cache then opens no data file at all.
    if (known := load_file_result(path, result_name)) is not None:
        return LazySource(path, load, *known)
    read_start, state = time.time_ns(), file_state(path)
    source = load()
    save_file_result(
        path, result_name, [source.digest, len(source), getattr(source, "missing_columns", {})], read_start, state
    )
    return source


def _format_extensions(source_types: SourceTypes) -> str:
    *most, last = source_types
    return f"{', '.join(most)} or {last}"


def _missing_file_message(path: Path, source_types: SourceTypes) -> str:
    if path.is_dir():
        kinds = sorted({file_extension(one.name) for one in list_entries(path)} & {*source_types})
        several = f" ({path / ('*' + kinds[0])} for all of them)" if len(kinds) == 1 else ""
        return f"{path} is a folder; name a .jsonl, .json or .parquet file in it{several}"
    if reason := not_file_reason(path):
        return f"{path} {reason}; name a .jsonl, .json or .parquet file"
    folder = path.parent
    names = sorted(entry.name for entry in list_entries(folder) if entry.is_file())
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    similar = f"similar names: {', '.join(near)}" if near else f"{folder} has no similar name, or does not exist"
    return f"there is no file {path} (looked from {Path.cwd()}; {similar}); check the path"
