"""Each allowed family computes in a packed row what it computes in padded rows; all others are refused with a reason."""

from __future__ import annotations

import pytest
import torch

from dstrain.models.attention import by_group
from dstrain.models.attention.packed import enable_packed_attention, packing_unsupported_reason
from tests.cells import mark_slow
from tests.unit.models.attention.packed_rows import (
    CONFIGS,
    gradient,
    made,
    packed,
    packed_logits,
    padded_logits,
)

PADDED = {"mamba2": "Mamba2ForCausalLM does not hand its arguments on to self.backbone"}
"""Configs of CONFIGS whose batches are padded -> why."""
ALLOWED = [name for name in CONFIGS if name not in PADDED]
TRAINED = (
    "llama", "qwen2 with windows", "gemma2", "gemma3_text, two types of layers", "qwen3_moe with windows", "lfm2",
    "qwen3_next", "bamba", "jamba",
)  # fmt: skip
"""Families whose gradients `make test` compares: each kind of layer; it compares the logits of all."""


@pytest.fixture(params=["as set", "small blocks"])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits as they are, and so small that tiny sequences run through every branch."""
    if request.param == "small blocks":
        for name, value in (("QUERY_BLOCK", 7), ("SAVED_BYTES", 2000)):
            monkeypatch.setattr(by_group, name, value)


@pytest.mark.parametrize("name", ALLOWED)
@pytest.mark.usefixtures("blocks")
def test_a_packed_row_is_read_as_padded_rows(name: str) -> None:
    model, batch = made(name), packed()
    assert packing_unsupported_reason(model.config, shares_prefixes=True) is None
    expected = padded_logits(model, batch)
    enable_packed_attention(model)
    assert float((packed_logits(model, batch) - expected).detach().abs().max()) <= 1e-5


@pytest.mark.parametrize("name", mark_slow(ALLOWED, [name for name in ALLOWED if name not in TRAINED]))
@pytest.mark.usefixtures("blocks")
def test_the_packed_gradient_is_the_padded_rows_gradient(name: str) -> None:
    # In fp64 the rows of gemma2's padding are nan: it takes their masks from fp64 to a softmax in fp32.
    model, batch = made(name, torch.float32 if name == "gemma2" else torch.float64), packed()
    model.set_experts_implementation("eager")  # the others have no fp64
    expected = gradient(model, padded_logits(model, batch))
    enable_packed_attention(model)
    found = gradient(model, packed_logits(model, batch))
    assert float((found - expected).norm() / expected.norm()) <= 1e-6


@pytest.mark.parametrize("name", PADDED)
def test_a_model_that_does_not_hand_the_groups_on_is_padded(name: str) -> None:
    assert packing_unsupported_reason(made(name).config, shares_prefixes=True) == PADDED[name]
