"""Batched text generation; the output does not depend on the number of processes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteria

from dstrain.batch import Batch
from dstrain.data.encoding.conversations import EncodedPrompt
from dstrain.data.loading.rows import attention_mask, pad
from dstrain.data.vision.images import ImageEntry, read_image
from dstrain.data.vision.processor import MM_TOKEN_TYPE_IDS, VisionProcessor
from dstrain.distributed.world import World
from dstrain.errors import TaskError
from dstrain.models.attention.model_types import needs_equal_prompt_lengths
from dstrain.models.patches import features_placed_without_waits, padding_known, special_tokens_prepared_on_host
from dstrain.models.router_loss import router_logits_disabled
from dstrain.tasks.common.forward import vision_inputs
from dstrain.training.engine.base import EvalEngine, seed_step
from dstrain.training.generation_config import collect_stop_ids, make_decoding_config

# Shapes: B rows (prompts), L tokens of the padded prompts.


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of tokens, and the number of answers that are generated at once."""

    max_new_tokens: int = 256
    """Limit of tokens per answer."""
    temperature: float = 0.0
    """Above 1 flattens the distribution, below 1 sharpens it; 0 is greedy decoding."""
    top_p: float = 1.0
    """Sample from the most likely tokens with this total probability (Holtzman et al., arXiv 1904.09751)."""
    seed: int = 0
    """Seed of the sampling."""
    num_samples: int = 1
    """Answers to each prompt."""
    batch: int = 8
    """Answers per batch."""


@dataclass(frozen=True)
class GenerationModel:
    """A transformers model and the processes that hold it, such as that of a training engine."""

    unwrapped: Any
    world: World
    is_sharded: bool


def generate_answers(
    engine: EvalEngine | GenerationModel,
    prompts: Sequence[EncodedPrompt],
    sampling: SamplingParams,
    tokenizer: Any,
    vision_processor: VisionProcessor | None = None,
    streamer: Any = None,
) -> list[list[int]]:
    """Return the token ids of each prompt's answer, in the order of the prompts, without the stop token. Collective.

    A vision-language model needs its `vision_processor`. `streamer`: one of transformers, such as TextStreamer, which
    gets the tokens of a single prompt one by one. Prompts of like length are batched, and the batches are distributed
    over the ranks: their content and seeds do not depend on the number of processes. Under ZeRO-3 every rank runs the
    same number of forward passes. The model's mode, its generation config and the state of the random generators are
    restored. Raises TaskError for a model that cannot generate.
    """
    devices = [engine.world.device] if engine.world.device.type == "cuda" else []
    with torch.random.fork_rng(devices), _generation_mode(engine.unwrapped), router_logits_disabled(engine.unwrapped):
        stops = _set_generation_config(engine.unwrapped, sampling, tokenizer)
        written = _generate_share(engine, prompts, sampling, stops, vision_processor, streamer)
    answers = {index: answer for share in engine.world.gather(written) for index, answer in share.items()}
    return [answers[index] for index in range(len(prompts))]


def _generate_share(
    engine: EvalEngine | GenerationModel,
    prompts: Sequence[EncodedPrompt],
    sampling: SamplingParams,
    stops: set[int],
    vision_processor: VisionProcessor | None,
    streamer: Any = None,
) -> dict[int, list[int]]:
    """Return index -> answer for the prompts of this rank's batches. Collective under ZeRO-3."""
    world = engine.world
    # Like lengths together: less padding.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].ids))
    processor = vision_processor if any(prompt.images for prompt in prompts) else None
    groups = [order]
    if needs_equal_prompt_lengths(engine.unwrapped.config):
        groups = [[*group] for _, group in itertools.groupby(order, key=lambda index: len(prompts[index].ids))]
    batches = [
        group[start : start + sampling.batch] for group in groups for start in range(0, len(group), sampling.batch)
    ]
    mine: dict[int, list[int]] = {}
    for place in range(world.rank, -(-len(batches) // world.size) * world.size, world.size):
        if place < len(batches):
            seed_step(sampling.seed, place, 0)  # by batch, not by rank: the same draws for any world size
            rows = [prompts[index] for index in batches[place]]
            batch = _collate_prompts(engine, rows, processor)
            written = _generate_batch(engine, batch, stops, sampling.max_new_tokens, streamer)
            mine.update(zip(batches[place], written, strict=True))
            world.log.record_progress()
        elif engine.is_sharded:  # the forward passes of other ranks gather this rank's shards
            _generate_batch(engine, _collate_prompts(engine, [prompts[order[0]]], processor), stops, 1)
    return mine


@contextmanager
def _generation_mode(model: Any) -> Iterator[None]:
    """Put the model into evaluation mode inside; restore its mode and its generation config afterwards.

    In evaluation mode dropout is off, and layers with gradient checkpointing use the cache.
    """
    was_training, config = model.training, getattr(model, "generation_config", None)
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)
        if config is not None:
            model.generation_config = config


def _set_generation_config(model: Any, sampling: SamplingParams, tokenizer: Any) -> set[int]:
    """Replace the model's generation config, but for its DECODING_SETTINGS; return the ids that end an answer."""
    if not hasattr(model, "generation_config"):
        raise TaskError(
            f"{type(model).__name__}: not a transformers model that can generate; export it and use its own code"
        )
    own = model.generation_config
    # top_k 0: transformers' default is 50, which would change the distribution.
    drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0} if sampling.temperature else {}
    model.generation_config = make_decoding_config(own, tokenizer, **drawn)
    return collect_stop_ids(own, tokenizer)


def _collate_prompts(
    engine: EvalEngine | GenerationModel, prompts: Sequence[EncodedPrompt], vision_processor: VisionProcessor | None
) -> Batch:
    """Return the prompts padded on the left, so that all end at the same position, and their images.

    Under ZeRO-3 a batch without images gets a blank one in a dummy row, as in training: other ranks may
    have images, and every rank has to run the vision tower.
    """
    downscale = None if vision_processor is None else vision_processor.downscale
    images = [
        image.load(downscale) if isinstance(image, ImageEntry) else read_image(image)
        for prompt in prompts
        for image in prompt.images
    ]
    blank = vision_processor is not None and engine.is_sharded and not images
    rows = [prompt.ids for prompt in prompts] + (
        [vision_processor.blank_image_ids] if vision_processor is not None and blank else []
    )
    # Reversed, padded on the right and reversed again is padded on the left.
    backwards = [list(row)[::-1] for row in rows]
    ids = pad(backwards, engine.unwrapped.generation_config.pad_token_id).flip(1)  # (B, L)
    vision = (
        {}
        if vision_processor is None or not (images or blank)
        else {**vision_processor.image_inputs(images), MM_TOKEN_TYPE_IDS: vision_processor.token_type_ids(ids)}
    )
    soft_inputs = [prompt.soft_inputs for prompt in prompts if prompt.soft_inputs is not None]
    if soft_inputs:
        vision |= soft_inputs[0].stack(soft_inputs)
    tensors = {"input_ids": ids, "attention_mask": attention_mask(backwards).flip(1)}
    return Batch(tensors=tensors, weight=0.0, samples=(), vision=vision, dummy_rows=int(blank))


@torch.no_grad()
def _generate_batch(
    engine: EvalEngine | GenerationModel, batch: Batch, stop_ids: set[int], max_new_tokens: int, streamer: Any = None
) -> list[list[int]]:
    """Return up to `max_new_tokens` ids for each row of the batch. Collective under ZeRO-3."""
    model, device = engine.unwrapped, engine.world.device
    here = (batch.pin_memory() if device.type == "cuda" else batch).to(device)
    inputs = {name: here.tensors[name] for name in ("input_ids", "attention_mask")}
    with ExitStack() as patches:
        patches.enter_context(special_tokens_prepared_on_host(model))
        patches.enter_context(padding_known(inputs["attention_mask"].shape, here.has_padding))
        if here.vision:
            patches.enter_context(features_placed_without_waits(model))
        written = model.generate(
            **inputs,
            **vision_inputs(model, here),
            max_new_tokens=max_new_tokens,
            # Until all ranks are done: a rank's forward pass needs the shards of the others.
            synced_gpus=engine.is_sharded,
            streamer=streamer,
            stopping_criteria=[_IgnoreDummyRows(batch.dummy_rows), _RecordProgress(engine.world)],
        )
    rows = written[: len(written) - batch.dummy_rows, here.tensors["input_ids"].shape[1] :]
    return [_truncate_at_stop(row, stop_ids) for row in rows.tolist()]


class _IgnoreDummyRows(StoppingCriteria):
    """Stopping criterion that never waits for the dummy rows at the end of a batch."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return (B,) bool, true for the dummy rows."""
        return torch.arange(len(input_ids), device=input_ids.device) >= len(input_ids) - self._num_rows


class _RecordProgress(StoppingCriteria):
    """Stopping criterion that stops nothing and tells the watchdog of each token: a batch may take minutes."""

    def __init__(self, world: World) -> None:
        self._world = world

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return (B,) bool, all false."""
        self._world.log.record_progress()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _truncate_at_stop(ids: list[int], stop_ids: set[int]) -> list[int]:
    return ids[: next((at for at, token in enumerate(ids) if token in stop_ids), len(ids))]
