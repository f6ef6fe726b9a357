"""Model types that need no attention mask for right-padded rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_MASK_MODEL_TYPES = frozenset(
    {"cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4", "gpt_oss", "granite", "llama", "mistral", "mixtral",
     "olmoe", "phi3", "qwen2", "qwen3", "smollm3"}
)  # fmt: skip
"""Model types in which every layer is causal and positions count from the start of the row, so that padding on the
right changes nothing before it. tests/unit/models/test_attention_mask.py checks that their logits are bit-identical. Others
keep their mask: vision-language models (Gemma 3 and PaliGemma attend to images in both directions, Qwen2-VL counts
positions by the mask), models with a recurrent state that padding would change (Mamba 2, LFM2, Qwen3-Next), encoders.
"""


def needs_attention_mask(model: torch.nn.Module) -> bool:
    """Return True where the model needs an attention mask although all padding is on the right.

    Without a mask torch's attention uses `is_causal`, for which a GPU has flash attention. With a mask that contains a
    0 it uses an explicit mask (B, 1, L, L) (B rows, L tokens), and a slower kernel.
    """
    config = getattr(model, "config", None)
    of_transformers = type(model).__module__.startswith("transformers.")  # not code that came with the weights
    known = of_transformers and getattr(config, "model_type", None) in NO_MASK_MODEL_TYPES
    both_ways = getattr(config, "use_bidirectional_attention", None) or not getattr(config, "is_causal", True)
    return not known or bool(both_ways)
