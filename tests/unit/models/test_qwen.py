"""Qwen2.5-VL: positions along time, height and width, which follow from the images that a batch holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, CLIPImageProcessorPil, Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import is_torchvision_available

from dstrain.batch import Batch
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.data.loading.rows import attention_mask, pad
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS, VisionProcessor
from dstrain.errors import RecipeError
from dstrain.models.load import is_multimodal
from dstrain.models.params import components_by_id
from dstrain.models.processors import limit_pixels
from dstrain.tasks.common.forward import forward_logits
from tests.vision_recipes import picture

TOKENS = {"image": "<|image_pad|>", "video": "<|video_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
HIDDEN = 32


def words() -> Any:
    tokenizer = train_tokenizer(["what is it? a fox, a dog"] * 4, 300)
    tokenizer.add_tokens([*TOKENS.values()], special_tokens=True)
    return tokenizer


def image_processor() -> Any:
    return Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, min_pixels=64, max_pixels=64 * 12)


def processor() -> Any:
    """The family's own; its constructor refuses to be without a part for videos, which needs torchvision."""
    made = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
    made.image_processor, made.tokenizer, made.chat_template = image_processor(), words(), None
    for kind in ("image", "video"):
        setattr(made, f"{kind}_token", TOKENS[kind])
        setattr(made, f"{kind}_token_id", made.tokenizer.convert_tokens_to_ids(TOKENS[kind]))
    return made


def config_for(tokenizer: Any) -> Any:
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    return AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": 320, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "patch_size": 4, "out_hidden_size": HIDDEN,
            "intermediate_size": 48, "window_size": 16, "fullatt_block_indexes": [1],
        },
        image_token_id=ids["image"], video_token_id=ids["video"],
        vision_start_token_id=ids["start"], vision_end_token_id=ids["end"],
    )  # fmt: skip


def batch_of(sight: VisionProcessor) -> tuple[Batch, list[tuple[int, int]]]:
    """A row with two images, one without, and the rows and columns of the images' tokens."""
    images = [picture(1, (24, 16)), picture(2, (16, 32))]
    around = [f"{TOKENS['start']}{sight.get_image_text(image.size)}{TOKENS['end']}" for image in images]
    texts = [f"what is it? {around[0]} a fox {around[1]} a dog", "what?"]
    rows = [sight.tokenizer(text)["input_ids"] for text in texts]
    tensors = {"input_ids": pad(rows, sight.tokenizer.pad_token_id), "attention_mask": attention_mask(rows)}
    return sight.attach_images(Batch(tensors=tensors, weight=1.0, samples=(0, 1)), images), [(2, 3), (4, 2)]


def expected(ids: list[int], grids: list[tuple[int, int]], image: int) -> torch.Tensor:
    """(3, L): Wang et al. (arXiv 2409.12191), section 2.1: text goes on behind the largest position of an image."""
    positions: list[tuple[int, int, int]] = []
    at, left = 0, list(grids)
    while len(positions) < len(ids):
        if ids[len(positions)] != image:
            positions.append((at, at, at))
            at += 1
            continue
        rows, columns = left.pop(0)
        positions += [(at, at + row, at + column) for row in range(rows) for column in range(columns)]
        at += max(rows, columns)
    return torch.tensor(positions).T


def check(sight: VisionProcessor) -> None:
    torch.manual_seed(0)
    config = config_for(sight.tokenizer)
    assert is_multimodal(config)
    model = AutoModelForImageTextToText.from_config(config).eval()
    asked: list[Any] = []
    model.model.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: asked.append(kwargs["position_ids"]), with_kwargs=True
    )
    batch, grids = batch_of(sight)
    assert set(batch.vision) == {"pixel_values", "image_grid_thw", MM_TOKEN_TYPE_IDS}
    with torch.no_grad():
        logits = forward_logits(model, batch)
    found = asked[0][-3:]  # some versions put the text's own positions in front
    ids = batch.tensors["input_ids"][0].tolist()
    assert torch.equal(found[:, 0], expected(ids, grids, config.image_token_id))
    assert torch.isfinite(logits).all()
    blank = sight.attach_images(
        Batch(tensors={name: rows[1:] for name, rows in batch.tensors.items()}, weight=1.0, samples=(1,)), []
    )
    with torch.no_grad():
        assert torch.allclose(forward_logits(model, blank)[0, :2], logits[1, :2], atol=1e-5)
    parts = {components_by_id(model)[id(p)] for p in model.model.visual.merger.parameters()}
    assert parts == {"projector"}


def test_positions_follow_the_images() -> None:
    check(VisionProcessor(processor()))


@pytest.mark.skipif(not is_torchvision_available(), reason="Qwen2.5-VL's own processor needs torchvision")
def test_qwens_own_processor_gives_the_same() -> None:
    from transformers import Qwen2VLVideoProcessor

    check(VisionProcessor(Qwen2_5_VLProcessor(image_processor(), words(), Qwen2VLVideoProcessor())))


def test_larger_images_are_reduced_to_the_pixels_of_the_recipe(tmp_path: Path) -> None:
    made = processor()
    before = VisionProcessor(processor())
    large, small = picture(1, (64, 48)), picture(2, (16, 16))
    limit_pixels(made, 256)
    after = VisionProcessor(made)
    assert after.get_image_text(large.size).count(TOKENS["image"]) * 64 <= 256
    assert after.get_image_text(large.size).count(TOKENS["image"]) < before.get_image_text(large.size).count(
        TOKENS["image"]
    )
    assert after.get_image_text(small.size) == before.get_image_text(small.size)
    assert after.fingerprint != before.fingerprint, "the cache holds other tokens"
    made.image_processor.save_pretrained(tmp_path)
    assert Qwen2VLImageProcessorPil.from_pretrained(tmp_path).size == made.image_processor.size, "in the export too"


@pytest.mark.parametrize(("pixels", "told"), [(8, "below the least"), (256, "gives each image its own size")])
def test_a_limit_of_pixels_that_cannot_hold_is_refused(pixels: int, told: str) -> None:
    made = processor()
    if pixels == 256:
        made.image_processor = CLIPImageProcessorPil()
    with pytest.raises(RecipeError, match=told):
        limit_pixels(made, pixels)
