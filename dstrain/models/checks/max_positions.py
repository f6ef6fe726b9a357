"""Maximum sequence length by a model's position embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dstrain.errors import Fault, RecipeError
from dstrain.models.attention.model_types import length_limit
from dstrain.models.folder.model_types import max_length_fault
from dstrain.models.params.components import components_by_id

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

    from dstrain.config.schema import RunConfig


def check_positions(model: torch.nn.Module, config: PretrainedConfig, max_length: int) -> None:
    """Raise RecipeError where `max_length` exceeds the model's learned positions. The model may be on the meta device.

    A longer sequence would end the run with an index out of range, on a GPU as an assert in some later kernel.
    """
    limit = max_positions(model, config)
    if limit is not None and limit < max_length:
        raise RecipeError(max_length_fault(max_length, limit))


def max_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """Return the number of tokens with learned positions; None for a model without a position table.

    Tables are embeddings of the text decoder with a position name (`wpe`, `position_embeddings`, `embed_positions`).
    OPT and BART reserve leading rows (`offset`), RoBERTa's positions start after its pad token, and Nystromformer has
    two rows more than its config says. GPT-J's table is a buffer.
    """
    text = config.get_text_config()
    if "rotary" in str(getattr(text, "position_embedding_type", "")):  # ESM has a table but does not use it
        return None
    sizes = [size for size in _iter_table_sizes(model) if size > 0]
    configured = getattr(text, "max_position_embeddings", None)
    if sizes and isinstance(configured, int) and 0 < configured < min(sizes):
        sizes.append(configured)
    return min(sizes, default=None)


def _iter_table_sizes(model: torch.nn.Module) -> Iterator[int]:
    """Yield the usable rows of each position table of the text decoder."""
    import torch

    components = components_by_id(model)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or not _is_position_table(name):
            continue
        # A vision tower has positions too, of patches.
        if components and components.get(id(module.weight)) != "language":
            continue
        # RoBERTa counts positions from the id after its pad token's.
        reserved = 0 if module.padding_idx is None else module.padding_idx + 1
        yield module.num_embeddings - reserved - int(getattr(module, "offset", 0) or 0)
    for name, buffer in model.named_buffers():
        if not components and _is_position_table(name) and buffer.dim() == 2 and buffer.is_floating_point():
            yield buffer.shape[0]


def _is_position_table(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "wpe" or ("pos" in last and "rel" not in last)


def check_length_dependent(config: PretrainedConfig, recipe: RunConfig, rows_per_sample: int) -> None:
    """Raise RecipeError where a row's rotary positions would depend on the other rows of its batch.

    longrope takes the long or the short factors for a whole batch, by its longest row; dynamic NTK keeps those of the
    longest row that it has seen.
    """
    found = length_limit(config)
    if found is None or recipe.data.max_length <= found[1]:
        return
    alone = found[0] == "longrope" and recipe.batch.micro == 1 and recipe.batch.tokens_per_micro is None
    if alone and rows_per_sample == 1:
        return
    how = "the longest row of a batch" if found[0] == "longrope" else "the longest row that was seen"
    problem = (
        f"is {recipe.data.max_length}, and the model's {found[0]} positions depend on {how} above {found[1]} tokens"
    )
    other = ", or set batch.micro to 1" if found[0] == "longrope" and rows_per_sample == 1 else ""
    raise RecipeError(Fault("data.max_length", problem, f"lower it to {found[1]}{other}"))


def rope_length_warning(config: PretrainedConfig, max_length: int) -> str:
    """Return a warning where `max_length` exceeds the trained range of rotary positions; else an empty string."""
    text = config.get_text_config()
    trained = getattr(text, "max_position_embeddings", None)
    if getattr(text, "rope_parameters", None) is None or not isinstance(trained, int) or not 0 < trained < max_length:
        return ""
    return (
        f"data.max_length is {max_length}, and the model's rotary positions were trained up to {trained} tokens "
        f"(max_position_embeddings): longer sequences work, but with lower quality at first"
    )
