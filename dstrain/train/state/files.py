"""Weights and optimizer state in files: safetensors that each process writes, found by name and position when read.

    state/about.json                      names, shapes, counters; written by rank 0
    state/rank-00000-000.safetensors      stretches of what rank 0 holds, under NAME/KEY@START

START is the first value of the stretch in the flattened parameter, so that a run with another number of processes or
another ZeRO stage finds what it holds. The optimizer's other tensors have no START, its numbers lie in the metadata.
Nothing here is pickled. Every block that is read is compared with its hash.
"""

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
from dstrain.train.state.hashed_file import (
    BLOCK_BYTES,
    FileEntry,
    HashedFileReader,
    HashedFileWriter,
    check_no_pickles,
    write_hashed_file,
)
from dstrain.train.state.manifest import read_file_entries
from dstrain.train.state.slices import WEIGHT_KEY, ParamRange, StateSlice

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
    """A file that one process writes."""

    name: str
    tensors: Sequence[tuple[str, torch.Tensor]]
    """(NAME/KEY@START, values); they may change as soon as the next shard is asked for."""
    scalars: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Parameter -> what the optimizer keeps for it as numbers."""


def iter_state_files(slice_groups: Iterable[Sequence[StateSlice]], rank: int, world_size: int) -> Iterator[StateFile]:
    """What a process writes: all it holds alone, and its share of what all processes hold."""
    for index, parts in enumerate(slice_groups):
        tensors: list[tuple[str, str, torch.Tensor]] = []
        numbers: dict[str, dict[str, float]] = {}
        for part, places in _ranges_to_write(parts, rank, world_size):
            numbers |= {place.name: part.scalars() for place in places if part.scalars()}
            for key, values in part.elementwise_state().items():
                for place in part.key_ranges.get(key, places):
                    name = f"{place.name}/{key}@{place.start}"
                    tensors.append((key, name, values.narrow(0, place.offset, place.numel)))
            for key, values in part.other_tensors().items():
                tensors += [(key, f"{place.name}/{key}", values.detach()) for place in places if place.start == 0]
        tensors.sort(key=lambda found: (found[0] != WEIGHT_KEY, found[0]))  # who reads weights alone reads one stretch
        if tensors:
            yield StateFile(
                f"rank-{rank:05d}-{index:03d}.safetensors", [(name, values) for _, name, values in tensors], numbers
            )


def _ranges_to_write(
    slices: Sequence[StateSlice], rank: int, world_size: int
) -> Iterator[tuple[StateSlice, list[ParamRange]]]:
    """The places of each part that this rank writes: of what all hold, an equal share of the values."""
    total = sum(part.tensor.numel() for part in slices if part.is_replicated)
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
    """Write this process's files, and `about` where it is given; returns their sizes and hashes by name."""
    found = {f"{STATE_DIR}/{shard.name}": write_state_file(folder / STATE_DIR, shard) for shard in state_files}
    if metadata is not None:
        found[METADATA_FILE] = write_hashed_file(
            folder / METADATA_FILE, (json.dumps(metadata, indent=1) + "\n").encode()
        )
    return found


def write_state_file(folder: Path, state_file: StateFile) -> FileEntry:
    """Write the file, tensor by tensor and in pieces; returns its size and hashes."""
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
    header += b" " * (-len(header) % 8)
    with HashedFileWriter(folder / state_file.name) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for _, tensor in state_file.tensors:
            flat = tensor.detach().reshape(-1)
            for piece in flat.split(max(1, BLOCK_BYTES // flat.element_size())):
                file.write(memoryview(piece.cpu().contiguous().view(torch.uint8).numpy()))
    return file.entry


@dataclass(frozen=True)
class _TensorRange:
    file: str
    byte_offset: int
    """First byte in the file."""
    start: int
    numel: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def _parse_header_entry(file: str, start: int, entry: Mapping[str, Any], bounds: tuple[int, int]) -> _TensorRange:
    """What a table says of a tensor. Raises ValueError where it lies outside of the file's values, (first, end)."""
    shape, dtype = tuple(entry["shape"]), TORCH_DTYPES[entry["dtype"]]
    begin, end = (bounds[0] + offset for offset in entry["data_offsets"])
    numel = math.prod(shape)
    if (
        start < 0
        or min(shape, default=0) < 0
        or not bounds[0] <= begin <= end <= bounds[1]
        or end - begin != numel * dtype.itemsize
    ):
        raise ValueError(f"shape {list(shape)} at {entry['data_offsets']}")
    return _TensorRange(file, begin, start, numel, dtype, shape)


def check_state_complete(checkpoint: Path) -> None:
    """Raise CheckpointError where the state in a checkpoint lacks values that it names. Reads tables, no values."""
    CheckpointReader(checkpoint).check_complete()


class CheckpointReader:
    """The state in a checkpoint, read by name and position."""

    def __init__(self, checkpoint: Path) -> None:
        """Raises CheckpointError where the folder, whose manifest is there, holds no such state, or a pickle."""
        self.checkpoint = checkpoint
        check_no_pickles(checkpoint)
        files = {name: entry for name, entry in read_file_entries(checkpoint).items() if name.startswith(STATE_DIR)}
        self._files = {name: HashedFileReader(checkpoint / name, entry) for name, entry in files.items()}
        if METADATA_FILE not in self._files:
            raise CheckpointError(f"{checkpoint}: holds no state that this version reads; choose another checkpoint")
        self._tensor_ranges: dict[tuple[str, str], list[_TensorRange]] = {}
        self._state_keys: dict[str, set[str]] = {}
        self._elementwise: set[tuple[str, str]] = set()
        self._scalars: dict[str, dict[str, float]] = {}
        for name, file in self._files.items():
            if name.endswith(".safetensors"):
                self._index_file(name, file)
        for stretches in self._tensor_ranges.values():
            stretches.sort(key=lambda stretch: stretch.start)

    def _index_file(self, name: str, file: HashedFileReader) -> None:
        """Raises CheckpointError for a table that is none, even where its hash is right."""
        try:
            length = int.from_bytes(file.read(0, 8), "little")
            table = json.loads(file.read(8, length))
            for parameter, numbers in json.loads(table.pop("__metadata__")["numbers"]).items():
                self._scalars.setdefault(parameter, {}).update(numbers)
            for full, entry in table.items():
                parameter, _, rest = full.rpartition("/")
                key, _, start = rest.partition("@")
                stretch = _parse_header_entry(name, int(start or 0), entry, (8 + length, file.size))
                self._tensor_ranges.setdefault((parameter, key), []).append(stretch)
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
        """What rank 0 wrote of names, shapes and counters. Raises CheckpointError where it is not that."""
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
        """Parameter or buffer -> its whole shape, of those whose values are there: older checkpoints name frozen adapters too."""
        shapes = {name: tuple(shape) for name, shape in self.metadata["shapes"].items()}
        return {
            name: shape for name, shape in shapes.items() if WEIGHT_KEY in self.state_keys(name) or not math.prod(shape)
        }

    def check_complete(self) -> None:
        """Raise CheckpointError where values are missing: of a weight that is named, or of what an optimizer keeps for each."""
        for name, shape in self.metadata["shapes"].items():
            for key in sorted(
                {WEIGHT_KEY} | {key for key in self.state_keys(name) if (name, key) in self._elementwise}
            ):
                self._find_ranges(name, key, 0, math.prod(shape))

    def state_keys(self, name: str) -> set[str]:
        """What is kept for a parameter, but for numbers."""
        return self._state_keys.get(name, set())

    def get_dtype(self, name: str, key: str = WEIGHT_KEY) -> torch.dtype:
        return self._tensor_ranges[name, key][0].dtype

    def get_shape(self, name: str, key: str) -> tuple[int, ...]:
        """The shape of one of the optimizer's tensors that is no stretch."""
        return self._tensor_ranges[name, key][0].shape

    def scalars(self, name: str) -> Mapping[str, float]:
        """What the optimizer kept for a parameter as numbers."""
        return self._scalars.get(name, {})

    def read_into(self, name: str, key: str, out: torch.Tensor, start: int = 0) -> None:
        """Fill `into` (n,) with the values from `start` on, in pieces. Raises CheckpointError where some are missing."""
        for stretch, low, high in self._find_ranges(name, key, start, start + out.numel()):
            self._copy_range(stretch, low, out.narrow(0, low - start, high - low))

    def _find_ranges(self, name: str, key: str, start: int, end: int) -> list[tuple[_TensorRange, int, int]]:
        """(stretch, first value to take of it, end), all of them. Raises CheckpointError where values are missing."""
        found, at = [], start
        for stretch in self._tensor_ranges.get((name, key), []):
            low, high = max(at, stretch.start), min(end, stretch.start + stretch.numel)
            if low < high and low == at:
                found.append((stretch, low, high))
                at = high
        if at < end:
            raise CheckpointError(
                f"{self.checkpoint}: holds no {key} of {name} from value {at} on; choose another checkpoint"
            )
        return found

    def _copy_range(self, tensor_range: _TensorRange, start: int, out: torch.Tensor) -> None:
        width = tensor_range.dtype.itemsize
        at = tensor_range.byte_offset + (start - tensor_range.start) * width
        for piece in out.split(max(1, BLOCK_BYTES // width)):
            content = self._files[tensor_range.file].read(at, piece.numel() * width)
            piece.copy_(torch.frombuffer(content, dtype=tensor_range.dtype))
            at += piece.numel() * width

    def read_tensor(self, name: str, key: str = WEIGHT_KEY) -> torch.Tensor:
        """A parameter's values in their shape, on the host. Raises CheckpointError where some are missing."""
        shape = self.shapes[name]
        self._find_ranges(name, key, 0, math.prod(shape))  # asked before so much room is taken
        found = torch.empty(math.prod(shape), dtype=self.get_dtype(name, key))
        self.read_into(name, key, found)
        return found.view(shape)
