"""Transformer encoder and decoder over the residues of protein chains."""

# Shapes: B chains, L residues; 4 atoms N, CA, C, O.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dstrain.models.gradient_checkpointing import choose_layers
from dstrain.models.protein.geometry import (
    DIHEDRAL_FEATURES,
    PAIR_FEATURES,
    dihedral_features,
    pair_features,
    residue_frames,
)
from dstrain.models.protein.layers import MAX_OFFSET, BackboneHead, ResidueLayer, offset_classes


@dataclass(frozen=True, kw_only=True)
class ProteinConfig:
    """Sizes of a `ProteinModel`."""

    hidden_dim: int = 256
    encoder_layers: int = 3
    decoder_layers: int = 3
    num_heads: int = 8
    pair_dim: int = 32
    dropout: float = 0.1
    input_types: int = 23
    """Types of residues in the input: amino acids, unknown, hidden, padding."""
    output_types: int = 20
    gradient_checkpointing: bool | float = False
    """Share of the layers that recompute their activations in the backward pass."""


class ProteinModel(nn.Module):
    """Predicts hidden residue types and backbones from the visible ones.

    The encoder attends to residues with a visible backbone, the decoder to all, as in a masked autoencoder (He et al.,
    arXiv 2111.06377). The input is read in distances, dihedral angles and local frames only: types do not depend on a
    rotation or translation of the chain, and predicted atoms follow it.
    """

    def __init__(self, config: ProteinConfig) -> None:
        super().__init__()
        self.config, dim = config, config.hidden_dim
        self.types = nn.Embedding(config.input_types, dim)
        self.backbone = nn.Linear(DIHEDRAL_FEATURES + 1, dim)
        self.pairs = nn.Linear(PAIR_FEATURES, config.pair_dim)
        self.offsets = nn.Embedding(2 * MAX_OFFSET + 1, config.pair_dim)
        self.pair_norm = nn.LayerNorm(config.pair_dim)
        self.encoder, self.decoder = (
            nn.ModuleList(ResidueLayer(dim, config.pair_dim, config.num_heads, config.dropout) for _ in range(count))
            for count in (config.encoder_layers, config.decoder_layers)
        )
        layers = [*self.encoder, *self.decoder]
        chosen = choose_layers(len(layers), float(config.gradient_checkpointing))
        self._recomputed = {layer for layer, is_chosen in zip(layers, chosen, strict=True) if is_chosen}
        self.bridge = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.type_head = nn.Linear(dim, config.output_types)
        self.backbone_head = BackboneHead(dim, config.num_heads)

    def forward(self, inputs: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits of the types, (B, L, 20), and coordinates of the atoms, (B, L, 4, 3) in Å.

        `inputs`: `residues` and `positions`, (B, L); `coordinates`, (B, L, 4, 3) in Å; `visible`, (B, L) bool, where
        the coordinates may be read; `is_residue`, (B, L) bool, false for padding.
        """
        dtype, visible, positions = self.type_head.weight.dtype, inputs["visible"], inputs["positions"]
        # Hidden coordinates are removed here, so that no feature can read them.
        coordinates = torch.where(visible[..., None, None], inputs["coordinates"].float(), 0.0)
        offsets = offset_classes(positions)
        pairs = self.pairs(pair_features(coordinates, visible).to(dtype)) + self.offsets(offsets)
        pairs = self.pair_norm(pairs)  # (B, L, L, P)
        angles = dihedral_features(coordinates, visible, positions)
        local = torch.cat((angles, visible.unsqueeze(-1).float()), -1)
        states = self.types(inputs["residues"]) + self.backbone(local.to(dtype))
        for layer in self.encoder:
            states = self._run(layer, states, pairs, visible)
        states = self.bridge(F.gelu(states))
        for layer in self.decoder:
            states = self._run(layer, states, pairs, inputs["is_residue"])
        states = self.norm(states)
        frames = residue_frames(coordinates)
        return self.type_head(states), self.backbone_head(states, frames, offsets, visible)

    def _run(self, layer: nn.Module, states: torch.Tensor, pairs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        if layer in self._recomputed and self.training and torch.is_grad_enabled():
            found: torch.Tensor = checkpoint(layer, states, pairs, keys, use_reentrant=False)
            return found
        found = layer(states, pairs, keys)
        return found
