"""Without dropout, two passes in training mode say the same, in whatever form a family keeps its dropout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dstrain.config.schema import RunConfig
from dstrain.tasks import find_task, make_task
from dstrain.tasks.common.forward import disable_dropout_in_model
from dstrain.train.build_model import build_model

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "d_model": 32, "d_ff": 48, "d_kv": 8, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "num_layers": 3, "num_heads": 4, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_heads": 4, "n_layers": 3, "rotary_dim": 4,
    "ffn_dim": 48, "word_embed_proj_dim": 32, "max_seq_len": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
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

    kind, (auto, own) = family.partition(",")[0], FAMILIES[family]
    known = transformers.AutoConfig.for_model(kind)
    names = {*known.to_dict(), *known.attribute_map}
    settings = {name: value for name, value in (TEXT | own).items() if name in names}
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


@pytest.mark.parametrize("family", FAMILIES)
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
    recipe = find_task(task).tiny(tmp_path)
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
