"""Weights and optimizer state as safetensors files per rank, read by name and position."""

# state/about.json                      names, shapes, counters; written by rank 0
# state/rank-00000-000.safetensors      slices of rank 0's state, as tensors NAME/KEY@START
# state/index.json, state/index.npy     where each tensor of all files is; written by rank 0 from what all ranks report
#
# NAME is a parameter or buffer, KEY is `weight` or a key of the optimizer's state (`exp_avg`), START the index of the
# tensor's first value in the flattened parameter. A run with another number of ranks or another ZeRO stage finds its
# values by these. Tensors of the optimizer that are not elementwise have no START; numbers are in the file's metadata.
# Nothing is pickled. Every block that is read is compared with its hash. A reader opens the index and the files that hold
# what it needs: a resume of 1,024 ranks must not read the header of 1,024 files in each process.

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dstrain.errors import CheckpointError
from dstrain.files import parse_json, read_npy_header
from dstrain.training.state.layout import WEIGHT_KEY, ParamRange, StateSlice
from dstrain.training.state.manifest import (
    BLOCK_BYTES,
    MAX_MANIFEST_BYTES,
    BlockCache,
    FileEntry,
    HashedFileReader,
    HashedFileWriter,
    check_no_pickles,
    read_file_entries,
    write_hashed_file,
)

STATE_DIR = "state"
METADATA_FILE = "state/about.json"
INDEX_FILE, INDEX_ROWS_FILE = "state/index.json", "state/index.npy"
INDEX_ROW = np.dtype(
    [
        *(("name", "<i4"), ("key", "<i2"), ("file", "<i4"), ("dtype", "<i2")),
        *(("start", "<i8"), ("numel", "<i8"), ("offset", "<i8")),
    ]
)
"""A stored tensor: numbers of its name, key, file and dtype in index.json, its first value in the parameter (-1: not
elementwise), its values, and its first byte in the file. Sorted by name, key and start."""
SAFETENSORS_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64", torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True)
class StateFile:
    """File of a checkpoint that one rank writes."""

    name: str
    tensors: Sequence[tuple[str, torch.Tensor]]
    """(NAME/KEY@START, values); the values may change once the next file is requested."""
    scalars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Parameter name -> numbers in its optimizer state, such as the step."""


def iter_state_files(slice_groups: Iterable[Sequence[StateSlice]], rank: int, world_size: int) -> Iterator[StateFile]:
    """Yield the files that a rank writes: all state that it alone has, and its share of replicated state."""
    for index, parts in enumerate(slice_groups):
        tensors: list[tuple[str, str, torch.Tensor]] = []
        numbers: dict[str, dict[str, float]] = {}
        for part, places in _ranges_to_write(parts, rank, world_size):
            numbers |= {place.name: part.scalars() for place in places if part.scalars()}
            for key, values in part.elementwise_state().items():
                for place in part.key_ranges.get(key, places):
                    name = f"{place.name}/{key}@{place.start}"
                    tensors.append((key, name, values.narrow(0, place.offset, place.numel)))
            tensors += part.block_scales(places)
            for key, values in part.other_tensors().items():
                # Without a position it cannot be divided: written once, by the rank that has the first value.
                tensors += [(key, f"{place.name}/{key}", values.detach()) for place in places if place.start == 0]
        # Weights first: an export, which reads nothing else, then reads one contiguous part.
        tensors.sort(key=lambda found: (found[0] != WEIGHT_KEY, found[0]))
        if tensors:
            yield StateFile(
                f"rank-{rank:05d}-{index:03d}.safetensors", [(name, values) for _, name, values in tensors], numbers
            )


def _ranges_to_write(
    slices: Sequence[StateSlice], rank: int, world_size: int
) -> Iterator[tuple[StateSlice, list[ParamRange]]]:
    """Yield the ranges that this rank writes of each slice; of replicated ones, an equal share of the values."""
    total = sum(part.tensor.numel() for part in slices if part.is_replicated)
    # Rounded down alike on all ranks, so that the shares meet without a gap or an overlap.
    first, last = rank * total // world_size, (rank + 1) * total // world_size
    seen = 0
    for part in slices:
        if not part.is_replicated:
            yield part, list(part.ranges)
            continue
        low, high = max(first - seen, 0), min(last - seen, part.tensor.numel())
        seen += part.tensor.numel()
        if low < high:
            (place,) = part.ranges
            yield part, [ParamRange(place.name, low, high - low, low)]


def write_state(
    folder: Path, state_files: Iterable[StateFile], metadata: Mapping[str, Any] | None
) -> dict[str, FileEntry]:
    """Write this rank's files, and the metadata on rank 0; return their sizes, hashes and tables by name."""
    found = {f"{STATE_DIR}/{shard.name}": write_state_file(folder / STATE_DIR, shard) for shard in state_files}
    if metadata is not None:
        found[METADATA_FILE] = write_hashed_file(
            folder / METADATA_FILE, (json.dumps(metadata, indent=1) + "\n").encode()
        )
    return found


def write_state_file(folder: Path, state_file: StateFile) -> FileEntry:
    """Write the file in pieces of a block, so that no tensor is copied as a whole; return its size, hashes and table."""
    table: dict[str, Any] = {"__metadata__": {"numbers": json.dumps(state_file.scalars)}}
    end = 0
    for name, tensor in state_file.tensors:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table, separators=(",", ":")).encode()
    # The format aligns the values to 8 bytes by blanks after the JSON.
    header += b" " * (-len(header) % 8)
    with HashedFileWriter(folder / state_file.name) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in state_file.tensors:
            flat = tensor.detach().reshape(-1)
            for piece in flat.split(max(1, BLOCK_BYTES // flat.element_size())):
                # As bytes, since numpy has no bfloat16.
                file.write(memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()))
    del table["__metadata__"]
    first = 8 + len(header)
    tensors = {
        name: (entry["dtype"], entry["shape"], first + entry["data_offsets"][0]) for name, entry in table.items()
    }
    return {**file.entry, "table": {"tensors": tensors, "numbers": state_file.scalars}}


def write_index(folder: Path, files: dict[str, FileEntry]) -> None:
    """Write the index from the tables in the entries of all ranks, which it removes, and add its own entries."""
    tables = {name: entry.pop("table") for name, entry in files.items() if "table" in entry}
    if not tables:
        return
    names, keys, dtypes = _Numbers(), _Numbers(), _Numbers()
    rows, shapes = list[tuple[int, ...]](), dict[str, Sequence[int]]()
    numbers: dict[str, dict[str, float]] = {}
    for number, table in enumerate(tables.values()):
        for parameter, scalars in table["numbers"].items():
            numbers.setdefault(parameter, {}).update(scalars)
        for full, (dtype, shape, offset) in table["tensors"].items():
            parameter, _, rest = full.rpartition("/")
            key, _, start = rest.partition("@")
            if not start:
                shapes[full] = shape
            at = int(start) if start else -1
            rows.append((names[parameter], keys[key], number, dtypes[dtype], at, math.prod(shape), offset))
    found = np.array(rows, dtype=INDEX_ROW)
    stream = io.BytesIO()
    np.save(stream, found[np.lexsort((found["start"], found["key"], found["name"]))], allow_pickle=False)
    about = {
        "names": [*names], "keys": [*keys], "files": [*tables], "dtypes": [*dtypes], "shapes": shapes, "numbers": numbers,
    }  # fmt: skip
    files[INDEX_ROWS_FILE] = write_hashed_file(folder / INDEX_ROWS_FILE, stream.getvalue())
    files[INDEX_FILE] = write_hashed_file(folder / INDEX_FILE, json.dumps(about).encode())


class _Numbers(dict[str, int]):
    """Texts, numbered in the order in which they are first asked for."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def check_state_complete(checkpoint: Path) -> None:
    """Raise CheckpointError if a checkpoint lacks values that its metadata names. Reads the index, no values."""
    CheckpointReader(checkpoint).check_complete()


def find_index_fault(checkpoint: Path) -> str:
    """Return why a checkpoint's index or metadata cannot be read, though its hashes are right; empty if they can be."""
    with suppress(CheckpointError):  # a file that may be a pickle: told where the checkpoint is opened
        check_no_pickles(checkpoint)
        try:
            if INDEX_FILE in read_file_entries(checkpoint):
                CheckpointReader(checkpoint).metadata  # noqa: B018  read now
        except CheckpointError as error:
            return str(error).removeprefix(f"{checkpoint}/").partition("; choose")[0]
    return ""


class CheckpointReader:
    """State in a checkpoint, read by parameter name and position."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the index. The manifest must exist. Raises CheckpointError without readable state, or for a pickle."""
        self.checkpoint = checkpoint
        check_no_pickles(checkpoint)
        entries = {name: entry for name, entry in read_file_entries(checkpoint).items() if name.startswith(STATE_DIR)}
        if not entries.keys() >= {METADATA_FILE, INDEX_FILE, INDEX_ROWS_FILE}:
            raise CheckpointError(f"{checkpoint}: has no state that this version can read; choose another checkpoint")
        cache = BlockCache()
        self._files = {name: HashedFileReader(checkpoint / name, entry, cache) for name, entry in entries.items()}
        try:
            self._read_index()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{checkpoint / INDEX_FILE}: the index cannot be read ({why}); choose another checkpoint"
            ) from error

    def _read_index(self) -> None:
        """Read which tensor is where. Raises ValueError and others for an invalid index, even if its hash is right."""
        about = self._read_json(INDEX_FILE)
        content = self._files[INDEX_ROWS_FILE].read_all()
        stream = io.BytesIO(content)
        dtype, shape = read_npy_header(stream, len(content))
        if dtype != INDEX_ROW or len(shape) != 1:
            raise ValueError(f"rows of {dtype}")
        rows = np.frombuffer(content, dtype, offset=stream.tell())
        names, keys = list[str](about["names"]), list[str](about["keys"])
        self._tensor_files = list[str](about["files"])
        self._dtypes = [TORCH_DTYPES[name] for name in about["dtypes"]]
        self._shapes = {str(full): tuple(map(int, shape)) for full, shape in about["shapes"].items()}
        self._scalars: dict[str, dict[str, float]] = about["numbers"]
        for column, count in (("name", len(names)), ("key", len(keys)), ("file", len(self._tensor_files))):
            _check_numbers(rows[column], count)
        _check_numbers(rows["dtype"], len(self._dtypes))
        sizes = np.array([self._files[name].size for name in self._tensor_files], dtype=np.int64)
        widths = np.array([dtype.itemsize for dtype in self._dtypes], dtype=np.int64)
        if len(rows):
            # Divided, not multiplied: a number from elsewhere may overflow.
            room = (sizes[rows["file"]] - rows["offset"]) // widths[rows["dtype"]]
            if (
                rows["start"].min() < -1
                or min(rows["numel"].min(), rows["offset"].min()) < 0
                or (rows["numel"] > room).any()
            ):
                raise ValueError("a tensor outside of its file")
        self._rows = rows
        self._groups: dict[tuple[str, str], slice] = {}
        self._state_keys: dict[str, set[str]] = {}
        changes = (np.diff(rows["name"]) != 0) | (np.diff(rows["key"]) != 0)
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(rows)] if len(rows) else [0]
        for low, high in pairwise(bounds):
            name, key = names[rows["name"][low]], keys[rows["key"][low]]
            if (name, key) in self._groups or (np.diff(rows["start"][low:high]) < 0).any():
                raise ValueError("rows that are not sorted")
            self._groups[name, key] = slice(low, high)
            self._state_keys.setdefault(name, set()).add(key)

    def _read_json(self, name: str) -> Any:
        return parse_json(self._files[name].read_all(), MAX_MANIFEST_BYTES)

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Names, shapes and counters that rank 0 wrote. Raises CheckpointError if they are invalid."""
        file = self._files[METADATA_FILE]
        try:
            found = self._read_json(METADATA_FILE)
            if not found["optimizer"] or any(int(size) < 0 for shape in found["shapes"].values() for size in shape):
                raise ValueError("a size below 0, or no optimizer")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{file.path}: cannot be read ({why}); choose another checkpoint") from error
        return found

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter or buffer -> full shape, of those with values: older checkpoints also name frozen adapters."""
        shapes = {name: tuple(shape) for name, shape in self.metadata["shapes"].items()}
        return {
            name: shape for name, shape in shapes.items() if WEIGHT_KEY in self.state_keys(name) or not math.prod(shape)
        }

    def check_complete(self) -> None:
        """Raise CheckpointError if values of a named weight, or of its elementwise optimizer state, are missing."""
        for name, shape in self.metadata["shapes"].items():
            for key in sorted({WEIGHT_KEY} | {key for key in self.state_keys(name) if self._is_elementwise(name, key)}):
                self._find_ranges(name, key, 0, math.prod(shape))

    def _is_elementwise(self, name: str, key: str) -> bool:
        return bool((self._rows["start"][self._groups[name, key]] >= 0).any())

    def state_keys(self, name: str) -> set[str]:
        """Return the keys of a parameter's tensors: `weight`, `exp_avg`, ..."""
        return self._state_keys.get(name, set())

    def get_dtype(self, name: str, key: str = WEIGHT_KEY) -> torch.dtype:
        return self._dtypes[self._rows["dtype"][self._groups[name, key].start]]

    def get_shape(self, name: str, key: str) -> tuple[int, ...]:
        """Return the shape of an optimizer tensor that is not elementwise."""
        return self._shapes[f"{name}/{key}"]

    def scalars(self, name: str) -> Mapping[str, float]:
        """Return the numbers in a parameter's optimizer state."""
        return self._scalars.get(name, {})

    def read_into(self, name: str, key: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill `out` (n,) with the values from `start` on. Raises CheckpointError if some are missing."""
        for row, low, high in self._find_ranges(name, key, start, start + out.numel()):
            self._copy_range(row, low, out.narrow(0, low - start, high - low))

    def _find_ranges(self, name: str, key: str, start: int, end: int) -> list[tuple[Any, int, int]]:
        """Return (row of the index, first value to read, end) that cover start to end, or raise CheckpointError."""
        rows = self._rows[self._groups.get((name, key), slice(0))]
        # -1, not elementwise: one tensor, whose values begin at 0.
        firsts = np.maximum(rows["start"], 0)
        lasts = firsts + rows["numel"]
        found, at = [], start
        # Sorted by start, so a start above `at` is a gap. Ranges may overlap: two ranks can hold the momentum
        # of one matrix (Muon).
        for number in np.flatnonzero((firsts < end) & (lasts > start)).tolist():
            low, high = max(at, int(firsts[number])), min(end, int(lasts[number]))
            if low < high and low == at:
                found.append((rows[number], low, high))
                at = high
        if at < end:
            raise CheckpointError(
                f"{self.checkpoint}: holds no {key} of {name} from value {at} on; choose another checkpoint"
            )
        return found

    def _copy_range(self, row: Any, start: int, out: torch.Tensor) -> None:
        dtype, file = self._dtypes[row["dtype"]], self._files[self._tensor_files[row["file"]]]
        at = int(row["offset"]) + (start - max(int(row["start"]), 0)) * dtype.itemsize
        # In pieces, so that only one stored block of a large parameter is in memory as a copy.
        for piece in out.split(max(1, BLOCK_BYTES // dtype.itemsize)):
            content = file.read(at, piece.numel() * dtype.itemsize)
            piece.copy_(torch.frombuffer(content, dtype=dtype))
            at += piece.numel() * dtype.itemsize

    def read_tensor(self, name: str, key: str = WEIGHT_KEY) -> torch.Tensor:
        """Return a parameter in its full shape, on the host. Raises CheckpointError if values are missing."""
        shape = self.shapes[name]
        self._find_ranges(name, key, 0, math.prod(shape))  # before memory is allocated
        found = torch.empty(math.prod(shape), dtype=self.get_dtype(name, key))
        self.read_into(name, key, found)
        return found.view(shape)


def _check_numbers(numbers: np.ndarray, count: int) -> None:
    if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < count:
        raise ValueError(f"a number that is not below {count}")
