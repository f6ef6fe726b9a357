"""Processors: as many image tokens as the model makes features, from a folder as from memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.utils import is_torchvision_available

from dstrain.config.schema import ModelConfig
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.errors import RecipeError
from dstrain.models.load import is_multimodal, read_config
from dstrain.models.processors import build_processor, count_special_tokens, read_processor, sync_config_with_processor
from tests.vision_recipes import GEMMA3, IDEFICS3, llava, picture

TEXTS = ["a red cat sits on a mat"] * 4
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "llava, CLIP, without CLS": (llava(), 4),
    "llava, CLIP, with CLS": (llava(strategy="full", side=42), 10),
    "llava, SigLIP, all": (llava("siglip_vision_model", "full", 42), 9),
    "llava, SigLIP, the first left out": (llava("siglip_vision_model", "default", 56), 15),
    "gemma3, no pooling": (GEMMA3, 16),
    "gemma3, pooled": ({**GEMMA3, "mm_tokens_per_image": 4}, 4),
    "gemma3, pooled to what can be": ({**GEMMA3, "mm_tokens_per_image": 9}, 16),
    "idefics3": (IDEFICS3, 4),
}


def made(values: dict[str, Any], **normal: Any) -> tuple[Any, Any]:
    """(config that fits, processor)."""
    config = read_config(ModelConfig(config=values))
    tokenizer = train_tokenizer(TEXTS, config.text_config.vocab_size - count_special_tokens(config))
    processor = build_processor(config, tokenizer, **normal)
    sync_config_with_processor(config, processor)
    return config, processor


def mark(processor: Any) -> str:
    return str(getattr(processor, "boi_token", processor.image_token))


def inputs(processor: Any) -> Any:
    texts = [f"a {mark(processor)} cat", f"{mark(processor)} red"]
    return processor(text=texts, images=[[picture(1)], [picture(2, (31, 90))]], return_tensors="pt", padding=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokens_of_an_image_are_the_models_features(name: str, tmp_path: Path) -> None:
    values, tokens = MODELS[name]
    config, processor = made(values)
    before = inputs(processor)
    assert [int((row == config.image_token_id).sum()) for row in before["input_ids"]] == [tokens, tokens]
    assert len(processor.tokenizer) <= config.text_config.vocab_size
    model = AutoModelForImageTextToText.from_config(config).eval()
    for parameter in model.model.multi_modal_projector.parameters() if config.model_type == "gemma3" else []:
        torch.nn.init.normal_(parameter)  # drawn as 0, so that images say nothing at first
    said = model(**before).logits
    assert said.isfinite().all()
    moved = model(**(before | {"pixel_values": before["pixel_values"] + 1})).logits
    assert not torch.equal(said, moved)
    processor.save_pretrained(str(tmp_path))
    after = inputs(read_processor(str(tmp_path), "model.processor"))
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("name", ["llava, CLIP, without CLS", "gemma3, pooled", "idefics3"])
def test_a_config_that_fits_keeps_fitting(name: str, tmp_path: Path) -> None:
    config, processor = made(MODELS[name][0])
    config.save_pretrained(str(tmp_path))
    again = AutoConfig.from_pretrained(str(tmp_path))
    tokenizer = processor.tokenizer
    for token in ("image_token", "boi_token", "eoi_token"):
        if hasattr(config, f"{token}_id"):
            assert getattr(again, f"{token}_id") == tokenizer.convert_tokens_to_ids(getattr(tokenizer, token))
    assert again.get_text_config().pad_token_id == tokenizer.pad_token_id
    assert again.get_text_config().eos_token_id == tokenizer.eos_token_id
    sync_config_with_processor(again, processor)
    assert again.to_diff_dict() == config.to_diff_dict()


@pytest.mark.parametrize("values", [llava(), GEMMA3, IDEFICS3], ids=lambda values: values["model_type"])
def test_a_mean_and_deviation_are_the_ones_given(values: dict[str, Any]) -> None:
    grey = picture(3, (28, 28))
    own = made(values)[1].image_processor
    given = made(values, mean=(0.1, 0.2, 0.3), std=(0.5, 0.25, 1.0))[1].image_processor
    raw = made(values, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))[1].image_processor
    pixels = [torch.tensor(one(grey, return_tensors="np")["pixel_values"]).double() for one in (own, given, raw)]
    scaled = (pixels[2] - torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)) / torch.tensor([0.5, 0.25, 1.0]).view(3, 1, 1)
    assert torch.allclose(pixels[1], scaled, atol=1e-6)
    assert not torch.allclose(pixels[0], pixels[1], atol=1e-2)


def test_a_tokenizer_keeps_the_tokens_it_has() -> None:
    config, processor = made(IDEFICS3)
    size, ids = len(processor.tokenizer), processor.tokenizer.convert_tokens_to_ids("<image>")
    again = build_processor(config, processor.tokenizer)
    assert (len(again.tokenizer), again.tokenizer.image_token_id) == (size, ids)


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"model_type": "paligemma"}, r"model\.processor: none can be built for a paligemma model \(only for llava"),
        (llava("dinov2"), r"a llava model with a dinov2 \(only with clip_vision_model or siglip"),
        (llava(vision_config={"model_type": "pixtral"}), r"with a pixtral .*give a folder with its processor"),
    ],
)
def test_what_cannot_be_made_must_come_from_a_folder(values: dict[str, Any], wanted: str) -> None:
    config = read_config(ModelConfig(config=values))
    with pytest.raises(RecipeError, match=wanted):
        build_processor(config, train_tokenizer(TEXTS, 300))


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        ("llava", True), ("gemma3", True), ("idefics3", True), ("qwen2_5_vl", True), ("mllama", True),
        ("chameleon", True), ("llama", False), ("gemma3_text", False), ("mistral4", False), ("bert", False),
        ("clip", False), ("siglip_vision_model", False),
    ],
)  # fmt: skip
def test_a_model_sees_where_it_has_a_vision_part_and_writes_text(kind: str, wanted: bool) -> None:
    assert is_multimodal(AutoConfig.for_model(kind)) is wanted


def test_a_folder_gives_its_chat_template_and_a_pad_token_to_its_tokenizer(tmp_path: Path) -> None:
    processor = made(llava())[1]
    processor.tokenizer.pad_token = None
    processor.save_pretrained(str(tmp_path))
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    found = read_processor(str(tmp_path), "model.processor").tokenizer
    assert found.chat_template == "{{ messages }}"
    assert found.pad_token == "<pad>", "which it has, and does not name"


def test_a_folder_without_a_processor_is_refused(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 300).save_pretrained(str(tmp_path))
    with pytest.raises(RecipeError, match=r"model\.path: .* not a processor of texts and images; set model\.processor"):
        read_processor(str(tmp_path), "model.path")


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed")
def test_where_torchvision_is_what_lacks_it_is_named(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 300).save_pretrained(str(tmp_path))
    kind = {"processor_class": "Qwen2_5_VLProcessor"}
    (tmp_path / "processor_config.json").write_text(json.dumps(kind))
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps(kind | {"image_processor_type": "Qwen2VLImageProcessor"})
    )
    (tmp_path / "video_preprocessor_config.json").write_text('{"video_processor_type": "Qwen2VLVideoProcessor"}')
    told = r"cannot be loaded \(its processor needs torchvision: torchvision is not installed\); run pip install"
    with pytest.raises(RecipeError, match=rf'{told} "dstrain\[torchvision\]" "torchvision==0\.\d+\.\*"'):
        read_processor(str(tmp_path), "model.processor")


def test_llama_vision_is_refused_by_its_name(tmp_path: Path) -> None:
    from transformers import MllamaImageProcessor, MllamaProcessor

    words = train_tokenizer(["some words"], 320)
    words.add_tokens(["<|image|>", "<|python_tag|>"], special_tokens=True)
    words.bos_token = words.eos_token
    MllamaProcessor(MllamaImageProcessor(), words).save_pretrained(str(tmp_path))
    with pytest.raises(
        RecipeError, match=r"Llama 3\.2 Vision \(mllama\), which is not supported: its cross-attention masks .* another"
    ):
        read_processor(str(tmp_path), "model.path")
