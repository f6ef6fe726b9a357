"""Recipe configuration: schema, reading and resolution."""

from dstrain.config.read import Recipe, check_keys, dump_recipe, list_keys, read_recipe
from dstrain.config.resolve import (
    BatchPlan,
    check_learning_changes,
    find_learning_changes,
    most_tokens_of_pass,
    resolve_batch,
    resolve_steps,
)
from dstrain.config.schema import RunConfig

__all__ = [
    "BatchPlan",
    "Recipe",
    "RunConfig",
    "check_keys",
    "check_learning_changes",
    "dump_recipe",
    "find_learning_changes",
    "list_keys",
    "most_tokens_of_pass",
    "read_recipe",
    "resolve_batch",
    "resolve_steps",
]
