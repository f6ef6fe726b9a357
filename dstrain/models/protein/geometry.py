"""Geometry of protein backbones: frames, dihedral angles, distances, superposition. All in fp32, in Å."""

# Shapes: B chains, L residues, P points; 4 atoms N, CA, C, O.

from __future__ import annotations

import torch
from torch.nn import functional as F

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
