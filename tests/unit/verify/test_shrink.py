"""A config becomes small and keeps two layers of each kind."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from dstrain.errors import RecipeError
from dstrain.verify.rows import check_padded_rows
from dstrain.verify.shrink import WIDTH, count_layers_to_keep, describe_layers, shrink_config
from tests.cells import SLOW
from tests.unit.data.vision.test_processor import made_from
from tests.unit.verify.families import CONFIGS, shrunk, write_config, write_model

QUICK = ("gemma3_text", "deepseek_v3", "qwen3_next", "gemma4", "qwen3_vl")
MORE = (
    "llama", "qwen2", "qwen3", "mistral", "mixtral", "phi3", "gpt_oss", "olmo3", "glm4_moe", "jamba", "mamba2", "lfm2",
    "zamba2", "falcon_h1", "nemotron_h", "minimax", "gpt2", "bloom", "falcon", "cohere2", "granitemoe", "smollm3",
    "deepseek_v32", "qwen3_5", "qwen3_5_moe", "kimi_linear", "llava", "idefics3", "internvl", "mistral3",
)  # fmt: skip


@pytest.mark.parametrize("model_type", [*QUICK, *map(SLOW, MORE)])
def test_a_published_config_becomes_small(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    is_text = getattr(config, "vision_config", None) is None
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    small = shrink_config(config, auto, 320)
    text, before = small.get_text_config(), config.get_text_config()
    assert text.hidden_size == WIDTH
    assert text.vocab_size == 320
    assert 2 <= text.num_hidden_layers <= 24
    assert sum(parameter.numel() for parameter in auto.from_config(small).parameters()) < 5e6
    kinds = describe_layers(small, auto)
    layer_types = getattr(before, "layer_types", None)
    if layer_types:
        assert {*text.layer_types} == {*layer_types}
    assert all(kinds.count(kind) >= 2 or kinds.count(kind) == 1 for kind in kinds)


@pytest.mark.parametrize(
    ("kinds", "kept"),
    [("aaaa", 2), ("aaabaaab", 8), ("abab", 4), ("baaa", 3), ("aaaaab", 6), ("", 2), ("a" * 50 + "b", 24)],
)
def test_the_first_layers_with_two_of_each_kind_are_kept(kinds: str, kept: int) -> None:
    assert count_layers_to_keep([*kinds]) == kept


def test_the_real_tokenizer_and_the_files_dtype_are_kept(tmp_path: Path) -> None:
    small = shrunk(write_model("llama", tmp_path / "base"), tmp_path / "work")
    assert not small.tokenizer_note
    assert len(small.task().tokenizer) == small.config.vocab_size  # type: ignore[attr-defined]
    assert str(small.config.dtype) == "torch.bfloat16"
    assert "2 layers of width 64" in small.describe()
    assert "the model's own tokenizer" in small.describe()


def test_a_tokenizer_is_made_where_there_is_none(tmp_path: Path) -> None:
    small = shrunk(write_config("qwen3_moe", tmp_path / "base"), tmp_path / "work")
    assert "there is no tokenizer in" in small.tokenizer_note


def test_a_models_own_processor_is_kept(tmp_path: Path) -> None:
    config, processor = made_from(CONFIGS["llava"])
    config.save_pretrained(str(tmp_path / "base"))
    processor.hf_processor.save_pretrained(str(tmp_path / "base"))
    small = shrunk(tmp_path / "base", tmp_path / "work")
    assert "the model's own processor" in small.describe()
    assert small.config.image_token_id == config.image_token_id
    assert check_padded_rows(small).state == "ok"


def test_a_model_with_images_without_its_processor_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_vl").save_pretrained(str(tmp_path / "base"))
    with pytest.raises(RecipeError, match=r"cannot be loaded|torchvision"):
        shrunk(tmp_path / "base", tmp_path / "work")
