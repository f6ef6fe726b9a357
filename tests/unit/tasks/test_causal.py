"""What a model says of a token of an answer does not hang on that token, nor on those behind it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from dstrain.batch import Batch
from dstrain.tasks.common.forward import forward_logits, prefix_token_types
from tests.unit.data.vision.test_processor import FAMILIES, made
from tests.vision_recipes import TEXT, TOWER, picture

PALIGEMMA = {
    "text_config": {"model_type": "gemma", "head_dim": 8, **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "projection_dim": 32, **TOWER},
    "projection_dim": 32,
    "image_token_id": 300,
}


def of_paligemma() -> tuple[Any, Batch]:
    """Its processor needs sentencepiece's tokens: the ids are written by hand. Without padding, which hides what is seen."""
    ids = torch.tensor([[300, 300, 300, 300, 2, 11, 12, 13, 14, 15]])
    tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "loss_mask": torch.tensor([[1, 1, 1, 1]])}
    vision = {"pixel_values": torch.randn(1, 3, 28, 28)}
    return AutoConfig.for_model("paligemma", **PALIGEMMA), Batch(tensors=tensors, weight=1.0, samples=(), vision=vision)


def of_family(name: str) -> tuple[Any, Batch]:
    config, sight = made(name)
    image = picture(1)
    row = sight.tokenizer(f"{sight.get_image_text(image.size)} what is it? a fox and a dog")["input_ids"]
    tensors = {"input_ids": torch.tensor([row]), "attention_mask": torch.ones(1, len(row), dtype=torch.long)}
    loss_mask = torch.tensor([[0] * (len(row) - 5) + [1] * 5])
    return config, sight.attach_images(
        Batch(tensors={**tensors, "loss_mask": loss_mask}, weight=1.0, samples=()), [image]
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", [*FAMILIES, "paligemma"])
def test_no_answer_sees_itself(name: str, training: bool) -> None:
    torch.manual_seed(0)
    config, batch = of_paligemma() if name == "paligemma" else of_family(name)
    model = AutoModelForImageTextToText.from_config(config).train(training)
    for parameter in model.parameters():  # some families begin with zeros, through which nothing is seen
        torch.nn.init.normal_(parameter, std=0.1)
    ids, loss_mask = batch.tensors["input_ids"], batch.tensors["loss_mask"]
    first = ids.shape[1] - loss_mask.shape[1] + int(loss_mask[0].argmax())
    for at in range(first, ids.shape[1]):
        other = ids.clone()
        other[0, at] = 16 + (other[0, at] == 16)
        changed = replace(batch, tensors={**batch.tensors, "input_ids": other})
        with torch.no_grad():
            before, after = forward_logits(model, batch)[0], forward_logits(model, changed)[0]
        assert torch.allclose(before[first - 1 : at], after[first - 1 : at], atol=1e-6), f"token {at} is seen before it"
        assert not torch.allclose(before[at], after[at], atol=1e-6), "it is seen from its own place on"


def test_prompts_end_where_the_first_learnt_token_stands() -> None:
    _, batch = of_paligemma()
    assert prefix_token_types(batch).tolist() == [[0] * 6 + [1] * 4]
    blank = replace(batch, tensors={**batch.tensors, "input_ids": torch.zeros(2, 10, dtype=torch.long)}, dummy_rows=1)
    assert prefix_token_types(blank)[1].tolist() == [0] * 10
    asked = {name: value for name, value in batch.tensors.items() if name != "loss_mask"}
    assert not prefix_token_types(replace(batch, tensors=asked)).any(), "a prompt, and a reward model's text"
