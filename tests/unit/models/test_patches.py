"""Patches of torch.nn and transformers, with the fault that each is for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dstrain.models.patches import (
    features_placed_without_waits,
    padding_known,
    parameters_on_meta,
    set_special_tokens,
    special_tokens_prepared_on_host,
)


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


@pytest.mark.parametrize(
    ("rows", "has_padding", "asked", "is_ignored"),
    [
        (2, False, False, True),
        (2, True, False, False),
        (2, None, True, True),  # not known: transformers looks
        (3, True, True, True),  # a mask of something else, such as the patches of an image
    ],
)
def test_transformers_asks_no_mask_whose_padding_is_known(
    rows: int, has_padding: bool | None, asked: bool, is_ignored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import masking_utils

    looks: list[torch.Tensor] = []
    fast_all = masking_utils.fast_all
    monkeypatch.setattr(masking_utils, "fast_all", lambda mask: looks.append(mask) or fast_all(mask))
    mask = torch.ones(2, 5, dtype=torch.bool)
    with padding_known((rows, 5), has_padding):
        ignored = masking_utils._ignore_causal_mask_sdpa(mask, 5, 5, 0, 0)
    assert (bool(looks), bool(ignored)) == (asked, is_ignored)


class Merging(torch.nn.Module):
    """The end of an image model of transformers: it puts features in the places of the token 1, and compares both."""

    def get_placeholder_mask(self, ids: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        from transformers.utils import torch_compilable_check

        is_place = ids == 1
        count = is_place.sum()
        torch_compilable_check(count == len(features), f"{count} places for {len(features)} features")
        return is_place.unsqueeze(-1)

    def forward(self, ids: torch.Tensor, embedded: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        with features_placed_without_waits(self):
            return embedded.masked_scatter(self.get_placeholder_mask(ids, features), features)


class RecordOperations(TorchDispatchMode):
    """Records the names of the operations inside."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


READS = {"aten::_local_scalar_dense", "aten::masked_scatter_backward", "aten::nonzero", "aten::masked_select"}
"""Operations in which the host waits for a value of the device."""


def test_features_are_placed_as_masked_scatter_does_without_reading_their_number() -> None:
    masked_scatter, find_places = torch.Tensor.masked_scatter, Merging.get_placeholder_mask
    ids = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 0]])
    inputs = [torch.randn(2, 4, 3), torch.randn(3, 3)]
    expected = [value.clone().requires_grad_() for value in inputs]
    placed = [value.clone().requires_grad_() for value in inputs]
    plain = expected[0].masked_scatter((ids == 1).unsqueeze(-1), expected[1])
    model = Merging()
    model(ids, *placed)  # in the first pass the numbers are compared
    weights = torch.randn(2, 4, 3)
    with RecordOperations() as recorded:
        result = model(ids, *placed)
        (result * weights).sum().backward()
    assert not READS & {*recorded.names}
    assert torch.equal(result, plain)
    with RecordOperations() as recorded:
        (plain * weights).sum().backward()
    assert READS & {*recorded.names}, "without the patch"
    for ours, theirs in zip(placed, expected, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=0)
    assert torch.Tensor.masked_scatter is masked_scatter
    assert Merging.get_placeholder_mask is find_places


def test_the_first_pass_compares_until_it_agrees() -> None:
    model, ids = Merging(), torch.tensor([[0, 1, 1]])
    inputs: dict[str, Any] = {"ids": ids, "embedded": torch.zeros(1, 3, 2)}
    for _ in range(2):
        with pytest.raises(ValueError, match="2 places for 1 features"):
            model(**inputs, features=torch.ones(1, 2))
    assert model(**inputs, features=torch.ones(2, 2)).sum() == 4


def test_other_masks_are_those_of_torch() -> None:
    values, source = torch.zeros(2, 3), torch.arange(1.0, 7.0)
    mask = torch.tensor([[True, False, True], [False, True, False]])
    expected = values.masked_scatter(mask, source)
    with features_placed_without_waits(torch.nn.Linear(1, 1)):
        assert torch.equal(values.masked_scatter(mask, source), expected)


def test_generate_checks_its_special_tokens_on_the_host() -> None:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
    )
    model = LlamaForCausalLM(config)
    prepare = LlamaForCausalLM._prepare_special_tokens
    settings = GenerationConfig(eos_token_id=[2, 3], pad_token_id=0)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):  # a device whose values cannot be read
        model._prepare_special_tokens(settings, True, device="meta", batch_size=2)
    with special_tokens_prepared_on_host(model):
        model._prepare_special_tokens(settings, True, device="meta", batch_size=2)
        moved = (settings._eos_token_tensor, settings._pad_token_tensor)
        model._prepare_special_tokens(settings, True, device=torch.device("cpu"), batch_size=2)
    assert [(ids.device.type, ids.shape) for ids in moved] == [("meta", (2,)), ("meta", ())]
    assert settings._eos_token_tensor.tolist() == [2, 3]
    assert settings._pad_token_tensor.tolist() == 0
    assert LlamaForCausalLM._prepare_special_tokens is prepare
