"""Patches of torch.nn and transformers, and calls of their private functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrain.patching import check_version, replaced

if TYPE_CHECKING:
    import torch

TESTED_TORCH, TESTED_TRANSFORMERS = ("2.8", "2.16"), ("5.5.4", "6")
"""First version tested, and the first one not tested."""


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Create all parameters of modules on the meta device inside, without memory; buffers are real. Not thread-safe.

    Tied parameters stay tied; accelerate's `init_empty_weights` (1.15) creates a new parameter for each module, and so
    unties them. torch's own `with torch.device("meta")` moves buffers too, and their values would be lost.
    """
    import torch

    check_version("torch", *TESTED_TORCH)
    register = torch.nn.Module.register_parameter

    def register_on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and parameter.device.type != "meta":
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    with replaced(torch.nn.Module, "register_parameter", register_on_meta):
        yield


@contextmanager
def rows_of_one_sequence() -> Iterator[None]:
    """Keep transformers from searching the positions for several sequences in a row, where no mask is given.

    Its decision waits for the device in each forward pass (`find_packed_sequence_indices` in masking_utils.py).
    """
    from transformers import masking_utils

    check_version("transformers", *TESTED_TRANSFORMERS)
    with replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None):
        yield


@contextmanager
def weight_files_opened_by(open_file: Callable[..., Any]) -> Iterator[None]:
    """Let transformers open safetensors files of weights with another function than `safe_open` inside."""
    from transformers import modeling_utils

    check_version("transformers", *TESTED_TRANSFORMERS)
    with replaced(modeling_utils, "safe_open", open_file):
        yield


def set_special_tokens(tokenizer: Any, tokens: Mapping[str, str]) -> None:
    """Give a tokenizer attributes such as `image_token`. There is no public function after its constructor."""
    check_version("transformers", *TESTED_TRANSFORMERS)
    tokenizer._set_model_specific_special_tokens(dict(tokens))
