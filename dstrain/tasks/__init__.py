"""Tasks, found by scanning this folder, by file path or by dotted module."""

from dstrain.tasks.base import Loss, Split, Task
from dstrain.tasks.find import Option, find_task, make_task, options, packaged_tasks

__all__ = ["Loss", "Option", "Split", "Task", "find_task", "make_task", "options", "packaged_tasks"]
