"""dstrain presets, tasks, recipes, checkpoints: what there is."""

from __future__ import annotations

import json
from pathlib import Path

from dstrain.commands.recipe_args import RECIPES, packaged_recipes
from dstrain.errors import PresetError, UsageError, did_you_mean
from dstrain.preset import adopt, describe, summaries
from dstrain.tasks import find_task, learning_rate, options, packaged_tasks
from dstrain.units import show_bytes


def list_presets(name: str | None) -> str:
    if name is None:
        lines = [f"{preset:14} {summary}".rstrip() for preset, summary in summaries().items()]
        return "\n".join([*lines, "", "`dstrain presets NAME` prints one with every key explained"])
    return describe(name)


def adopt_preset(path: Path) -> tuple[str, list[str]]:
    """(one of ours made from a public DeepSpeed JSON, what went where). Raises PresetError for what a person must decide."""
    adopted = adopt(path)
    if adopted.faults:
        raise PresetError(adopted.faults)
    return adopted.json, adopted.lines


def list_tasks(name: str | None) -> str:
    """One line for each task, or a task's options with their help."""
    if name is None:
        return "\n".join(f"{task:10} {_summary(task)}" for task in packaged_tasks())
    task = find_task(name)
    full, adapters = (learning_rate(task, lora) for lora in (False, True))
    lines = [
        f"{name}: {_summary(name)}",
        "",
        f"optim.lr: {full:g} by default, {adapters:g} with model.lora",
        "",
        "options:",
    ]
    for option in options(task):
        lines += [f"  {option.name}: {option.type} = {option.default!r}", f"      {option.help}"]
    return "\n".join(lines)


def _summary(name: str) -> str:
    return (find_task(name).__doc__ or "").strip().splitlines()[0]


def list_recipes(name: str | None) -> str:
    """One line for each packaged recipe, or one in full."""
    if name is None:
        return "\n".join(f"{recipe:16} {_headline(recipe)}" for recipe in packaged_recipes())
    if name not in packaged_recipes():
        raise UsageError(f"recipe '{name}': there is no such recipe; {did_you_mean(name, packaged_recipes())}")
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").rstrip()


def _headline(name: str) -> str:
    return (RECIPES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip()


def list_checkpoints(run: Path, read_all: bool, as_json: bool) -> tuple[str, bool]:
    """(a line for each checkpoint, newest first; whether all are whole)."""
    from dstrain.train.checkpoint.select import best_name
    from dstrain.train.state.manifest import listed

    folder = run / "checkpoints"
    if not folder.is_dir():
        raise UsageError(f"{run}: has no checkpoints folder; give the folder of a run")
    best = best_name(folder)
    rows = [
        {
            "step": info.step, "samples": info.samples, "bytes": info.size, "world_size": info.world_size,
            "zero_stage": info.zero_stage, "metric": info.metric, "state": info.state, "best": info.path.name == best,
        }
        for info in listed(folder, read_all)
    ]  # fmt: skip
    whole = all(row["state"] == "whole" for row in rows)
    if as_json:
        return json.dumps(rows), whole
    lines = [f"{'step':>8} {'size':>10} {'processes':>9} {'stage':>5} {'metric':>10}  state"]
    for row in rows:
        metric = "" if row["metric"] is None else f"{row['metric']:.4g}"
        state = f"{row['state']}{', best' if row['best'] else ''}"
        size = show_bytes(int(row["bytes"] or 0))
        lines.append(
            f"{row['step']:>8} {size:>10} {row['world_size'] or '':>9} {row['zero_stage'] if row['zero_stage'] is not None else '':>5} {metric:>10}  {state}"
        )
    return "\n".join(lines), whole
