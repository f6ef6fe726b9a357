"""The protein model: invariant types, coordinates that follow the chain, and no leak of what is hidden."""

from __future__ import annotations

import pytest
import torch

from dstrain.models.protein import MAX_OFFSET, OffsetBias, ProteinConfig, ProteinModel
from tests.unit.models.protein.test_geometry import backbone, moved


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
