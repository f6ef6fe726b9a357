"""A small model of the user's family in a folder, with random weights, and the tasks that train it."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from dstrain.config.schema import ModelConfig, RunConfig
from dstrain.data.encoding.trained_tokenizer import train_tokenizer
from dstrain.errors import Fault, RecipeError
from dstrain.models.folder import find_tokenizer_files, find_tokenizer_place, resolve_base_model
from dstrain.models.load import error_reason, is_multimodal, load_model, read_config, read_tokenizer, set_pad_token
from dstrain.models.processors import (
    PROCESSOR_BUILDERS,
    build_processor,
    count_special_tokens,
    read_processor,
    sync_config_with_processor,
)
from dstrain.models.weight_names import keep_file_names, read_base_names
from dstrain.models.weights import load_report_disabled, open_tensors
from dstrain.tasks import Task, make_task
from dstrain.tasks.common.task import load_split
from dstrain.units import format_count
from dstrain.verify.shrink import shrink_config

VOCABULARY = 320
"""Entries of a tokenizer that is trained here."""
ADDED_TOKENS = 8
"""Entries that a family's class may add to such a tokenizer when it reads it."""
SAMPLES = 4
"""Of a batch: rows of unequal lengths, longer and shorter than the windows of a shrunk model."""
MAX_LENGTH = 4096
SEED = 0
_THINGS = ("pump", "valve", "kettle", "lamp", "wheel")
_WORKS = ("open it", "clean it", "oil it", "close it")


@dataclass(frozen=True, kw_only=True)
class ShrunkModel:
    """A small model in a folder, which dstrain trains as it would train the user's."""

    folder: Path
    """Config, random weights, tokenizer or processor."""
    data: Path
    """Folder of the records."""
    given: ModelConfig
    """What the user named."""
    takes_images: bool
    tokenizer_note: str = ""
    """Why the tokenizer is not the model's own; empty where it is."""

    def task(self, name: str = "sft", **changes: Any) -> Task:
        """Return a task that trains the small model; `changes` overrides sections of the recipe."""
        name = "vlm" if name == "sft" and self.takes_images else name
        model = {
            "path": str(self.folder),
            "gradient_checkpointing": False,
            "kernels": "none",
            "tiled_mlp": False,
            "router_aux_loss_coef": 0.0,
            "trust_remote_code": self.given.trust_remote_code,
            "attn_implementation": self.given.attn_implementation,
        }
        recipe: dict[str, Any] = {
            "task": name,
            "model": model,
            "data": {"train": str(self.data / f"{name}.jsonl"), "max_length": self.max_length, "workers": 0},
            "batch": {"total": SAMPLES, "micro": SAMPLES},
            "optim": {"name": "sgd", "lr": 0.5, "clip": 1.0},
            "steps": 2,
            "ds_config": "zero2",
            "precision": "fp32",
        }
        for section, values in changes.items():
            recipe[section] = {**recipe.get(section, {}), **values} if isinstance(values, dict) else values
        return make_task(RunConfig.model_validate(recipe))

    def describe(self) -> str:
        """Return how many layers and parameters it has, and whose tokenizer."""
        weights = open_tensors(sorted(self.folder.glob("*.safetensors"))).values()
        count, text = sum(math.prod(tensor.shape) for tensor in weights), self.config.get_text_config()
        kind = "processor" if self.takes_images else "tokenizer"
        note = self.tokenizer_note or f"the model's own {kind}"
        return f"{text.num_hidden_layers} layers of width {text.hidden_size}, {format_count(count)} weights; {note}"

    @cached_property
    def config(self) -> Any:
        """The config of the small model."""
        return read_config(ModelConfig(path=str(self.folder), trust_remote_code=self.given.trust_remote_code))

    @cached_property
    def max_length(self) -> int:
        """Tokens of a sample at most; rotary frequencies of some families change for longer ones."""
        text = self.config.get_text_config()
        rope = getattr(text, "rope_parameters", None) or {}
        limits = [getattr(text, "max_position_embeddings", None), rope.get("original_max_position_embeddings")]
        return min([MAX_LENGTH, *(int(limit) for limit in limits if limit)])


def examples_of(task: Task) -> list[Mapping[str, Any]]:
    """Return the task's training examples, in the order of its records."""
    examples = load_split(task, "train")
    assert examples is not None, "the task has training data"
    return [examples[index] for index in range(len(examples))]


def auto_class_of(config: Any) -> Any:
    """Return the class of transformers that makes a model of this config."""
    import transformers

    return transformers.AutoModelForImageTextToText if is_multimodal(config) else transformers.AutoModelForCausalLM


def make_shrunk_model(given: ModelConfig, work: Path) -> ShrunkModel:
    """Write a small model of this family into `work`. Raises RecipeError where dstrain or transformers cannot."""
    base = resolve_base_model(given)
    config = read_config(base)
    if getattr(config, "is_encoder_decoder", False):
        problem = f"is a {config.model_type} model, with an encoder and a decoder, which no task of dstrain trains"
        raise RecipeError(Fault("model.path", problem, "name a causal or an image-text model"))
    folder, data = work / "model", work / "data"
    data.mkdir(parents=True)
    write_records(data, is_multimodal(config))
    saved, tokenizer, note = _find_processor(given, config)
    # Never above the model's own: its ids of special tokens are within.
    size = len(tokenizer) + ADDED_TOKENS if note else _count_tokens(config, tokenizer)
    small = shrink_config(config, auto_class_of(config), size, given.trust_remote_code)
    if note:
        if saved is tokenizer:
            for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
                if getattr(tokenizer, name) is not None:
                    setattr(small.get_text_config(), name, getattr(tokenizer, name))
        else:
            sync_config_with_processor(small, saved)
    _save_model(small, base, folder)
    saved.save_pretrained(str(folder))
    shrunk = ShrunkModel(folder=folder, data=data, given=base, takes_images=is_multimodal(config), tokenizer_note=note)
    checks = shrunk.task().checks
    checks.required_keys()
    checks.run()
    return shrunk


def _count_tokens(config: Any, tokenizer: Any) -> int:
    """Return the entries of a vocabulary that has the tokenizer's, and the ids that the config names."""
    ids = [0]
    for part in (config, config.get_text_config()):
        named = [value for name, value in part.to_dict().items() if name.endswith(("token_id", "token_index"))]
        ids += [value for value in named if isinstance(value, int)]
    return max(len(tokenizer), max(ids) + 1)


def _find_processor(given: ModelConfig, config: Any) -> tuple[Any, Any, str]:
    """Return the processor or tokenizer, the tokenizer, and why they are not the model's own (empty: they are).

    Raises RecipeError for a model with images whose processor cannot be read or made.
    """
    place, revision = find_tokenizer_place(given)
    try:
        if is_multimodal(config):
            processor = read_processor(str(place), "model.path", given.trust_remote_code, revision)
            return processor, processor.tokenizer, ""
        if Path(str(place)).expanduser().is_dir() and not find_tokenizer_files(Path(str(place)).expanduser()):
            # transformers makes an empty tokenizer of some families there.
            raise RecipeError(Fault("model.path", f"there is no tokenizer in '{place}'", "put one there"))
        tokenizer = read_tokenizer(str(place), "model.path", given.trust_remote_code, revision)
        set_pad_token(tokenizer, "model.path")
        return tokenizer, tokenizer, ""
    except RecipeError as error:
        if is_multimodal(config) and config.model_type not in PROCESSOR_BUILDERS:
            raise
        fault = error.faults[0]
    size = min(VOCABULARY, config.get_text_config().vocab_size)
    added = count_special_tokens(config) if is_multimodal(config) else 0
    tokenizer = train_tokenizer(list(_iter_texts()), size - added)
    note = f"a tokenizer made here: {fault.problem}"
    if not is_multimodal(config):
        return tokenizer, tokenizer, note
    return build_processor(config, tokenizer), tokenizer, note


def _save_model(config: Any, base: ModelConfig, folder: Path) -> None:
    """Save a model with random weights as its family's files are: their names and dtypes. Raises RecipeError."""
    auto_class = auto_class_of(config)
    wanted, trust = getattr(config, "dtype", None) or torch.float32, base.trust_remote_code
    try:
        model: Any = load_model(auto_class, ModelConfig(config={}, trust_remote_code=trust), config, SEED)
    except RecipeError:
        raise
    except Exception as error:  # any error of the family's code
        problem = f"no small {config.model_type} model can be built ({error_reason(error)})"
        raise RecipeError(Fault("model.path", problem, "give a small model of this family")) from error
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # some families begin with zeros, through which nothing is seen
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    # transformers alone knows which parameters of a family stay in fp32: it reads the weights in the wanted dtype.
    with load_report_disabled():
        model.save_pretrained(str(folder))
        model = auto_class.from_pretrained(str(folder), dtype=wanted, trust_remote_code=trust)
    names = read_base_names(base)
    if names:
        keep_file_names(model, names)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    model.save_pretrained(str(folder))


def write_records(folder: Path, with_images: bool) -> None:
    """Write conversations and pairs of unequal lengths; with images, of none to two in a record."""
    draw = random.Random(SEED)
    lines: dict[str, list[str]] = {"sft": [], "vlm": [], "dpo": []}
    for index in range(SAMPLES):
        names = _write_images(folder, index) if with_images else []
        asked = (
            f"{'<image>' * len(names)}How do I mend the {_THINGS[index]}{', and how long does it take' * (index % 3)}?"
        )
        answers = [_draw_answer(draw, steps) for steps in (1 + 5 * (index % 2), 2 + index)]
        prompt, images = [{"role": "user", "content": asked}], {"images": names} if names else {}
        messages = [*prompt, {"role": "assistant", "content": answers[0]}]
        lines["sft"].append(json.dumps({"messages": messages, **images}))
        lines["dpo"].append(json.dumps({"prompt": prompt, "chosen": answers[0], "rejected": answers[1], **images}))
    lines["vlm"] = lines["sft"]
    for name, records in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in records), encoding="utf-8")


def _draw_answer(draw: random.Random, steps: int) -> str:
    return f"Gladly: {', then '.join(draw.choice(_WORKS) for _ in range(steps))}."


def _write_images(folder: Path, index: int) -> list[str]:
    """Write `index % 3` images of different sizes, and return their names."""
    from PIL import Image

    names = []
    for number in range(index % 3):
        name, size = f"{index}-{number}.png", (60 + 8 * index, 40 + 16 * number)
        Image.frombytes("RGB", size, random.Random(name).randbytes(3 * size[0] * size[1])).save(folder / name)
        names.append(name)
    return names


def _iter_texts() -> Iterator[str]:
    draw = random.Random(SEED)
    for thing in _THINGS:
        yield f"How do I mend the {thing}, and how long does it take?"
        yield _draw_answer(draw, 6)
