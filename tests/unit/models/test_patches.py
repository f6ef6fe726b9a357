"""Patches of torch.nn and transformers, with the fault that each is for."""

from __future__ import annotations

import pytest
import torch

from dstrain.models.patches import parameters_on_meta, set_special_tokens


class Tied(torch.nn.Module):
    """Two layers with one weight, and a buffer with values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2))


def test_parameters_are_on_meta_tied_and_buffers_are_real() -> None:
    register = torch.nn.Module.register_parameter
    with parameters_on_meta():
        model = Tied()
    assert model.first.weight.device.type == "meta"
    assert model.second.weight is model.first.weight
    assert model.scale.tolist() == [1.0, 1.0]
    assert torch.nn.Module.register_parameter is register


def test_torchs_own_way_loses_the_values_of_buffers() -> None:
    """Fails once torch keeps buffers: then `with torch.device("meta")` may do."""
    with torch.device("meta"):
        assert Tied().scale.device.type == "meta"


def test_accelerates_way_unties_parameters() -> None:
    """Fails once accelerate keeps ties: then `init_empty_weights` may do."""
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights(include_buffers=False):
        model = Tied()
    assert model.second.weight is not model.first.weight


def test_a_token_gets_an_attribute_only_by_the_private_function() -> None:
    """Fails once add_tokens or add_special_tokens gives the attribute."""
    from tokenizers import Tokenizer, models
    from transformers import AddedToken, PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, unk_token="a")))
    tokenizer.add_tokens([AddedToken("<image>", special=True)], True)
    assert getattr(tokenizer, "image_token", None) is None
    set_special_tokens(tokenizer, {"image_token": "<image>"})
    assert tokenizer.image_token == "<image>"
