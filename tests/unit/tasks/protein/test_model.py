"""The protein model: invariant types, coordinates that follow the chain, and no leak of what is hidden."""

from __future__ import annotations

import math

import pytest
import torch

from dstrain.models.quantization import dequantized_weights, quantize_model
from dstrain.tasks.protein.model import (
    MAX_OFFSET,
    OffsetBias,
    ProteinConfig,
    ProteinModel,
    dihedral_features,
    pair_features,
    residue_frames,
    superposed_rmsd,
)


def model(**values: object) -> ProteinModel:
    torch.manual_seed(0)
    small = {"hidden_dim": 32, "encoder_layers": 1, "decoder_layers": 2, "num_heads": 4, "dropout": 0.0}
    return ProteinModel(ProteinConfig(**{**small, **values})).eval()  # type: ignore[arg-type]


def inputs(length: int = 9) -> dict[str, torch.Tensor]:
    visible = torch.ones(1, length, dtype=torch.bool)
    visible[0, 3] = False
    return {
        "residues": torch.arange(length)[None] % 20,
        "positions": torch.arange(length)[None],
        "coordinates": backbone(length).float(),
        "visible": visible,
        "is_residue": torch.ones(1, length, dtype=torch.bool),
    }


def test_types_do_not_see_the_place_of_the_chain_and_atoms_follow_it() -> None:
    given = inputs()
    turned = {**given, "coordinates": moved(backbone()).float()}
    (logits, atoms), (again, followed) = model()(given), model()(turned)
    torch.testing.assert_close(again, logits, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(followed, moved(atoms.double()).float(), atol=1e-3, rtol=1e-3)


def test_hidden_coordinates_are_not_read() -> None:
    given, other = inputs(), inputs()
    other["coordinates"] = other["coordinates"].clone()
    other["coordinates"][0, 3] = 77.0
    for found, wanted in zip(model()(other), model()(given), strict=True):
        assert torch.equal(found, wanted)


def test_a_quantized_model_computes_with_its_dequantized_weights() -> None:
    """Features are cast to the dtype of the weights, which is that of codes in a quantized layer."""
    pytest.importorskip("bitsandbytes", reason="the extra [quantize] is not installed")
    quantized, dequantized = model(hidden_dim=64), model(hidden_dim=64)
    dequantized.load_state_dict(quantized.state_dict())
    quantize_model(quantized, "nf4")
    with dequantized_weights():
        quantize_model(dequantized, "nf4")
    with torch.no_grad():
        torch.testing.assert_close(quantized(inputs()), dequantized(inputs()))


def test_padding_changes_nothing() -> None:
    given, padded = inputs(), inputs(12)
    padded["coordinates"] = torch.cat((given["coordinates"], torch.full((1, 3, 4, 3), 5.0)), 1)
    padded["visible"][0, 9:] = False
    padded["is_residue"][0, 9:] = False
    padded["residues"] = torch.cat((given["residues"], torch.full((1, 3), 22)), 1)
    for found, wanted in zip(model()(padded), model()(given), strict=True):
        torch.testing.assert_close(found[:, :9], wanted, atol=1e-5, rtol=1e-4)


def test_a_chain_without_a_visible_backbone_gives_numbers() -> None:
    given = inputs()
    given["visible"] = torch.zeros_like(given["visible"])
    assert all(found.isfinite().all() for found in model()(given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_recomputed_layers_have_the_same_gradient(dtype: torch.dtype) -> None:
    grads = []
    for checkpointing in (False, True):
        made = model(gradient_checkpointing=checkpointing).to(dtype).train()
        logits, atoms = made(inputs())
        (logits.float().square().sum() + atoms.square().sum()).backward()
        grads.append({name: parameter.grad for name, parameter in made.named_parameters()})
    assert all(torch.equal(grad, grads[1][name]) for name, grad in grads[0].items())


def test_the_first_guess_of_a_backbone_is_near_its_neighbours() -> None:
    bias = OffsetBias(8).weight
    assert (bias[MAX_OFFSET] == 0).all()
    assert (bias[MAX_OFFSET + 1 :].diff(dim=0) < 0).all()


# Geometry of backbones: what does not change with the chain's place, and superposition.


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
