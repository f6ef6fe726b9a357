"""Masked modelling of protein structures: geometry, layers, model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dstrain.models.gradient_checkpointing import choose_layers

# Shapes: B chains, L residues, P points; 4 atoms N, CA, C, O.


MIN_DISTANCE, MAX_DISTANCE, NUM_BINS = 2.0, 22.0, 16
"""Centres of the radial basis functions in Å (Dauparas et al., Science 2022, ProteinMPNN: 16 from 2 to 22 Å)."""
_IDEAL_CB = (-0.58273431, 0.56802827, -0.54067466)
"""Cβ from N, Cα and C with ideal bonds (ProteinMPNN): factors of a = b x c, b = Cα - N, c = C - Cα."""
PAIR_FEATURES = 4 * NUM_BINS + 3 + 9 + 1
"""Invariant numbers for each pair of residues."""
DIHEDRAL_FEATURES = 6


def residue_frames(coordinates: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rotations (B, L, 3, 3) and origins (B, L, 3) of the residues' frames from (B, L, 4, 3).

    Gram-Schmidt on C - CA and N - CA (Jumper et al., Nature 2021, supplement, algorithm 21). The columns of a rotation
    are the axes of the frame.
    """
    nitrogen, alpha, carbon = coordinates[..., 0, :], coordinates[..., 1, :], coordinates[..., 2, :]
    first = F.normalize(carbon - alpha, dim=-1, eps=1e-6)
    side = nitrogen - alpha
    second = F.normalize(side - first * (first * side).sum(-1, keepdim=True), dim=-1, eps=1e-6)
    third = torch.linalg.cross(first, second)
    return torch.stack((first, second, third), -1), alpha


def pair_features(coordinates: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Return numbers of each pair of residues that no rotation or translation changes, (B, L, L, PAIR_FEATURES).

    Distances CA-CA, CB-CB, N-C and C-N in radial basis functions; the direction from residue i to residue j and the
    axes of j in the frame of i (Ingraham et al., NeurIPS 2019, eq. 3); 1. All are 0 where one of the two backbones is
    not visible, (B, L) bool.
    """
    rotation, origin = residue_frames(coordinates)
    beta = _virtual_beta(coordinates)
    nitrogen, carbon = coordinates[..., 0, :], coordinates[..., 2, :]
    pairs = ((origin, origin), (beta, beta), (nitrogen, carbon), (carbon, nitrogen))
    distances = torch.stack([(a[:, :, None] - b[:, None]).square().sum(-1) for a, b in pairs], -1)  # (B, L, L, 4)
    centres = torch.linspace(MIN_DISTANCE, MAX_DISTANCE, NUM_BINS, device=coordinates.device)
    width = (MAX_DISTANCE - MIN_DISTANCE) / NUM_BINS
    radial = (-((distances.sqrt()[..., None] - centres) / width).square()).exp().flatten(-2)  # (B, L, L, 4 * 16)
    offset = origin[:, None] - origin[:, :, None]  # from i to j
    direction = F.normalize(torch.einsum("bixy,bijx->bijy", rotation, offset), dim=-1, eps=1e-6)
    axes = torch.einsum("bixy,bjxz->bijyz", rotation, rotation).flatten(-2)  # (B, L, L, 9)
    both = (visible[:, :, None] & visible[:, None]).unsqueeze(-1)
    features = torch.cat((radial, direction, axes, torch.ones_like(radial[..., :1])), -1)
    return features * both


def dihedral_features(coordinates: torch.Tensor, visible: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return sines and cosines of phi, psi and omega, (B, L, 6); 0 where an atom or a neighbour is missing."""
    nitrogen, alpha, carbon = coordinates[..., 0, :], coordinates[..., 1, :], coordinates[..., 2, :]
    joined = visible[:, :-1] & visible[:, 1:] & (positions[:, 1:] - positions[:, :-1] == 1)  # (B, L - 1)
    phi = _dihedral(carbon[:, :-1], nitrogen[:, 1:], alpha[:, 1:], carbon[:, 1:])
    psi = _dihedral(nitrogen[:, :-1], alpha[:, :-1], carbon[:, :-1], nitrogen[:, 1:])
    omega = _dihedral(alpha[:, :-1], carbon[:, :-1], nitrogen[:, 1:], alpha[:, 1:])
    shown = joined.unsqueeze(-1)
    # phi and omega belong to the later residue of a bond, psi to the earlier one.
    return torch.cat([F.pad(phi * shown, (0, 0, 1, 0)), F.pad(psi * shown, (0, 0, 0, 1)),
                      F.pad(omega * shown, (0, 0, 1, 0))], -1)  # fmt: skip


def _dihedral(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """Return (..., 2): sine and cosine of the dihedral angle of four points."""
    one, axis, three = b - a, c - b, d - c
    left, right = torch.linalg.cross(one, axis), torch.linalg.cross(axis, three)
    sine = (torch.linalg.cross(left, right) * F.normalize(axis, dim=-1, eps=1e-6)).sum(-1)
    return F.normalize(torch.stack((sine, (left * right).sum(-1)), -1), dim=-1, eps=1e-6)


def _virtual_beta(coordinates: torch.Tensor) -> torch.Tensor:
    bond = coordinates[..., 1, :] - coordinates[..., 0, :]
    other = coordinates[..., 2, :] - coordinates[..., 1, :]
    normal = torch.linalg.cross(bond, other)
    return _IDEAL_CB[0] * normal + _IDEAL_CB[1] * bond + _IDEAL_CB[2] * other + coordinates[..., 1, :]


@torch.no_grad()
def superposed_rmsd(points: torch.Tensor, targets: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the RMSD of points (B, P, 3) to targets after superposition, (B,) in Å; 0 without a point.

    The optimal rotation is not a reflection (Kabsch, Acta Cryst. A34, 1978). `mask`: (B, P) bool.
    """
    weight = mask.unsqueeze(-1).double()
    count = weight.sum(1).clamp(min=1)  # (B, 1)
    points, targets = (
        (each.double() - ((each.double() * weight).sum(1) / count).unsqueeze(1)) * weight for each in (points, targets)
    )
    covariance = points.transpose(1, 2) @ targets  # (B, 3, 3)
    values = torch.linalg.svdvals(covariance)
    sign = torch.where(torch.linalg.det(covariance) < 0, -1.0, 1.0).double()
    overlap = values[:, 0] + values[:, 1] + sign * values[:, 2]
    squares = points.square().sum((1, 2)) + targets.square().sum((1, 2)) - 2 * overlap
    return (squares.clamp(min=0) / count[:, 0]).sqrt()


# Shapes: B chains, L residues, H heads, D channels of a head, P channels of a pair.


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


# Shapes: B chains, L residues; 4 atoms N, CA, C, O.


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
        dtype, visible, positions = self.norm.weight.dtype, inputs["visible"], inputs["positions"]
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
