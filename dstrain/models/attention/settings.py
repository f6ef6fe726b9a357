"""Settings of one attention call, as transformers' layers give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class AttentionSettings:
    """Everything of an attention call besides query, key and value."""

    scale: float | None = None
    """Factor of the logits; None: one over the square root of the head's width."""
    dropout: float = 0.0
    window: int | None = None
    """A token attends to itself and to the window - 1 positions before it; None: to all."""
    softcap: float | None = None
    """Logits become softcap * tanh(logits / softcap): Gemma 2 (arXiv 2408.00118), section 2."""
    sinks: torch.Tensor | None = None
    """(H,): a logit per head that takes part in the softmax and has no value: gpt-oss (arXiv 2508.10925)."""
    is_eager: bool = False
    """True: compute the logits explicitly, without a fused kernel."""

    @classmethod
    def from_kwargs(cls, kwargs: dict[str, Any], is_eager: bool) -> Self:
        """Return the settings of a call of transformers' attention interface."""
        return cls(
            scale=kwargs.get("scaling"), dropout=kwargs.get("dropout") or 0.0, window=kwargs.get("sliding_window"),
            softcap=kwargs.get("softcap"), sinks=kwargs.get("s_aux"), is_eager=is_eager,
        )  # fmt: skip

    @property
    def needs_logits(self) -> bool:
        """True if the logits or their sum are changed, which SDPA cannot do."""
        return self.softcap is not None or self.sinks is not None
