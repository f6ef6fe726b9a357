"""dstrain tasks, recipes, presets and checkpoints: tables on the terminal."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from dstrain.commands.init import format_lora
from dstrain.commands.recipe_args import list_builtin_recipes
from dstrain.config import RunConfig
from dstrain.config.aliases import RECIPES_DIR
from dstrain.errors import DstrainError, PresetError, UsageError, suggest_name
from dstrain.planner.memory import plan_memory
from dstrain.planner.shapes import named_config, read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import convert_preset, describe_preset, preset_names, read_preset, summarize_presets
from dstrain.tasks import (
    Task,
    builtin_tasks,
    default_learning_rate,
    fill_defaults,
    find_task,
    task_options,
)
from dstrain.tasks.common.task import Option
from dstrain.units import format_bytes


def list_checkpoints(run_dir: Path, verify: bool, as_json: bool) -> tuple[str, bool]:
    """Return (a line per checkpoint, newest first; True where all are complete)."""
    from dstrain.training.checkpoints import list_checkpoint_rows
    from dstrain.training.state.manifest import COMPLETE_STATUS

    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: has no checkpoints folder; give the folder of a run")
    rows = list_checkpoint_rows(folder, verify)
    whole = all(row["state"] == COMPLETE_STATUS for row in rows)
    if as_json:
        return json.dumps(rows), whole
    lines = [f"{'step':>8} {'size':>10} {'processes':>9} {'stage':>5} {'metric':>10}  state"]
    for row in rows:
        metric = "" if row["metric"] is None else f"{row['metric']:.4g}"
        state = f"{row['state']}{', best' if row['best'] else ''}"
        size = format_bytes(int(row["bytes"] or 0))
        lines.append(
            f"{row['step']:>8} {size:>10} {row['world_size'] or '':>9} {row['zero_stage'] if row['zero_stage'] is not None else '':>5} {metric:>10}  {state}"
        )
    return "\n".join(lines), whole


GAP = 2
MIN_TEXT_WIDTH = 24
"""Narrowest column that text is wrapped into; below it a row becomes a paragraph."""


def terminal_width() -> int | None:
    """Return the columns of the terminal; None where the output goes to a file or a pipe, which has no width."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]], width: int | None) -> str:
    """Return rows with aligned columns, the last of which is wrapped to the width.

    Without a width each row is one line. Where the width is too small for the other columns, each row is a paragraph.
    """
    table = [header, *rows]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    fixed = sum(widths[:-1]) + GAP * (len(header) - 1)
    if width is not None and width - fixed < min(MIN_TEXT_WIDTH, widths[-1]):
        return "\n".join(_paragraph(header, row, width) for row in rows)
    left = None if width is None else width - fixed
    return "\n".join(line for row in table for line in _lines(row, widths, left))


def wrap_note(text: str, width: int | None) -> str:
    """Return the lines of a text wrapped to the width; unchanged without one."""
    if width is None:
        return text
    return "\n".join(textwrap.fill(line, max(width, 12), break_on_hyphens=False) for line in text.splitlines())


def _lines(row: Sequence[str], widths: Sequence[int], left: int | None) -> list[str]:
    cells = [f"{cell:{size}}{'':{GAP}}" for cell, size in zip(row[:-1], widths[:-1], strict=True)]
    indent = "".join(cells)
    if left is None:
        return [(indent + row[-1]).rstrip()]
    texts = textwrap.wrap(row[-1], left, break_on_hyphens=False) or [""]
    return [(f"{indent if index == 0 else ' ' * len(indent)}{text}").rstrip() for index, text in enumerate(texts)]


def _paragraph(header: Sequence[str], row: Sequence[str], width: int) -> str:
    """Return the first cell as a title, and each other below it with the name of its column."""
    lines = [row[0]]
    for name, cell in zip(header[1:], row[1:], strict=True):
        text = f"{name}: {cell}"
        lines += textwrap.wrap(
            text, max(width, 12), initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


_TASKS_NOTE = "Run: `dstrain init NAME --to mine.yaml` writes a recipe; `dstrain tasks NAME` prints the options of one."


def list_tasks(name: str | None) -> str:
    """Return a table of the packaged tasks, or one task's options with their help. Raises TaskError."""
    if name is None:
        rows = [
            (task, _rates(find_task(task)), _metrics(find_task(task)), _summarize_task(task))
            for task in builtin_tasks()
        ]
        header = ("task", "optim.lr (LoRA)", "metrics", "trains")
        width = terminal_width()
        return f"{format_table(header, rows, width)}\n\n{wrap_note(_TASKS_NOTE, width)}"
    task = find_task(name)
    full, adapters = (default_learning_rate(task, use_lora) for use_lora in (False, True))
    lines = [f"{name}: {_summarize_task(name)}", ""]
    lines.append(f"optim.lr: {full:g} by default, {adapters:g} with model.lora")
    if task.default_lora is not None:
        lines.append(f"model.lora: {format_lora(task.default_lora)} by default; null trains all weights")
    lines.append(f"eval.metric: {', '.join(('loss', *task.metric_names))}")
    return "\n".join([*lines, "", "options:", *_describe_options(task_options(task), "  ")])


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


def _summarize_task(name: str) -> str:
    return (find_task(name).__doc__ or "").strip().splitlines()[0]


NEEDS = "# Needs: "
"""Begins the line of a packaged recipe on its hardware, model and data."""
FILL_IN = re.compile(r"^ +(?P<key>path|train|harmless_rm|helpful_rm): .*# FILL IN", re.MULTILINE)
"""Lines of keys that a recipe leaves to the user."""
STAND_INS = {
    "path": "model.path=MODEL",
    "train": "data.train=FILE",
    "harmless_rm": "options.safety.harmless_rm=FOLDER",
    "helpful_rm": "options.safety.helpful_rm=FOLDER",
}
_RECIPES_NOTE = "`dstrain recipes NAME > mine.yaml` gives you a copy to edit."


def list_recipes(name: str | None) -> str:
    """Return a table of the packaged recipes, or one in full. Raises UsageError."""
    names = list_builtin_recipes()
    if name is not None:
        if name not in names:
            raise UsageError(f"recipe '{name}': there is no such recipe; {suggest_name(name, names)}")
        return _read(name).rstrip()
    rows = []
    for recipe in names:
        text = _read(recipe)
        summary = text.splitlines()[0].removeprefix("#").strip()
        rows.append((recipe, str(yaml.safe_load(text)["task"]), find_comment(recipe, NEEDS), summary))
    width = terminal_width()
    table = format_table(("recipe", "task", "needs", "trains"), rows, width)
    runs = format_table(("recipe", "run"), [(recipe, run_command(recipe)) for recipe in names], width)
    return f"{table}\n\n{runs}\n\n{wrap_note(_RECIPES_NOTE, width)}"


def _read(name: str) -> str:
    return (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8")


def find_comment(name: str, begin: str) -> str:
    """Return the rest of the first comment line of a recipe that begins so; empty if there is none."""
    return next((line.removeprefix(begin) for line in _read(name).splitlines() if line.startswith(begin)), "")


def run_command(name: str) -> str:
    """Return the command that trains a recipe, with --set for what it leaves to the user."""
    keys = [found["key"] for found in FILL_IN.finditer(_read(name))]
    words = ["dstrain", "train", name, *(word for key in keys for word in ("--set", STAND_INS[key]))]
    return shlex.join(words)


SHAPE = "qwen3-8b"
EXAMPLES: tuple[tuple[str, dict[str, Any] | None, int], ...] = (
    ("8B LoRA, 1 GPU", {"rank": 16, "alpha": 32}, 1),
    ("8B full, 1 GPU", None, 1),
    ("8B full, 8 GPUs", None, 8),
)
"""Heading, adapters and GPUs of each column of memory: sft of SHAPE, one sample of 1024 tokens in a pass."""
_PRESETS_NOTE = (
    "Memory of a GPU as `dstrain plan` predicts it: sft of Qwen3-8B, a sample of 1024 tokens in a pass. Your own recipe: "
    "`dstrain plan RECIPE --gpu-memory 24GiB --gpus 8`.\n"
    "Run: `dstrain train RECIPE --ds-config NAME`; --ds-config auto takes the fastest preset that fits.\n"
    "`dstrain presets NAME` prints one with every key explained"
)


def list_presets(name: str | None) -> str:
    """Return a table of the packaged presets, or one in full. Raises PresetError."""
    if name is not None:
        return describe_preset(name)
    summaries = summarize_presets()
    columns = [list(_memory(lora, gpus)) for _, lora, gpus in EXAMPLES]
    rows = [
        (preset, *(column[index] for column in columns), summary)
        for index, (preset, summary) in enumerate(summaries.items())
    ]
    header = ("preset", *(title for title, _, _ in EXAMPLES), "divides")
    width = terminal_width()
    return f"{format_table(header, rows, width)}\n\n{wrap_note(_PRESETS_NOTE, width)}"


def _memory(lora: dict[str, Any] | None, gpus: int) -> Iterator[str]:
    """Yield the memory of one GPU with each preset; - where the preset does not take such a run."""
    values = {
        "task": "sft",
        "model": {"config": named_config(SHAPE), "lora": lora},
        "data": {"train": [], "max_length": 1024},
        "batch": {"micro": 1, "accumulate": 1},
    }
    config = fill_defaults(RunConfig.model_validate(values), find_task("sft"))
    shape, cluster = read_shape(config), Cluster(gpus_per_node=gpus)
    for preset in preset_names():
        try:
            yield format_bytes(plan_memory(config, read_preset(preset), cluster, shape).gpu_bytes)
        except DstrainError:
            yield "-"


def convert_preset_file(path: Path) -> tuple[str, list[str]]:
    """Convert a public DeepSpeed JSON. Returns (preset, messages). Raises PresetError for keys a person must decide on."""
    adopted = convert_preset(path)
    if adopted.faults:
        raise PresetError(adopted.faults)
    return adopted.json_text, adopted.messages
