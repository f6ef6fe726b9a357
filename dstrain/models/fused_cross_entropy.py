"""The Triton kernel of liger-kernel that turns logits into scores and errors: one launch, and no logits in fp32."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from dstrain.models.quantization import preload_bitsandbytes

# Shapes: n targets, V vocabulary.

_ATTRIBUTE = "has_fused_cross_entropy"
_NO_TARGET = -100
"""liger's mark of rows without a target; there are none here."""
_BLACKWELL = 10
"""Compute capability from which liger uses 8 warps for 16 bits, and 32 otherwise."""


def fuse_cross_entropy(head: torch.nn.Module) -> None:
    """Let the scores of a head be computed by the kernel."""
    setattr(head, _ATTRIBUTE, True)


def has_fused_cross_entropy(head: torch.nn.Module) -> bool:
    """Return True where `fuse_cross_entropy` was called for the head."""
    return bool(vars(head).get(_ATTRIBUTE, False))


def compute_cross_entropy(
    logits: torch.Tensor, targets: torch.Tensor, with_errors: bool, with_accuracy: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the losses (n,) of targets (n,) in fp32, and True where a target is the first largest of its logits (n, V).

    With `with_errors` the logits become softmax(logits) - onehot(target), computed in fp32 and rounded once; without,
    they are not changed. The second value is None without `with_accuracy`. Raises what Triton's compiler raises.
    """
    preload_bitsandbytes()  # liger imports peft
    cross_entropy: Any = importlib.import_module("liger_kernel.ops.cross_entropy")
    count, vocab_size = logits.shape
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    accuracy = torch.empty_like(losses) if with_accuracy else None
    block_size = min(cross_entropy.MAX_FUSED_SIZE, 1 << (vocab_size - 1).bit_length())
    launch: Any = cross_entropy.liger_cross_entropy_kernel[(count,)]
    launch(
        X_ptr=logits,
        X_stride=logits.stride(0),
        Y_ptr=targets,
        Y_stride=targets.stride(0),
        weight_ptr=None,
        loss_ptr=losses,
        z_loss_ptr=None,
        loss_stride=1,
        token_accuracy_ptr=accuracy,
        token_accuracy_stride=1,
        predicted_tokens_ptr=None,
        predicted_tokens_stride=0,
        n_cols=vocab_size,
        n_non_ignore=count,
        sum_non_ignore_weight=count,
        weight_sum=0.0,
        ignore_index=_NO_TARGET,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="none",
        softcap=None,
        RETURN_Z_LOSS=False,
        RETURN_TOKEN_ACCURACY=with_accuracy,
        RETURN_PREDICTED_TOKENS=False,
        BLOCK_SIZE=block_size,
        HAS_WEIGHT=False,
        HAS_SOFTCAPPING=False,
        HAS_GRADIENTS=with_errors,
        num_warps=_count_warps(logits),
    )
    return losses, None if accuracy is None else accuracy > 0


def _count_warps(logits: torch.Tensor) -> int:
    """Return the warps that liger takes for a row."""
    if logits.device.type != "cuda":
        return 32
    is_blackwell = torch.cuda.get_device_capability(logits.device)[0] >= _BLACKWELL
    return 8 if is_blackwell and logits.element_size() == 2 else 32
