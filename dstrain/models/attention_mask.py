"""Which models read rows that are padded on the right without an attention mask."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_MASK_MODEL_TYPES = frozenset(
    {"cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral",
     "olmoe", "phi3", "qwen2", "qwen3", "smollm3"}
)  # fmt: skip
"""Families of transformers in which every layer reads from left to right and positions are counted from the row's
beginning: padding on the right changes nothing before it. tests/unit/models/test_attention_mask.py holds each of them to
equal logits, bit by bit. Others keep their mask: those that see images (Gemma 3 and PaliGemma read them both ways, Qwen2-VL
counts positions by the mask), those with a state that padding would enter (Mamba 2, LFM2, Qwen3-Next), BERTs.
"""


def needs_attention_mask(model: torch.nn.Module) -> bool:
    """Whether the model must be told which tokens are padding, where all padding is on the right.

    Without a mask torch's attention takes `is_causal`, for which a GPU has flash attention; with one that has a 0 it takes
    a mask (B, 1, L, L).
    """
    config = getattr(model, "config", None)
    of_transformers = type(model).__module__.startswith("transformers.")  # and not Python that came with the weights
    known = of_transformers and getattr(config, "model_type", None) in NO_MASK_MODEL_TYPES
    both_ways = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    return not known or bool(both_ways)
