"""Patches of torch.nn and transformers, and calls of their private functions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from dstrain.device_copies import copy_to_device
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
def padding_known(shape: tuple[int, ...], has_padding: bool | None) -> Iterator[None]:
    """Tell transformers whether the attention mask of a pass, of `shape` (B, L), hides a token; None: let it look.

    It looks on the device, which makes the host wait up to two times in each forward pass, also in that of each
    generated token (`_ignore_causal_mask_sdpa` in masking_utils.py). While answers are generated the mask gets longer.
    Only causal masks are decided here: vision towers have masks of their own, which are not.
    """
    from transformers import masking_utils

    check_version("transformers", *TESTED_TRANSFORMERS)
    look = masking_utils._ignore_causal_mask_sdpa

    def decide(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if has_padding is None or padding_mask is None:
            return look(padding_mask, *args, **kwargs)
        if padding_mask.shape[0] != shape[0] or padding_mask.shape[1] < shape[1]:
            return look(padding_mask, *args, **kwargs)
        return False if has_padding else look(None, *args, **kwargs)

    with replaced(masking_utils, "_ignore_causal_mask_sdpa", decide):
        yield


_COMPARED_MODELS: WeakKeyDictionary[torch.nn.Module, tuple[type, ...]] = WeakKeyDictionary()
"""Model whose placeholders were once compared with its features -> classes of its modules that compare them."""


@contextmanager
def features_placed_without_waits(model: torch.nn.Module) -> Iterator[None]:
    """Let a model of transformers put the features of images in the places of their tokens without waits.

    In each forward pass transformers compares the number of placeholders with that of the features, and formats it for
    a message (`get_placeholder_mask`); the backward pass of `masked_scatter` counts the placeholders again. The host
    waits for the device each time. Here transformers compares them in the first pass of a model that raises nothing.
    Then model and processor agree, and `VisionProcessor.attach_images` compares each batch on the host. The values are
    the same to the bit.
    """
    import torch

    check_version("transformers", *TESTED_TRANSFORMERS)
    with ExitStack() as patches:
        patches.enter_context(replaced(torch.Tensor, "masked_scatter", _make_scatter(torch.Tensor.masked_scatter)))
        for owner in _COMPARED_MODELS.get(model, ()):
            find_places = _without_comparison(owner.get_placeholder_mask)  # type: ignore[attr-defined]
            patches.enter_context(replaced(owner, "get_placeholder_mask", find_places))
        yield
    if model not in _COMPARED_MODELS:
        owners = {type(module) for module in model.modules() if hasattr(type(module), "get_placeholder_mask")}
        _COMPARED_MODELS[model] = tuple(owners)


@cache
def _make_scatter(masked_scatter: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return torch's `masked_scatter`, which does not wait where the mask takes whole rows of the last dimension."""
    import torch

    @wraps(masked_scatter)
    def scatter(self: torch.Tensor, mask: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        width = self.shape[-1] if self.ndim else 0
        by_row = mask.ndim == self.ndim > 1 and (mask.shape[-1] == 1 or mask.stride(-1) == 0)
        if not by_row or not source.numel() or source.shape[-1] != width or mask.shape[:-1] != self.shape[:-1]:
            return masked_scatter(self, mask, source)
        rows = source.reshape(-1, width)
        places = torch.nonzero_static(mask[..., 0].flatten(), size=len(rows)).squeeze(-1)
        return self.reshape(-1, width).index_copy(0, places, rows).view(self.shape)

    return scatter


def _without_comparison(find_places: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's `get_placeholder_mask`, which reads no number of placeholders from the device."""
    import torch
    from torch.overrides import TorchFunctionMode

    class SkipComparison(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.Tensor.item and args[0].dtype == torch.bool:
                return True
            if func is torch.Tensor.__format__:
                return "unknown"
            return func(*args, **(kwargs or {}))

    @wraps(find_places)
    def find(*args: Any, **kwargs: Any) -> Any:
        with SkipComparison():
            return find_places(*args, **kwargs)

    return find


TOKEN_TENSORS = ("_bos_token_tensor", "_eos_token_tensor", "_pad_token_tensor", "_decoder_start_token_tensor")
"""Attributes of a generation config that `generate` makes of its ids."""


@contextmanager
def special_tokens_prepared_on_host(model: Any) -> Iterator[None]:
    """Let `generate` check the special tokens of its config on the host, and copy them from page-locked memory.

    transformers copies each to the device and asks it whether an id is negative and whether the pad token ends an
    answer (`_prepare_special_tokens` in generation/utils.py): four waits for each batch of prompts. A model without
    that function has a `generate` of its own.
    """
    import torch

    check_version("transformers", *TESTED_TRANSFORMERS)
    prepare = getattr(model, "_prepare_special_tokens", None)
    if prepare is None:
        yield
        return

    def prepare_on_host(generation_config: Any, *args: Any, device: Any = None, **kwargs: Any) -> None:
        target = model.device if device is None else torch.device(device)
        prepare(generation_config, *args, device="cpu", **kwargs)
        for name in TOKEN_TENSORS:
            ids = getattr(generation_config, name, None)
            if ids is not None:
                setattr(generation_config, name, copy_to_device(ids.numpy(), target))

    with replaced(type(model), "_prepare_special_tokens", staticmethod(prepare_on_host)):
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
