"""Answers of a policy, written token by token on all processes: the same ones, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from dstrain.batch import Batch
from dstrain.data.formats.prompts import Prompt, enders
from dstrain.data.loading.collate import attention_mask, pad
from dstrain.data.vision.image_io import read_image
from dstrain.data.vision.processor import KINDS, Sight
from dstrain.errors import TaskError
from dstrain.tasks.common.losses import inputs_of_images
from dstrain.train.engine.deepspeed import seed_step
from dstrain.train.engine.inference import ForwardEngine


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen, and how prompts are put together."""

    max_new_tokens: int = 256
    """Tokens of an answer at most."""
    temperature: float = 0.0
    """Flattens the distribution above 1, sharpens it below; 0: the likeliest token, always the same."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability (Holtzman et al., arXiv 1904.09751)."""
    seed: int = 0
    """Of the draws."""
    batch: int = 8
    """Prompts that are answered together."""


def write_answers(
    engine: ForwardEngine, prompts: Sequence[Prompt], sampling: Sampling, tokenizer: Any, sight: Sight | None = None
) -> list[list[int]]:
    """The ids of each prompt's answer, without the one that ends it, in the prompts' order. Collective.

    `sight`: of a model that sees, its processor.

    Prompts of like length are put together, and these batches are dealt out to the ranks: what is in a batch and what
    it draws do not depend on the number of processes. In shards every rank makes as many passes as the others.
    """
    model, world = engine.bare, engine.world
    stops = _prepare(model, sampling, tokenizer)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    seen = sight if any(prompt.images for prompt in prompts) else None
    batches = [order[start : start + sampling.batch] for start in range(0, len(order), sampling.batch)]
    mine: dict[int, list[int]] = {}
    for place in range(world.rank, -(-len(batches) // world.size) * world.size, world.size):
        if place < len(batches):
            seed_step(sampling.seed, place, 0)
            rows = [prompts[index] for index in batches[place]]
            written = _answer(engine, _batch(engine, rows, seen), stops, sampling.max_new_tokens)
            mine.update(zip(batches[place], written, strict=True))
        elif engine.sharded:  # the others' passes need this rank's shards
            _answer(engine, _batch(engine, [prompts[order[0]]], seen), stops, 1)
    told = {index: answer for of_rank in world.gather(mine) for index, answer in of_rank.items()}
    return [told[index] for index in range(len(prompts))]


def _prepare(model: Any, sampling: Sampling, tokenizer: Any) -> set[int]:
    """Have the model generate as `sampling` says and not as its files do. The ids that end an answer."""
    from transformers import GenerationConfig

    if not hasattr(model, "generation_config"):
        raise TaskError(
            f"{type(model).__name__}: is no model of transformers that generates; export it and ask it there"
        )
    own = getattr(model.generation_config, "eos_token_id", None)
    stops = enders(tokenizer) | {int(token) for token in (own if isinstance(own, list) else [own]) if token is not None}
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    model.generation_config = GenerationConfig(
        do_sample=bool(drawn),
        use_cache=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(stops),
        **drawn,
    )
    return stops


def _batch(engine: ForwardEngine, prompts: Sequence[Prompt], sight: Sight | None) -> Batch:
    """The prompts padded on the left, so that all end together, and their images.

    In shards, a blank image where other ranks' prompts may have one: it has a row of its own, as in training.
    """
    images = [read_image(image) for prompt in prompts for image in prompt.images]
    blank = sight is not None and engine.sharded and not images
    rows = [prompt.ids for prompt in prompts] + ([sight.blank_ids] if sight is not None and blank else [])
    backwards = [list(row)[::-1] for row in rows]
    ids = pad(backwards, engine.bare.generation_config.pad_token_id).flip(1)  # (B, L)
    vision = {} if sight is None or not (images or blank) else {**sight.inputs(images), KINDS: sight.kinds(ids)}
    tensors = {"input_ids": ids, "attention_mask": attention_mask(backwards).flip(1)}
    return Batch(tensors=tensors, weight=0.0, samples=(), vision=vision, blank_rows=int(blank))


@torch.no_grad()
def _answer(engine: ForwardEngine, batch: Batch, stops: set[int], most: int) -> list[list[int]]:
    """Up to `most` ids behind each row of the batch. Collective in shards."""
    here = batch.to(engine.world.device)
    written = engine.bare.generate(
        **{name: here.tensors[name] for name in ("input_ids", "attention_mask")},
        **inputs_of_images(engine.bare, here),
        max_new_tokens=most,
        synced_gpus=engine.sharded,
        stopping_criteria=[_Waits(batch.blank_rows)] if batch.blank_rows else None,
    )
    rows = written[: len(written) - batch.blank_rows, here.tensors["input_ids"].shape[1] :]
    return [_until(row, stops) for row in rows.tolist()]


class _Waits(StoppingCriteria):
    """The last rows of a batch are nobody's, and no answer waits for them."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """(B,) true where a row is done."""
        return torch.arange(len(input_ids), device=input_ids.device) >= len(input_ids) - self._count


def _until(ids: list[int], stops: set[int]) -> list[int]:
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]
