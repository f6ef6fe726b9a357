"""dstrain tasks: the packaged tasks, or the options of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dstrain.commands.init import format_lora
from dstrain.commands.lists.table import format_table, terminal_width, wrap_note
from dstrain.tasks import Task, builtin_tasks, default_learning_rate, default_lora, find_task, task_options
from dstrain.tasks.common.options import Option

_TASKS_NOTE = "Run: `dstrain init NAME --to mine.yaml` writes a recipe; `dstrain tasks NAME` prints the options of one."


def list_tasks(name: str | None) -> str:
    """Return a table of the packaged tasks, or one task's options with their help. Raises TaskError."""
    if name is None:
        rows = [(task, _rates(find_task(task)), _metrics(find_task(task)), _summarize_task(task)) for task in builtin_tasks()]
        header = ("task", "optim.lr (LoRA)", "metrics", "trains")
        width = terminal_width()
        return f"{format_table(header, rows, width)}\n\n{wrap_note(_TASKS_NOTE, width)}"
    task = find_task(name)
    full, adapters = (default_learning_rate(task, lora) for lora in (False, True))
    lines = [
        f"{name}: {_summarize_task(name)}",
        "",
        f"optim.lr: {full:g} by default, {adapters:g} with model.lora",
        *_describe_default_lora(task),
        "",
        "options:",
    ]
    return "\n".join([*lines, *_describe_options(task_options(task), "  ")])


def _rates(task: type[Task]) -> str:
    full, adapters = (f"{default_learning_rate(task, lora):g}" for lora in (False, True))
    return f"{full} ({adapters})"


def _metrics(task: type[Task]) -> str:
    """Return the first metrics of a task; some have a dozen."""
    names = list(task.metric_names)
    return ", ".join([*names[:2], *(["…"] if len(names) > 2 else [])])


def _describe_options(options: Iterable[Option], indent: str) -> Iterator[str]:
    for option in options:
        yield f"{indent}{option.name}: {option.type} = {option.default!r}"
        yield f"{indent}    {option.help}"
        yield from _describe_options(option.nested, f"{indent}    ")


def _describe_default_lora(task: type[Task]) -> list[str]:
    lora = default_lora(task)
    return [] if lora is None else [f"model.lora: {format_lora(lora)} by default; null trains all weights"]


def _summarize_task(name: str) -> str:
    return (find_task(name).__doc__ or "").strip().splitlines()[0]
