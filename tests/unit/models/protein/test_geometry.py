"""Geometry of backbones: what does not change with the chain's place, and superposition."""

from __future__ import annotations

import math

import pytest
import torch

from dstrain.models.protein import dihedral_features, pair_features, residue_frames, superposed_rmsd


def rotation(seed: int = 0) -> torch.Tensor:
    """Return a random rotation, (3, 3) float64."""
    matrix, _ = torch.linalg.qr(torch.randn(3, 3, generator=torch.Generator().manual_seed(seed)).double())
    return matrix * torch.linalg.det(matrix).sign()


def backbone(length: int = 9, seed: int = 0) -> torch.Tensor:
    return 5 * torch.randn(1, length, 4, 3, generator=torch.Generator().manual_seed(seed)).double()


def moved(points: torch.Tensor) -> torch.Tensor:
    return points @ rotation().T + torch.tensor([3.0, -40.0, 7.0]).double()


def test_a_frame_is_a_rotation_that_turns_with_the_chain() -> None:
    (axes, origins), (turned, shifted) = residue_frames(backbone()), residue_frames(moved(backbone()))
    torch.testing.assert_close(axes.transpose(-1, -2) @ axes, torch.eye(3).double().expand_as(axes))
    assert (torch.linalg.det(axes) > 0).all()
    torch.testing.assert_close(turned, rotation() @ axes)
    torch.testing.assert_close(shifted, moved(origins))


def test_features_do_not_change_with_rotation_and_translation() -> None:
    visible, positions = torch.ones(1, 9, dtype=torch.bool), torch.arange(9)[None]
    visible[0, 4] = False
    for features in (pair_features, lambda *given: dihedral_features(*given, positions)):
        torch.testing.assert_close(features(moved(backbone()), visible), features(backbone(), visible))


def test_a_mirror_image_has_other_features() -> None:
    visible = torch.ones(1, 9, dtype=torch.bool)
    mirrored = backbone() * torch.tensor([1.0, 1.0, -1.0])
    assert not torch.allclose(pair_features(mirrored, visible), pair_features(backbone(), visible))


def test_features_of_a_hidden_backbone_are_zero() -> None:
    visible = torch.ones(1, 9, dtype=torch.bool)
    visible[0, 4] = False
    pairs = pair_features(backbone(), visible)
    assert not pairs[0, 4].any()
    assert not pairs[0, :, 4].any()
    angles = dihedral_features(backbone(), visible, torch.arange(9)[None])
    assert not angles[0, 4].any()
    assert not angles[0, 3, 2:4].any(), "psi of the residue before"
    assert not angles[0, 5, :2].any(), "phi of the residue after"


def test_a_right_angle_is_plus_ninety_degrees() -> None:
    place = torch.zeros(1, 2, 4, 3).double()
    place[0, 0, 0], place[0, 0, 1], place[0, 0, 2] = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 0, 1.0]]).double()
    place[0, 1, 0] = torch.tensor([0, 1.0, 1.0]).double()
    psi = dihedral_features(place, torch.ones(1, 2, dtype=torch.bool), torch.arange(2)[None])[0, 0, 2:4]
    assert abs(math.degrees(math.atan2(*psi.tolist()))) == pytest.approx(90)


def test_superposition_removes_rotation_and_translation_and_nothing_else() -> None:
    points = backbone().flatten(1, 2)
    mask = torch.ones(points.shape[:2], dtype=torch.bool)
    assert float(superposed_rmsd(moved(points), points, mask)) == pytest.approx(0, abs=1e-6)
    mirrored = points * torch.tensor([1.0, 1.0, -1.0])
    assert float(superposed_rmsd(mirrored, points, mask)) > 1


def test_the_rmsd_is_the_least_over_all_rotations() -> None:
    points, targets = backbone(seed=1).flatten(1, 2), backbone(seed=2).flatten(1, 2)
    mask = torch.ones(points.shape[:2], dtype=torch.bool)
    mask[0, 5:9] = False
    found = float(superposed_rmsd(points, targets, mask))
    one, two = (each[mask] - each[mask].mean(0) for each in (points, targets))
    tried = [float((one @ rotation(seed).T - two).square().sum(-1).mean().sqrt()) for seed in range(300)]
    assert found <= min(tried) + 1e-9
    assert min(tried) < 1.3 * found


def test_no_point_has_no_rmsd() -> None:
    points = backbone().flatten(1, 2)
    assert float(superposed_rmsd(points, points, torch.zeros(points.shape[:2], dtype=torch.bool))) == 0
