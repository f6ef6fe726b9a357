"""Task vlm: what is learnt from images, and how it is counted."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from dstrain.config import RunConfig
from dstrain.data.loading.loader import make_batch
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS
from dstrain.errors import DataError, RecipeError, TaskError
from dstrain.tasks import make_task
from dstrain.tasks.common import forward
from dstrain.tasks.vlm import VLM
from tests.tiny import LLAMA, LLAVA, tiny_recipe
from tests.vision_recipes import picture

QUESTIONS = ("What is it?", "Is it red?", "Is it blue?")


def asked(folder: Path, images: int = 6, name: str = "train") -> str:
    """Three questions about each image."""
    lines = []
    for image in range(images):
        picture(image, (20, 20)).save(folder / f"{name}-{image}.png")
        for place, question in enumerate(QUESTIONS):
            lines.append({"image": f"{name}-{image}.png", "question": question, "answer": "yes" if place else "noise"})
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return str(folder / f"{name}.jsonl")


def task_on(
    file: str,
    options: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    packing: bool | str = "auto",
    **data: Any,
) -> Any:
    values = {
        "task": "vlm",
        "batch": {"packing": packing},
        "options": options or {},
        "model": {"config": LLAVA, **(model or {})},
        "data": {"train": file, "max_length": 64, **data},
    }
    return make_task(RunConfig.model_validate(values))


def test_exact_answers_are_counted_as_by_hand() -> None:
    loss_mask = torch.tensor([[1, 1, 0, 1, 0, 0], [0, 0, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1]])
    right = torch.tensor([[1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1], [1, 1, 1, 0, 1, 1]]).bool()
    exact, count = forward.count_exact_answers(right & (loss_mask != 0), loss_mask)
    assert (int(exact), int(count)) == (1 + 1 + 2, 2 + 1 + 3)


def test_an_answer_that_is_exact_is_what_the_model_writes(tmp_path: Path) -> None:
    """Teacher forcing and greedy writing agree where all tokens, the end among them, are the likeliest."""
    task = task_on(asked(tmp_path, 2), model={"chat_template": "human_assistant"})
    model, examples = task.build_model(), task.examples("train")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = make_batch(examples, task.collate, [*range(6)], 0)
    for _ in range(25):
        task.loss(model, batch).total.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    answers = ("noise", "yes", "yes")
    for index in range(6):
        one = make_batch(examples, task.collate, [index], 0)
        exact, count = task.loss(model, one).metrics["exact_match"]
        learnt = np.flatnonzero(examples[index]["loss_mask"])
        ids = one.tensors["input_ids"][:, : learnt[0]]
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": task.tokenizer.eos_token_id}
        written = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=one.vision["pixel_values"], **settings
        )
        said = task.tokenizer.decode(written[0, ids.shape[1] :], skip_special_tokens=True).strip()
        assert int(count) == 1
        assert bool(exact) == (said == answers[index % 3])


def test_questions_of_an_image_are_one_dialog_in_training_alone(tmp_path: Path) -> None:
    file = asked(tmp_path)
    task = task_on(
        file,
        {"group_by_image": True},
        {"chat_template": "human_assistant"},
        eval=asked(tmp_path, 2, "eval"),
        max_length=96,
    )
    train, test = task.examples("train"), task.examples("eval")
    assert (len(train), len(test)) == (6, 6)
    said = task.tokenizer.decode(
        [t for t, mark in zip(train[0]["input_ids"], train[0]["loss_mask"], strict=True) if mark]
    )
    assert said.split() == ["noise</s>", "yes</s>", "yes</s>"], "each answer has its end"
    text = task.tokenizer.decode(train[0]["input_ids"])
    assert text.count("<image>") == 4, "the image comes once, in four tokens"
    assert all(question in text for question in QUESTIONS)


def test_images_are_altered_in_training_alone(tmp_path: Path) -> None:
    task = task_on(asked(tmp_path), {"horizontal_flip": 1.0})
    examples = task.examples("train")
    plain = make_batch(examples, task.collate, [0], 0).vision["pixel_values"]
    flipped = make_batch(examples, task.collate, [0], 0, positions=[0]).vision["pixel_values"]
    assert torch.allclose(flipped, plain.flip(-1), atol=1e-6)
    assert not torch.equal(flipped, plain)


def test_images_may_be_seen_by_their_own_colours(tmp_path: Path) -> None:
    task = task_on(asked(tmp_path), model={"processor": {"normalize": "data"}})
    pixels = np.concatenate([np.asarray(picture(image, (20, 20))).reshape(-1, 3) for image in range(6)]) / 255
    processor = task.model_source.vision_processor.hf_processor.image_processor
    assert np.allclose(processor.image_mean, pixels.mean(0), atol=1e-5)
    assert np.allclose(processor.image_std, pixels.std(0), atol=1e-5)


def test_text_among_images_is_learnt_too_and_data_without_any_needs_no_blank(tmp_path: Path) -> None:
    lines = [{"question": "What is it?", "answer": "a text"}]
    picture(0, (20, 20)).save(tmp_path / "a.png")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, [*lines, {"image": "a.png", "caption": "noise"}])))
    (tmp_path / "text.jsonl").write_text("\n".join(map(json.dumps, lines)))
    mixed, text = (task_on(str(tmp_path / f"{name}.jsonl"), packing=False) for name in ("train", "text"))
    batches = [make_batch(task.examples("train"), task.collate, [0], 0) for task in (mixed, text)]
    assert [batch.dummy_rows for batch in batches] == [1, 0]
    assert set(batches[1].vision) == {MM_TOKEN_TYPE_IDS}, "Gemma 3 wants to be told that nothing is an image"
    assert not batches[1].vision[MM_TOKEN_TYPE_IDS].any()
    model, blank = mixed.build_model().eval(), batches[0]
    rows = {name: value if name == "loss_positions" else value[:1] for name, value in blank.tensors.items()}
    alone = replace(blank, vision={}, dummy_rows=0, tensors=rows)
    losses = [float(mixed.loss(model, batch).total.detach()) for batch in (blank, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_tokens_of_images_count(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)18 of 18 .*train.jsonl:1: its last user turn .* and data.max_length 6 leaves none for"
    ):
        task_on(asked(tmp_path), max_length=6).examples("train")


def test_a_model_that_sees_nothing_is_refused(tmp_path: Path) -> None:
    llama = {"config": LLAMA}
    with pytest.raises(
        RecipeError, match="llama is a text-only model; task vlm needs a vision-language model; name one"
    ):
        task_on(asked(tmp_path), model=llama).checks.run()


def test_options_that_make_no_sense_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="horizontal_flip is 2, but a probability is between 0 and 1"):
        task_on(asked(tmp_path), {"horizontal_flip": 2.0})


def test_a_chat_template_may_be_a_file_or_be_missing(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text(
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text or '<image>' }}{% endfor %}{% endfor %}"
    )
    text = {"chat_template": str(file)}
    task = task_on(asked(tmp_path), model=text)
    assert task.tokenizer.decode(task.examples("train")[0]["input_ids"]).startswith("[user]<image>")
    with pytest.raises(RecipeError, match=r"model.chat_template: 'nowhere' cannot be read"):
        task_on(asked(tmp_path), model={"chat_template": "nowhere"}).tokenizer  # noqa: B018


def test_the_tiny_recipe_learns(tmp_path: Path) -> None:
    task = make_task(RunConfig.model_validate(tiny_recipe("vlm", tmp_path)))
    model, examples = task.build_model(), task.examples("train")
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(12):
        batch = make_batch(examples, task.collate, [(4 * step + at) % 64 for at in range(4)], 0)
        loss = task.loss(model, batch).total / batch.weight
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert all(map(math.isfinite, losses))
    assert losses[-1] < 0.8 * losses[0]


GROUND = (250, 240, 230)


def shape(width: int = 40, height: int = 30, at: tuple[int, int] = (5, 7)) -> Image.Image:
    """A patch of noise, 9 wide and 6 high, on a plain background."""
    image = Image.new("RGB", (width, height), GROUND)
    image.paste(Image.fromarray(np.random.RandomState(1).randint(0, 200, (6, 9, 3), dtype=np.uint8)), at)
    return image


def noise() -> Image.Image:
    return Image.fromarray(np.random.RandomState(0).randint(0, 256, (8, 12, 3), dtype=np.uint8))


def box(image: Image.Image) -> tuple[int, int, int, int]:
    rows, columns = np.nonzero((np.asarray(image) != GROUND).any(axis=-1))
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def content(image: Image.Image) -> bytes:
    return image.crop(box(image)).tobytes()


def augmentation(*, random_translate: bool, flip_probability: float, seed: int) -> Any:
    """Return the function (image, position, number) -> image of a task with these options."""
    recipe = RunConfig.model_validate({"seed": seed})
    return VLM(recipe=recipe, random_translate=random_translate, horizontal_flip=flip_probability).augment_image


def test_an_image_is_a_function_of_seed_place_and_number_alone():
    image, augment = shape(), augmentation(random_translate=True, flip_probability=0.5, seed=7)
    keys = [(place, which) for place in range(6) for which in range(2)]
    first = {key: augment(image, *key).tobytes() for key in keys}
    for key in reversed(keys):
        assert augmentation(random_translate=True, flip_probability=0.5, seed=7)(image, *key).tobytes() == first[key]
    assert len(set(first.values())) > 8
    assert augmentation(random_translate=True, flip_probability=0.5, seed=8)(image, 0, 0).tobytes() != first[0, 0]
    assert augment(image, 2**40, 0).size == image.size


def test_what_is_shown_moves_whole_within_the_frame():
    image, augment = shape(), augmentation(random_translate=True, flip_probability=0.0, seed=0)
    seen = [augment(image, place, 0) for place in range(400)]
    assert {one.size for one in seen} == {(40, 30)}
    assert {content(one) for one in seen} == {content(image)}
    lefts, tops = {box(one)[0] for one in seen}, {box(one)[1] for one in seen}
    assert lefts == set(range(40 - 9 + 1))
    assert tops == set(range(30 - 6 + 1))


def test_an_image_without_a_plain_border_stays():
    augment = augmentation(random_translate=True, flip_probability=0.0, seed=0)
    touching = shape(at=(0, 3))
    for image in (noise(), touching):
        assert augment(image, 3, 0) is image
    plain = Image.new("RGB", (9, 9), GROUND)
    assert augment(plain, 3, 0).tobytes() == plain.tobytes()


def test_a_mirror_image_comes_as_often_as_asked():
    image = noise()
    mirrored = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT).tobytes()
    for share in (0.0, 0.25, 1.0):
        augment = augmentation(random_translate=False, flip_probability=share, seed=3)
        seen = [augment(image, place, 0).tobytes() for place in range(400)]
        assert set(seen) <= {image.tobytes(), mirrored}
        assert seen.count(mirrored) / 400 == pytest.approx(share, abs=0.06)


def test_a_mirrored_shape_is_moved_too():
    image, augment = shape(), augmentation(random_translate=True, flip_probability=1.0, seed=0)
    mirrored = content(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    assert {content(augment(image, place, 1)) for place in range(20)} == {mirrored}


def test_the_stream_is_frozen():
    augment = augmentation(random_translate=True, flip_probability=0.5, seed=42)
    assert [tuple(map(int, box(augment(shape(), place, 0))[:2])) for place in range(4)] == FROZEN


FROZEN = [(22, 7), (30, 5), (5, 23), (7, 16)]
