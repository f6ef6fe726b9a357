"""State of 8-bit optimizers in checkpoints: codes per value, and the scale of each block of values."""

# bitsandbytes quantizes blocks of 256 values of the tensor that it updates (Dettmers et al., arXiv 2110.02861,
# section 2). ZeRO cuts these tensors by stage and number of ranks, so that other values share a block after an elastic
# resume. A checkpoint has, of each range of a parameter,
#
#     NAME/state1@START            a code per value, elementwise like any other state
#     NAME/absmax1.START.PHASE     the scales of the blocks from the range's first value on, which is at PHASE in its block
#
# A block whose values had one scale is loaded as it was; any other is quantized again.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dstrain.training.state.files import CheckpointReader
from dstrain.training.state.layout import BLOCK, SCALE_KEYS, ParamRange, StateSlice

PIECE = BLOCK << 14
"""Values that are loaded at a time."""
MOMENTS = tuple(zip(("state1", "state2"), SCALE_KEYS, ("dynamic", "udynamic"), strict=True))
"""Keys of codes and scales, and the name of the map from codes to numbers; the second moment has no sign."""


def is_blockwise(optimizer: Any) -> bool:
    """Return True for an 8-bit optimizer of bitsandbytes."""
    return hasattr(optimizer, "name2qmap")


def load_blockwise_state(state_slice: StateSlice, reader: CheckpointReader) -> None:
    """Load both moments and the step of a slice; values without stored state start from zero."""
    stored = [place for place in state_slice.ranges if MOMENTS[0][0] in reader.state_keys(place.name)]
    if not stored:
        return
    if not state_slice.optimizer_state:
        _init_state(state_slice)
    state = state_slice.optimizer_state
    for codes_key, scales_key, map_name in MOMENTS:
        moment = _StoredState(reader, codes_key, scales_key, state_slice.optimizer.name2qmap[map_name].cpu())
        target, scales = state[codes_key].view(-1), state.get(scales_key)
        for begin in range(0, target.numel(), PIECE):
            piece = target[begin : begin + PIECE]
            values = moment.read(stored, begin, piece.numel())
            if scales is None:
                piece.copy_(values.numbers(moment.numbers_by_code))
            else:
                codes, block_scales = values.as_blocks(moment.numbers_by_code)
                piece.copy_(codes)
                scales[begin // BLOCK : begin // BLOCK + len(block_scales)].copy_(block_scales)
    # A slice of several parameters has one step: the highest of theirs.
    state["step"] = max(int(reader.scalars(place.name)["step"]) for place in stored)


def _init_state(state_slice: StateSlice) -> None:
    """Allocate the state by the optimizer's own rule, which keeps small tensors in 32 bits."""
    optimizer, tensor = state_slice.optimizer, state_slice.tensor
    kept = optimizer.param_groups
    # At stage 3 a group has no tensors between two steps.
    optimizer.param_groups = [{**state_slice.param_group, "params": [tensor]}]
    try:
        optimizer.init_state(optimizer.param_groups[0], tensor, 0, 0)
    finally:
        optimizer.param_groups = kept


@dataclass(frozen=True)
class _Values:
    """Stored values of a range of a slice: (n,) each."""

    codes: torch.Tensor
    scales: torch.Tensor
    """Scale of each value; nan where nothing is stored: ZeRO's padding."""
    plain: torch.Tensor
    """Values that were stored in 32 bits, nan elsewhere."""

    def numbers(self, numbers_by_code: torch.Tensor) -> torch.Tensor:
        """Return the values in fp32; 0 where nothing is stored."""
        quantized = numbers_by_code[self.codes.long()] * self.scales
        return torch.where(self.plain.isnan(), quantized, self.plain).nan_to_num_(nan=0.0)

    def as_blocks(self, numbers_by_code: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return codes (n,) and one scale per block. Blocks whose values had one scale keep codes and scale."""
        n, padding = self.codes.numel(), -self.codes.numel() % BLOCK

        def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, padding), value=value).view(-1, BLOCK)

        numbers = fill(self.numbers(numbers_by_code), 0.0)
        scales, plain = fill(self.scales, torch.nan), fill(self.plain, torch.nan)
        unknown = scales.isnan()
        highest = scales.nan_to_num(nan=-torch.inf).amax(1)  # (blocks,)
        lowest = scales.nan_to_num(nan=torch.inf).amin(1)
        is_kept = ((lowest == highest) | unknown.all(1)) & plain.isnan().all(1)
        new_scales = numbers.abs().amax(1)
        # The nearest number of the map, which is sorted; a block of zeros stays one.
        middles = (numbers_by_code[1:] + numbers_by_code[:-1]) / 2
        new_codes = torch.bucketize(numbers / new_scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None], middles)
        zero = int(numbers_by_code.abs().argmin())
        kept_codes = torch.where(unknown, zero, fill(self.codes.long(), zero))
        kept_scales = torch.where(unknown.all(1), 0.0, highest)
        codes = torch.where(is_kept[:, None], kept_codes, new_codes).view(-1)[:n]
        return codes.to(torch.uint8), torch.where(is_kept, kept_scales, new_scales)


@dataclass(frozen=True)
class _StoredState:
    """One moment in a checkpoint."""

    reader: CheckpointReader
    codes_key: str
    scales_key: str
    numbers_by_code: torch.Tensor
    """(256,) sorted numbers between -1 and 1."""
    _cache: dict[str, list[tuple[int, int, torch.Tensor]]] = field(default_factory=dict)
    """`_records` by parameter."""

    def read(self, ranges: Sequence[ParamRange], begin: int, n: int) -> _Values:
        """Read the values of a slice from `begin` on."""
        found = _Values(torch.zeros(n, dtype=torch.uint8), torch.full((n,), torch.nan), torch.full((n,), torch.nan))
        for place in ranges:
            low, high = max(place.offset, begin), min(place.offset + place.numel, begin + n)
            if low >= high:
                continue
            start, here = place.start + low - place.offset, slice(low - begin, high - begin)
            # One dtype per parameter: the ranks' tensors of a group have one size, which decides it.
            if self.reader.get_dtype(place.name, self.codes_key) == torch.uint8:
                self.reader.read_into(place.name, self.codes_key, found.codes[here], start)
                self._expand_scales(place.name, start, found.scales[here])
            else:
                self.reader.read_into(place.name, self.codes_key, found.plain[here], start)
        return found

    def _expand_scales(self, name: str, start: int, out: torch.Tensor) -> None:
        """Fill `out` with the scale of each value of a parameter from `start` on."""
        records = self._records(name)
        for (first, phase, scales), (end, *_) in zip(records, [*records[1:], (start + out.numel(),)], strict=True):
            low, high = max(first, start), min(end, start + out.numel())
            if low < high:
                blocks = torch.arange(low - first + phase, high - first + phase) // BLOCK
                out[low - start : high - start] = scales[blocks]

    def _records(self, name: str) -> list[tuple[int, int, torch.Tensor]]:
        """Return (start, phase, scales) of each stored range of a parameter, by start."""
        if name not in self._cache:
            records = []
            for key in self.reader.state_keys(name):
                kind, *place = key.split(".")
                if kind == self.scales_key and place:
                    scales = torch.empty(self.reader.get_shape(name, key))
                    self.reader.read_into(name, key, scales)
                    records.append((int(place[0]), int(place[1]), scales))
            self._cache[name] = sorted(records, key=lambda record: record[:2])
        return self._cache[name]
