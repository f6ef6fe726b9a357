"""Tasks, found by scanning this folder, by file path or by dotted module."""

from dstrain.tasks.base import Loss, Split, Task
from dstrain.tasks.find import (
    Option,
    find_task,
    learning_rate,
    make_task,
    options,
    packaged_tasks,
    with_learning_rate,
)

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
