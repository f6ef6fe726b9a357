"""Settings of the speed benchmark: the shape of the model, and the samples of a step."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from dstrain.cache import cache_root

TASKS = ("rm", "dpo", "dpo-precomputed", "sft", "vlm")
IMAGE_SIDE, PATCH_SIDE = 112, 14
"""Pixels of an image and of a patch: 64 tokens for each image."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A model shape, and the lengths of the samples."""

    name: str
    hidden: int
    layers: int
    vocabulary: int
    lengths: tuple[int, int]
    """Least and largest number of tokens of each answer with its prompt."""
    prompt: int | None = None
    """Tokens of each prompt, made of several dialogs; None for the prompts of the data."""
    micro: int = 4
    """Samples of a step."""

    @property
    def intermediate(self) -> int:
        return 4 * self.hidden

    @property
    def max_length(self) -> int:
        """Length above which samples are truncated; no sample reaches it."""
        return self.lengths[1] + 64

    def text_config(self) -> dict[str, Any]:
        return {
            "model_type": "llama", "vocab_size": self.vocabulary, "hidden_size": self.hidden,
            "intermediate_size": self.intermediate, "num_hidden_layers": self.layers, "tie_word_embeddings": True,
            "num_attention_heads": self.hidden // 64, "num_key_value_heads": self.hidden // 64, "head_dim": 64,
            "max_position_embeddings": 2 * self.max_length,
        }  # fmt: skip


SETTINGS = {
    "hh": Setting(name="hh", hidden=256, layers=3, vocabulary=31000, lengths=(0, 490)),
    "even": Setting(name="even", hidden=256, layers=3, vocabulary=2000, lengths=(200, 232)),
    "long-prompts": Setting(
        name="long-prompts", hidden=256, layers=3, vocabulary=31000, lengths=(0, 1650), prompt=1500
    ),
    "tiny": Setting(name="tiny", hidden=64, layers=2, vocabulary=600, lengths=(0, 160), micro=2),
}


def drawn_setting(seed: int) -> Setting:
    """Return a setting that the seed alone determines."""
    draw = random.Random(seed)
    return Setting(
        name=f"drawn-{seed}",
        hidden=64 * draw.randint(2, 8),
        layers=draw.randint(2, 6),
        vocabulary=1000 * draw.randint(3, 30),
        lengths=(0, draw.randint(120, 700)),
        prompt=draw.choice((None, draw.randint(100, 500))),
        micro=draw.randint(2, 6),
    )


def find_setting(name: str, seed: int) -> Setting:
    return drawn_setting(seed) if name == "drawn" else SETTINGS[name]


def hh_pairs() -> list[dict[str, Any]]:
    """Return hh-rlhf's helpful pairs of DSTRAIN_DATA."""
    folder = Path(os.environ.get("DSTRAIN_DATA", ROOT.parent / "shared" / "data"))
    path = folder / "hh" / "helpful-train.jsonl"
    assert path.is_file(), f"{path} does not exist; set DSTRAIN_DATA to the folder that contains hh/helpful-train.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def trained_tokenizer(vocabulary: int) -> Path:
    """Return the folder of a byte-level BPE of hh-rlhf, trained by dstrain at the first call."""
    from dstrain.data.encoding.trained_tokenizer import train_tokenizer

    folder = cache_root() / "benchmarks" / f"hh-bpe-{vocabulary}"
    if not (folder / "tokenizer.json").is_file():
        texts = (pair[side] for pair in hh_pairs() for side in ("chosen", "rejected"))
        train_tokenizer(texts, vocabulary).save_pretrained(folder)
    return folder


def made_task(setting: Setting, task: str, steps: int, overrides: Sequence[str] = ()) -> Any:
    """Return dstrain's task in this setting; `overrides` are KEY=VALUE as of `--set`."""
    from dstrain.config import read_recipe
    from dstrain.tasks import make_task

    folder = Path(tempfile.mkdtemp(prefix="dstrain-bench-"))
    (folder / "recipe.yaml").write_text(json.dumps(_recipe(setting, task, steps, folder)))
    return make_task(read_recipe(folder / "recipe.yaml", tuple(overrides)).config)


def _recipe(setting: Setting, task: str, steps: int, folder: Path) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = trained_tokenizer(setting.vocabulary)
    write_record, records = _RECORDS[task], []
    pairs = _fitting_pairs(setting, AutoTokenizer.from_pretrained(tokenizer))
    for _ in range(setting.micro * min(steps, 40)):
        records.append(write_record(next(pairs), folder, len(records)))
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    model: dict[str, Any] = {"config": setting.text_config(), "tokenizer": str(tokenizer)}
    if task == "vlm":
        model = {"config": _llava_config(setting), "tokenizer": str(tokenizer)}
    return {
        "task": task.partition("-")[0],
        "options": {"precompute_ref_log_probs": True} if task == "dpo-precomputed" else {},
        "model": {**model, "gradient_checkpointing": False},
        "data": {"train": str(folder / "train.jsonl"), "max_length": setting.max_length + (IMAGE_SIDE // PATCH_SIDE) ** 2},
        "optim": {"name": "adamw", "lr": 1e-4, "warmup": 0, "schedule": "constant", "clip": 1.0},
        "batch": {"total": setting.micro, "micro": setting.micro},
        "ds_config": "zero2",
        "steps": steps,
    }  # fmt: skip


def _fitting_pairs(setting: Setting, tokenizer: Any) -> Iterator[dict[str, str]]:
    """Yield prompt, chosen and rejected of pairs with the setting's lengths, over and over in a fixed order."""
    pairs, count, rng = hh_pairs(), 0, random.Random(0)
    rng.shuffle(pairs)
    length = lambda text: len(tokenizer(text)["input_ids"])  # noqa: E731
    low, high = setting.lengths
    while True:
        before = count
        for index, pair in enumerate(pairs):
            start = pair["chosen"].rindex("\n\nAssistant:") + len("\n\nAssistant:")
            prompt, chosen, rejected = pair["chosen"][:start], pair["chosen"][start:], pair["rejected"][start:]
            if not chosen.strip() or not rejected.strip() or not pair["rejected"].startswith(prompt):
                continue
            if setting.prompt is not None:
                prompt = _long_prompt(pairs, index, setting.prompt, tokenizer) + prompt
            if all(low <= length(prompt + answer) < high for answer in (chosen, rejected)):
                count += 1
                yield {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        assert count > before, f"no pair of hh-rlhf fits the setting {setting}"


def _long_prompt(pairs: Sequence[Mapping[str, str]], index: int, tokens: int, tokenizer: Any) -> str:
    """Return the beginning of the dialogs after `index`, of about so many tokens."""
    text = ""
    while len(ids := tokenizer(text)["input_ids"]) < tokens:
        index += 1
        text += pairs[index % len(pairs)]["chosen"]
    return str(tokenizer.decode(ids[:tokens]))


def _pair_record(pair: Mapping[str, str], folder: Path, index: int) -> dict[str, Any]:
    return dict(pair)


def _completion_record(pair: Mapping[str, str], folder: Path, index: int) -> dict[str, Any]:
    return {"prompt": pair["prompt"], "completion": pair["chosen"]}


def _image_record(pair: Mapping[str, str], folder: Path, index: int) -> dict[str, Any]:
    from tests.vision_recipes import picture

    picture(index, (IMAGE_SIDE, IMAGE_SIDE)).save(folder / f"{index}.png")
    return {"image": f"{index}.png", "question": "<image>\n" + pair["prompt"], "answer": pair["chosen"]}


_RECORDS: dict[str, Callable[[Mapping[str, str], Path, int], dict[str, Any]]] = {
    "rm": _pair_record, "dpo": _pair_record, "dpo-precomputed": _pair_record, "sft": _completion_record,
    "vlm": _image_record,
}  # fmt: skip


def _llava_config(setting: Setting) -> dict[str, Any]:
    tower = {
        "model_type": "clip_vision_model", "image_size": IMAGE_SIDE, "patch_size": PATCH_SIDE,
        "projection_dim": setting.hidden, "hidden_size": setting.hidden, "intermediate_size": setting.intermediate,
        "num_hidden_layers": setting.layers, "num_attention_heads": setting.hidden // 64,
    }  # fmt: skip
    text = setting.text_config()
    # dstrain adds the image token to the tokenizer.
    return {
        "model_type": "llava",
        "vision_config": tower,
        "text_config": {**text, "vocab_size": text["vocab_size"] + 1},
    }
