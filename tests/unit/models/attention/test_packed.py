"""Packed attention under checkpointing and adapters; batches that are not packed do not notice it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig

from dstrain.config.schema import LoraConfig, ModelConfig
from dstrain.models.adapters import add_adapters
from dstrain.models.attention.packed import (
    EAGER,
    enable_packed_attention,
    has_packed_attention,
    packed_model_kwargs,
    packing_unsupported_reason,
)  # fmt: skip
from dstrain.models.gradient_checkpointing import enable_gradient_checkpointing
from dstrain.models.load import read_config
from tests.model_families import BASE, FAMILIES, family
from tests.unit.models.attention.packed_rows import gradient, made, packed, packed_logits, padded_logits, rows

KINDS = ["llama", "gemma2", "gemma3_text, two types of layers", "gpt_oss", "qwen2 with windows"]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", KINDS)
def test_checkpointed_layers_are_computed_the_same_again(name: str) -> None:
    model, batch = made(name), packed()
    model.train()
    enable_packed_attention(model)
    expected = gradient(model, packed_logits(model, batch))
    enable_gradient_checkpointing(model)
    found = gradient(model, packed_logits(model, batch))
    assert distance(found, expected) <= (1e-6 if name == "gpt_oss" else 0)  # see below


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_get_the_padded_rows_gradient(name: str, checkpointing: bool) -> None:
    base, batch = made(name), packed()
    base.set_experts_implementation("eager")
    model = add_adapters(base, LoraConfig(rank=2), (), 1)
    model = model if name == "gemma2" else model.double()  # see test_model_types.py
    for parameter in model.parameters():  # B matrices begin with zeros
        torch.nn.init.normal_(parameter, std=0.1) if not parameter.any() else None
    expected = gradient(model, padded_logits(model, batch))
    enable_packed_attention(model)
    if checkpointing:
        model.enable_input_require_grads()
        enable_gradient_checkpointing(model.get_base_model())
        model.train()
    assert has_packed_attention(model)
    found = gradient(model, packed_logits(model, batch))
    assert distance(found, expected) <= (1e-5 if found.dtype == torch.float32 else 1e-6)


@pytest.mark.parametrize("name", [*KINDS, "mistral", "deepseek_v3"])
@pytest.mark.parametrize("with_mask", [False, True])
def test_padded_rows_give_the_same_bits_as_before(name: str, with_mask: bool) -> None:
    model = made(name)
    ids, mask, _ = rows(packed())
    inputs = {"input_ids": ids, "use_cache": False, **({"attention_mask": mask} if with_mask else {})}
    before = model(**inputs).logits
    gradient_before = gradient(model, before)
    enable_packed_attention(model)
    after = model(**inputs).logits
    assert torch.equal(before, after)
    # The experts' gradients of gpt_oss are added in another order each time.
    assert distance(gradient(model, after), gradient_before) <= (1e-6 if name == "gpt_oss" else 0)


def test_rows_whose_positions_jump_are_not_cut_into_sequences() -> None:
    """transformers takes a jump for a new sequence; a branch would then not see its prefix."""
    model, batch = made("llama"), packed()
    enable_packed_attention(model)
    plain = model(input_ids=batch.tensors["input_ids"], position_ids=batch.tensors["position_ids"], use_cache=False)
    assert distance(plain.logits[0], packed_logits(model, batch)) > 1e-3


@pytest.mark.parametrize(("name", "implementation"), [("llama", "sdpa"), ("gemma2", EAGER), ("gpt_oss", EAGER)])
def test_the_config_keeps_the_implementation(name: str, implementation: str) -> None:
    model = made(name)
    assert not has_packed_attention(made("gemma2"))
    for _ in range(2):
        enable_packed_attention(model)
        assert model.config._attn_implementation == implementation
        assert has_packed_attention(model)
    assert "packed" not in str(model.config.to_dict())


def test_eager_attention_is_packed_too() -> None:
    model, batch = made("llama"), packed()
    model.set_attn_implementation("eager")
    expected = padded_logits(model, batch)
    enable_packed_attention(model)
    assert float((packed_logits(model, batch) - expected).detach().abs().max()) <= 1e-5


def test_groups_of_another_row_are_refused() -> None:
    model, batch = made("llama"), packed()
    enable_packed_attention(model)
    ids = batch.tensors["input_ids"][:, 1:]
    kwargs = packed_model_kwargs(batch) | {"position_ids": batch.tensors["position_ids"][:, 1:]}
    with pytest.raises(ValueError, match=r"1 rows of \d+ tokens, but the packed groups have \d+"):
        model(input_ids=ids, use_cache=False, **kwargs)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_attention_dropout_is_applied_in_training_only(name: str) -> None:
    model, batch = made(name, attention_dropout=0.5), packed()
    enable_packed_attention(model)
    model.eval()
    assert torch.equal(packed_logits(model, batch), packed_logits(model, batch))
    model.train()
    assert distance(packed_logits(model, batch), packed_logits(model, batch)) > 1e-3


def test_a_reward_models_body_takes_packed_rows() -> None:
    torch.manual_seed(0)
    config = read_config(ModelConfig(config=family("llama")))
    config.num_labels, config.pad_token_id = 1, 2
    model, batch = AutoModelForSequenceClassification.from_config(config), packed()
    ids, mask, places = rows(batch)
    expected = model.model(input_ids=ids, attention_mask=mask).last_hidden_state.flatten(0, 1)[places]
    enable_packed_attention(model)
    found = model.model(input_ids=batch.tensors["input_ids"], **packed_model_kwargs(batch)).last_hidden_state[0]
    assert float((found - expected).detach().abs().max()) <= 1e-5


def config(model_type: str, **values: Any) -> PretrainedConfig:
    known = {**(family(model_type) if model_type in FAMILIES else BASE), "model_type": model_type, **values}
    return AutoConfig.for_model(**known)


REFUSED = {
    "mamba2": ({}, r"Mamba2ForCausalLM does not hand its arguments on to self\.backbone"),
    "minimax": ({}, r"MiniMaxLightningAttention keeps more in its cache than keys, values and states \(get_linear_cache"),
    "llama4_text": ({}, r"Llama4TextModel has masks of another kind \(create_chunked_causal_mask\)"),
    "deepseek_v32": ({}, r"DeepseekV32Attention changes its mask \(attention_mask\)"),
    "falcon": ({}, r"no layer of FalconModel calls transformers' attention functions"),
    "mamba": ({}, r"MambaModel does not hand its arguments on to mixer_block"),
    "recurrent_gemma": ({}, r"RecurrentGemmaRecurrentBlock has a convolution over tokens whose state no cache keeps"),
    "bert": ({}, r"BertModel has masks of another kind \(create_bidirectional_mask\)"),
    "t5": ({}, r"t5 attends in both directions in its encoder"),
    "gemma3_text": ({"use_bidirectional_attention": True}, r"this gemma3_text model attends in both directions"),
    "olmoe": ({"sliding_window": 24}, r"OlmoeAttention has a window \(sliding_window\) that its padded rows do not have"),
    "llama": ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, r"\(dynamic\) depend on"),
}  # fmt: skip


@pytest.mark.parametrize("model_type", REFUSED)
def test_other_families_are_refused_with_a_reason(model_type: str) -> None:
    values, reason = REFUSED[model_type]
    made = config(model_type, **values) if values else AutoConfig.for_model(model_type)
    assert re.search(reason, packing_unsupported_reason(made, shares_prefixes=True) or "")


def test_code_that_came_with_the_weights_is_refused() -> None:
    class LlamaConfig(PretrainedConfig):
        model_type = "llama"

    assert "is not part of transformers" in (packing_unsupported_reason(LlamaConfig(), shares_prefixes=False) or "")


VISION_REFUSED = {
    "gemma3": r"Gemma3Model has masks of another kind \(create_masks_for_vision_model\)",
    "paligemma": r"PaliGemmaModel lets tokens attend to later ones \(block_sequence_ids\)",
    "minicpmv4_7": r"MiniCPMV4_7Model counts the positions of images in its own way",
    "qwen2_audio": r"transformers has no model of type qwen2_audio that takes images",
}


@pytest.mark.parametrize("model_type", VISION_REFUSED)
def test_other_models_with_images_or_sound_are_refused(model_type: str) -> None:
    found = packing_unsupported_reason(AutoConfig.for_model(model_type), shares_prefixes=False)
    assert re.search(VISION_REFUSED[model_type], found or "")


def test_the_text_model_around_images_has_a_say() -> None:
    longrope = {"model_type": "llama", "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    for text, reason in (({"model_type": "falcon"}, "no layer of FalconModel"), (longrope, r"\(dynamic\) depend on")):
        found = packing_unsupported_reason(AutoConfig.for_model("llava", text_config=text), shares_prefixes=False)
        assert re.search(reason, found or "")


def test_longrope_and_unknown_layers_are_refused() -> None:
    model = config("qwen2")
    model.layer_types = ["full_attention", "chunked_attention"]
    assert "chunked_attention" in (packing_unsupported_reason(model, shares_prefixes=False) or "")
    model = config("phi3")
    model.rope_parameters = {"rope_type": "longrope"}
    assert "longest sequence" in (packing_unsupported_reason(model, shares_prefixes=False) or "")


def test_an_unknown_attention_implementation_is_refused() -> None:
    model = config("llama")
    model._attn_implementation = "paged|eager"
    assert "paged|eager" in (packing_unsupported_reason(model, shares_prefixes=False) or "")
