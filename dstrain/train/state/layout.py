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

WEIGHT = "weight"
"""The key of a parameter's own values; what an optimizer keeps has its own keys (exp_avg, step, ...)."""


@dataclass(frozen=True)
class Place:
    """Where a stretch of a parameter lies in a part."""

    name: str
    """The parameter or buffer in the task's model."""
    start: int
    """First value in the flattened parameter."""
    numel: int
    offset: int
    """First value in the flattened part."""


@dataclass(frozen=True, eq=False)
class Part:
    """One tensor of this process, and what the optimizer keeps for it."""

    tensor: torch.Tensor
    """The values that learn, in the master's precision; as the optimizer knows it."""
    places: Sequence[Place]
    everywhere: bool
    """Whether all processes hold the same."""
    optimizer: Any = None
    """Of torch's kind; None where nothing learns."""
    group: Mapping[str, Any] = field(default_factory=dict)
    """The optimizer's settings for it."""
    own_places: Mapping[str, Sequence[Place]] = field(default_factory=dict)
    """Key -> places, for what the optimizer lays out in another way."""

    @property
    def state(self) -> dict[str, Any]:
        """What the optimizer keeps for it; empty before its first step."""
        return {} if self.optimizer is None else self.optimizer.state.get(self.tensor, {})

    def places_of(self, key: str) -> Sequence[Place]:
        """Where the stretches lie in the tensor of a key."""
        return self.own_places.get(key, self.places)

    def along(self) -> dict[str, torch.Tensor]:
        """Key -> (n,), what has values for those of the parameters."""
        kept = {key: value for key, value in self.state.items() if self._is_along(key, value)}
        return {key: value.detach().view(-1) for key, value in {WEIGHT: self.tensor, **kept}.items()}

    def beside(self) -> dict[str, torch.Tensor]:
        """Key -> the optimizer's other tensors, such as row and column means of a whole matrix."""
        return {
            key: value
            for key, value in self.state.items()
            if isinstance(value, torch.Tensor) and value.dim() > 0 and not self._is_along(key, value)
        }

    def numbers(self) -> dict[str, float]:
        """Key -> what is one number for the whole part, such as the step."""
        return {
            key: float(value)
            for key, value in self.state.items()
            if isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
        }

    def set_number(self, key: str, value: float) -> None:
        """Set a number in the form that the optimizer gave it."""
        old = self.state[key]
        if isinstance(old, torch.Tensor):
            old.fill_(value)
        else:
            self.state[key] = type(old)(value)

    def _is_along(self, key: str, value: Any) -> bool:
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        return key in self.own_places or value.shape == self.tensor.shape

    def make(self, key: str, dtype: torch.dtype) -> None:
        """Have room for what the optimizer makes only when it needs it."""
        numel = sum(place.numel for place in self.own_places[key]) if key in self.own_places else self.tensor.numel()
        self.optimizer.state[self.tensor][key] = torch.zeros(numel, dtype=dtype, device=self.tensor.device)

    def wake(self) -> None:
        """Have the optimizer make what it keeps: a step with zero gradients at rate 0. The weights are not looked at after.

        Where values are laid end to end it steps on two others, and what it keeps is made in the part's size: the step
        itself would take several times the part's memory.
        """
        kept, grad = self.optimizer.param_groups, self.tensor.grad
        probe = self.tensor if self.tensor.dim() > 1 else self.tensor.new_zeros(2)
        self.optimizer.param_groups = [{**self.group, "params": [probe], "lr": 0.0}]
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


class Whole:
    """The parts of a model that every process holds whole: plain PyTorch, and DeepSpeed's stage 0."""

    def __init__(self, model: torch.nn.Module, optimizer: Any) -> None:
        self._model = model
        self._optimizer = getattr(optimizer, "optimizer", optimizer)
        lows, masters = getattr(optimizer, "fp16_groups", []), getattr(optimizer, "fp32_groups", [])
        pairs = [pair for group in zip(lows, masters, strict=True) for pair in zip(*group, strict=True)]
        self._masters = {id(low): master for low, master in pairs}  # fp32 copies beside weights in bf16
        self._groups = {id(tensor): group for group in self._optimizer.param_groups for tensor in group["params"]}

    def live(self, change: bool = False) -> Iterator[list[Part]]:
        """All parts at once; with `change` their values go where the model sees them."""
        yield list(self._parts())
        if change:
            for parameter in self._model.parameters():
                if id(parameter) in self._masters:
                    parameter.data.copy_(self._masters[id(parameter)].data)

    def _parts(self) -> Iterator[Part]:
        for name, parameter in self._model.named_parameters():
            tensor = self._masters.get(id(parameter), parameter)
            group = self._groups.get(id(tensor))
            learnt = {} if group is None else {"optimizer": self._optimizer, "group": group}
            yield Part(tensor, [Place(name, 0, tensor.numel(), 0)], everywhere=True, **learnt)
        yield from _buffers(self._model)


class Flat:
    """The parts of stages 1 and 2: of each group of parameters, laid end to end, a stretch."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero, self._rank = model, optimizer, rank
        bf16 = hasattr(optimizer, "bf16_groups_flat")  # stage 1 with gradients accumulated in fp32
        self._flats = optimizer.bf16_groups_flat if bf16 else optimizer.bit16_groups_flat
        self._groups = optimizer.bf16_groups if bf16 else optimizer.bit16_groups
        self._masters = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups

    def live(self, change: bool = False) -> Iterator[list[Part]]:
        """All parts at once; with `change` their values go where the model sees them. Collective with `change`."""
        yield [*self._learning(), *map(_whole, _frozen(self._model, self._groups)), *_buffers(self._model)]
        if change:
            self._zero.update_lp_params()

    def _learning(self) -> Iterator[Part]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        optimizer = self._zero.optimizer
        for index, (flat, parameters) in enumerate(zip(self._flats, self._groups, strict=True)):
            master = self._masters[index]
            first = self._rank * master.numel()
            places = []
            for parameter in parameters:
                # Each parameter is a view of the flat tensor: its position there is what counts, whatever the order.
                begin = parameter.data.storage_offset() - flat.storage_offset()
                low, high = max(begin, first), min(begin + parameter.numel(), first + master.numel())
                if low < high:
                    places.append(Place(names[id(parameter)], low - begin, high - low, low - first))
            places.sort(key=lambda place: place.offset)
            group = optimizer.param_groups[index]
            own = self._momenta(index, names) if group.get("use_muon") else {}
            yield Part(master, places, everywhere=False, optimizer=optimizer, group=group, own_places=own)

    def _momenta(self, index: int, names: Mapping[int, str]) -> dict[str, list[Place]]:
        """Muon's momenta are those of whole matrices, of each that reaches into this process's stretch."""
        if not hasattr(self._zero, "params_in_partition") or self._zero.cpu_offload:
            return {}  # stretches there too: stage 1 with gradients in fp32, and on the host
        places, offset = [], 0
        for parameter in self._zero.params_in_partition[index]:
            places.append(Place(names[id(parameter)], 0, parameter.numel(), offset))
            offset += parameter.numel()
        return {"momentum_buffer": places}


class Sharded:
    """The parts of stage 3: of each parameter a stretch, in groups that may lie on a disk."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, rank: int) -> None:
        self._model, self._zero, self._rank = model, optimizer, rank

    def live(self, change: bool = False) -> Iterator[list[Part]]:
        """Parts that are in memory together; with `change` their values go where the model sees them. Collective with `change`."""
        zero = self._zero
        if change:
            zero.checkpoint_event_prologue()  # persistent parameters give up their whole copies
        staying = [index for index in range(len(zero.fp16_groups)) if not zero._swappable_optimizer_subgroup(index)]
        yield [*map(self._learning, staying), *_buffers(self._model)]
        if change:
            for index in staying:
                zero._reassign_or_swap_out_partitioned_parameters(index)
        for index in sorted(set(range(len(zero.fp16_groups))) - set(staying)):
            with self._swapped_in(index, change):
                yield [self._learning(index)]
        frozen = _frozen(self._model, zero.fp16_groups)
        in_memory = [pair for pair in frozen if not _on_disk(pair[1])]
        for pairs in (in_memory, *([pair] for pair in frozen if _on_disk(pair[1]))):
            with _available([parameter for _, parameter in pairs], change):
                yield [Part(held.ds_tensor, self._places(name, held), everywhere=False) for name, held in pairs]
        if change:
            # Its `checkpoint_event_epilogue` would gather persistent parameters too, and never see that a module reads
            # another one's weight, as DoRA's does: an engine finds that where the weight is in shards at the first pass.
            zero.invalidate_secondary_tensor()

    def _learning(self, index: int) -> Part:
        zero, optimizer = self._zero, self._zero.optimizer
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        places, offset = [], 0
        for parameter in zero.fp16_groups[index]:
            places += self._places(names[id(parameter)], parameter, offset)
            offset += parameter.partition_numel()
        group = optimizer.param_groups[zero.sub_group_to_group_id[index]]
        master = zero.fp32_partitioned_groups_flat[index]
        return Part(master, places, everywhere=False, optimizer=optimizer, group=group)

    def _places(self, name: str, parameter: Any, offset: int = 0) -> list[Place]:
        share = parameter.partition_numel()
        start = self._rank * share
        numel = min(share, parameter.ds_numel - start)  # the last stretches are padded
        return [Place(name, start, numel, offset)] if numel > 0 else []

    @contextmanager
    def _swapped_in(self, index: int, change: bool) -> Iterator[None]:
        """Inside, a group that lies on a disk is in memory."""
        zero = self._zero
        zero._optimizer_states_and_gradient_swap_in(index)
        yield
        if change:
            zero._reassign_or_swap_out_partitioned_parameters(index)
            zero._optimizer_states_and_gradient_swap_out(index)
        else:
            zero._release_swap_buffers(index)


def _on_disk(parameter: Any) -> bool:
    return getattr(parameter, "nvme_swapper", None) is not None and parameter.ds_tensor.status.name == "NOT_AVAILABLE"


@contextmanager
def _available(parameters: Sequence[Any], change: bool) -> Iterator[None]:
    """Inside, this process's stretches of frozen parameters are in memory, even where they lie on a disk."""
    swapped = [parameter for parameter in parameters if _on_disk(parameter)]
    if swapped:
        swapped[0].nvme_swapper.swap_in(swapped, async_op=False)
    yield
    if swapped and change:
        swapped[0].nvme_swapper.swap_out_and_release(swapped)
    elif swapped:
        swapped[0].nvme_swapper.remove_partition_and_release_buffers(swapped)


def _frozen(model: torch.nn.Module, groups: Iterable[Iterable[Any]]) -> list[tuple[str, torch.nn.Parameter]]:
    """The parameters in none of the optimizer's groups: `requires_grad` may have changed since these were made."""
    trained = {id(parameter) for group in groups for parameter in group}
    return [pair for pair in model.named_parameters() if id(pair[1]) not in trained]


def _whole(named: tuple[str, torch.Tensor]) -> Part:
    return Part(named[1], [Place(named[0], 0, named[1].numel(), 0)], everywhere=True)


def _buffers(model: torch.nn.Module) -> Iterator[Part]:
    """Those that belong to the model's state."""
    lasting = model.state_dict(keep_vars=True).keys()
    return (_whole(pair) for pair in model.named_buffers() if pair[0] in lasting)


Cut = Whole | Flat | Sharded


def cut_of(model: torch.nn.Module, optimizer: Any, rank: int) -> Cut:
    """How DeepSpeed's optimizer, or torch's, has cut up the state of a model; `rank`: this process's."""
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return Sharded(model, optimizer, rank)
    if hasattr(optimizer, "bit16_groups_flat") or hasattr(optimizer, "bf16_groups_flat"):
        return Flat(model, optimizer, rank)
    return Whole(model, optimizer)
