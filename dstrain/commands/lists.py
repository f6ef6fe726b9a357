"""dstrain presets, tasks, recipes, checkpoints: lists of what exists."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from dstrain.commands.init import format_lora
from dstrain.commands.recipe.find_recipe import RECIPES_DIR, list_builtin_recipes
from dstrain.errors import PresetError, UsageError, suggest_name
from dstrain.preset import convert_preset, describe_preset, summarize_presets
from dstrain.tasks import Task, builtin_tasks, default_learning_rate, default_lora, find_task, task_options
from dstrain.tasks.common.options import Option
from dstrain.units import format_bytes


def list_presets(name: str | None) -> str:
    if name is None:
        summaries = summarize_presets()
        width = max(map(len, summaries))
        lines = [f"{preset:{width}} {summary}".rstrip() for preset, summary in summaries.items()]
        return "\n".join([*lines, "", "`dstrain presets NAME` prints one with every key explained"])
    return describe_preset(name)


def convert_preset_file(path: Path) -> tuple[str, list[str]]:
    """Convert a public DeepSpeed JSON. Returns (preset, messages). Raises PresetError for keys a person must decide on."""
    adopted = convert_preset(path)
    if adopted.faults:
        raise PresetError(adopted.faults)
    return adopted.json_text, adopted.messages


def list_tasks(name: str | None) -> str:
    """Return one line per task, or one task's options with their help."""
    if name is None:
        return "\n".join(f"{task:10} {_task_summary(task)}" for task in builtin_tasks())
    task = find_task(name)
    full, adapters = (default_learning_rate(task, lora) for lora in (False, True))
    lines = [
        f"{name}: {_task_summary(name)}",
        "",
        f"optim.lr: {full:g} by default, {adapters:g} with model.lora",
        *_describe_default_lora(task),
        "",
        "options:",
    ]
    return "\n".join([*lines, *_describe_options(task_options(task), "  ")])


def _describe_options(options: Iterable[Option], indent: str) -> Iterator[str]:
    for option in options:
        yield f"{indent}{option.name}: {option.type} = {option.default!r}"
        yield f"{indent}    {option.help}"
        yield from _describe_options(option.nested, f"{indent}    ")


def _describe_default_lora(task: type[Task]) -> list[str]:
    lora = default_lora(task)
    return [] if lora is None else [f"model.lora: {format_lora(lora)} by default; null trains all weights"]


def _task_summary(name: str) -> str:
    return (find_task(name).__doc__ or "").strip().splitlines()[0]


def list_recipes(name: str | None) -> str:
    """Return one line per packaged recipe, or one in full."""
    if name is None:
        return "\n".join(f"{recipe:16} {_recipe_summary(recipe)}" for recipe in list_builtin_recipes())
    if name not in list_builtin_recipes():
        raise UsageError(f"recipe '{name}': there is no such recipe; {suggest_name(name, list_builtin_recipes())}")
    return (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8").rstrip()


def _recipe_summary(name: str) -> str:
    return (RECIPES_DIR / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


def list_checkpoints(run_dir: Path, verify: bool, as_json: bool) -> tuple[str, bool]:
    """Return (a line per checkpoint, newest first; True where all are complete)."""
    from dstrain.train.checkpoint.select import list_checkpoint_rows

    folder = run_dir / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{run_dir}: has no checkpoints folder; give the folder of a run")
    rows = list_checkpoint_rows(folder, verify)
    whole = all(row["state"] == "whole" for row in rows)
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
