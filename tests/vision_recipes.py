"""Recipes of tiny vision-language models: configs, images and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from tests.tiny import LLAVA, tiny_recipe

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 14,
}  # fmt: skip


def llava(tower: str = "clip_vision_model", strategy: str = "default", side: int = 28, **more: Any) -> dict[str, Any]:
    """Return a LLaVA config with a vision tower of this kind; (side / 14)^2 patches."""
    return {
        "model_type": "llava",
        "vision_feature_select_strategy": strategy,
        "text_config": {"model_type": "llama", **TEXT},
        "vision_config": {"model_type": tower, "image_size": side, **TOWER},
        **more,
    }


GEMMA3: dict[str, Any] = {
    "model_type": "gemma3",
    "text_config": {"model_type": "gemma3_text", "head_dim": 8, **TEXT},
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 56, **TOWER},
}
IDEFICS3: dict[str, Any] = {
    "model_type": "idefics3",
    "text_config": {"model_type": "llama", **TEXT},
    "vision_config": {"image_size": 56, **TOWER},
}


def picture(seed: int = 0, size: tuple[int, int] = (60, 40)) -> Image.Image:
    """Return an image of noise; `size` is (width, height)."""
    width, height = size
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


def recipe(task: str, folder: Path) -> dict[str, Any]:
    """Return a task's tiny recipe with a vision-language model; samples have 0, 1 or 2 images in turn."""
    values = tiny_recipe(task, folder)
    if task == "vlm":
        return values
    values["model"] = {"config": LLAVA}
    for split, count in (("train", 64), ("eval", 16)):
        lines = [json.dumps(_preference(folder, split, index)) for index in range(count)]
        (folder / f"{split}.jsonl").write_text("\n".join(lines))
    return values


def _preference(folder: Path, split: str, index: int) -> dict[str, Any]:
    """Return a pair with `index % 3` images; the chosen answer gives their number."""
    count = index % 3
    names = [f"{split}-{index}-{at}.png" for at in range(count)]
    for at, name in enumerate(names):
        picture(index * 3 + at, (10 + index % 7, 12)).save(folder / name)
    asked = f"{'<image>' * count}{'How many' + ' really' * (index % 4)}?"
    return {
        "images": names,
        "prompt": [{"role": "user", "content": asked}],
        "chosen": f"I see {count}.",
        "rejected": "No idea.",
    }


def text_alone(task: str, folder: Path) -> dict[str, Any]:
    """Return the same recipe with records without images."""
    values = recipe(task, folder)
    for split in ("train", "eval"):
        file = folder / f"{split}.jsonl"
        records = [json.loads(line) for line in file.read_text().replace("<image>", "").splitlines()]
        file.write_text("\n".join(json.dumps(record | {"images": []}) for record in records))
    return values


def things(task: str, folder: Path) -> dict[str, Any]:
    """Return the same recipe with images of a shape on the left of a plain background, which flip and shift change."""
    values = recipe(task, folder)
    for index, file in enumerate(sorted(folder.glob("*.png"))):
        image = Image.new("RGB", (16, 16), (250, 240, 230))
        ImageDraw.Draw(image).polygon([(1, 2), (8, 2 + index % 5), (2, 11)], (20, 40 * (index % 6), 90))
        image.save(file)
    return values


SAFE = {"method": "safedpo", "delta": 2.0, "scaling_weight": 0.5, "anchor_weight": 0.5}
IMAGE_TERM = {"image_weight": 1.0}


def safe(task: str, folder: Path) -> dict[str, Any]:
    """Return the recipe with safety options and labels; of every 8 pairs 4 are swapped or dropped."""
    return _labelled(tiny_recipe(task, folder), folder, SAFE)


def safe_with_images(task: str, folder: Path) -> dict[str, Any]:
    """Return the same for a vision-language model, with corrupted images."""
    return _labelled(recipe(task, folder), folder, SAFE | IMAGE_TERM)


def _labelled(values: dict[str, Any], folder: Path, safety: Mapping[str, Any]) -> dict[str, Any]:
    for split in ("train", "eval"):
        file = folder / f"{split}.jsonl"
        records = [json.loads(line) for line in file.read_text().splitlines()]
        lines = [
            json.dumps(
                one | {"chosen_safe": index % 4 > 1, "rejected_safe": index % 8 not in (0, 2), "margin": index % 5 / 2}
            )
            for index, one in enumerate(records)
        ]
        file.write_text("\n".join(lines))
    return values | {"options": {"safety": dict(safety)}}


RECIPES: Mapping[str, Callable[[str, Path], dict[str, Any]]] = {
    "": lambda task, folder: tiny_recipe(task, folder),
    "with images": recipe,
    "text alone": text_alone,
    "things": things,
    "safe": safe,
    "safe, with images": safe_with_images,
}


def named_recipe(name: str, folder: Path) -> tuple[str, dict[str, Any]]:
    """Return (task, recipe) for a name such as `rm` or `rm, with images`, with its data written into the folder."""
    task, _, kind = name.partition(", ")
    return task, RECIPES[kind](task, folder)
