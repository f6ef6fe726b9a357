"""Answers of a policy, written token by token on all processes: the same ones, however many there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dstrain.data.collate import attention_mask, pad
from dstrain.data.prompts import enders
from dstrain.errors import TaskError
from dstrain.train.engine import seed_step
from dstrain.train.forward import ForwardEngine


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
    engine: ForwardEngine, prompts: Sequence[Sequence[int]], sampling: Sampling, tokenizer: Any
) -> list[list[int]]:
    """The ids of each prompt's answer, without the one that ends it, in the prompts' order. Collective.

    Prompts of like length are put together, and these batches are dealt out to the ranks: what is in a batch and what
    it draws do not depend on the number of processes. In shards every rank makes as many passes as the others.
    """
    model, world = engine.bare, engine.world
    stops = _prepare(model, sampling, tokenizer)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    batches = [order[start : start + sampling.batch] for start in range(0, len(order), sampling.batch)]
    mine: dict[int, list[int]] = {}
    for place in range(world.rank, -(-len(batches) // world.size) * world.size, world.size):
        if place < len(batches):
            seed_step(sampling.seed, place, 0)
            rows = [prompts[index] for index in batches[place]]
            mine.update(zip(batches[place], _answer(engine, rows, stops, sampling.max_new_tokens), strict=True))
        elif engine.sharded:  # the others' passes need this rank's shards
            _answer(engine, [prompts[order[0]]], stops, 1)
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


@torch.no_grad()
def _answer(engine: ForwardEngine, rows: Sequence[Sequence[int]], stops: set[int], most: int) -> list[list[int]]:
    """Up to `most` ids behind each row, padded on the left so that all end together. Collective in shards."""
    backwards = [list(row)[::-1] for row in rows]
    ids = pad(backwards, engine.bare.generation_config.pad_token_id).flip(1)  # (B, L)
    mask = attention_mask(backwards).flip(1)
    device = engine.world.device
    written = engine.bare.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), max_new_tokens=most, synced_gpus=engine.sharded
    )
    return [_until(row, stops) for row in written[:, ids.shape[1] :].tolist()]


def _until(ids: list[int], stops: set[int]) -> list[int]:
    return ids[: next((at for at, token in enumerate(ids) if token in stops), len(ids))]
