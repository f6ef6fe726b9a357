"""Sequence parallelism: the exchange of tokens for heads around attention, and sums over the group (DeepSpeed-Ulysses)."""

# Shapes: N processes of a group, T tokens of the packed row, t = T / N of them in this process, H heads, G key-value
# heads, D width of a head.

# Jacobs et al. (arXiv 2309.14509), section 3.2. DeepSpeed's own class (runtime/sequence_parallel/ulysses_sp.py of 0.19)
# replaces transformers' attention functions, discards masks, and splits batches that are already on the device; packed
# batches bring their own function, which knows the groups of the whole row, so only the exchange is needed.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrain.models.attention.layer_kinds import read_layer_kinds

if TYPE_CHECKING:
    from dstrain.distributed.world import SequenceGroup
    from dstrain.models.attention.layout import PackedLayout


def sequence_unsupported_reason(text_config: Any, size: int) -> str | None:
    """Return why `size` processes cannot compute the layers of this text config together, or None."""
    kinds = read_layer_kinds(text_config.model_type)
    if kinds.recurrent:
        return f"{kinds.recurrent[0]} reads a sequence token by token, which processes cannot share"
    heads = getattr(text_config, "num_attention_heads", 0)
    if heads % size == 0:
        return None
    divisors = [str(number) for number in range(2, heads + 1) if heads % number == 0]
    return f"the model has {heads} attention heads, which {size} processes cannot share evenly; {' or '.join(divisors)} could"


def heads_for_tokens(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequence: SequenceGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a part of the heads for all tokens: (1, H, t, D) and twice (1, G, t, D) -> (1, H/N, T, D), (1, G'/N, T, D).

    Key-value heads that N does not divide are repeated until it does (G'), as for a model without grouped heads.
    """
    queries, shared = query.shape[1], key.shape[1]
    assert queries % sequence.size == 0, "sequence_unsupported_reason"
    if shared % sequence.size:
        repeats = (queries if sequence.size % shared else sequence.size) // shared
        key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
    query, key, value = (_Exchange.apply(one, sequence) for one in (query, key, value))
    return query, key, value


def tokens_for_heads(out: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """Return all heads of this process's tokens: (1, T, H/N, D) -> (1, t, H, D)."""
    found: torch.Tensor = _Exchange.apply(out, sequence)
    return found


def sum_over_sequence(values: torch.Tensor, sequence: SequenceGroup | None) -> torch.Tensor:
    """Return the sum over the group, the same in each of its processes.

    Each process computes the same loss from it, and counts the N-th part: hence the factor N of its gradient. A sum of
    one value and zeros is exact, so scores that only one process has become known to all of them.
    """
    if sequence is None:
        return values
    found: torch.Tensor = _SumOverSequence.apply(values, sequence)
    return found


def share_decoder_inputs(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a text model: cut its inputs to the tokens of this process.

    A vision-language model has put the images' features into the embeddings of the whole row before.
    """
    layout: PackedLayout | None = kwargs.get("packed_groups")
    if layout is None or layout.sequence is None:
        return None
    part = slice(*layout.sequence.part(layout.tokens))
    kwargs = dict(kwargs)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        tensor = kwargs.get(name)
        if tensor is not None:  # positions may be (3, 1, T)
            kwargs[name] = tensor[:, part] if name == "inputs_embeds" else tensor[..., part]
    is_image = kwargs.get("visual_pos_masks")
    if is_image is not None:  # Qwen3-VL adds features of images to the tokens of its first layers
        first, count = int(is_image[:, : part.start].sum()), int(is_image[:, part].sum())
        kwargs["visual_pos_masks"] = is_image[:, part]
        features = kwargs["deepstack_visual_embeds"]
        kwargs["deepstack_visual_embeds"] = [layer[first : first + count] for layer in features]
    return args, kwargs


class _Exchange(torch.autograd.Function):
    """(1, A, b, D) -> (1, A/N, B, D): heads A for tokens b, or tokens A for heads b; backwards the other way round."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.sequence = sequence
        return _exchange(tensor, sequence)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchange(grad.transpose(1, 2), ctx.sequence).transpose(1, 2), None


def _exchange(tensor: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
    """Send each process its part of dimension 1, and receive all of dimension 2: (1, A, b, D) -> (1, A/N, B, D)."""
    sent = tensor[0].unflatten(0, (sequence.size, -1)).contiguous()  # (N, A/N, b, D), by receiver
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=sequence.process_group)  # by sender, whose parts are consecutive
    return received.transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _SumOverSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, sequence: SequenceGroup) -> torch.Tensor:
        ctx.size = sequence.size
        total = values.clone()
        dist.all_reduce(total, group=sequence.process_group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.size, None
