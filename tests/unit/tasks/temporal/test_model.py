"""Temporal models: padding and placeholders change nothing, and a language model's weights stay where they belong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dstrain.errors import UsageError
from dstrain.tasks.temporal.model import (
    AutoTemporalModel,
    TemporalConfig,
    TemporalForClassification,
    TemporalForConditionalGeneration,
    TemporalForMaskedModeling,
)
from dstrain.tasks.temporal.series import PatchConfig, cut_patches, normalize, stack_patches

LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip
SIZES: dict[str, Any] = {
    "patch_length": 4, "patches_per_token": 2, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
}  # fmt: skip
PATCHES = PatchConfig(4, 2)


def batch_of(*shapes: tuple[int, int]) -> dict[str, torch.Tensor]:
    rng = np.random.RandomState(0)
    pieces = [cut_patches(rng.randn(*shape).astype("float32"), rng.randn(shape[0], 2), PATCHES) for shape in shapes]
    return stack_patches(pieces)


def generator(**text: Any) -> TemporalForConditionalGeneration:
    torch.manual_seed(0)
    return TemporalForConditionalGeneration(TemporalConfig({**LLAMA, **text}, **SIZES)).eval()


def test_padding_of_other_series_changes_nothing() -> None:
    torch.manual_seed(0)
    model = TemporalForClassification(TemporalConfig(num_labels=3, **SIZES)).eval()
    together, alone = batch_of((1, 5), (3, 30)), batch_of((1, 5))
    with torch.no_grad():
        assert torch.allclose(model(**together)[0], model(**alone)[0], atol=1e-6)


@pytest.mark.parametrize("level", [0.0, 50.0, 5000.0])
def test_the_level_of_a_series_does_not_hide_its_values(level: float) -> None:
    torch.manual_seed(0)
    sizes = {**SIZES, "hidden_size": 64, "num_attention_heads": 4}
    encoder = TemporalForClassification(TemporalConfig(num_labels=2, **sizes)).eval().encoder
    series = np.random.RandomState(0).rand(64, 1, 16) * max(level, 1) + level
    batch = stack_patches([cut_patches(*normalize(one), PATCHES) for one in series])
    with torch.no_grad():
        hidden = encoder(**batch)  # (64, N, H)
    assert hidden.var(0).mean() / hidden.square().mean() > 0.1, "share of the states that differs between series"


def test_channels_patches_and_statistics_matter() -> None:
    torch.manual_seed(0)
    model = TemporalForClassification(TemporalConfig(num_labels=3, **SIZES)).eval()
    batch = batch_of((2, 16))
    with torch.no_grad():
        first = model(**batch)
        for column in range(2):
            other = {name: value.clone() for name, value in batch.items()}
            other["series_positions"][..., column] = other["series_positions"][..., column].flip(1)
            assert not torch.allclose(first, model(**other), atol=1e-5)
        other = {name: value.clone() for name, value in batch.items()}
        other["series"][..., -1] += 1.0
        assert not torch.allclose(first, model(**other), atol=1e-5)


def test_soft_tokens_take_the_places_of_placeholders() -> None:
    model = generator()
    series = batch_of((1, 16), (1, 5))  # two soft tokens and one
    ids = torch.tensor([[2, -1, -1, 7, 8], [2, -1, 9, 9, 0]])
    with torch.no_grad():
        soft = model.encode_series(**series)
        assert soft.shape == (4, 16), "the last is padding"
        embedded = model.get_input_embeddings()(ids.clamp(min=0))
        embedded[0, 1:3], embedded[1, 1] = soft[:2], soft[2]
        wanted = model.language_model(inputs_embeds=embedded).logits
        assert torch.equal(model(ids, **series).logits, wanted)


def test_generation_with_a_cache_equals_that_without() -> None:
    model, series = generator(), batch_of((1, 16), (2, 7))
    ids = torch.tensor([[-1, -1, 7, 8], [-1, -1, 9, 5]])
    mask = torch.ones_like(ids)
    found = [
        model.generate(
            input_ids=ids, attention_mask=mask, **series, max_new_tokens=6, do_sample=False, use_cache=cached
        )
        for cached in (True, False)
    ]
    assert torch.equal(*found)


def test_checkpointed_layers_give_the_same_gradients() -> None:
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        model = TemporalForMaskedModeling(TemporalConfig(**SIZES)).train()
        if checkpointed:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        assert {layer.gradient_checkpointing for layer in model.encoder.layers} == {checkpointed}
        batch = batch_of((1, 16), (2, 7))
        model(**batch, series_masked=torch.zeros(batch["series"].shape[:2])).square().sum().backward()
        gradients.append(model.encoder.patch_projection.weight.grad)
    assert torch.allclose(*gradients)


@pytest.mark.parametrize("tied", [False, True])
def test_a_language_models_weights_are_loaded_under_its_name(tied: bool, tmp_path: Path) -> None:
    torch.manual_seed(1)
    values = {name: value for name, value in LLAMA.items() if name != "model_type"}
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **values, tie_word_embeddings=tied))
    base.save_pretrained(tmp_path / "base")
    config = TemporalConfig(base.config, **SIZES)
    torch.manual_seed(5)
    model = AutoTemporalModel("sft").from_pretrained(str(tmp_path / "base"), config=config)
    for name, value in base.state_dict().items():
        assert torch.equal(model.state_dict()[f"language_model.{name}"], value), name
    torch.manual_seed(5)
    again = AutoTemporalModel("sft").from_pretrained(str(tmp_path / "base"), config=config)
    new = [name for name in model.state_dict() if not name.startswith("language_model.")]
    assert all(torch.equal(model.state_dict()[name], again.state_dict()[name]) for name in new)
    assert model.encoder.layers[0].qkv.weight.std().item() == pytest.approx(8**-0.5, rel=0.2)
    assert (model.encoder.norm.weight == 1).all()
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert (head.weight is embedding.weight) == tied
    model.save_pretrained(tmp_path / "both")
    reloaded = AutoTemporalModel("sft").from_pretrained(str(tmp_path / "both"))
    assert all(torch.equal(value, reloaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_an_encoder_goes_from_one_stage_to_another(tmp_path: Path) -> None:
    torch.manual_seed(0)
    masked = TemporalForMaskedModeling(TemporalConfig(**SIZES))
    masked.save_pretrained(tmp_path)
    model = AutoTemporalModel("classify").from_pretrained(str(tmp_path))
    for name, value in masked.encoder.state_dict().items():
        assert torch.equal(model.state_dict()[f"encoder.{name}"], value)
    assert not model.classifier.bias.any()


def test_a_folder_of_adapters_is_refused_with_the_way_to_load_it(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"holds adapters alone; `dstrain export --merge-lora` writes the whole model"):
        AutoTemporalModel("sft").from_pretrained(str(tmp_path))
