"""Families of 2026 with their own processors and towers: a packed row with images is read as padded and single rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, PreTrainedModel

from dstrain.batch import Batch
from dstrain.data.vision.processor import IMAGE_GRIDS, MM_TOKEN_TYPE_IDS, TEXT_INPUTS, VisionProcessor
from dstrain.models.attention.packed import enable_packed_attention, packing_unsupported_reason
from dstrain.models.processors import read_processor
from dstrain.tasks.common.forward import forward_logits
from dstrain.torchvision_fit import find_torchvision_problem
from tests.cells import SLOW
from tests.unit.models.attention.packed_images import CASES, Forms, forms, packed_logits, padded_logits
from tests.unit.models.attention.packed_rows import gradient
from tests.vision_families import FAMILIES, NEEDS_TORCHVISION, PACKED, save_family
from tests.vision_recipes import picture

PADDED = [name for name in FAMILIES if name not in PACKED]
EQUAL = 1e-5
"""Of logits in fp32."""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        yield Path(name)
    _save.cache_clear()


@cache
def _save(name: str, folder: Path) -> Path:
    return save_family(name, folder / name)


def load(name: str, folder: Path) -> tuple[PreTrainedModel, VisionProcessor]:
    """Return a family's model and processor as read from the folder of a recipe."""
    problem = find_torchvision_problem()
    if name in NEEDS_TORCHVISION and problem is not None:
        pytest.skip(f"the processor of {name} needs torchvision: {problem}")
    path = str(_save(name, folder))
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return model.eval(), VisionProcessor(read_processor(path, "model.path"))


def make_forms(name: str, processor: VisionProcessor, case: str) -> Forms:
    return forms(processor, *CASES[case], around=(FAMILIES[name].before, FAMILIES[name].after))


def single_logits(name: str, model: Any, processor: VisionProcessor, case: str, packed: Forms) -> torch.Tensor:
    """Return the logits of the packed row's tokens, each sequence read alone; (T, V)."""
    texts, _ = CASES[case]
    logits = torch.empty(packed.rows.num_tokens, model.config.get_text_config().vocab_size)
    around = (FAMILIES[name].before, FAMILIES[name].after)
    for text, indices in zip(texts, packed.rows.indices, strict=True):
        alone = forms(processor, [text], [[0]], around=around).padded
        logits[torch.from_numpy(indices)] = forward_logits(model, alone, use_cache=False)[0, : len(indices)]
    return logits


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("case", ["shared", SLOW("apart"), "no images"])
@torch.no_grad()
def test_a_packed_row_is_read_as_padded_and_single_rows(name: str, case: str, folder: Path) -> None:
    model, processor = load(name, folder)
    assert packing_unsupported_reason(model.config, shares_prefixes=True) is None
    found = make_forms(name, processor, case)
    padded, single = padded_logits(model, found), single_logits(name, model, processor, case, found)
    enable_packed_attention(model)
    packed = packed_logits(model, found)
    assert float((packed - single).abs().max()) <= EQUAL
    assert float((padded - single).abs().max()) <= EQUAL
    assert packed.std() > 1e-2
    if case != "no images":
        found.packed.vision["pixel_values"] *= -1
        assert float((packed_logits(model, found) - packed).abs().max()) > 1e-3, "the images have an effect"


@pytest.mark.parametrize("name", PADDED)
@torch.no_grad()
def test_images_in_both_directions_are_read_in_padded_rows(name: str, folder: Path) -> None:
    model, processor = load(name, folder)
    assert "create_masks_for_vision_model" in str(packing_unsupported_reason(model.config, shares_prefixes=True))
    found = make_forms(name, processor, "shared")
    padded, single = padded_logits(model, found), single_logits(name, model, processor, "shared", found)
    assert float((padded - single).abs().max()) <= EQUAL
    assert padded.std() > 1e-2


@pytest.mark.parametrize("name", ["qwen3_vl", SLOW("qwen3_vl_moe"), "qwen3_5", "glm4v_moe"])
@pytest.mark.parametrize("case", ["shared", "apart"])
def test_packed_positions_are_those_of_the_model(name: str, case: str, folder: Path) -> None:
    model, processor = load(name, folder)
    found = make_forms(name, processor, case)
    positions = model.model.get_rope_index(
        found.padded.tensors["input_ids"],
        mm_token_type_ids=found.padded.vision[MM_TOKEN_TYPE_IDS],
        image_grid_thw=found.padded.vision[IMAGE_GRIDS],
        attention_mask=found.padded.tensors["attention_mask"],
    )[0]
    places = found.padded_places()
    expected = positions[-3:].flatten(1)[:, places]
    assert torch.equal(found.packed.tensors["position_ids"][:, 0], expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_holds_what_the_processor_itself_makes_of_a_record(name: str, folder: Path) -> None:
    _, processor = load(name, folder)
    family, images = FAMILIES[name], [picture(1, (24, 16)), picture(2, (40, 40))]
    shown = f"{family.before}{processor.image_token}{family.after}"
    text = f"what {shown} is it? {shown} a fox"
    made = processor.hf_processor(text=[text], images=images, return_tensors="pt")
    expanded, _ = processor.expand_images(text, [processor.get_image_text(image.size) for image in images])
    ids = torch.tensor([processor.tokenizer(expanded)["input_ids"]])
    assert torch.equal(ids, made["input_ids"])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    batch = processor.attach_images(Batch(tensors=tensors, weight=1.0, samples=(0,)), images)
    for key, value in batch.vision.items():
        if key != MM_TOKEN_TYPE_IDS:
            torch.testing.assert_close(value, made[key], rtol=0, atol=0)
    types = made.get(MM_TOKEN_TYPE_IDS, made.get("token_type_ids"))
    assert types is None or torch.equal(batch.vision[MM_TOKEN_TYPE_IDS], types.long())
    assert {*made} - {*TEXT_INPUTS} <= {*batch.vision}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("size", [(300, 200), (90, 400)])
def test_an_image_that_is_stored_smaller_gives_the_same_tensors(name: str, size: tuple[int, int], folder: Path) -> None:
    _, processor = load(name, folder)
    large = picture(3, size)
    small = processor.downscale(large)
    if small is not None:
        assert processor.get_image_text(small.size) == processor.get_image_text(large.size)
        for key, value in processor.image_inputs([large]).items():
            torch.testing.assert_close(processor.image_inputs([small])[key], value, rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("case", CASES)
def test_the_packed_gradient_is_the_padded_rows_gradient(name: str, case: str, folder: Path) -> None:
    model, processor = load(name, folder)
    model.set_experts_implementation("eager")  # the others have no fp64
    model = model.double()
    found = make_forms(name, processor, case)
    expected = gradient(model, padded_logits(model, found))
    enable_packed_attention(model)
    packed = gradient(model, packed_logits(model, found))
    assert float((packed - expected).norm() / expected.norm()) <= 1e-6
    tower = [parameter.grad for part, parameter in model.named_parameters() if "vision" in part or "visual" in part]
    assert any(one is not None and one.any() for one in tower) is (case != "no images")
