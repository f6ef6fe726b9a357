"""Tasks, found by scanning this folder, by file path or by dotted module."""

from dstrain.tasks.common.registry import (
    Option,
    find_task,
    learning_rate,
    make_task,
    options,
    packaged_tasks,
    with_learning_rate,
)
from dstrain.tasks.common.task import Loss, Split, Task

__all__ = [
    "Loss",
    "Option",
    "Split",
    "Task",
    "find_task",
    "learning_rate",
    "make_task",
    "options",
    "packaged_tasks",
    "with_learning_rate",
]
