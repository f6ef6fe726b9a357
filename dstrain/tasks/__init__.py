"""Tasks, found by scanning this folder, by file path or by dotted module."""

from dstrain.tasks.common.generation import GenerationMetrics
from dstrain.tasks.common.registry import (
    TaskOptions,
    builtin_tasks,
    default_learning_rate,
    fill_defaults,
    find_task,
    make_task,
)
from dstrain.tasks.common.task import (
    Checks,
    Export,
    Loss,
    LossInputs,
    Option,
    Reference,
    Split,
    Task,
    task_options,
)

__all__ = [
    "Checks",
    "Export",
    "GenerationMetrics",
    "Loss",
    "LossInputs",
    "Option",
    "Reference",
    "Split",
    "Task",
    "TaskOptions",
    "builtin_tasks",
    "default_learning_rate",
    "fill_defaults",
    "find_task",
    "make_task",
    "task_options",
]
