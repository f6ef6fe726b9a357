"""Weights and optimizer state as safetensors files per rank, read by name and position."""

# state/about.json                      names, shapes, counters; written by rank 0
# state/rank-00000-000.safetensors      slices of rank 0's state, as tensors NAME/KEY@START
#
# NAME is a parameter or buffer, KEY is `weight` or a key of the optimizer's state (`exp_avg`), START the index of the
# tensor's first value in the flattened parameter. A run with another number of ranks or another ZeRO stage finds its
# values by these. Tensors of the optimizer that are not elementwise have no START; numbers are in the file's metadata.
# Nothing is pickled. Every block that is read is compared with its hash.

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dstrain.errors import CheckpointError
from dstrain.train.state.layout import WEIGHT_KEY, ParamRange, StateSlice
from dstrain.train.state.manifest import (
    BLOCK_BYTES,
    FileEntry,
    HashedFileReader,
    HashedFileWriter,
    check_no_pickles,
    read_file_entries,
    write_hashed_file,
)

STATE_DIR = "state"
METADATA_FILE = "state/about.json"
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
    """Write this rank's files, and the metadata on rank 0; return their sizes and hashes by name."""
    found = {f"{STATE_DIR}/{shard.name}": write_state_file(folder / STATE_DIR, shard) for shard in state_files}
    if metadata is not None:
        found[METADATA_FILE] = write_hashed_file(
            folder / METADATA_FILE, (json.dumps(metadata, indent=1) + "\n").encode()
        )
    return found


def write_state_file(folder: Path, state_file: StateFile) -> FileEntry:
    """Write the file in pieces of a block, so that no tensor is copied as a whole; return its size and hashes."""
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
    return file.entry


@dataclass(frozen=True)
class _TensorRange:
    """Stored range of values of one parameter and key."""

    file: str
    byte_offset: int
    """Offset of the first byte in the file."""
    start: int
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _parse_header_entry(file: str, start: int, entry: Mapping[str, Any], first: int, end: int) -> _TensorRange:
    """Parse a header entry. Raises ValueError if it is outside of the file's values, at `first` to `end`."""
    shape, dtype = tuple(entry["shape"]), TORCH_DTYPES[entry["dtype"]]
    begin, last = (first + offset for offset in entry["data_offsets"])
    numel = math.prod(shape)
    if (
        start < 0
        or min(shape, default=0) < 0
        or not first <= begin <= last <= end
        or last - begin != numel * dtype.itemsize
    ):
        raise ValueError(f"shape {list(shape)} at {entry['data_offsets']}")
    return _TensorRange(file, begin, start, numel, dtype, shape)


def check_state_complete(checkpoint: Path) -> None:
    """Raise CheckpointError if a checkpoint lacks values that its metadata names. Reads headers, no values."""
    CheckpointReader(checkpoint).check_complete()


class CheckpointReader:
    """State in a checkpoint, read by parameter name and position."""

    def __init__(self, checkpoint: Path) -> None:
        """Read the headers. The manifest must exist. Raises CheckpointError without readable state, or for a pickle."""
        self.checkpoint = checkpoint
        check_no_pickles(checkpoint)
        files = {name: entry for name, entry in read_file_entries(checkpoint).items() if name.startswith(STATE_DIR)}
        self._files = {name: HashedFileReader(checkpoint / name, entry) for name, entry in files.items()}
        if METADATA_FILE not in self._files:
            raise CheckpointError(f"{checkpoint}: has no state that this version can read; choose another checkpoint")
        self._tensor_ranges: dict[tuple[str, str], list[_TensorRange]] = {}
        self._state_keys: dict[str, set[str]] = {}
        self._elementwise: set[tuple[str, str]] = set()
        self._scalars: dict[str, dict[str, float]] = {}
        for name, file in self._files.items():
            if name.endswith(".safetensors"):
                self._index_file(name, file)
        for tensor_ranges in self._tensor_ranges.values():
            tensor_ranges.sort(key=lambda entry: entry.start)

    def _index_file(self, name: str, file: HashedFileReader) -> None:
        """Raises CheckpointError for an invalid header, even if its hash is right."""
        try:
            # safetensors: 8 bytes with the header's length, the header as JSON, the values.
            length = int.from_bytes(file.read(0, 8), "little")
            table = json.loads(file.read(8, length))
            for parameter, numbers in json.loads(table.pop("__metadata__")["numbers"]).items():
                self._scalars.setdefault(parameter, {}).update(numbers)
            for full, entry in table.items():
                parameter, _, rest = full.rpartition("/")
                key, _, start = rest.partition("@")
                tensor_range = _parse_header_entry(name, int(start or 0), entry, 8 + length, file.size)
                self._tensor_ranges.setdefault((parameter, key), []).append(tensor_range)
                self._state_keys.setdefault(parameter, set()).add(key)
                if start:
                    self._elementwise.add((parameter, key))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CheckpointError(
                f"{file.path}: its table cannot be read ({why}); choose another checkpoint"
            ) from error

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """Names, shapes and counters that rank 0 wrote. Raises CheckpointError if they are invalid."""
        file = self._files[METADATA_FILE]
        try:
            found = json.loads(file.read(0, file.size))
            if not found["optimizer"] or any(int(size) < 0 for shape in found["shapes"].values() for size in shape):
                raise ValueError("a size below 0, or no optimizer")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
            for key in sorted(
                {WEIGHT_KEY} | {key for key in self.state_keys(name) if (name, key) in self._elementwise}
            ):
                self._find_ranges(name, key, 0, math.prod(shape))

    def state_keys(self, name: str) -> set[str]:
        """Return the keys of a parameter's tensors: `weight`, `exp_avg`, ..."""
        return self._state_keys.get(name, set())

    def get_dtype(self, name: str, key: str = WEIGHT_KEY) -> torch.dtype:
        return self._tensor_ranges[name, key][0].dtype

    def get_shape(self, name: str, key: str) -> tuple[int, ...]:
        """Return the shape of an optimizer tensor that is not elementwise."""
        return self._tensor_ranges[name, key][0].shape

    def scalars(self, name: str) -> Mapping[str, float]:
        """Return the numbers in a parameter's optimizer state."""
        return self._scalars.get(name, {})

    def read_into(self, name: str, key: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill `out` (n,) with the values from `start` on. Raises CheckpointError if some are missing."""
        for tensor_range, low, high in self._find_ranges(name, key, start, start + out.numel()):
            self._copy_range(tensor_range, low, out.narrow(0, low - start, high - low))

    def _find_ranges(self, name: str, key: str, start: int, end: int) -> list[tuple[_TensorRange, int, int]]:
        """Return (stored range, first value to read, end) that cover start to end, or raise CheckpointError."""
        found, at = [], start
        # Sorted by start, so a start above `at` is a gap. Ranges may overlap: two ranks can hold the momentum
        # of one matrix (Muon).
        for tensor_range in self._tensor_ranges.get((name, key), []):
            low, high = max(at, tensor_range.start), min(end, tensor_range.start + tensor_range.numel)
            if low < high and low == at:
                found.append((tensor_range, low, high))
                at = high
        if at < end:
            raise CheckpointError(
                f"{self.checkpoint}: holds no {key} of {name} from value {at} on; choose another checkpoint"
            )
        return found

    def _copy_range(self, tensor_range: _TensorRange, start: int, out: torch.Tensor) -> None:
        width = tensor_range.dtype.itemsize
        at = tensor_range.byte_offset + (start - tensor_range.start) * width
        # In pieces, so that only one stored block of a large parameter is in memory as a copy.
        for piece in out.split(max(1, BLOCK_BYTES // width)):
            content = self._files[tensor_range.file].read(at, piece.numel() * width)
            piece.copy_(torch.frombuffer(content, dtype=tensor_range.dtype))
            at += piece.numel() * width

    def read_tensor(self, name: str, key: str = WEIGHT_KEY) -> torch.Tensor:
        """Return a parameter in its full shape, on the host. Raises CheckpointError if values are missing."""
        shape = self.shapes[name]
        self._find_ranges(name, key, 0, math.prod(shape))  # before memory is allocated
        found = torch.empty(math.prod(shape), dtype=self.get_dtype(name, key))
        self.read_into(name, key, found)
        return found.view(shape)
