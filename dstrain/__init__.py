"""dstrain: train reward models, policies and vision-language models on DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__version__ = "0.1.0"


def load_reward_model(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the reward model of a folder that `dstrain export` wrote, in evaluation mode.

    Call it with the outputs of its tokenizer or processor (input_ids, attention_mask, pixel_values,
    ...): `logits` of its output, shape (B, 1) for B rows, are the scores, read at the last token
    that is not padding. `dtype` of the weights: None for that of the export. Raises UsageError for
    a folder without a reward model.
    """
    from dstrain.models.reward_model import load_reward_model as load

    return load(folder, dtype)
