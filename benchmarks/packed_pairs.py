"""Train DPO on models of 2026, padded and packed with shared prompts: equal losses first, then seconds of a step.

    python -m benchmarks.packed_pairs [--model qwen3_5_text|qwen3_vl] [--rounds 7]

The text model has three layers of gated delta nets and one of attention, as Qwen3.5, and reads hh-rlhf's helpful pairs.
The vision-language model is Qwen3-VL in small; its prompts have one to three images of three sizes. qwen3_vl needs
torchvision. fp32, one process, `zero0`, the reference's passes included; seconds of the process.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.common import join_alone, made_batches, made_engine, ratio, run, take_turns

LIMIT = 1e-5
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "num_key_value_heads": 2,
         "head_dim": 64}  # fmt: skip
DELTA_NETS = {
    **SIZES, "model_type": "qwen3_5_text", "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 64,
}  # fmt: skip
SPECIAL = {"image": "<|image_pad|>", "video": "<|video_pad|>", "start": "<|vision_start|>", "end": "<|vision_end|>"}
PATCH, MERGE, SIDE = 8, 2, 256
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}\\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def text_recipe(folder: Path, pairs: int) -> dict[str, Any]:
    """Return a DPO recipe of the hybrid text model on the first real pairs."""
    from benchmarks.trl_rm import pairs as helpful

    lines = Path(helpful("train")).read_text(encoding="utf-8").splitlines()
    (folder / "train.jsonl").write_text("\n".join(lines[: 2 * pairs]) + "\n", encoding="utf-8")
    return {
        "model": {"config": DELTA_NETS, "tokenizer": {"train": "bpe", "vocab_size": 512}},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 1024, "on_error": "skip"},
    }


def vision_recipe(folder: Path, pairs: int) -> dict[str, Any]:
    """Return a DPO recipe of a small Qwen3-VL with an image in each prompt."""
    made = write_vision_model(folder / "model")
    draw = random.Random(0)
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        for number in range(pairs):
            sides = [draw.choice((64, 128, SIDE)) for _ in range(draw.choice((1, 1, 2, 3)))]
            images = [write_image(folder / f"{number}-{place}.png", side) for place, side in enumerate(sides)]
            words = [
                draw.choice(("a red wheel", "two lamps", "a valve", "dust", "a hose"))
                for _ in range(draw.randint(2, 40))
            ]
            record = {
                "prompt": "<image>" * len(images) + "What does this part of the plant show, and what would you check first?",
                "chosen": f"I see {', '.join(words)}.", "rejected": f"Nothing but {' or '.join(words[: len(words) // 2 + 1])}.",
                "images": [str(image) for image in images],
            }  # fmt: skip
            file.write(json.dumps(record) + "\n")
    return {"model": {"path": made}, "data": {"train": str(folder / "train.jsonl"), "max_length": 1024}}


def write_image(path: Path, side: int) -> Path:
    """Write a square image of smooth noise."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(side).integers(0, 256, (side // 8, side // 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize((side, side)).save(path)
    return path


def write_vision_model(folder: Path) -> str:
    """Write a small Qwen3-VL with random weights, its tokenizer and its processor."""
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLProcessor, Qwen3VLVideoProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

    from dstrain.data.encoding.trained_tokenizer import train_tokenizer

    tokenizer = train_tokenizer(
        ["I see a red wheel, two lamps, a valve, dust or a hose. Nothing but this part"] * 4, 400
    )
    tokenizer.add_tokens([*SPECIAL.values()], special_tokens=True)
    tokenizer.chat_template = TEMPLATE
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in SPECIAL.items()}
    config = AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            **SIZES, "num_hidden_layers": 4, "tie_word_embeddings": True, "pad_token_id": tokenizer.pad_token_id,
            "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "mrope_interleaved": True, "rope_theta": 1e4},
        },
        vision_config={
            "depth": 2, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "patch_size": PATCH,
            "spatial_merge_size": MERGE, "temporal_patch_size": 2, "out_hidden_size": 256, "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["image"], video_token_id=ids["video"], vision_start_token_id=ids["start"],
        vision_end_token_id=ids["end"],
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    sizes = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    pixels = {"size": {"shortest_edge": 64, "longest_edge": SIDE * SIDE}}
    Qwen3VLProcessor(
        Qwen2VLImageProcessor(**sizes, **pixels), tokenizer, Qwen3VLVideoProcessor(**sizes), chat_template=TEMPLATE
    ).save_pretrained(folder)
    return str(folder)


RECIPES = {"qwen3_5_text": text_recipe, "qwen3_vl": vision_recipe}


def measure(*, model: str = "qwen3_5_text", rounds: int = 7, warmup: int = 1, micro: int = 8) -> Mapping[str, Any]:
    """Compare the losses of both forms on the same pairs, then let them take turns."""
    from dstrain.config.schema import RunConfig
    from dstrain.tasks import make_task

    world = join_alone()
    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    sections = RECIPES[model](folder, (rounds + warmup) * micro)
    steps: dict[str, Any] = {}
    losses: dict[str, list[float]] = {}
    computed: dict[str, int] = {}
    for form, packing in (("padded", False), ("packed", True)):
        recipe = {
            "task": "dpo", **sections, "precision": "fp32", "ds_config": "zero0",
            "batch": {"total": micro, "micro": micro, "packing": packing},
            "optim": {"name": "sgd", "lr": 1e-3, "warmup": 0, "schedule": "constant"}, "steps": rounds,
        }  # fmt: skip
        task = make_task(RunConfig.model_validate(recipe))
        engine = made_engine(task, "zero0", world, micro=micro)
        batches = made_batches(task, rounds + warmup, micro)
        losses[form] = []
        computed[form] = sum(batch.tensors["input_ids"].numel() for step in batches for batch in step)

        def step(turn: int, engine: Any = engine, batches: Any = batches, form: str = form) -> None:
            result = engine.step(batches[turn], 1e-3)
            losses[form].append(float(result.loss) / result.weight)

        steps[form] = step
    seconds = take_turns(steps, rounds, warmup, world.device, time.process_time)
    worst = max(abs(padded - packed) for padded, packed in zip(losses["padded"], losses["packed"], strict=True))
    assert worst <= LIMIT * max(map(abs, losses["padded"])), f"losses differ by {worst:.1e}"
    rows = [{"form": form, "tokens": computed[form], **ratio(seconds, form, "packed")} for form in ("padded", "packed")]
    return {
        "settings": {"model": model, "micro": micro},
        "checked": f"losses of all steps differ by at most {worst:.1e}",
        "rows": rows,
    }


if __name__ == "__main__":
    run(measure, __doc__)
