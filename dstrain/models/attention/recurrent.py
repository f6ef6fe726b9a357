"""Recurrent layers of packed rows: linear attention, state-space models, short convolutions."""

# Shapes: T tokens of the packed row, R rows of a call, L tokens of the longest of them, H width of the hidden states.

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.nn.functional import pad

from dstrain.models.attention.layer_kinds import CACHE_NAMES, LayerKinds

if TYPE_CHECKING:
    from dstrain.models.attention.layout import PackedLayout, Segment

LEAST_SHARE = 0.75
"""Rows of one call have at least this share of the tokens of the longest."""


@dataclass
class LayerStates:
    """The states of one recurrent layer behind some tokens: a cache of transformers that changes nothing in place.

    So the gradients of all branches flow through the states into their prefix. `state_idx` names a convolution or a
    recurrence of a layer that has several.
    """

    conv: dict[int, torch.Tensor] = field(default_factory=dict)
    """The inputs of a convolution so far, at least those that the next tokens read; (R, channels, tokens)."""
    recurrent: dict[int, torch.Tensor] = field(default_factory=dict)
    """(R, …)."""

    @classmethod
    def stack(cls, states: Sequence[Self]) -> Self:
        """Return the states of several rows as those of one call."""
        stacked = cls()
        for name in states[0].conv:
            tensors = [row.conv[name] for row in states]
            longest = max(tensor.shape[-1] for tensor in tensors)
            # A convolution begins with zeros.
            stacked.conv[name] = torch.cat([pad(tensor, (longest - tensor.shape[-1], 0)) for tensor in tensors])
        for name in states[0].recurrent:
            stacked.recurrent[name] = torch.cat([row.recurrent[name] for row in states])
        return stacked

    def is_recording_past(self, layer_idx: int) -> bool:
        """Return True: the inputs of a convolution are kept as they came."""
        return True

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether tokens have been read."""
        return bool(self.conv or self.recurrent)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the inputs of a convolution so far; None before the first."""
        return self.conv.get(state_idx)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        """Return the state behind the last token; None before the first."""
        return self.recurrent.get(state_idx)

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> torch.Tensor:
        """Return the inputs of a convolution with those before them, and keep as many as it reads."""
        before = self.conv.get(state_idx)
        inputs = conv_states if before is None else torch.cat([before, conv_states], dim=-1)
        self.conv[state_idx] = inputs if conv_kernel_size is None else inputs[..., -conv_kernel_size:]
        return inputs

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0
    ) -> torch.Tensor:
        """Keep the state behind the last token."""
        self.recurrent[state_idx] = recurrent_states
        return recurrent_states


class PackedRecurrence:
    """The forward function of a recurrent layer, which also takes packed rows: each sequence begins in its own state."""

    def __init__(self, layer: torch.nn.Module, kinds: LayerKinds) -> None:
        self.base = layer.forward
        self.restarts = type(layer).__name__ in kinds.restarts
        self.takes_lengths = type(layer).__name__ in kinds.takes_lengths
        names = [*inspect.signature(type(layer).forward).parameters]
        self.input_name = names[1]
        self.cache_name = next(name for name in names if name in CACHE_NAMES)

    def __call__(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the layer; of a packed row (1, T, H), in calls of sequences of similar length.

        Rows are padded on the right, which no token before it reads. A prefix is a call of its own, since the state
        behind its last token starts all branches; a layer that cannot begin in a state reads [prefix; branch] again.
        """
        layout: PackedLayout | None = kwargs.pop("packed_groups", None)
        if layout is None:
            return self.base(hidden_states, *args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name not in (self.cache_name, "attention_mask")}
        if self.takes_lengths and reads_rows_at_once(hidden_states.device.type, layout):
            device = hidden_states.device
            limits = layout.varlen_tensors(device).cu_queries
            return self.base(hidden_states, **kwargs, cu_seq_lens_q=limits, seq_idx=layout.sequence_numbers(device))
        row = hidden_states[0]
        outputs: dict[int, torch.Tensor] = {}
        states: dict[int, LayerStates] = {}
        prefixes = [] if self.restarts else [segment for segment in layout.segments if segment.branch == 0]
        for segment in prefixes:
            states[segment.group] = LayerStates()
            outputs |= self._run(row, [segment], states[segment.group], kwargs)
        others = [segment for segment in layout.segments if segment.start not in outputs]
        for call in group_by_length([segment for segment in others if segment.group not in states], self._tokens_read):
            outputs |= self._run(row, call, None, kwargs)
        for call in group_by_length([segment for segment in others if segment.group in states], self._tokens_read):
            begin = LayerStates.stack([states[segment.group] for segment in call])
            outputs |= self._run(row, call, begin, kwargs)
        return torch.cat([outputs[segment.start] for segment in layout.segments])[None]

    def _run(
        self, row: torch.Tensor, segments: Sequence[Segment], states: LayerStates | None, kwargs: dict[str, Any]
    ) -> dict[int, torch.Tensor]:
        """Return segment's first token -> output (n, H), of segments of the row (T, H) that are read in one call."""
        inputs = [self._read(row, segment) for segment in segments]
        # Layers change the state in place, without gradients, for a single token.
        least = 1 if states is None or not states.has_previous_state() else 2
        longest = max(least, *map(len, inputs))
        batch = torch.stack([pad(tokens, (0, 0, 0, longest - len(tokens))) for tokens in inputs])
        output = self.base(batch, **kwargs, **{self.cache_name: states})
        return {
            segment.start: output[number, len(tokens) - segment.length : len(tokens)]
            for number, (segment, tokens) in enumerate(zip(segments, inputs, strict=True))
        }

    def place_input(
        self, layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Forward pre-hook: let the input be the first argument, with a gradient.

        DeepSpeed reduces the gradients of a leaf module (`use_leaf_modules`) once its positional inputs have theirs.
        """
        if not args:
            args = (kwargs[self.input_name],)
            kwargs = {name: value for name, value in kwargs.items() if name != self.input_name}
        hidden_states = args[0]
        is_trained = torch.is_grad_enabled() and any(weight.requires_grad for weight in layer.parameters())
        if is_trained and not hidden_states.requires_grad:
            hidden_states = hidden_states.detach().requires_grad_()
        return (hidden_states, *args[1:]), kwargs

    def _tokens_read(self, segment: Segment) -> int:
        return segment.length + (segment.prefix if self.restarts else 0)

    def _read(self, tokens: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Return the tokens that a call reads for a segment, of those of the row (T, H)."""
        segment_tokens = tokens[segment.start : segment.start + segment.length]
        if not segment.prefix or not self.restarts:
            return segment_tokens
        return torch.cat([tokens[segment.prefix_start : segment.prefix_start + segment.prefix], segment_tokens])


def reads_rows_at_once(device_type: str, layout: PackedLayout) -> bool:
    """Return whether kernels compute a packed row in one call: on a GPU, where sequences share no prefix.

    They are those of flash-linear-attention and causal-conv1d, where both are installed. The second begins no sequence
    in a given state, so rows with prefixes are read in several calls.
    """
    if device_type != "cuda" or any(segment.prefix for segment in layout.segments):
        return False
    from transformers.utils.import_utils import is_causal_conv1d_available, is_flash_linear_attention_available

    return is_flash_linear_attention_available() and is_causal_conv1d_available()


def group_by_length(segments: Sequence[Segment], length: Callable[[Segment], int]) -> Iterator[list[Segment]]:
    """Yield the segments in groups of similar length, the longest first."""
    group: list[Segment] = []
    for segment in sorted(segments, key=length, reverse=True):
        if group and length(segment) < LEAST_SHARE * length(group[0]):
            yield group
            group = []
        group.append(segment)
    if group:
        yield group


def enable_packed_recurrence(model: torch.nn.Module, kinds: LayerKinds) -> None:
    """Let the recurrent layers of a text model read packed rows. Idempotent."""
    for layer in model.modules():
        is_recurrent = type(layer).__name__ in kinds.recurrent
        if is_recurrent and not isinstance(vars(layer).get("forward"), PackedRecurrence):
            layer.forward = PackedRecurrence(layer, kinds)
            layer.register_forward_pre_hook(layer.forward.place_input, with_kwargs=True)
