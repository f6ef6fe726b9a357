"""Transformer encoder of time-series patches."""

# Shapes: B series, N patches of the longest series, P values of a patch, H width.

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from dstrain.models.temporal.config import TemporalConfig

NUM_STATS = 2
"""Numbers per channel besides its normalized values: its mean and its scale."""
STATS_SCALE = 0.1
"""Factor of these numbers. As asinh they reach 10, and would hide the values, whose deviation is 1, from the layers."""


class TemporalEncoder(nn.Module):
    """Patches of one or more channels as tokens of a bidirectional transformer.

    Patches as tokens with channels kept apart: PatchTST, Nie et al. (arXiv 2211.14730), section 3.1. Here the patches
    of all channels attend to each other. Values are normalized per channel, and mean and scale are inputs, since
    normalization alone would remove them (Kim et al., RevIN, ICLR 2022).
    """

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        self.config = config
        # A value and whether it is observed, so that a missing value is not a zero.
        self.patch_projection = nn.Linear(2 * config.patch_length, config.hidden_size)
        self.stats_projection = nn.Linear(NUM_STATS, config.hidden_size, bias=False)
        self.channel_projection = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(TemporalLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)

    def forward(
        self, series: torch.Tensor, series_positions: torch.Tensor, mask_token: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the state of each patch, (B, N, H).

        series (B, N, 2P + 2): the patch's values, 1 where they are observed, and mean and scale of its channel.
        series_positions (B, N, 3) int64: index of the patch in its channel, of the channel, and 1 (0 for padding).
        mask_token (B, N, H): added to the embedding of each patch.
        """
        dtype, width = self.patch_projection.weight.dtype, self.config.hidden_size
        patches, stats = series.to(dtype).split([series.shape[-1] - NUM_STATS, NUM_STATS], dim=-1)
        patch, channel, is_real = series_positions.unbind(-1)  # (B, N) each
        hidden = self.patch_projection(patches) + self.stats_projection(STATS_SCALE * stats)
        hidden = hidden + sinusoids(patch, width).to(dtype)
        hidden = hidden + self.channel_projection(sinusoids(channel, width).to(dtype))
        if mask_token is not None:
            hidden = hidden + mask_token
        attention_mask = is_real[:, None, None, :] > 0  # (B, 1, 1, N): every patch attends to all that are real
        for layer in self.layers:
            hidden = layer(hidden, attention_mask)
        return self.norm(hidden)


class TemporalLayer(GradientCheckpointingLayer):
    """One pre-norm transformer layer: attention in both directions, then two linear layers."""

    def __init__(self, config: TemporalConfig) -> None:
        super().__init__()
        self.num_heads, self.dropout = config.num_attention_heads, config.hidden_dropout_prob
        self.attention_norm = nn.LayerNorm(config.hidden_size)
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.attention_output = nn.Linear(config.hidden_size, config.hidden_size)
        self.mlp_norm = nn.LayerNorm(config.hidden_size)
        self.intermediate = nn.Linear(config.hidden_size, config.intermediate_size)
        self.output = nn.Linear(config.intermediate_size, config.hidden_size)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return (B, N, H) from (B, N, H) and a mask (B, 1, 1, N)."""
        rows, length, width = hidden.shape
        shape = (rows, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = self.qkv(self.attention_norm(hidden)).view(shape).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask)
        attended = attended.transpose(1, 2).reshape(rows, length, width)
        hidden = hidden + self.hidden_dropout(self.attention_output(attended))
        inner = F.gelu(self.intermediate(self.mlp_norm(hidden)))
        return hidden + self.hidden_dropout(self.output(inner))


def sinusoids(positions: torch.Tensor, width: int) -> torch.Tensor:
    """Return sines and cosines of positions, (...,) -> (..., width) float32.

    Vaswani et al. (arXiv 1706.03762), section 3.5. No table limits the length of a series.
    """
    half = width // 2
    steps = torch.arange(half, device=positions.device, dtype=torch.float32)
    angles = positions[..., None].float() * torch.exp(steps * (-math.log(10000.0) / max(half, 1)))
    return torch.cat([angles.sin(), angles.cos()], dim=-1)
