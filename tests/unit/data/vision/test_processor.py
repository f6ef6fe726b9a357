"""What processors make of images: tokens in texts, tensors in batches, for three families."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from dstrain.batch import Batch, PackedGroup
from dstrain.config.schema import ModelConfig
from dstrain.data.encoding.conversations import encode_conversations
from dstrain.data.encoding.preferences import encode_preferences
from dstrain.data.encoding.rendering import EncodingConfig, PlaceholderExpansion
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.data.formats.conversations import Conversation
from dstrain.data.formats.messages import IMAGE_PLACEHOLDER
from dstrain.data.formats.preferences import Preference
from dstrain.data.loading.rows import pack_rows
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS, VisionProcessor, packed_rope_positions
from dstrain.errors import BadRecord, DataError
from dstrain.models.load import read_config
from dstrain.models.processors import build_processor, count_special_tokens, sync_config_with_processor
from dstrain.tasks.common.forward import forward_logits
from tests.unit.models.test_qwen import config_for, words
from tests.vision_recipes import GEMMA3, IDEFICS3, llava, picture

FAMILIES = {"llava": llava(), "gemma3": GEMMA3, "idefics3": IDEFICS3}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% for part in m.content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TURNS = [
    {"role": "user", "content": f"{IMAGE_PLACEHOLDER}\nwhat is it?"},
    {"role": "assistant", "content": "a fox"},
    {"role": "user", "content": f"and {IMAGE_PLACEHOLDER} this?"},
    {"role": "assistant", "content": "a dog"},
]
TALK = Conversation(TURNS, (1, 3))


def made(family: str) -> tuple[Any, VisionProcessor]:
    return made_from(FAMILIES[family])


def made_from(values: dict[str, Any]) -> tuple[Any, VisionProcessor]:
    config = read_config(ModelConfig(config=values))
    texts = [" ".join(turn["content"] for turn in TURNS).replace(IMAGE_PLACEHOLDER, "")] * 4
    tokenizer = train_tokenizer(texts, config.text_config.vocab_size - count_special_tokens(config))
    processor = build_processor(config, tokenizer)
    sync_config_with_processor(config, processor)
    return config, VisionProcessor(processor)


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, VisionProcessor]:
    return made(request.param)


def views(sight: VisionProcessor, *images: Any) -> PlaceholderExpansion:
    return PlaceholderExpansion(sight, [[sight.get_image_text(image.size) for image in images]])


def encoded(sight: VisionProcessor, views: PlaceholderExpansion, **settings: Any) -> Any:
    wanted = EncodingConfig(**{"max_length": 400, **settings})
    return encode_conversations(sight.tokenizer, [TALK], wanted, views)[0]


@pytest.mark.parametrize("templated", [False, True])
def test_the_ids_are_those_the_processor_gives(family: tuple[Any, VisionProcessor], templated: bool) -> None:
    _, sight = family
    tokenizer, images = sight.tokenizer, [picture(1), picture(2, (31, 90))]
    text = f"\n\nHuman: {sight.image_token}\nwhat is it?\n\nAssistant: a fox\n\nHuman: and {sight.image_token} this?\n\nAssistant: a dog"
    if templated:
        tokenizer.chat_template = TEMPLATE.replace("MARK", sight.image_token)
        text = f"<|user|>{sight.image_token}what is it?</s><|assistant|>a fox</s><|user|>and {sight.image_token} this?</s><|assistant|>a dog</s>"
    example = encoded(sight, views(sight, *images))
    theirs = sight.hf_processor(text=[text], images=[images], return_tensors="pt")
    ids = list(example["input_ids"])
    assert ids[: theirs["input_ids"].shape[1]] == theirs["input_ids"][0].tolist()
    learnt = [token for token, mark in zip(ids, example["loss_mask"], strict=True) if mark]
    ends = "</s>" if templated else ""
    assert tokenizer.decode(learnt).replace(" ", "") == f"afox{ends}adog</s>"
    ours = sight.image_inputs(images)
    assert set(ours) == {
        name for name in theirs if name not in ("input_ids", "attention_mask", "token_type_ids", MM_TOKEN_TYPE_IDS)
    }
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def test_images_are_never_learnt(family: tuple[Any, VisionProcessor]) -> None:
    _, sight = family
    example = encoded(sight, views(sight, picture(1), picture(2)), assistant_only=False)
    marks = {
        mark
        for token, mark in zip(example["input_ids"], example["loss_mask"], strict=True)
        if token in sight.image_related_ids
    }
    assert marks == {0}
    assert sum(example["loss_mask"]) > 10


def test_a_cut_through_an_image_is_found(family: tuple[Any, VisionProcessor]) -> None:
    _, sight = family
    shown = views(sight, picture(1), picture(2))
    example = encoded(sight, shown)
    whole, asked = len(example["input_ids"]), example["loss_mask"].index(1)
    assert not isinstance(encoded(sight, shown, max_length=whole), BadRecord)
    needed = sum(map(sight.count_in_text, shown.image_texts[0]))
    for limits, said in (
        ({"max_length": asked + 4}, f"data.max_length {asked + 4} cuts"),
        ({"max_prompt_length": 4}, "data.max_length 400 (data.max_prompt_length 4) cuts"),
    ):
        fault = encoded(sight, shown, **limits)
        assert isinstance(fault, BadRecord)
        assert f"its images take {needed} tokens, and {said}" in fault.reason
    fault = encoded(sight, shown, max_length=asked)
    assert isinstance(fault, BadRecord)
    assert f"the answer take {asked} tokens, and data.max_length {asked} leaves none" in fault.reason, "images and all"


def test_preferences_hold_the_image_in_both_rows(family: tuple[Any, VisionProcessor]) -> None:
    _, sight = family
    preference = Preference(f"{IMAGE_PLACEHOLDER} what is it?", " a fox", " a dog")
    shown = views(sight, picture(1))
    (example,) = encode_preferences(sight.tokenizer, [preference], 400, None, shown)
    assert isinstance(example, dict)
    needed = sight.count_in_text(shown.image_texts[0][0])
    assert [sight.count_image_ids(example[side]) for side in ("chosen", "rejected")] == [needed, needed]
    (short,) = encode_preferences(sight.tokenizer, [preference], 8, None, shown)
    assert isinstance(short, BadRecord)
    (named,) = encode_preferences(
        sight.tokenizer, [Preference("q", f" {sight.image_token}", " b")], 400, None, PlaceholderExpansion(sight, [[]])
    )
    assert isinstance(named, BadRecord), "an answer that spells the token out would be taken for an image"


def test_a_text_that_names_the_token_itself_is_refused(family: tuple[Any, VisionProcessor]) -> None:
    _, sight = family
    said = Conversation([{"role": "user", "content": f"what does {sight.image_token} mean?"}, TURNS[1]], (1,))
    (fault,) = encode_conversations(
        sight.tokenizer, [said], EncodingConfig(max_length=400), PlaceholderExpansion(sight, [[]])
    )
    assert isinstance(fault, BadRecord)
    assert sight.image_token in fault.reason


def text_batch(sight: VisionProcessor, *texts: str) -> Batch:
    rows = [sight.tokenizer(text)["input_ids"] for text in texts]
    length = max(map(len, rows))
    ids = torch.tensor([row + [sight.tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows])
    loss_mask = torch.tensor([[0, 1]] * len(rows))
    return Batch(tensors={"input_ids": ids, "attention_mask": mask, "loss_mask": loss_mask}, weight=1.0, samples=())


@pytest.mark.parametrize(
    "texts", [("what is it?",), ("a fox", "and this is a dog and this is a fox and what is it? " * 4)]
)
def test_a_blank_row_changes_nothing_and_reaches_every_part(
    family: tuple[Any, VisionProcessor], texts: tuple[str, ...]
) -> None:
    config, sight = family
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config)
    batch = text_batch(sight, *texts)
    blank = sight.attach_images(batch, [])
    assert blank.dummy_rows == 1
    width = batch.tensors["input_ids"].shape[1]
    plain, beside = forward_logits(model, batch), forward_logits(model, blank)
    assert len(beside) == len(plain) == len(texts)
    for row, text in enumerate(texts):
        count = len(sight.tokenizer(text)["input_ids"])
        assert torch.allclose(plain[row, :count], beside[row, :count], atol=1e-5)
    moved = blank.tensors["input_ids"].shape[1] - width
    assert blank.tensors["loss_mask"].shape[1] == 2 + moved, "the same tokens are learnt, counted from the end"
    beside.sum().backward()
    silent = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    used = [name for name in silent if "layers.1" not in name and "post_layernorm" not in name and "head" not in name]
    assert not used, "gradients of the tower are there, and zero"
    assert all(
        float(p.grad.abs().max()) == 0 for n, p in model.named_parameters() if "vision" in n and p.grad is not None
    )


def test_images_in_some_rows_of_a_batch_reach_their_rows_alone(family: tuple[Any, VisionProcessor]) -> None:
    config, sight = family
    model = AutoModelForImageTextToText.from_config(config).eval()
    image = picture(3)
    with_image = f"{sight.get_image_text(image.size)} what is it?"
    batch = sight.attach_images(text_batch(sight, "a fox", with_image), [image])
    assert batch.dummy_rows == 0
    assert torch.equal(
        batch.vision[MM_TOKEN_TYPE_IDS],
        torch.isin(batch.tensors["input_ids"], torch.tensor(sight.image_token_ids)).long(),
    )
    alone = sight.attach_images(text_batch(sight, with_image), [image])
    assert torch.allclose(forward_logits(model, batch)[1], forward_logits(model, alone)[0], atol=1e-5)


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_row_whose_images_take_other_tokens_is_named(family: tuple[Any, VisionProcessor], is_packed: bool) -> None:
    """The model would find it on the device, where each pass would wait for it."""
    _, sight = family
    image = picture(3)
    place = sight.get_image_text(image.size)
    batch = replace(text_batch(sight, f"{place} a fox", f"{place} {place} a dog", "what?"), samples=(5, 8, 9))
    if is_packed:
        ids, mask = batch.tensors["input_ids"], batch.tensors["attention_mask"]
        rows = pack_rows([row[: int(length)].numpy() for row, length in zip(ids, mask.sum(1), strict=True)])
        batch = replace(batch, tensors=rows.input_tensors(), groups=rows.groups)
    tokens = int(sight.token_type_ids(batch.tensors["input_ids"]).sum()) // 3
    fault = rf"row 1 of a batch \(sample 8\) has {2 * tokens} image tokens, and its images take {tokens}"
    with pytest.raises(DataError, match=fault):
        sight.attach_images(batch, [image, image])
    assert sight.attach_images(batch, [image] * 3).vision


def test_a_processor_is_known_by_what_it_does() -> None:
    (_, first), (_, again), (_, other) = made("llava"), made("llava"), made("llava")
    other.hf_processor.image_processor.image_mean = [0.5, 0.5, 0.5]
    assert first.fingerprint == again.fingerprint != other.fingerprint


# Positions of a packed row are those that transformers computes for each sequence alone.


IMAGE, GRIDS = 1, [(1, 2, 3), (1, 4, 1), (1, 1, 1), (1, 2, 2)]
"""A token of an image, and the tokens of images along time, height and width."""
Parts = tuple[int, ...]
"""Parts of a sequence: n tokens of text for n, the tokens of image k for -1 - k."""
PAIR: list[Parts] = [(4, -1, 3, -2, 5), (4, -1, 3, -2, 1)]
CASES: dict[str, tuple[list[Parts], list[list[int]], list[int]]] = {
    "a shared beginning": ([*PAIR, (2, -3), (6,)], [[0, 1], [2], [3]], [0, 1, 2]),
    "nothing shared": (PAIR, [[0], [1]], [0, 1, 0, 1]),
    "an image in each branch": ([(3, -4), (3, 2, -1, 1)], [[0, 1]], [3, 0]),
    "a beginning that ends with an image": ([(1, -4, 2), (1, -4, 1)], [[0, 1]], [3]),
}
"""Sequences, their groups, and the images in the order of the packed row."""


def ids_of(parts: Parts) -> np.ndarray:
    pieces = [np.full(np.prod(GRIDS[-1 - part]), IMAGE) if part < 0 else 10 + np.arange(part) for part in parts]
    return np.concatenate(pieces)


def of_transformers(parts: Parts) -> np.ndarray:
    """Return the positions (3, L) of a sequence alone."""
    ids = ids_of(parts)
    model = AutoModelForImageTextToText.from_config(config_for(words())).model
    patches = torch.tensor([GRIDS[-1 - part] for part in parts if part < 0]).view(-1, 3) * torch.tensor([1, 2, 2])
    row, is_image = torch.from_numpy(ids)[None], torch.from_numpy(ids == IMAGE)[None].int()
    return np.asarray(model.get_rope_index(row, is_image, patches)[0][:, 0])


@pytest.mark.parametrize("case", CASES)
def test_packed_positions_are_those_of_each_sequence_alone(case: str) -> None:
    sequences, groups, images = CASES[case]
    rows = pack_rows([ids_of(parts) for parts in sequences], groups, {IMAGE})
    is_image = rows.input_tensors()["input_ids"][0].numpy() == IMAGE
    found = packed_rope_positions(is_image, rows.groups, [GRIDS[image] for image in images])
    for parts, indices in zip(sequences, rows.indices, strict=True):
        assert np.array_equal(found[:, indices], of_transformers(parts))


@pytest.mark.parametrize(
    ("grids", "reason"),
    [([], "more images"), ([(1, 2, 2)], "more images"), ([(1, 2, 4)], "has fewer"), ([(1, 2, 3)] * 2, "fewer images")],
)
def test_images_that_are_not_those_of_the_row_are_an_error(grids: list[tuple[int, int, int]], reason: str) -> None:
    is_image = np.array([0, 0, 1, 1, 1, 1, 1, 1, 0]) > 0
    with pytest.raises(ValueError, match=reason):
        packed_rope_positions(is_image, (PackedGroup(0, (9,)),), grids)


def test_adjacent_images_are_told_apart_by_their_sizes() -> None:
    found = packed_rope_positions(np.ones(6) > 0, (PackedGroup(4, (2,)),), [(1, 2, 2), (1, 1, 2)])
    assert found.tolist() == [[0, 0, 0, 0, 2, 2], [0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 2, 3]]
