"""Check of the sizes in a model's config: whole numbers above 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrain.errors import Fault, one_line

SIZE_LIMITS = dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "depth"), 10_000) | dict.fromkeys(
    ("hidden_size", "n_embd", "d_model", "intermediate_size", "n_inner", "ffn_dim", "d_ff", "num_attention_heads", "n_head",
     "num_heads", "num_key_value_heads", "head_dim", "vocab_size", "patch_size", "image_size"), 10**9,
)  # fmt: skip
"""Keys of a config -> the largest value that a model may have; each layer is listed."""


def wrong_size_fault(values: Mapping[str, Any], key: str) -> Fault | None:
    """Return the fault of a size that makes no model, also in a part such as text_config; None if there is none."""
    parts = [values, *(part for part in values.values() if isinstance(part, Mapping))]
    for part in parts:
        for name, most in SIZE_LIMITS.items():
            value = part.get(name)
            if isinstance(value, (bool, str)) or (isinstance(value, (int, float)) and not _is_size(value, most)):
                where = f"{key}.{name}" if key == "model.config" and part is values else key
                what = f"is {one_line(repr(value))[:40]}"
                problem = what if where != key else f"{name} {what} in its config"
                return Fault(where, problem, f"correct it: a whole number from 1 to {most}")
    return None


def _is_size(value: float, most: int) -> bool:
    return isinstance(value, int) and 1 <= value <= most
