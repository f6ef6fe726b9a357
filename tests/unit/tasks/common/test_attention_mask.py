"""Families that go without a mask say of real tokens what they say with one, bit by bit; all others keep theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from dstrain.batch import Batch
from dstrain.config.schema import LoraConfig, ModelConfig
from dstrain.models.adapters import add_adapters
from dstrain.models.load import read_config
from dstrain.tasks.common.forward import NO_MASK_MODEL_TYPES, forward_logits, needs_attention_mask
from tests.model_families import FAMILIES, family

LENGTHS = (70, 50, 9, 33)
"""Of rows; sliding windows are 16 long."""


def made(auto: Any, name: str, **more: Any) -> PreTrainedModel:
    config = read_config(ModelConfig(config={**family(name), **more}))
    config.num_labels, config.pad_token_id = 1, 2
    torch.manual_seed(0)
    model = auto.from_config(config)
    for parameter in model.parameters():  # some families begin with zeros, through which nothing is seen
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(3, 320, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(4))
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).long()
    return ids.masked_fill(mask == 0, 2), mask


def of_both_ways(model: PreTrainedModel, whole: bool) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(Logits of real tokens, or all; gradient), with the mask and without."""
    ids, mask = rows()
    found = []
    for more in ({"attention_mask": mask}, {}):
        logits = model(input_ids=ids, use_cache=False, **more).logits
        logits = logits if whole else logits[mask == 1]
        model.zero_grad(set_to_none=True)
        logits.float().square().sum().backward()
        found.append((logits.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])))
    return found


@pytest.mark.parametrize("name", sorted(NO_MASK_MODEL_TYPES))
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_real_tokens_are_read_the_same_without_a_mask(name: str, attention: str) -> None:
    model = made(AutoModelForCausalLM, name)
    if attention == "eager":
        model.set_attn_implementation("eager")
    assert not needs_attention_mask(model)
    (masked, gradient), (plain, other) = of_both_ways(model, whole=False)
    assert torch.equal(masked, plain)
    assert float((gradient - other).norm() / gradient.norm()) <= 1e-7, "other kernels add in another order"


@pytest.mark.parametrize("name", ["gemma2", "llama", "mistral", "mixtral", "phi3", "qwen3"])
def test_scores_are_read_at_the_last_real_token_without_a_mask(name: str) -> None:
    model = made(AutoModelForSequenceClassification, name)
    assert not needs_attention_mask(model)
    (masked, _), (plain, _) = of_both_ways(model, whole=True)
    assert torch.equal(masked, plain)


def test_every_family_that_goes_without_a_mask_is_held_to_it() -> None:
    assert set(FAMILIES) >= NO_MASK_MODEL_TYPES
    assert set(FAMILIES) - NO_MASK_MODEL_TYPES == {"qwen3_next", "lfm2", "mamba2"}, (
        "their states take in what is not masked"
    )


class Custom(torch.nn.Module):
    """Python that came with weights, under a name that is known."""

    config = read_config(ModelConfig(config=family("llama")))


def test_others_keep_their_mask() -> None:
    assert needs_attention_mask(torch.nn.Linear(1, 1))
    assert needs_attention_mask(Custom())
    assert needs_attention_mask(made(AutoModelForCausalLM, "gemma3_text", use_bidirectional_attention=True))
    encoder = made(AutoModelForCausalLM, "llama")
    encoder.config.is_causal = False  # transformers then makes a mask for both ways
    assert needs_attention_mask(encoder)
    for name in ("qwen3_next", "lfm2", "mamba2"):
        assert needs_attention_mask(made(AutoModelForCausalLM, name))


@pytest.mark.parametrize(("name", "given"), [("llama", False), ("lfm2", True)])
def test_a_model_with_adapters_is_run_as_the_one_inside(name: str, given: bool) -> None:
    model, seen = add_adapters(made(AutoModelForCausalLM, name), LoraConfig(rank=2), (), 1), []
    inner = model.get_base_model()
    forward = type(inner).forward
    inner.forward = lambda **inputs: (seen.append("attention_mask" in inputs), forward(inner, **inputs))[1]
    ids, mask = rows()
    batch = Batch(tensors={"input_ids": ids, "attention_mask": mask}, weight=1.0, samples=())
    forward_logits(inner, batch)
    assert seen == [given]
    with pytest.raises(AssertionError, match="unwrap_peft"):
        forward_logits(model, batch)
