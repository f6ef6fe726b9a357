"""The whole weights of a checkpoint, whatever the stage and number of processes that wrote it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from dstrain.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def whole_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Name in the task's model -> tensor, in fp32 where ZeRO keeps fp32 masters."""
    import torch

    state = checkpoint / "state"
    if any(state.glob("*zero_pp_rank_*_optim_states.pt")):
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed tells there what it does
            from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

            found = get_fp32_state_dict_from_zero_checkpoint(str(checkpoint), tag="state")
    else:
        path = state / "mp_rank_00_model_states.pt"
        if not path.is_file():
            raise CheckpointError(f"{checkpoint}: holds no weights of DeepSpeed's; choose another checkpoint")
        found = torch.load(path, weights_only=True, map_location="cpu")["module"]
    return {name.removeprefix("model."): tensor for name, tensor in found.items()}
