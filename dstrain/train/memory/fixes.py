"""Changes of a recipe that save memory, in the order to try them, where no forecast gives their size."""

from __future__ import annotations

from collections.abc import Iterator

from dstrain.config import BatchPlan, RunConfig
from dstrain.preset import Preset

BYTES_OF_TRAINING = 16
"""Bytes per trained parameter with Adam in mixed precision: weight and gradient 2 each, fp32 master weight and two
moments 4 each (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1)."""


def list_fixes(config: RunConfig, batch: BatchPlan, preset: Preset, world_size: int) -> list[str]:
    """Return the fixes for a full device, each with the key to set and what it saves."""
    return [
        *_reduced_micro_batch(config, batch, world_size),
        *_next_preset(preset, world_size),
        *_lora(config),
        f"data.max_length: below {config.data.max_length}: saves in proportion to the tokens of the longest samples",
    ]


def list_host_fixes(config: RunConfig, preset: Preset, is_on_cpu: bool) -> list[str]:
    """Return the fixes for full host memory."""
    data = config.data
    found = [
        f"data.workers: below {data.workers}, and data.prefetch: below {data.prefetch}: saves batches that wait in memory"
    ]
    if preset.offload_optimizer == "cpu" or preset.offload_param == "cpu":
        found.append(
            f"ds_config: one without offloading to the host (now {preset.name}), or zero3_nvme: "
            f"saves up to {BYTES_OF_TRAINING - 4} bytes per trained parameter on the host"
        )
    if config.save.background:
        found.append("save.background: false: saves the copy of the state that is being written")
    if not is_on_cpu and data.pin:
        found.append("data.pin: false: saves page-locked copies of batches")
    return [*found, "fewer processes per host, or a host or a container limit with more memory"]


def _reduced_micro_batch(config: RunConfig, batch: BatchPlan, world_size: int) -> Iterator[str]:
    if reduced := batch.half(world_size):
        same = "with the same batch.total, which leaves the steps as they are"
        if reduced.tokens is not None:
            yield f"batch.tokens_per_micro: {reduced.tokens} (now {batch.tokens}): saves about half of the activations"
        else:
            largest = batch.largest_micro(world_size)
            yield f"batch.micro: {reduced.micro} (now {largest}) {same}: saves about half of the activations"
        if config.batch.on_oom == "stop":
            yield "batch.on_oom: shrink: the run does that by itself when memory runs out"
    if not config.model.gradient_checkpointing:
        yield "model.gradient_checkpointing: true: saves most of the activations, for about a third more computing"


def _next_preset(preset: Preset, world_size: int) -> Iterator[str]:
    several, where = world_size > 1, f"the {world_size} processes"
    if preset.stage < 2 and several:
        yield f"ds_config: zero2: shards gradients and optimizer state over {where}: saves up to 14 bytes per trained parameter"
    if preset.offload_optimizer is None:
        yield "ds_config: zero2_offload: moves optimizer state to the host: saves 12 bytes per trained parameter"
    if preset.stage < 3 and several:
        yield f"ds_config: zero3: shards the weights over {where} as well: saves 2 bytes per parameter"
    if preset.offload_param is None:
        yield "ds_config: zero3_offload: moves the weights to the host as well: saves 2 bytes per parameter"


def _lora(config: RunConfig) -> Iterator[str]:
    if config.model.lora is None:
        yield (
            f"model.lora: {{rank: 16}}: trains adapters only: saves {BYTES_OF_TRAINING - 2} bytes per parameter of the "
            "weights, which stay frozen"
        )
    if config.model.quantize is None:
        yield "model.quantize: nf4, with model.lora: saves about 1.4 bytes per frozen parameter"
