"""What this process holds of a run's state: stretches of parameters and of what the optimizer keeps beside them.

Every ZeRO stage cuts the same state another way. Here the cuts are told in one way, by name and position in the whole
parameter, so that what was written under one cut can be read under another:

    stage 0, one process     whole parameters, the same on every process
    stages 1, 2              a stretch of all parameters of a group laid end to end
    stage 3                  a stretch of each parameter

Frozen parameters and buffers are parts like the others, without an optimizer's state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

WEIGHT_KEY = "weight"
"""The key of a parameter's own values; what an optimizer keeps has its own keys (exp_avg, step, ...)."""


@dataclass(frozen=True)
class ParamRange:
    """Where a stretch of a parameter lies in a part."""

    name: str
    """The parameter or buffer in the task's model."""
    start: int
    """First value in the flattened parameter."""
    numel: int
    offset: int
    """First value in the flattened part."""


@dataclass(frozen=True, eq=False)
class StateSlice:
    """One tensor of this process, and what the optimizer keeps for it."""

    tensor: torch.Tensor
    """The values that learn, in the master's precision; as the optimizer knows it."""
    ranges: Sequence[ParamRange]
    is_replicated: bool
    """Whether all processes hold the same."""
    optimizer: Any = None
    """Of torch's kind; None where nothing learns."""
    param_group: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's settings for it."""
    key_ranges: Mapping[str, Sequence[ParamRange]] = field(default_factory=dict)
    """Key -> places, for what the optimizer lays out in another way."""

    @property
    def optimizer_state(self) -> dict[str, Any]:
        """What the optimizer keeps for it; empty before its first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.tensor, {})

    def get_ranges(self, key: str) -> Sequence[ParamRange]:
        """Where the stretches lie in the tensor of a key."""
        return self.key_ranges.get(key, self.ranges)

    def elementwise_state(self) -> dict[str, torch.Tensor]:
        """Key -> (n,), what has values for those of the parameters."""
        kept = {key: value for key, value in self.optimizer_state.items() if self._is_elementwise(key, value)}
        return {key: value.detach().view(-1) for key, value in {WEIGHT_KEY: self.tensor, **kept}.items()}

    def other_tensors(self) -> dict[str, torch.Tensor]:
        """Key -> the optimizer's other tensors, such as row and column means of a whole matrix."""
        return {
            key: value
            for key, value in self.optimizer_state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_elementwise(key, value)
        }

    def scalars(self) -> dict[str, float]:
        """Key -> what is one number for the whole part, such as the step."""
        return {
            key: float(value)
            for key, value in self.optimizer_state.items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }

    def set_scalar(self, key: str, value: float) -> None:
        """Set a number in the form that the optimizer gave it."""
        old = self.optimizer_state[key]
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            self.optimizer_state[key] = type(old)(value)

    def _is_elementwise(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        return key in self.key_ranges or value.shape == self.tensor.shape

    def allocate_state(self, key: str, dtype: torch.dtype) -> None:
        """Have room for what the optimizer makes only when it needs it."""
        numel = sum(place.numel for place in self.key_ranges[key]) if key in self.key_ranges else self.tensor.numel()
        self.optimizer.state[self.tensor][key] = torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def init_optimizer_state(self) -> None:
        """Have the optimizer make what it keeps: a step with zero gradients at rate 0. The weights are not looked at after.

        Where values are laid end to end it steps on two others, and what it keeps is made in the part's size: the step
        itself would take several times the part's memory.
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


class ReplicatedLayout:
    """The parts of a model that every process holds whole: plain PyTorch, and DeepSpeed's stage 0."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        lows, masters = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = [pair for group in zip(lows, masters, strict=True) for pair in zip(*group, strict=True)]
        self._master_weights = {id(low): master for low, master in pairs}  # fp32 copies beside weights in bf16
        self._param_groups = {id(tensor): group for group in self._optimizer.param_groups for tensor in group["params"]}

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """All parts at once; with `change` their values go where the model sees them."""
        yield list(self._iter_slices())
        if write_back:
            for parameter in self._model.parameters():
                if id(parameter) in self._master_weights:
                    parameter.data.copy_(self._master_weights[id(parameter)].data)

    def _iter_slices(self) -> Iterator[StateSlice]:
        for name, parameter in self._model.named_parameters():
            tensor = self._master_weights.get(id(parameter), parameter)
            group = self._param_groups.get(id(tensor))
            learnt = {} if group is None else {"optimizer": self._optimizer, "param_group": group}
            yield StateSlice(tensor, [ParamRange(name, 0, tensor.numel(), 0)], is_replicated=True, **learnt)
        yield from _iter_buffer_slices(self._model)


class FlatPartitionLayout:
    """The parts of stages 1 and 2: of each group of parameters, laid end to end, a stretch."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero_optimizer, self._rank = model, optimizer, rank
        bf16 = hasattr(optimizer, "bf16_groups_flat")  # stage 1 with gradients accumulated in fp32
        self._flat_groups = optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat
        self._bit16_groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        self._master_weights = (
            optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
        )

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """All parts at once; with `change` their values go where the model sees them. Collective with `change`."""
        yield [
            *self._iter_trained_slices(),
            *map(_replicated_slice, _frozen_params(self._model, self._bit16_groups)),
            *_iter_buffer_slices(self._model),
        ]
        if write_back:
            self._zero_optimizer.update_lp_params()

    def _iter_trained_slices(self) -> Iterator[StateSlice]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        optimizer = self._zero_optimizer.optimizer
        for index, (flat, parameters) in enumerate(zip(self._flat_groups, self._bit16_groups, strict=True)):
            master = self._master_weights[index]
            first = self._rank * master.numel()
            places = []
            for parameter in parameters:
                # Each parameter is a view of the flat tensor: its position there is what counts, whatever the order.
                begin = parameter.data.storage_offset() - flat.storage_offset()
                low, high = max(begin, first), min(begin + parameter.numel(), first + master.numel())
                if low < high:
                    places.append(ParamRange(names[id(parameter)], low - begin, high - low, low - first))
            places.sort(key=lambda place: place.offset)
            group = optimizer.param_groups[index]
            own = self._muon_momentum_ranges(index, names) if group.get("use_muon") else {}
            yield StateSlice(
                master, places, is_replicated=False, optimizer=optimizer, param_group=group, key_ranges=own
            )

    def _muon_momentum_ranges(self, group_index: int, names: Mapping[int, str]) -> dict[str, list[ParamRange]]:
        """Muon's momenta are those of whole matrices, of each that reaches into this process's stretch."""
        if not hasattr(self._zero_optimizer, "params_in_partition") or self._zero_optimizer.cpu_offload:
            return {}  # stretches there too: stage 1 with gradients in fp32, and on the host
        places, offset = [], 0
        for parameter in self._zero_optimizer.params_in_partition[group_index]:
            places.append(ParamRange(names[id(parameter)], 0, parameter.numel(), offset))
            offset += parameter.numel()
        return {"momentum_buffer": places}


class Zero3Layout:
    """The parts of stage 3: of each parameter a stretch, in groups that may lie on a disk."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero_optimizer, self._rank = model, optimizer, rank

    def iter_slice_groups(self, write_back: bool = False) -> Iterator[list[StateSlice]]:
        """Parts that are in memory together; with `change` their values go where the model sees them. Collective with `change`."""
        zero = self._zero_optimizer
        if write_back:
            zero.checkpoint_event_prologue()  # persistent parameters give up their whole copies
        staying = [index for index in range(len(zero.fp16_groups)) if not zero._swappable_optimizer_subgroup(index)]
        yield [*map(self._trained_slice, staying), *_iter_buffer_slices(self._model)]
        if write_back:
            for index in staying:
                zero._reassign_or_swap_out_partitioned_parameters(index)
        for index in sorted(set(range(len(zero.fp16_groups))) - set(staying)):
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
            # Its `checkpoint_event_epilogue` would gather persistent parameters too, and never see that a module reads
            # another one's weight, as DoRA's does: an engine finds that where the weight is in shards at the first pass.
            zero.invalidate_secondary_tensor()

    def _trained_slice(self, group_index: int) -> StateSlice:
        zero, optimizer = self._zero_optimizer, self._zero_optimizer.optimizer
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places, offset = [], 0
        for parameter in zero.fp16_groups[group_index]:
            places += self._local_ranges(names[id(parameter)], parameter, offset)
            offset += parameter.partition_numel()
        group = optimizer.param_groups[zero.sub_group_to_group_id[group_index]]
        master = zero.fp32_partitioned_groups_flat[group_index]
        return StateSlice(master, places, is_replicated=False, optimizer=optimizer, param_group=group)

    def _local_ranges(self, name: str, parameter: Any, offset: int = 0) -> list[ParamRange]:
        share = parameter.partition_numel()
        start = self._rank * share
        numel = min(share, parameter.ds_numel - start)  # the last stretches are padded
        return [ParamRange(name, start, numel, offset)] if numel > 0 else []

    @contextmanager
    def _group_in_memory(self, group_index: int, write_back: bool) -> Iterator[None]:
        """Inside, a group that lies on a disk is in memory."""
        zero = self._zero_optimizer
        zero._optimizer_states_and_gradient_swap_in(group_index)
        yield
        if write_back:
            zero._reassign_or_swap_out_partitioned_parameters(group_index)
            zero._optimizer_states_and_gradient_swap_out(group_index)
        else:
            zero._release_swap_buffers(group_index)


def _is_on_nvme(parameter: Any) -> bool:
    return getattr(parameter, "nvme_swapper", None) is not None and parameter.ds_tensor.status.name == "NOT_AVAILABLE"


@contextmanager
def _params_in_memory(parameters: Sequence[Any], write_back: bool) -> Iterator[None]:
    """Inside, this process's stretches of frozen parameters are in memory, even where they lie on a disk."""
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
    """The parameters in none of the optimizer's groups: `requires_grad` may have changed since these were made."""
    trained = {id(parameter) for group in param_groups for parameter in group}
    return [pair for pair in model.named_parameters() if id(pair[1]) not in trained]


def _replicated_slice(named_tensor: tuple[str, torch.Tensor]) -> StateSlice:
    return StateSlice(named_tensor[1], [ParamRange(named_tensor[0], 0, named_tensor[1].numel(), 0)], is_replicated=True)


def _iter_buffer_slices(model: torch.nn.Module) -> Iterator[StateSlice]:
    """Those that belong to the model's state."""
    lasting = model.state_dict(keep_vars=True).keys()
    return (_replicated_slice(pair) for pair in model.named_buffers() if pair[0] in lasting)


Layout = ReplicatedLayout | FlatPartitionLayout | Zero3Layout


def detect_layout(model: torch.nn.Module, optimizer: Any, rank: int) -> Layout:
    """How DeepSpeed's optimizer, or torch's, has cut up the state of a model; `rank`: this process's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Zero3Layout(model, optimizer, rank)
    if hasattr(optimizer, "bit16_groups_flat") or hasattr(optimizer, "bf16_groups_flat"):
        return FlatPartitionLayout(model, optimizer, rank)
    return ReplicatedLayout(model, optimizer)
