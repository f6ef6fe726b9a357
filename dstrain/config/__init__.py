"""The recipe: its schema, how it is read, and what follows from it."""

from dstrain.config.read import Recipe, check_keys, read_recipe, show_recipe
from dstrain.config.resolve import BatchPlan, changed_learning_keys, learning_changes, resolve_batch, resolve_steps
from dstrain.config.schema import RunConfig

__all__ = [
    "BatchPlan",
    "Recipe",
    "RunConfig",
    "changed_learning_keys",
    "check_keys",
    "learning_changes",
    "read_recipe",
    "resolve_batch",
    "resolve_steps",
    "show_recipe",
]
