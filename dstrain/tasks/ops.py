"""Losses on tensors, each as its paper writes it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def bradley_terry(
    chosen: torch.Tensor,
    rejected: torch.Tensor,
    margin: torch.Tensor | None = None,
    label_smoothing: float = 0.0,
    center: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(chosen - rejected - margin) per pair; (B,), (B,) -> (B,).

    Margin: Llama 2 (arXiv 2307.09288), eq. 2. `center` adds center * (chosen + rejected)^2, which keeps the
    scores around 0: Eisenstein et al. (arXiv 2312.09244), eq. 2. `label_smoothing` takes this share of the
    labels for flipped: Mitchell, a note on DPO with noisy preferences (2023), eq. 3, for rewards.
    """
    difference = chosen - rejected if margin is None else chosen - rejected - margin
    loss = -F.logsigmoid(difference)
    if label_smoothing:
        loss = (1 - label_smoothing) * loss - label_smoothing * F.logsigmoid(-difference)
    if center:
        loss = loss + center * (chosen + rejected).square()
    return loss


def switch_off_dropout(model: torch.nn.Module) -> None:
    """Set every dropout probability of the model to 0; its config keeps what it says."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
        for name, value in vars(module).items():
            if "dropout" in name and isinstance(value, float):
                setattr(module, name, 0.0)
