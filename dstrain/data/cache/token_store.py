"""Token stores: memory-mapped columns of examples, their writer, datasets of their rows."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dstrain.data.dataset import SequenceLengths
from dstrain.data.records import BadRow, Example
from dstrain.data.vision.image_index import IMAGE_INDEX_FILE, ImageIndex

_COLUMNS_WITHOUT_TOKENS = ("images", "answers", "coordinates", "positions", "series_stats")
"""Ragged columns whose values are not tokens: positions of images, bytes of accepted answers, coordinates of atoms,
positions of residues, statistics of series."""

_PAIR_COLUMNS = ("chosen", "rejected")


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


@dataclass(frozen=True)
class WithExtraFiles:
    """A `Build`, or an `Encode` for `prepare`, that also writes files of its own into the store's folder."""

    function: Callable[..., Any]
    """The build or the encoder itself."""
    write_extra_files: Callable[[Path], list[str]]
    """Writes the files once all examples are written. Returns their names."""

    def __call__(self, argument: Any) -> Any:
        return self.function(argument)


class TokenStore:
    """Read-only examples: ragged int32 columns, float64 scalars and the sample ids. Thread-safe.

    With an image index, the column `images` holds lazy images instead of positions; no example has the column where
    no example of the store has an image.
    """

    def __init__(self, folder: Path) -> None:
        """Open a folder that `write_store` wrote. Raises ValueError or OSError where it is not complete."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        for name, size in meta["files"].items():
            if (folder / name).stat().st_size != size:
                raise ValueError(f"{folder / name} does not have the {size} bytes that were written")
        self.folder = folder
        self.report = BuildReport(**{**meta["report"], "bad": [BadRow(*row) for row in meta["report"]["bad"]]})
        self._count = int(meta["count"])
        self.record_indices = _open_column(folder / "sample.npy")
        self._scalars = {name: _open_column(folder / f"{name}.npy") for name in meta["scalars"]}
        self._ragged = {
            name: (_open_column(folder / f"{name}.npy"), _open_column(folder / f"{name}.ends.npy"))
            for name in meta["ragged"]
        }
        self.image_index = ImageIndex(folder) if IMAGE_INDEX_FILE in meta["files"] else None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return an example: arrays and floats by column, and `sample`, the index of its record."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        example: dict[str, Any] = {"sample": int(self.record_indices[index])}
        for name, (values, ends) in self._ragged.items():
            example[name] = values[ends[index - 1] if index else 0 : ends[index]]
        if self.image_index is not None:
            shown = self.image_index.select(example.pop("images"))
            example |= {"images": shown} if len(self.image_index) else {}
        return example | {name: float(values[index]) for name, values in self._scalars.items()}

    @property
    def ragged_columns(self) -> list[str]:
        """Names of the ragged columns."""
        return [*self._ragged]

    def scalar_column(self, name: str) -> np.ndarray:
        """Return a column of numbers, (count,) float64."""
        return self._scalars[name]

    def column_lengths(self, column: str) -> np.ndarray:
        """Return the length of every example's sequence in a ragged column, (count,)."""
        return np.diff(self._ragged[column][1], prepend=0)

    def max_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Return the length of the longest sequence of each of these rows, (N,) -> (N,), image tokens included."""
        sizes = [self._row_lengths(name, rows) for name in self._ragged if name not in _COLUMNS_WITHOUT_TOKENS]
        return np.max([np.zeros(len(rows), dtype=np.int64), *sizes], axis=0)

    def sequence_lengths(self, rows: np.ndarray) -> SequenceLengths:
        """Return the lengths of the sequences that these rows have in a batch: both answers of a pair, else the longest.

        A pair shares at least its prompt.
        """
        if not all(side in self._ragged for side in _PAIR_COLUMNS):
            return SequenceLengths(self.max_lengths(rows)[:, None], np.zeros(len(rows), dtype=np.int64))
        sides = np.stack([self._row_lengths(side, rows) for side in _PAIR_COLUMNS], axis=1)
        prompts = self._scalars.get("prompt_length")
        shared = np.zeros(len(rows)) if prompts is None else prompts[rows]
        return SequenceLengths(sides, shared.astype(np.int64))

    def _row_lengths(self, column: str, rows: np.ndarray) -> np.ndarray:
        """Return the length of a ragged column in each of these rows, (N,), without reading all rows."""
        ends = self._ragged[column][1]
        # Row 0 reads the last end, which np.where drops.
        return np.asarray(ends[rows] - np.where(rows > 0, ends[rows - 1], 0))

    def summarize(self, rows: np.ndarray) -> dict[str, Any]:
        """Return the number of tokens, the longest sequence and the images of these rows, (N,)."""
        # `learnt` has a value for each token that is counted already.
        names = [name for name in self._ragged if name not in ("learnt", *_COLUMNS_WITHOUT_TOKENS)]
        lengths = [self.column_lengths(name)[rows] for name in names]
        summary: dict[str, Any] = {
            "tokens": int(sum(column.sum() for column in lengths)),
            "longest": int(max(column.max() for column in lengths)),
            "tokens_folder": str(self.folder),
        }
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


def _open_column(path: Path) -> np.ndarray:
    # Without the view, every slice of a memmap pays for building a memmap; an empty file cannot be mapped.
    if path.stat().st_size <= 128:
        return np.load(path, allow_pickle=False)
    return np.load(path, mmap_mode="r", allow_pickle=False).view(np.ndarray)


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
    """Name -> a number for each row of the store: precomputed outputs of frozen models."""
    aligned_stores: Mapping[str, AlignedStore] = field(default_factory=dict, repr=False)
    """Name of a frozen model with a tokenizer of its own -> the same records as it reads them."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts for the report."""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        row = int(self.rows[index])
        return self.store[row] | {name: float(column[row]) for name, column in self.output_columns.items()}

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        """Return the tokens of the longest sequence of each of these examples, (N,) -> (N,)."""
        return self.store.max_lengths(self.rows[ids])

    def sequence_lengths(self, ids: np.ndarray) -> SequenceLengths:
        """Return the tokens of all sequences of each of these examples."""
        return self.store.sequence_lengths(self.rows[ids])

    @property
    def image_digest(self) -> str | None:
        return None if self.store.image_index is None else self.store.image_index.digest

    def summarize(self) -> dict[str, Any]:
        return {"samples": len(self), **self.store.summarize(self.rows), **self.report}

    @property
    def report(self) -> dict[str, Any]:
        """Counts of records read, used and skipped, for events.jsonl."""
        report = asdict(self.store.report)
        bad, notes, _ = report.pop("bad"), report.pop("notes"), report.pop("sizes")
        report |= {"notes": notes} if notes else {}
        skipped = [f"{where}: {reason}" for where, reason in bad[:100]]
        return {**report, **self.counts, "skipped": len(bad), "skipped_records": skipped}

    def column(self, name: str) -> np.ndarray:
        """Return a number for each example, (N,)."""
        values = self.output_columns.get(name)
        return (self.store.scalar_column(name) if values is None else values)[self.rows]

    def select(self, keep: np.ndarray) -> TokenizedDataset:
        """Return the examples where `keep`, (N,) bool, is true."""
        ends = np.cumsum(self.sizes)
        sizes = [int(keep[end - size : end].sum()) for size, end in zip(self.sizes, ends, strict=True)]
        return replace(self, rows=self.rows[keep], sizes=tuple(sizes))


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

    def close(self) -> int:
        """Write the header and fsync. Returns the file's size in bytes."""
        size = self._file.tell()
        self._file.seek(0)
        header = self._write_header()
        assert header + self.count * self.dtype.itemsize == size, "the header grew over the data"
        self._file.flush()
        # The folder is renamed to its final name next; a name must not outlive its content in a power failure.
        os.fsync(self._file.fileno())
        self._file.close()
        return size


class ColumnWriter:
    """Writes a column file per key of the examples; the first example determines the columns."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._samples = ColumnFile(folder / "sample.npy", "<i8")
        self._scalars: dict[str, ColumnFile] = {}
        self._ragged: dict[str, tuple[ColumnFile, ColumnFile]] = {}

    def append(self, chunk: Sequence[Example]) -> None:
        if not chunk:
            return
        if not self._samples.count:
            self._create_columns(chunk[0])
        names = {"sample", *self._scalars, *self._ragged}
        for example in chunk:
            assert set(example) == names, f"every example has the same columns: {sorted(set(example) ^ names)}"
        self._samples.append(np.array([example["sample"] for example in chunk]))
        for name, column in self._scalars.items():
            column.append(np.array([example[name] for example in chunk]))
        for name, (values, ends) in self._ragged.items():
            rows = [np.asarray(example[name], dtype=np.int32) for example in chunk]
            # Before the values are appended, which changes their count.
            ends.append(values.count + np.cumsum([len(row) for row in rows]))
            values.append(np.concatenate(rows))

    def _create_columns(self, example: Example) -> None:
        for name, value in example.items():
            path, ends = self._folder / f"{name}.npy", self._folder / f"{name}.ends.npy"
            if isinstance(value, list | tuple | np.ndarray):
                self._ragged[name] = ColumnFile(path, "<i4"), ColumnFile(ends, "<i8")
            elif name != "sample":
                self._scalars[name] = ColumnFile(path, "<f8")

    def close(self) -> dict[str, Any]:
        """Close all files. Returns the count, the column names, and every file with its size."""
        pairs = [column for pair in self._ragged.values() for column in pair]
        files = {column.path.name: column.close() for column in (self._samples, *self._scalars.values(), *pairs)}
        return {"count": self._samples.count, "scalars": [*self._scalars], "ragged": [*self._ragged], "files": files}
