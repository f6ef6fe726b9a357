"""Layers over residues: attention that reads pairs of residues, and prediction of coordinates in frames."""

# Shapes: B chains, L residues, H heads, D channels of a head, P channels of a pair.

from __future__ import annotations

import torch
from torch import nn

NUM_ATOMS = 4
MAX_OFFSET = 32
"""Offsets in the sequence are told apart up to this many residues (Jumper et al. 2021, supplement, algorithm 4)."""
_HIDDEN = -1.0e4
"""Logit of a key that is not attended. Finite: a row without any key must not become NaN."""
_POINT_SCALE = 4.0
"""Å per unit of a predicted point: about the distance of two CA, 3.8 Å."""


def offset_classes(positions: torch.Tensor) -> torch.Tensor:
    """Return the clipped offset of each pair of positions (B, L) as a class from 0 to 2 * MAX_OFFSET, (B, L, L)."""
    return (positions[:, None] - positions[:, :, None]).clamp(-MAX_OFFSET, MAX_OFFSET) + MAX_OFFSET


class PairAttention(nn.Module):
    """Self-attention with a bias from pairs, whose output also holds the attended pairs.

    Algorithm 22 of Jumper et al. 2021 (supplement) without its points: pairs are invariant features here.
    """

    def __init__(self, dim: int, pair_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.norm = nn.LayerNorm(dim)
        self.query_key_value = nn.Linear(dim, 3 * dim, bias=False)
        self.pair_bias = nn.Linear(pair_dim, num_heads, bias=False)
        self.output = nn.Linear(dim + num_heads * pair_dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, states: torch.Tensor, pairs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the change of states (B, L, dim). `pairs`: (B, L, L, P); `keys`: (B, L) bool."""
        shape = (*states.shape[:2], 3, self.num_heads, self.head_dim)
        query, key, value = self.query_key_value(self.norm(states)).view(shape).unbind(2)  # (B, L, H, D)
        logits = torch.einsum("bihd,bjhd->bhij", query, key) * self.head_dim**-0.5
        logits = logits.float() + self.pair_bias(pairs).permute(0, 3, 1, 2).float()
        shares = logits.masked_fill(~keys[:, None, None], _HIDDEN).softmax(-1).to(states.dtype)  # (B, H, L, L)
        shares = self.dropout(shares)
        own = torch.einsum("bhij,bjhd->bihd", shares, value).flatten(-2)
        of_pairs = torch.einsum("bhij,bijp->bihp", shares, pairs).flatten(-2)  # (B, L, H * P)
        return self.dropout(self.output(torch.cat((own, of_pairs), -1)))


class ResidueLayer(nn.Module):
    """A transformer layer over residues, with normalization first."""

    def __init__(self, dim: int, pair_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.attention = PairAttention(dim, pair_dim, num_heads, dropout)
        self.transition = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, states: torch.Tensor, pairs: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return states (B, L, dim)."""
        states = states + self.attention(states, pairs, keys)
        return states + self.transition(states)


class OffsetBias(nn.Embedding):
    """A logit for each offset and head that begins with nearby residues: -slope * |offset| (arXiv 2108.12409)."""

    def __init__(self, num_heads: int) -> None:
        super().__init__(2 * MAX_OFFSET + 1, num_heads)

    def reset_parameters(self) -> None:
        offsets = torch.arange(-MAX_OFFSET, MAX_OFFSET + 1).abs().float()
        slopes = 2.0 ** -torch.arange(self.embedding_dim).remainder(4).float()
        with torch.no_grad():
            self.weight.copy_(-offsets[:, None] * slopes)


class BackboneHead(nn.Module):
    """Predicts the atoms of each residue as points in the frames of visible residues.

    Head h: x_i = sum_j a_ij (R_j (v_j + u_i) + t_j), the points of algorithm 22 of Jumper et al. 2021; the heads are
    averaged with weights from residue i. Points rotate and move with the frames.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.norm = nn.LayerNorm(dim)
        self.query_key = nn.Linear(dim, 2 * dim, bias=False)
        self.offset_bias = OffsetBias(num_heads)
        self.points = nn.Linear(dim, 2 * num_heads * NUM_ATOMS * 3)
        self.gate = nn.Linear(dim, num_heads)

    def forward(
        self,
        states: torch.Tensor,
        frames: tuple[torch.Tensor, torch.Tensor],
        offsets: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """Return (B, L, 4, 3) in Å, fp32. `offsets`: `offset_classes`; `visible`: (B, L) bool."""
        states, (rotations, origins) = self.norm(states), frames
        shape = (*states.shape[:2], 2, self.num_heads, -1)
        query, key = self.query_key(states).view(shape).unbind(2)  # (B, L, H, D)
        logits = torch.einsum("bihd,bjhd->bhij", query, key).float() * self.head_dim**-0.5
        logits = logits + self.offset_bias(offsets).permute(0, 3, 1, 2).float()
        shares = logits.masked_fill(~visible[:, None, None], _HIDDEN).softmax(-1)  # (B, H, L, L)
        points = (_POINT_SCALE * self.points(states).float()).view(*states.shape[:2], 2, self.num_heads, NUM_ATOMS, 3)
        theirs, own = points.unbind(2)  # (B, L, H, 4, 3)
        placed = torch.einsum("bjxy,bjhay->bjhax", rotations, theirs) + origins[:, :, None, None]
        rotation = torch.einsum("bhij,bjxy->bihxy", shares, rotations)
        found = torch.einsum("bhij,bjhax->bihax", shares, placed) + torch.einsum("bihxy,bihay->bihax", rotation, own)
        gate = self.gate(states).float().softmax(-1)  # (B, L, H)
        return torch.einsum("bih,bihax->biax", gate, found)
