"""`batch.on_oom: shrink`: the longest batch is tried before the first step, and halved until it fits into memory."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from dstrain.config import BatchPlan
from dstrain.data.loading.loader import make_batch
from dstrain.data.loading.micro_batches import CostFunction, sort_longest_first
from dstrain.distributed.world import World
from dstrain.ds_config import resolve_ds_config
from dstrain.errors import RunError
from dstrain.report.allocation_errors import find_allocation_failure
from dstrain.report.run_log import RunLog
from dstrain.training.engine.deepspeed import DeepSpeedEngine
from dstrain.training.memory import MemoryMonitor, free_cached_memory
from dstrain.training.plan import RunPlan, build_sampler, get_preset_device

IDS_PER_BLOCK = 2**20
"""Samples whose costs are computed at a time."""

EngineBuilder = Callable[[RunPlan], DeepSpeedEngine]


def build_fitting_engine(
    plan: RunPlan, memory: MemoryMonitor, run_log: RunLog, build: EngineBuilder
) -> tuple[RunPlan, DeepSpeedEngine]:
    """Build the engine with the largest micro-batch whose longest batch fits into memory. Collective.

    Returns the plan with that micro-batch. The recipe keeps its own, and a resumed run tries that one again. Raises
    the error of the allocation where not even one sample fits.
    """
    engine, world = build(plan), memory.world
    while True:
        error = _try_longest_batch(engine, plan, world)
        if not world.any(error is not None):
            return plan, engine
        smaller = plan.batch.half(world.size)
        if smaller is None:
            if error is not None:
                raise error
            # The rank that ran out of memory reports it and ends, which ends this wait.
            world.barrier()
            raise RunError("another process ran out of memory")
        engine.destroy()
        del engine, error
        free_cached_memory()
        change = describe_reduction(plan.batch, smaller)
        message = f"{change}: the longest batch does not fit into memory; batch.total stays {plan.batch.total}"
        run_log.announce(message, "micro_batch_reduced", step=plan.start.point.step, change=change, what=message)
        plan = _with_batch(plan, smaller, world)
        memory.batch = smaller
        engine = build(plan)


def describe_reduction(before: BatchPlan, after: BatchPlan) -> str:
    """Return `batch.micro 8 -> 4`."""
    parts = []
    if after.tokens != before.tokens:
        parts.append(f"batch.tokens_per_micro {before.tokens} -> {after.tokens}")
    if after.micro != before.micro:
        parts.append(f"batch.micro {before.micro} -> {after.micro}")
    return ", ".join(parts)


def _try_longest_batch(engine: DeepSpeedEngine, plan: RunPlan, world: World) -> Exception | None:
    """Make the passes of the longest batch without an update; return the error of a failed allocation.

    No message is exchanged: a rank that runs out of memory would leave the others waiting in a collective.
    """
    ids = find_longest_batch(plan.sampler.costs, len(plan.train_dataset), plan.batch, world.size)
    batch = make_batch(plan.train_dataset, plan.task.collate, ids, ids[0], sequence=world.sequence)
    phase, step = world.log.phase, world.log.step
    world.log.record_progress("the longest batch, before the first step")
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(logging.ERROR)  # not that the update is skipped, which is meant here
    try:
        engine.try_batch(batch)
    except Exception as error:
        if find_allocation_failure(error) is None:
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the activations of the pass
        return error
    finally:
        logger.setLevel(level)
        world.log.record_progress(phase, step)
    return None


def find_longest_batch(costs: CostFunction | None, num_samples: int, batch: BatchPlan, world_size: int) -> list[int]:
    """Return the ids of the samples of the longest micro-batch that a run can have.

    These are the longest samples of the dataset, within the plan's limits of samples and tokens. Without costs, whose
    samples have no known lengths, the first ones are taken.
    """
    most = min(batch.largest_micro(world_size), num_samples)
    if costs is None:
        return [*range(most)]
    longest = np.arange(0)
    for start in range(0, num_samples, IDS_PER_BLOCK):
        ids = np.concatenate([longest, np.arange(start, min(start + IDS_PER_BLOCK, num_samples))])
        longest = ids[sort_longest_first(costs(ids).tokens)[:most]]
    if batch.tokens is not None:
        sample_costs = costs(longest)
        count = 1
        while count < len(longest) and sample_costs.of(np.arange(count + 1)) <= batch.tokens:
            count += 1
        longest = longest[:count]
    return longest.tolist()


def _with_batch(plan: RunPlan, batch: BatchPlan, world: World) -> RunPlan:
    """Return the plan with another micro-batch of the same total."""
    device = get_preset_device(plan.device)
    ds_config = resolve_ds_config(plan.config, plan.preset, batch, world.size, device, plan.run_dir)
    sampler = build_sampler(plan.task, plan.train_dataset, batch, world.size)
    sampler = replace(sampler, total_samples=plan.sampler.total_samples)
    return replace(plan, batch=batch, ds_config=ds_config, sampler=sampler)
