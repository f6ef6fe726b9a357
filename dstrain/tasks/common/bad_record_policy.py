"""Limit on bad records and number of encoding processes, from a recipe."""

from __future__ import annotations

from dstrain.config import RunConfig
from dstrain.data.cache.build import PreparePolicy
from dstrain.data.cache.process_pool import ProcessPoolConfig
from dstrain.launch.threads import count_available_cores
from dstrain.launch.worker import set_parent_death_signal


def policy_of(recipe: RunConfig) -> PreparePolicy:
    """Return the recipe's limit on bad records, and one encoding process per available core."""
    return PreparePolicy(
        task=recipe.task,
        on_error=recipe.data.on_error,
        processes=ProcessPoolConfig(count_available_cores(), set_parent_death_signal),
    )
