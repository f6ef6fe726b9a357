"""Recipes of the packaged tasks that train in seconds, with their data."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

MakeRecord = Callable[[Path, str, int], dict[str, Any]]
"""(folder, split, index) -> a record; files that it names are written into the folder."""
THINGS = ("pump", "valve", "kettle", "lamp", "wheel", "belt")
COLORS = {"red": (220, 30, 30), "green": (30, 200, 60), "blue": (40, 60, 220)}
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
LLAVA: dict[str, Any] = {
    "model_type": "llava",
    "vision_feature_select_strategy": "default",
    "vision_feature_layer": -1,
    "text_config": LLAMA,
    "vision_config": {
        "model_type": "clip_vision_model", "image_size": 16, "patch_size": 8, "hidden_size": 24, "intermediate_size": 36,
        "num_hidden_layers": 2, "num_attention_heads": 4, "projection_dim": 24,
    },
}  # fmt: skip
"""With 4 tokens for an image."""


def tiny_recipe(task: str, folder: Path) -> dict[str, Any]:
    """Return a recipe of a packaged task that trains in seconds, with its data written into the folder."""
    if task == "protein":
        return _protein_recipe(folder)
    _write_records(folder, RECORDS[task])
    recipe: dict[str, Any] = {
        "task": task,
        "model": {"config": {**LLAMA}},
        "data": {"train": str(folder / "train.jsonl"), "eval": str(folder / "eval.jsonl"), "max_length": 48},
        "batch": {"total": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": 4,
        "log": {"every": 1, "tensorboard": False},
        "ds_config": "zero2",
    }
    # LLaVA does not use the last norm of its tower, so it gets no gradient.
    llava = {"config": json.loads(json.dumps(LLAVA)), "freeze": ["*.post_layernorm"]}
    match task:
        case "vlm":
            recipe["model"] = llava
        case "docqa":
            recipe["options"] = {"prompt_template": "{question}"}
            recipe["eval"] = {"generate": {"max_new_tokens": 8}}
            recipe["model"] = llava | {"lora": None}  # adapters would train too slowly
        case "temporal":
            encoder = {"patch_length": 4, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
            recipe["options"] = {"encoder": encoder, "prompt": "Curve?", "stage": "sft"}
        case "distill":
            teacher = folder / "teacher"
            _save_teacher(recipe, teacher)
            recipe["model"]["tokenizer"] = str(teacher)
            recipe["options"] = {"teacher": str(teacher), "top_k": 8, "precompute_ref_log_probs": False}
    return recipe


def _write_records(folder: Path, make_record: MakeRecord) -> None:
    for split, count in (("train", 64), ("eval", 16)):
        lines = [json.dumps(make_record(folder, split, index)) + "\n" for index in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(lines))


def _save_teacher(student: dict[str, Any], folder: Path) -> None:
    """Save a larger model than the student's, with its tokenizer."""
    from dstrain.config.schema import RunConfig
    from dstrain.models.weights import save_module
    from dstrain.tasks.sft import SFT

    config = {**student["model"]["config"], "hidden_size": 48, "num_hidden_layers": 3}
    teacher = SFT(recipe=RunConfig.model_validate(student | {"task": "sft", "model": {"config": config}, "seed": 1}))
    teacher.model_source.save_processor(folder)
    model: Any = teacher.build_model()
    model.config.save_pretrained(str(folder))
    save_module(model, folder)  # not by transformers, which writes on the first process alone


def _protein_recipe(folder: Path) -> dict[str, Any]:
    for split, count in (("train", 64), ("eval", 16)):
        (folder / split).mkdir(exist_ok=True)
        for index in range(count):
            (folder / split / f"{index:03}.pdb").write_text(tiny_structure(f"{split}/{index}"))
    return {
        "task": "protein",
        "options": {"hidden_dim": 32, "encoder_layers": 1, "decoder_layers": 1, "num_heads": 4, "dropout": 0.0},
        "model": {"gradient_checkpointing": True},
        "data": {"train": str(folder / "train"), "eval": str(folder / "eval"), "max_length": 24},
        "batch": {"total": 4, "micro": 2},
        "optim": {"lr": 1e-3},
        "steps": 4,
        "log": {"every": 1, "tensorboard": False},
        "ds_config": "zero2",
    }


def tiny_structure(name: str) -> str:
    """Return a made-up helix of 6 to 30 residues as a PDB file."""
    draw = random.Random(name)
    lines: list[str] = []
    for index in range(draw.randint(6, 30)):
        residue = draw.choice(("ALA", "LEU", "GLY", "SER", "LYS", "GLU"))
        # Radius, angle in degrees and height in Å of an atom in an alpha helix: 100 degrees and 1.5 Å per residue.
        for atom, radius, angle, height in (
            ("N", 1.55, -28, -0.9), ("CA", 2.28, 0, 0.0), ("C", 1.66, 26, 1.1), ("O", 2.0, 22, 2.3),
        ):  # fmt: skip
            turn = math.radians(100 * index + angle)
            place = (radius * math.cos(turn), radius * math.sin(turn), height + 1.5 * index)
            x, y, z = (value + draw.gauss(0, 0.05) for value in place)
            head = f"ATOM  {len(lines) + 1:5}  {atom:<3} {residue} A{index + 1:4}"
            lines.append(f"{head}    {x:8.3f}{y:8.3f}{z:8.3f}  1.00  0.00           {atom[0]}")
    return "\n".join([*lines, "TER", "END", ""])


# ---- records


def _conversation(folder: Path, split: str, index: int) -> dict[str, Any]:
    """One or two questions, with answers of random length."""
    draw = random.Random(f"{split}/{index}")
    thing = draw.choice(THINGS)
    ways = " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    turns = [
        ("user", f"How do I mend the {thing}{', please' * draw.randint(0, 3)}?"),
        ("assistant", f"Gladly: {ways}."),
    ]
    if index % 3 == 0:
        turns += [("user", "And now?"), ("assistant", f"Test the {thing}.")]
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def _pair(folder: Path, split: str, index: int) -> dict[str, str]:
    """Two answers of uneven length: the polite one is the chosen one."""
    draw = random.Random(f"{split}/{index}")
    prompt = f"\n\nHuman: How do I mend the {draw.choice(THINGS)} number {index}{', please' * draw.randint(0, 4)}?"
    good = "Gladly: " + " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    return {"chosen": f"{prompt}\n\nAssistant: {good}.", "rejected": f"{prompt}\n\nAssistant: No idea, go away."}


def _labelled_answer(folder: Path, split: str, index: int) -> dict[str, Any]:
    """An answer of random length: polite ones are desirable."""
    draw = random.Random(f"{split}/{index}")
    thing = draw.choice(THINGS)
    ways = " then ".join(draw.choice(("open it", "clean it", "oil it")) for _ in range(draw.randint(1, 5)))
    wanted = draw.random() < 0.6
    return {
        "prompt": f"How do I mend the {thing}{', please' * draw.randint(0, 4)}?",
        "completion": f" Gladly: {ways}." if wanted else f" No idea{', really' * draw.randint(0, 3)}, go away.",
        "label": wanted,
    }


def _solution(folder: Path, split: str, index: int) -> dict[str, Any]:
    """A sum in steps, of which some are wrong."""
    draw = random.Random(f"{split}/{index}")
    total, steps, labels = draw.randint(1, 9), list[str](), list[bool]()
    prompt = f"Start with {total} and add."
    for _ in range(draw.randint(1, 3)):
        more, is_right = draw.randint(1, 9), draw.random() < 0.7
        steps.append(f"{total}+{more}={total + more + (0 if is_right else 1)}")
        labels.append(is_right)
        total += more
    return {"prompt": prompt, "completions": steps, "labels": labels}


def _question_on_images(folder: Path, split: str, index: int) -> dict[str, Any]:
    """A question about zero to two images; each image has one colour."""
    draw = random.Random(f"{split}/{index}")
    colors = [draw.choice([*COLORS]) for _ in range(index % 3)]
    images = _draw_images(folder, [f"{split}-{index}-{at}.png" for at in range(len(colors))], colors, draw)
    if not images:
        turns = [("user", f"What is sky{'?' * draw.randint(1, 3)}"), ("assistant", "Blue, mostly.")]
    else:
        turns = [("user", "<image>" * len(images) + "\nWhich colour?"), ("assistant", " and ".join(colors) + ".")]
    return {"messages": [{"role": role, "content": content} for role, content in turns], "images": images}


def _question_on_pages(folder: Path, split: str, index: int) -> dict[str, Any]:
    """A question about one of one to three pages; each page has one colour."""
    draw = random.Random(f"{split}/{index}")
    colors = [draw.choice([*COLORS]) for _ in range(1 + index % 3)]
    images = _draw_images(folder, [f"{split}-{index}-{page}.png" for page in range(len(colors))], colors, draw)
    page = draw.randrange(len(colors))
    return {"question": f"Page {page + 1}?", "answers": [colors[page], f"{colors[page]} page"], "images": images}


def _draw_images(folder: Path, names: list[str], colors: list[str], draw: random.Random) -> list[str]:
    from PIL import Image

    for name, color in zip(names, colors, strict=True):
        Image.new("RGB", (draw.randint(8, 24), draw.randint(8, 24)), COLORS[color]).save(folder / name)
    return names


def _curve(folder: Path, split: str, index: int) -> dict[str, Any]:
    """A short curve of one or two channels, some with missing values, that rises or falls."""
    draw = random.Random(f"{split}/{index}")
    rises, steps = draw.random() < 0.5, draw.randint(5, 14)
    line = [round((at if rises else -at) + draw.random(), 2) for at in range(steps)]
    other = [None if draw.random() < 0.2 else round(draw.random(), 2) for _ in range(steps)]
    series = [line, other] if index % 3 == 0 else line
    return {"series": series, "caption": "rises" if rises else "falls", "label": "up" if rises else "down"}


RECORDS: dict[str, MakeRecord] = {
    "sft": _conversation,
    "distill": _conversation,
    "rm": _pair,
    "dpo": _pair,
    "kto": _labelled_answer,
    "prm": _solution,
    "vlm": _question_on_images,
    "docqa": _question_on_pages,
    "temporal": _curve,
}
