"""Families that go without a mask say of real tokens what they say with one, bit by bit; all others keep theirs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from dstrain.batch import Batch
from dstrain.config.schema import LoraConfig, ModelConfig, RunConfig
from dstrain.models.adapters import add_adapters
from dstrain.models.load import read_config
from dstrain.tasks import make_task
from dstrain.tasks.common.forward import (
    disable_dropout_in_model,
    forward_logits,
    needs_attention_mask,
)
from dstrain.training.build_model import build_model
from tests.model_families import FAMILIES, family
from tests.tiny import tiny_recipe

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


@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"qwen3_next", "lfm2", "mamba2"}))  # recurrent: with a mask
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


# Without dropout, two passes in training mode say the same, in whatever form a family keeps its dropout.


SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "d_model": 32, "d_ff": 48, "d_kv": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "num_layers": 3, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_heads": 4, "n_layers": 3, "rotary_dim": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "max_seq_len": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
DROPOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, a number in a module": ("AutoModelForCausalLM", {}),
    "falcon, read from the config": ("AutoModelForCausalLM", {"new_decoder_architecture": False}),
    "persimmon, read from the config": ("AutoModelForCausalLM", {}),
    "gpt2, modules": ("AutoModelForCausalLM", {}),
    "gptj, modules": ("AutoModelForCausalLM", {}),
    "gpt_bigcode, a number by another name": ("AutoModelForCausalLM", {}),
    "bloom, a function of its own": ("AutoModelForCausalLM", {}),
    "starcoder2, four numbers": ("AutoModelForCausalLM", {}),
    "opt, layers left out": ("AutoModelForCausalLM", {}),
    "bart, layers left out": ("AutoModelForSeq2SeqLM", {}),
    "t5, modules": ("AutoModelForSeq2SeqLM", {}),
    "prophetnet, read from the config": (
        "AutoModelForSeq2SeqLM", {"num_encoder_layers": 2, "num_decoder_layers": 2, "num_encoder_attention_heads": 4,
                                  "num_decoder_attention_heads": 4}),
    "bert, modules": ("AutoModelForSequenceClassification", {}),
    "hubert, layers left out by the config": (
        "AutoModelForAudioClassification",
        {"conv_dim": [8, 8], "conv_stride": [4, 4], "conv_kernel": [8, 4], "num_feat_extract_layers": 2, "classifier_proj_size": 8,
         "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False}),
    "beit, whole paths": ("AutoModelForImageClassification", {"image_size": 16, "patch_size": 8}),
}  # fmt: skip


def chances(config: Any) -> Iterator[tuple[Any, str]]:
    """Where a config speaks of dropping something."""
    for name, value in [*vars(config).items()]:
        if hasattr(value, "to_diff_dict"):
            yield from chances(value)
        elif "drop" in name and isinstance(value, (int, float)) and not isinstance(value, bool):
            yield config, name


def tiny(family: str) -> Any:
    """A small model that drops half of whatever it may drop."""
    import transformers

    kind, (auto, own) = family.partition(",")[0], DROPOUTS[family]
    known = transformers.AutoConfig.for_model(kind)
    names = {*known.to_dict(), *known.attribute_map}
    settings = {name: value for name, value in (SIZES | own).items() if name in names}
    config = transformers.AutoConfig.for_model(kind, **settings)
    for place, name in chances(config):
        setattr(place, name, 0.5)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return getattr(transformers, auto).from_config(config).train()


def inputs(model: Any) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    if model.main_input_name != "input_ids":
        shape = (2, 400) if model.main_input_name == "input_values" else (2, 3, 16, 16)
        return {model.main_input_name: torch.randn(shape, generator=draw)}
    ids = torch.randint(3, 64, (2, 9), generator=draw)
    return {"input_ids": ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})}


@pytest.mark.parametrize("family", DROPOUTS)
def test_two_passes_in_training_mode_say_the_same(family: str) -> None:
    model = tiny(family)
    given, told = inputs(model), model.config.to_dict()
    assert not torch.equal(*(model(**given).logits for _ in range(2))), "it drops something to begin with"
    disable_dropout_in_model(model)
    first, second = (model(**given).logits for _ in range(2))
    assert torch.equal(first, second)
    assert torch.equal(first, model.eval()(**given).logits), "as in evaluation"
    assert model.config.to_dict() == told, "what an export writes"


@pytest.mark.parametrize("disabled", [True, False])
@pytest.mark.parametrize("task", ["dpo", "rm", "kto"])
def test_adapters_drop_nothing_either(task: str, disabled: bool, tmp_path: Path) -> None:
    recipe = tiny_recipe(task, tmp_path)
    recipe["model"]["config"]["attention_dropout"] = 0.25
    recipe["model"]["lora"] = {"rank": 4, "dropout": 0.5}
    recipe["options"] = {"disable_dropout": disabled}
    model: Any = build_model(make_task(RunConfig.model_validate(recipe)))
    chances = {part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)}
    assert chances == ({0.0} if disabled else {0.5})
    assert model.peft_config["default"].lora_dropout == 0.5, "what an export writes"
    assert model.config.attention_dropout == model.get_base_model().config.attention_dropout == 0.25


def test_a_module_of_torch_and_an_odd_name_are_found_too() -> None:
    odd = torch.nn.Module()
    odd.config, odd.tokens_dropped, odd.lstm = 0.5, 3, torch.nn.LSTM(2, 2, 2, dropout=0.5)  # Idefics writes the first
    disable_dropout_in_model(odd)
    assert (odd.config, odd.lstm.dropout, odd.tokens_dropped) == (0.0, 0.0, 3)
