"""Token stores: memory-mapped columns of examples, their writer, datasets of their rows."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dstrain.cache import get_or_build, read_cached_json, read_manifest
from dstrain.data.dataset import SequenceLengths, SequenceLengthsFunction, count_selected
from dstrain.data.records import BadRow, Example
from dstrain.data.vision.images import IMAGE_INDEX_FILE, ImageIndex
from dstrain.errors import ColumnError
from dstrain.files import load_npy, stat_or_none

META_FILE = "meta.json"
"""File of a store's folder with its columns and its report."""
GROUP = "sample.group"
"""Key of an example's group. No column can have this name: names of columns are identifiers."""
_SCALAR_TYPES = {int: "<i8", float: "<f8"}
_RAGGED_TYPES = {int: "<i4", float: "<f4"}
_FLAT = "a column holds numbers or flat lists of numbers"
_NUMBERS = f"{_FLAT}; encode text as token ids or bytes, such as [*text.encode()]"


def to_stored(examples: Sequence[Example]) -> list[Example]:
    """Return the examples with their values as `read_column` returns them. Raises ColumnError."""
    return [{name: read_column(name, [example])[0] for name in example} for example in examples]


def read_column(name: str, examples: Sequence[Example]) -> list[Any]:
    """Return a column's values as they are stored: an int, a float, or a 1-D array of int32 or float32 of each example.

    An empty list has no type of its own. Raises ColumnError.
    """
    values = []
    for example in examples:
        try:
            values.append(_read_value(example[name]))
        except ValueError as fault:
            raise ColumnError(name, example["sample"], str(fault)) from None
    return values


def check_columns(examples: Sequence[Example], names: Collection[str]) -> None:
    """Raise ColumnError for the first example whose columns are not these."""
    for example in examples:
        for name in (
            *(name for name in names if name not in example),
            *(name for name in example if name not in names),
        ):
            change = "is missing, and the examples before it have it" if name in names else "is new"
            problem = f"{change}; give every example the same columns"
            raise ColumnError(name, example["sample"], problem)


def _read_value(value: Any) -> int | float | np.ndarray:
    """Return a value of an example as it is stored. Raises ValueError."""
    if isinstance(value, float):
        return float(value)
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        raise ValueError(
            f"is {_describe(value)}; {_FLAT}: flatten it, and store the lengths in another column"
        ) from None
    except Exception as fault:  # of the conversion of another library's array
        raise ValueError(f"is {_describe(value)}, which is no array of numbers ({fault}); {_FLAT}") from None
    if array.ndim > 1:
        raise ValueError(f"is {_describe(value)}; {_FLAT}: flatten it, and store the shape in another column")
    if array.ndim and not array.size:
        return np.zeros(0, dtype=np.int32)
    if array.dtype.kind in "bui":
        limits = np.iinfo(np.int32 if array.ndim else np.int64)
        least, most = int(array.min()), int(array.max())
        if least < limits.min or most > limits.max:
            bits = "a list holds integers of 32 bits" if array.ndim else "a number is an integer of 64 bits"
            raise ValueError(f"has {least if least < limits.min else most}, and {bits}; store it in parts")
        return array.astype(np.int32) if array.ndim else int(array)
    if array.dtype.kind == "f":
        if not array.ndim:
            return float(array)
        with np.errstate(over="ignore"):
            narrow = array.astype(np.float32)
        if (np.isinf(narrow) & ~np.isinf(array)).any():
            largest = float(np.abs(array[~np.isinf(array)]).max())
            raise ValueError(f"has {largest:g}, and a list holds floats of 32 bits; scale it")
        return narrow
    if array.dtype.kind == "O" and _has_large_integers(value):
        raise ValueError("has an integer that does not fit; a list holds 32 bits, a number 64: store it in parts")
    raise ValueError(f"is {_describe(value)}; {_NUMBERS}")


def _has_large_integers(value: Any) -> bool:
    values = value if isinstance(value, list | tuple) else [value]
    return all(isinstance(one, int) for one in values)


def _describe(value: Any) -> str:
    """Return what a value is: `a str`, `a list of str`."""
    kind = type(value).__name__
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} with {value.ndim} dimensions"
    if isinstance(value, list | tuple):
        inner = [type(one).__name__ for one in value]
        return f"a {kind} of {' and '.join(dict.fromkeys(inner))}"
    return "None" if value is None else f"a {kind}"


@dataclass(frozen=True)
class TokenColumns:
    """The ragged columns of a store that hold sequences of tokens, from which the costs of samples follow."""

    names: tuple[str, ...] = ()
    """Empty: the lengths of samples are unknown."""
    is_pair: bool = False
    """True where the sequences of an example are rows of one batch; else each has a forward pass of its own."""
    prefix: str | None = None
    """Column with the number of tokens that all sequences of an example begin with."""


@dataclass
class BuildReport:
    """Counts and bad records of a source, as its store was built."""

    read: int = 0
    kept: int = 0
    bad: list[BadRow] = field(default_factory=list)
    cuts: dict[str, int] = field(default_factory=dict)
    """Name of a truncation -> number of examples."""
    notes: list[str] = field(default_factory=list)
    """Sentences of a `DerivedSource` on how its records were made."""
    sizes: list[int] = field(default_factory=list)
    """Records of each source, so that none needs to be opened where the store is complete; empty: unknown."""
    columns: dict[str, dict[str, Any]] = field(default_factory=dict)
    """File -> `ColumnReport.to_json` of its records: images, columns that were read, columns that were not."""
    names: list[str] = field(default_factory=list)
    """Names of the files or datasets in `bad` and `columns`, in their order."""

    def rename(self, names: Sequence[str]) -> None:
        """Let messages name these files: a store is found by its content, and serves copies of the files too."""
        if len(names) != len(self.names):
            return
        changed = {old: new for old, new in zip(self.names, names, strict=True) if old != new}

        def name_now(location: str) -> str:
            file = re.sub(r"(:\d+|\[\d+\])$", "", location)
            return changed.get(file, file) + location[len(file) :]

        self.bad = [BadRow(name_now(location), reason) for location, reason in self.bad]
        self.columns = {name_now(file): report for file, report in self.columns.items()}
        self.names = [*names]


def describe_report(report: BuildReport) -> dict[str, Any]:
    """Return the counts of a report and its first bad records, for events.jsonl."""
    counts = asdict(report)
    bad, notes = counts.pop("bad"), counts.pop("notes")
    del counts["sizes"], counts["names"]
    counts |= {"notes": notes} if notes else {}
    skipped = [f"{where}: {reason}" for where, reason in bad[:100]]
    return {**counts, "skipped": len(bad), "skipped_records": skipped}


class TokenStore:
    """Read-only examples: ragged columns of int32 or float32, numbers, and the indices of their records. Thread-safe.

    With an image index, the column `images` holds lazy images instead of positions; no example has the column where
    no example of the store has an image.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder that `load_or_build_store` made. Raises ValueError, KeyError or OSError."""
        manifest, meta = read_manifest(folder), read_cached_json(folder / META_FILE)
        self.folder = folder
        self._sizes = {name: int(file["size"]) for name, file in manifest["files"].items()}
        columns = {name: file["sha256"] for name, file in manifest["files"].items() if name.endswith(".npy")}
        columns.pop(f"{GROUP}.npy", None)  # hashes of prompts and image paths, of which only their equality counts
        self.digest = hashlib.sha256(json.dumps(columns, sort_keys=True).encode()).hexdigest()
        """Equal for equal columns, wherever the data and its images are."""
        self.report = BuildReport(**{**meta["report"], "bad": [BadRow(*row) for row in meta["report"]["bad"]]})
        self._count = int(meta["count"])
        self.record_indices = open_column(folder / "sample.npy")
        self._scalars = {name: open_column(folder / f"{name}.npy") for name in meta["scalars"]}
        self._ragged = {
            name: (open_column(folder / f"{name}.npy"), open_column(folder / f"{name}.ends.npy"))
            for name in meta["ragged"]
        }
        self.groups = open_column(folder / f"{GROUP}.npy") if meta["has_groups"] else None
        """(count,) group of each row's record, where `prepare` was given one: equal for records that belong together."""
        tokens = TokenColumns(**manifest["key"].get("token_columns", {}))
        self.token_columns = replace(tokens, names=tuple(name for name in tokens.names if name in self._ragged))
        self.image_index = ImageIndex(folder) if IMAGE_INDEX_FILE in manifest["files"] else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example: arrays and numbers by column, and `sample`, the index of its record."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        example: dict[str, Any] = {"sample": int(self.record_indices[index])}
        for name, (values, ends) in self._ragged.items():
            example[name] = values[ends[index - 1] if index else 0 : ends[index]]
        if self.image_index is not None:
            shown = [self.image_index[int(position)] for position in example.pop("images")]
            example |= {"images": shown} if len(self.image_index) else {}
        return example | {name: values[index].item() for name, values in self._scalars.items()}

    def find_change(self) -> str | None:
        """Return which of the store's files was changed after the store was opened, as a clause, by its size.

        A file that was removed is still mapped, with its content.
        """
        for name, size in self._sizes.items():
            found = stat_or_none(self.folder / name)
            if found is not None and found.st_size != size:
                return f"{self.folder / name} was changed while it was in use"
        return None

    @property
    def columns(self) -> list[str]:
        """Names of the columns of an example."""
        return [*self._ragged, *self._scalars]

    def scalar_column(self, name: str) -> np.ndarray:
        """Return a column of numbers, (count,) int64 or float64."""
        return self._scalars[name]

    def column_lengths(self, column: str) -> np.ndarray:
        """Return the length of every example's sequence in a ragged column, (count,)."""
        return np.diff(self._ragged[column][1], prepend=0)

    def max_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the length of the longest token sequence of each of these rows, (N,) -> (N,), image tokens included."""
        return np.max([self._row_lengths(name, rows) for name in self.token_columns.names], axis=0)

    @property
    def sequence_lengths(self) -> SequenceLengthsFunction | None:
        """The lengths of the sequences that rows have in a batch: of both answers of a pair, else of the longest."""
        return self._sequence_lengths if self.token_columns.names else None

    def _sequence_lengths(self, rows: np.ndarray) -> SequenceLengths:
        columns = self.token_columns
        if not columns.is_pair:
            return SequenceLengths(self.max_lengths(rows)[:, None], np.zeros(len(rows), dtype=np.int64))
        sides = np.stack([self._row_lengths(side, rows) for side in columns.names], axis=1)
        shared = np.zeros(len(rows)) if columns.prefix is None else self._scalars[columns.prefix][rows]
        return SequenceLengths(sides, shared.astype(np.int64))

    def _row_lengths(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Return the length of a ragged column in each of these rows, (N,), without reading all rows."""
        ends = self._ragged[column][1]
        # Row 0 reads the last end, which np.where drops.
        return np.asarray(ends[rows] - np.where(rows > 0, ends[rows - 1], 0))

    def summarize(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the number of tokens, the longest sequence and the images of these rows, (N,)."""
        lengths = [self.column_lengths(name)[rows] for name in self.token_columns.names]
        counts = {"tokens": int(np.sum(lengths)), "longest": int(np.max(lengths, initial=0))} if lengths else {}
        summary: dict[str, Any] = {**counts, "tokens_folder": str(self.folder)}
        if self.image_index is None:
            return summary
        images = {image for row in rows.tolist() for image in self[row].get("images", ())}
        copies = sum(image.has_copy for image in images)
        return summary | ({"images": len(images), "copies": copies} if images else {})

    def count_per_source(self, source_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the number of examples of each source in the store, given the sources' numbers of records."""
        # Record indices ascend, and those of a source are adjacent.
        ends = np.searchsorted(self.record_indices, np.cumsum((0, *source_sizes)))
        return tuple(int(count) for count in np.diff(ends))


Build = Callable[[BuildReport], Iterable[Sequence[Example]]]
"""Yields examples in chunks, filling in the report as it goes."""


def load_or_build_store(
    key: Mapping[str, Any],
    build: Build,
    write_extra: Callable[[Path], object] = lambda folder: None,
) -> TokenStore:
    """Return the store under this key, built first where it is not in the cache, or its images have changed.

    `write_extra` writes other files into the store's folder, once all examples are written.
    """
    return get_or_build(
        "tokens",
        key,
        partial(_write_store, build=build, write_extra=write_extra),
        TokenStore,
        find_change=lambda store: None if store.image_index is None else store.image_index.find_change(),
    )


def _write_store(folder: Path, build: Build, write_extra: Callable[[Path], object]) -> None:
    """Write the examples of `build` into an empty folder."""
    report, columns = BuildReport(), ColumnWriter(folder)
    for chunk in build(report):
        columns.append(chunk)
    meta = {**columns.close(), "report": asdict(report)}
    write_extra(folder)
    (folder / META_FILE).write_text(json.dumps(meta), encoding="utf-8")


def open_column(path: Path) -> np.ndarray:
    """Return the array of a .npy file, mapped into memory."""
    # Without the view, every slice of a memmap pays for building a memmap; an empty file cannot be mapped.
    if path.stat().st_size <= 128:
        return load_npy(path)
    return load_npy(path, "r").view(np.ndarray)


@dataclass(frozen=True)
class AlignedStore:
    """The records of a dataset's store, encoded for another model."""

    store: TokenStore
    rows: np.ndarray
    """(M,) rows of `store` that hold the records of the M rows of the dataset's store."""


@dataclass(frozen=True)
class TokenizedDataset:
    """Rows of a token store, as a `Dataset`. Thread-safe."""

    store: TokenStore
    rows: np.ndarray
    """(N,) rows of the store, those of each source together."""
    sizes: tuple[int, ...]
    """Examples of each source."""
    weights: tuple[float, ...]
    """Times that an epoch uses each source."""
    output_columns: Mapping[str, np.ndarray] = field(default_factory=dict, repr=False)
    """Name -> a number for each row of the store, or an array for each, as objects: outputs of frozen models."""
    aligned_stores: Mapping[str, AlignedStore] = field(default_factory=dict, repr=False)
    """Name of a frozen model with a tokenizer of its own -> the same records as it reads them."""
    counts: Mapping[str, int | str] = field(default_factory=dict)
    """Further counts for the report, and `selection`: a phrase on the samples that a task has chosen."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = int(self.rows[index])
        outputs = {name: column[row] for name, column in self.output_columns.items()}
        return self.store[row] | {
            name: value if isinstance(value, np.ndarray) else float(value) for name, value in outputs.items()
        }

    @property
    def sequence_lengths(self) -> SequenceLengthsFunction | None:
        """The tokens of all sequences of examples."""
        lengths = self.store.sequence_lengths
        return None if lengths is None else lambda ids: lengths(self.rows[ids])

    @property
    def image_digest(self) -> str | None:
        return None if self.store.image_index is None else self.store.image_index.digest

    def summarize(self) -> dict[str, Any]:
        return {"samples": len(self), **self.store.summarize(self.rows), **self.report}

    @property
    def report(self) -> dict[str, Any]:
        """Counts of records read, used and skipped, for events.jsonl."""
        return {**describe_report(self.store.report), **self.counts}

    def column(self, name: str) -> np.ndarray:
        """Return a number for each example, (N,)."""
        values = self.output_columns.get(name)
        return (self.store.scalar_column(name) if values is None else values)[self.rows]

    def select(self, keep: np.ndarray) -> TokenizedDataset:
        """Return the examples where `keep`, (N,) bool, is true."""
        return replace(self, rows=self.rows[keep], sizes=count_selected(keep, self.sizes))


class ColumnFile:
    """A .npy file of unknown length: `close` rewrites the header in the space that numpy reserves for it."""

    def __init__(self, path: Path, dtype: str) -> None:
        self.path, self.dtype, self.count = path, np.dtype(dtype), 0
        self._file: BinaryIO = path.open("wb")
        self._write_header()

    def _write_header(self) -> int:
        shape = {"descr": self.dtype.str, "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, shape)
        return self._file.tell()

    def append(self, values: np.ndarray) -> None:
        self._file.write(np.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.count += len(values)

    def close(self) -> None:
        """Write the header, and close the file."""
        size = self._file.tell()
        self._file.seek(0)
        header = self._write_header()
        assert header + self.count * self.dtype.itemsize == size, "the header grew over the data"
        self._file.close()


class ColumnWriter:
    """Writes a column file per key of the examples.

    The first example determines the columns, and the first value of a column its type: int or float. A list is stored
    in 32 bits per value, a number in 64. Raises ColumnError for a value of another kind, since a conversion would
    change it; integers in a column of floats are floats.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._scalars = {"sample": ColumnFile(folder / "sample.npy", "<i8")}
        self._ragged: dict[str, tuple[ColumnFile | None, ColumnFile]] = {}
        """Values, whose file is made for the first value, and the end of each row."""

    def append(self, chunk: Sequence[Example]) -> None:
        if not chunk:
            return
        if not self._scalars["sample"].count:
            self._create_columns(chunk[0])
        names = (*self._scalars, *self._ragged)
        check_columns(chunk, names)
        for name in names:
            values = read_column(name, chunk)
            for example, value in zip(chunk, values, strict=True):
                if isinstance(value, np.ndarray) != (name in self._ragged):
                    now, before = ("a list", "numbers") if name in self._scalars else ("a number", "lists")
                    problem = f"is {now}, and the examples before it have {before}; give every example the same"
                    raise ColumnError(name, example["sample"], problem)
            if (column := self._scalars.get(name)) is not None:
                self._check_kinds(name, column, chunk, [isinstance(value, float) for value in values])
                column.append(np.array(values, dtype=column.dtype))
            else:
                self._append_lists(name, chunk, values)

    def _append_lists(self, name: str, chunk: Sequence[Example], rows: list[np.ndarray]) -> None:
        values, ends = self._ragged[name]
        if values is None and (first := next((row for row in rows if len(row)), None)) is not None:
            kind = float if first.dtype.kind == "f" else int
            values = ColumnFile(self._folder / f"{name}.npy", _RAGGED_TYPES[kind])
            self._ragged[name] = values, ends
        # Before the values are appended, which changes their count.
        ends.append((values.count if values else 0) + np.cumsum([len(row) for row in rows]))
        if values is not None:
            self._check_kinds(name, values, chunk, [len(row) > 0 and row.dtype.kind == "f" for row in rows])
            values.append(np.concatenate([row.astype(values.dtype, copy=False) for row in rows]))

    def _check_kinds(self, name: str, column: ColumnFile, chunk: Sequence[Example], are_floats: list[bool]) -> None:
        if column.dtype.kind == "i" and any(are_floats):
            problem = (
                "holds floats, and the values before it are integers; make them floats in every example: float(value)"
            )
            raise ColumnError(name, chunk[are_floats.index(True)]["sample"], problem)

    def _create_columns(self, example: Example) -> None:
        for name in [name for name in example if name != "sample"]:
            if name != GROUP and not (isinstance(name, str) and name.isidentifier()):
                problem = "is the name of a file in the cache too; use letters, digits and underscores"
                raise ColumnError(name, example["sample"], problem)
            value = read_column(name, [example])[0]
            if isinstance(value, np.ndarray):
                self._ragged[name] = None, ColumnFile(self._folder / f"{name}.ends.npy", "<i8")
            else:
                self._scalars[name] = ColumnFile(self._folder / f"{name}.npy", _SCALAR_TYPES[type(value)])

    def close(self) -> dict[str, Any]:
        """Close all files. Returns the count, and the columns with their types."""
        ragged = {}
        for name, (values, ends) in self._ragged.items():
            # No row had a value: nothing told whether they are floats.
            ragged[name] = values or ColumnFile(self._folder / f"{name}.npy", _RAGGED_TYPES[int]), ends
        for column in (*self._scalars.values(), *(column for pair in ragged.values() for column in pair)):
            column.close()
        scalars = {name: column.dtype.str for name, column in self._scalars.items() if name not in ("sample", GROUP)}
        return {
            "count": self._scalars["sample"].count,
            "scalars": scalars,
            "ragged": {name: values.dtype.str for name, (values, _) in ragged.items()},
            "has_groups": GROUP in self._scalars,
        }
