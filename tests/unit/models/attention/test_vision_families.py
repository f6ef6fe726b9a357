"""Each allowed vision-language model computes in a packed row with images what it computes in padded rows."""

from __future__ import annotations

import pytest
import torch

from dstrain.models.attention.packed import enable_packed_attention, packing_unsupported_reason
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.tasks.common.forward import forward_logits, forward_scores
from tests.cells import SLOW
from tests.unit.models.attention.packed_images import (
    CASES,
    KINDS,
    SHARED,
    TEXTS,
    config_and_processor,
    forms,
    made,
    packed_logits,
    padded_logits,
)
from tests.unit.models.attention.packed_rows import gradient


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("implementation", ["sdpa", SLOW("eager")])  # eager: unit/tasks/test_packing
def test_a_packed_row_with_images_is_read_as_padded_rows(kind: str, case: str, implementation: str) -> None:
    config, processor = config_and_processor(kind)
    config._attn_implementation = implementation
    found, model = forms(processor, *CASES[case]), made(config).eval()
    assert packing_unsupported_reason(model.config, shares_prefixes=True) is None
    expected = padded_logits(model, found)
    enable_packed_attention(model)
    assert float((packed_logits(model, found) - expected).detach().abs().max()) <= 1e-5
    assert expected.std() > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("checkpointing", [SLOW(False), True])
def test_the_packed_gradient_is_the_padded_rows_gradient(kind: str, case: str, checkpointing: bool) -> None:
    config, processor = config_and_processor(kind)
    found, model = forms(processor, *CASES[case]), made(config).double()
    expected = gradient(model, padded_logits(model, found))
    enable_packed_attention(model)
    if checkpointing:
        model.train()
        enable_gradient_checkpointing(model)
    got = gradient(model, packed_logits(model, found))
    assert float((got - expected).norm() / expected.norm()) <= 1e-6
    vision = [one.grad for name, one in model.named_parameters() if "vision" in name or "visual" in name]
    assert any(one is not None and one.any() for one in vision) is (case != "no images")


@pytest.mark.parametrize("kind", KINDS)
def test_a_reward_model_scores_both_alike(kind: str) -> None:
    config, processor = config_and_processor(kind)
    config.get_text_config().pad_token_id = processor.tokenizer.pad_token_id
    found, model = forms(processor, TEXTS, SHARED), made(config, is_reward_model=True).eval()
    expected = forward_logits(model, found.padded)
    enable_packed_attention(model)
    ends = found.rows.score_tensors({"ends": processor.tokenizer.pad_token_id})["ends"]
    torch.testing.assert_close(forward_scores(model, found.packed, ends), expected, atol=1e-5, rtol=1e-5)
    assert expected.std() > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_of_a_pair_is_read_once(kind: str) -> None:
    _, processor = config_and_processor(kind)
    found = forms(processor, ["0 what is it? 1 a", "0 what is it? 1 b"], [[0, 1]])
    sizes = [int(batch.vision["pixel_values"].numel()) for batch in (found.packed, found.padded)]
    assert 2 * sizes[0] == sizes[1]
