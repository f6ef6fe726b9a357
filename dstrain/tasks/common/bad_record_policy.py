"""How a task on text has its data prepared."""

from __future__ import annotations

from dstrain.config import RunConfig
from dstrain.data.cache.build import Policy
from dstrain.data.cache.process_pool import Processes
from dstrain.launch.threads import cores_here
from dstrain.launch.worker import die_with_parent


def policy_of(recipe: RunConfig) -> Policy:
    """As many processes as this one may use cores, and what the recipe says of bad records."""
    return Policy(task=recipe.task, on_error=recipe.data.on_error, processes=Processes(cores_here(), die_with_parent))
