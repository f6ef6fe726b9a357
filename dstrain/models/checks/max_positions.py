"""How many tokens a model's positions reach: a table of learned ones ends, rotary ones only get worse."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dstrain.errors import Fault, RecipeError
from dstrain.models.params.components import components_by_id

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig


def check_positions(model: torch.nn.Module, config: PretrainedConfig, max_length: int) -> None:
    """Raise RecipeError where a sequence of `length` tokens has more positions than the model; a skeleton of it will do.

    Such a sequence ends the run with an index out of range, which on a GPU is an assert in some later kernel.
    """
    limit = max_positions(model, config)
    if limit is not None and limit < max_length:
        problem = f"is {max_length}, and the model has learned {limit} positions"
        raise RecipeError(
            Fault("data.max_length", problem, f"write {limit} or less, or name a model with rotary positions")
        )


def max_positions(model: torch.nn.Module, config: PretrainedConfig) -> int | None:
    """Tokens that the model has positions for; None where no table bounds them.

    Tables are found by what they are: embeddings named after positions (`wpe`, `position_embeddings`, `embed_positions`) of
    what reads text. OPT and BART keep rows in front (`offset`), RoBERTa counts from behind its pad token, and Nystromformer
    has two rows more than its config says. GPT-J's table is a buffer.
    """
    text = config.get_text_config()
    if "rotary" in str(getattr(text, "position_embedding_type", "")):  # ESM: the table is there and not used
        return None
    sizes = [size for size in _iter_table_sizes(model) if size > 0]
    told = getattr(text, "max_position_embeddings", None)
    if sizes and isinstance(told, int) and told > 0 and told < min(sizes):
        sizes.append(told)
    return min(sizes, default=None)


def _iter_table_sizes(model: torch.nn.Module) -> Iterator[int]:
    """Usable rows of each table of positions in what reads text."""
    import torch

    parts = components_by_id(model)
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Embedding) or not _is_position_table(name):
            continue
        if parts and parts.get(id(module.weight)) != "language":
            continue
        before = 0 if module.padding_idx is None else module.padding_idx + 1
        yield module.num_embeddings - before - int(getattr(module, "offset", 0) or 0)
    for name, buffer in model.named_buffers():
        if not parts and _is_position_table(name) and buffer.dim() == 2 and buffer.is_floating_point():
            yield buffer.shape[0]


def _is_position_table(name: str) -> bool:
    last = name.rpartition(".")[2]
    return last == "wpe" or ("pos" in last and "rel" not in last)


def rope_length_warning(config: PretrainedConfig, max_length: int) -> str:
    """What to say where a sequence is longer than rotary positions were trained for; empty where it is not."""
    text = config.get_text_config()
    trained = getattr(text, "max_position_embeddings", None)
    if getattr(text, "rope_parameters", None) is None or not isinstance(trained, int) or not 0 < trained < max_length:
        return ""
    return (
        f"data.max_length is {max_length}, and the model's rotary positions were trained up to {trained} tokens "
        f"(max_position_embeddings): longer sequences run, and are read badly at first"
    )
