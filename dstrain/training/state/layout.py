"""Which values of a parameter each rank holds, as slices of flat buffers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dstrain.distributed.patches import Zero3Subgroups

WEIGHT_KEY = "weight"
"""Key of a parameter's own values; the optimizer's state has keys of its own (exp_avg, step, ...)."""

BLOCK = 256
"""Values with one scale, in bitsandbytes' 8-bit optimizers."""
SCALE_KEYS = ("absmax1", "absmax2")
"""Keys of 8-bit state: the scales of the blocks of both moments."""
BLOCKWISE_KEYS = (*SCALE_KEYS, "qmap1", "qmap2")
"""The same, and the numbers that codes stand for, which are constants."""


@dataclass(frozen=True)
class ParamRange:
    """Range of a flattened parameter, and its position in a slice."""

    name: str
    """Name of the parameter or buffer in the task's model."""
    start: int
    """Index of the first value in the flattened parameter."""
    numel: int
    offset: int
    """Index of the first value in the flattened slice."""


@dataclass(frozen=True, eq=False)
class StateSlice:
    """Tensor of this rank with its optimizer state, and the parameter ranges that it holds."""

    tensor: torch.Tensor
    """Values in the precision of the master weights; the tensor that the optimizer updates."""
    ranges: Sequence[ParamRange]
    is_replicated: bool
    """True if all ranks hold the same values."""
    optimizer: Any = None
    """A torch.optim.Optimizer; None for frozen tensors and buffers."""
    param_group: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's parameter group of the tensor."""
    key_ranges: Mapping[str, Sequence[ParamRange]] = field(default_factory=dict)
    """Key -> ranges, for optimizer state with another layout than the tensor."""

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """The optimizer's state of the tensor; empty before its first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.tensor, {})

    def elementwise_state(self) -> dict[str, torch.Tensor]:
        """Return key -> (n,): the weight, and optimizer state with one value per weight."""
        kept = {key: value for key, value in self.optimizer_state.items() if self._is_elementwise(key, value)}
        return {key: value.detach().view(-1) for key, value in {WEIGHT_KEY: self.tensor, **kept}.items()}

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Return key -> other tensors of the optimizer, such as Adafactor's row and column means of a matrix.

        Without those of 8-bit state, whose blocks are stored by position (`block_scales`).
        """
        return {
            key: value
            for key, value in self.optimizer_state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_elementwise(key, value)
            if key not in BLOCKWISE_KEYS
        }

    def block_scales(self, places: Sequence[ParamRange]) -> list[tuple[str, str, torch.Tensor]]:
        """Return (key, name in a file, scales) of the blocks of 8-bit state that the ranges touch: blockwise.py."""
        found = []
        for key in SCALE_KEYS:
            scales: Any = self.optimizer_state.get(key)
            for place in places if scales is not None else ():
                first, end = place.offset // BLOCK, -(-(place.offset + place.numel) // BLOCK)
                found.append((key, f"{place.name}/{key}.{place.start}.{place.offset % BLOCK}", scales[first:end]))
        return found

    def scalars(self) -> dict[str, float]:
        """Return key -> optimizer state that is one number, such as the step."""
        return {
            key: float(value)
            for key, value in self.optimizer_state.items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }

    def set_scalar(self, key: str, value: float) -> None:
        """Set a number of the optimizer state, keeping its type (tensor, int or float)."""
        old = self.optimizer_state[key]
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            self.optimizer_state[key] = type(old)(value)

    def _is_elementwise(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        if key in BLOCKWISE_KEYS:
            return False
        return key in self.key_ranges or value.shape == self.tensor.shape

    def allocate_state(self, key: str, dtype: torch.dtype) -> None:
        """Allocate state that the optimizer creates only at its first step, filled with zeros."""
        numel = sum(place.numel for place in self.key_ranges[key]) if key in self.key_ranges else self.tensor.numel()
        self.optimizer.state[self.tensor][key] = torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def init_optimizer_state(self) -> None:
        """Allocate optimizer state by one step with zero gradients and lr 0; weights are loaded afterwards.

        For flat partitions, step a 2-element probe and re-allocate its state at full size; stepping the partition would
        need several times its memory.
        """
        kept, grad = self.optimizer.param_groups, self.tensor.grad
        probe = self.tensor if self.tensor.dim() > 1 else self.tensor.new_zeros(2)
        self.optimizer.param_groups = [{**self.param_group, "params": [probe], "lr": 0.0}]
        probe.grad = torch.zeros_like(probe)
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups, self.tensor.grad = kept, grad
        if probe is not self.tensor and probe in self.optimizer.state:
            self.optimizer.state[self.tensor] = {
                key: value.new_zeros(self.tensor.shape) if getattr(value, "shape", None) == probe.shape else value
                for key, value in self.optimizer.state.pop(probe).items()
            }


# Each ZeRO stage partitions the same state differently. A slice names its values by parameter and position, so that
# state written with one layout can be read with another:
#
#     stage 0, one process     complete parameters, the same on every rank (ReplicatedLayout)
#     stages 1, 2              a range of all parameters of a group, concatenated (FlatPartitionLayout)
#     stage 3                  a range of each parameter (Zero3Layout)
#
# Frozen parameters and buffers are slices without optimizer state.


class ReplicatedLayout:
    """State that every rank holds completely: plain PyTorch, and DeepSpeed's stage 0."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model = model
        # DeepSpeed's 16-bit optimizers wrap the one with the state.
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        lows, masters = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = [pair for group in zip(lows, masters, strict=True) for pair in zip(*group, strict=True)]
        self._master_weights = {id(low): master for low, master in pairs}  # fp32 copies of 16-bit weights
        self._param_groups = {id(tensor): group for group in self._optimizer.param_groups for tensor in group["params"]}

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """Yield all slices at once; with `write_back`, copy their values into the model's weights afterwards."""
        yield list(self._iter_slices())
        if write_back:
            for parameter in self._model.parameters():
                if id(parameter) in self._master_weights:
                    parameter.data.copy_(self._master_weights[id(parameter)].data)

    def _iter_slices(self) -> Iterator[StateSlice]:
        for name, parameter in self._model.named_parameters():
            tensor = self._master_weights.get(id(parameter), parameter)
            group = self._param_groups.get(id(tensor))
            # In no group of the optimizer: frozen.
            if group is None:
                yield _replicated_slice(name, tensor)
            else:
                yield _replicated_slice(name, tensor, self._optimizer, group)
        yield from _iter_buffer_slices(self._model)


class FlatPartitionLayout:
    """State of stages 1 and 2: of each parameter group, concatenated, one contiguous partition per rank."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero_optimizer, self._rank = model, optimizer, rank
        bf16 = hasattr(optimizer, "bf16_groups_flat")  # stage 1 with gradients accumulated in fp32
        self._flat_groups = optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat
        self._bit16_groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        self._master_weights = (
            optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
        )

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """Yield all slices at once. `write_back` copies them into the model's weights afterwards: Collective."""
        yield [
            *self._iter_trained_slices(),
            *(_replicated_slice(name, param) for name, param in _frozen_params(self._model, self._bit16_groups)),
            *_iter_buffer_slices(self._model),
        ]
        if write_back:
            self._zero_optimizer.update_lp_params()

    def _iter_trained_slices(self) -> Iterator[StateSlice]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        optimizer = self._zero_optimizer.optimizer
        for index, (flat, parameters) in enumerate(zip(self._flat_groups, self._bit16_groups, strict=True)):
            master = self._master_weights[index]
            # DeepSpeed pads the flat group, so that all ranks' partitions have the same size.
            first = self._rank * master.numel()
            places = []
            for parameter in parameters:
                # Each parameter is a view of the flat tensor. Its offset there counts, not the order in the group.
                begin = parameter.data.storage_offset() - flat.storage_offset()
                low, high = max(begin, first), min(begin + parameter.numel(), first + master.numel())
                if low < high:
                    places.append(ParamRange(names[id(parameter)], low - begin, high - low, low - first))
            # The order in the group may be another, as with round-robin gradients.
            places.sort(key=lambda place: place.offset)
            group = optimizer.param_groups[index]
            own = self._muon_momentum_ranges(index, names) if group.get("use_muon") else {}
            yield StateSlice(
                master, places, is_replicated=False, optimizer=optimizer, param_group=group, key_ranges=own
            )

    def _muon_momentum_ranges(self, group_index: int, names: Mapping[int, str]) -> dict[str, list[ParamRange]]:
        """Return the ranges of Muon's momenta: complete matrices, of all that reach into this rank's partition."""
        if not hasattr(self._zero_optimizer, "params_in_partition") or self._zero_optimizer.cpu_offload:
            return {}  # partitioned like the weights: stage 1 with fp32 gradients, and CPU offload
        places, offset = [], 0
        for parameter in self._zero_optimizer.params_in_partition[group_index]:
            places.append(ParamRange(names[id(parameter)], 0, parameter.numel(), offset))
            offset += parameter.numel()
        return {"momentum_buffer": places}


class Zero3Layout:
    """State of stage 3: a range of each parameter, in subgroups that may be on NVMe."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero_optimizer, self._rank = model, optimizer, rank
        self._subgroups = Zero3Subgroups(optimizer)

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """Yield slices that are in memory together. `write_back` copies them into the weights: Collective."""
        zero = self._zero_optimizer
        if write_back:
            zero.checkpoint_event_prologue()  # persistent parameters release their gathered copies
        on_nvme = [index for index in range(len(self._subgroups)) if self._subgroups.is_on_nvme(index)]
        # Those in memory come at once, those on NVMe one at a time: the host may not have the memory for all.
        staying = [index for index in range(len(self._subgroups)) if index not in on_nvme]
        yield [*map(self._trained_slice, staying), *_iter_buffer_slices(self._model)]
        if write_back:
            for index in staying:
                self._subgroups.update_weights(index)
        for index in on_nvme:
            with self._group_in_memory(index, write_back):
                yield [self._trained_slice(index)]
        frozen = _frozen_params(self._model, zero.fp16_groups)
        in_memory = [pair for pair in frozen if not _is_on_nvme(pair[1])]
        for pairs in (in_memory, *([pair] for pair in frozen if _is_on_nvme(pair[1]))):
            with _params_in_memory([parameter for _, parameter in pairs], write_back):
                yield [
                    StateSlice(held.ds_tensor, self._local_ranges(name, held), is_replicated=False)
                    for name, held in pairs
                ]
        if write_back:
            # Not `checkpoint_event_epilogue`: it also gathers persistent parameters, and DeepSpeed detects a module that
            # reads another one's weight, as DoRA's do, only if that weight is sharded at the first forward pass.
            zero.invalidate_secondary_tensor()

    def _trained_slice(self, group_index: int) -> StateSlice:
        zero, optimizer = self._zero_optimizer, self._subgroups.optimizer(group_index)
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places, offset = [], 0
        for parameter in zero.fp16_groups[group_index]:
            places += self._local_ranges(names[id(parameter)], parameter, offset)
            # The padded size: in the flat tensor the padded shares follow each other.
            offset += parameter.partition_numel()
        group = optimizer.param_groups[zero.sub_group_to_group_id[group_index]]
        master = zero.fp32_partitioned_groups_flat[group_index]
        return StateSlice(master, places, is_replicated=False, optimizer=optimizer, param_group=group)

    def _local_ranges(self, name: str, parameter: Any, offset: int = 0) -> list[ParamRange]:
        share = parameter.partition_numel()
        start = self._rank * share
        numel = min(share, parameter.ds_numel - start)  # the last ranks' shares are padded
        return [ParamRange(name, start, numel, offset)] if numel > 0 else []

    @contextmanager
    def _group_in_memory(self, group_index: int, write_back: bool) -> Iterator[None]:
        """Hold a subgroup that is on NVMe in memory inside."""
        self._subgroups.swap_in(group_index)
        yield
        if write_back:
            self._subgroups.update_weights(group_index)
            self._subgroups.swap_out(group_index)
        else:
            self._subgroups.release(group_index)


def _is_on_nvme(parameter: Any) -> bool:
    return getattr(parameter, "nvme_swapper", None) is not None and parameter.ds_tensor.status.name == "NOT_AVAILABLE"


@contextmanager
def _params_in_memory(parameters: Sequence[Any], write_back: bool) -> Iterator[None]:
    """Hold this rank's shares of frozen parameters in memory inside, also if they are on NVMe."""
    swapped = [parameter for parameter in parameters if _is_on_nvme(parameter)]
    if swapped:
        swapped[0].nvme_swapper.swap_in(swapped, async_op=False)
    yield
    if swapped and write_back:
        swapped[0].nvme_swapper.swap_out_and_release(swapped)
    elif swapped:
        swapped[0].nvme_swapper.remove_partition_and_release_buffers(swapped)


def _frozen_params(
    model: torch.nn.Module, param_groups: Iterable[Iterable[Any]]
) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters in none of the optimizer's groups; `requires_grad` may have changed since."""
    trained = {id(parameter) for group in param_groups for parameter in group}
    return [pair for pair in model.named_parameters() if id(pair[1]) not in trained]


def _replicated_slice(
    name: str, tensor: torch.Tensor, optimizer: Any = None, param_group: Mapping[str, Any] | None = None
) -> StateSlice:
    places = [ParamRange(name, 0, tensor.numel(), 0)]
    return StateSlice(tensor, places, is_replicated=True, optimizer=optimizer, param_group=param_group or {})


def _iter_buffer_slices(model: torch.nn.Module) -> Iterator[StateSlice]:
    """Yield the persistent buffers of the model."""
    # `named_buffers` also has those that are never saved, such as rotary frequencies.
    lasting = model.state_dict(keep_vars=True).keys()
    return (_replicated_slice(name, buffer) for name, buffer in model.named_buffers() if name in lasting)


Layout = ReplicatedLayout | FlatPartitionLayout | Zero3Layout


def detect_layout(model: torch.nn.Module, optimizer: Any, rank: int) -> Layout:
    """Return the layout by which DeepSpeed's optimizer, or torch's, has partitioned the model's state."""
    # By attribute, so that plain PyTorch does not import DeepSpeed.
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Zero3Layout(model, optimizer, rank)
    if hasattr(optimizer, "bit16_groups_flat") or hasattr(optimizer, "bf16_groups_flat"):
        return FlatPartitionLayout(model, optimizer, rank)
    return ReplicatedLayout(model, optimizer)
