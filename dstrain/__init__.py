"""dstrain: train reward models, policies and vision-language models on DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dstrain import old_paths

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

__version__ = "0.1.0"

old_paths.install()


def load_reward_model(folder: str | Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """Load the reward model of a folder that `dstrain export` wrote, in evaluation mode.

    Called with what its tokenizer or processor gives (input_ids, attention_mask, pixel_values, ...), its answer's
    `logits`, (B, 1), are the scores; each is read at the last token that is no padding. `dtype`: of the weights; None: as
    they were exported. Raises UsageError for a folder that holds none.
    """
    from dstrain.models.reward_model import load_reward_model as load

    return load(folder, dtype)
