"""What can be known wrong of a run without torch, before a process is started or a folder is made for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dstrain.config import Recipe, RunConfig, resolve_batch
from dstrain.data.hub import is_hub_name
from dstrain.data.messages import BadRecord
from dstrain.data.prepare import attempt, judge
from dstrain.data.source import BadRow, Joined
from dstrain.data.store import Report
from dstrain.preset import Device, read_preset
from dstrain.tasks import make_task
from dstrain.tasks.preparing import policy_of
from dstrain.tasks.text import TextTask
from dstrain.train.folder import Resume, batch_to_go_on_with, check_resume
from dstrain.train.inputs import check_inputs, files_of
from dstrain.train.settings import resolved_ds_config

FIRST = 2000
"""Records that are read before the launch; the ranks read all."""


def preflight(recipe: Recipe, run_dir: Path, resume: Resume, processes: int, device: Device) -> dict[str, Any]:
    """Check the recipe, the preset, the data and the run folder. Returns the DeepSpeed JSON. Raises UsageError."""
    config = recipe.config
    task = make_task(config)
    task.check_named()
    preset = read_preset(config.ds_config)
    start = check_resume(run_dir, resume, config)
    asked = batch_to_go_on_with(config.batch, start, resume.allowed)
    batch = resolve_batch(asked, processes, preset.micro, None if asked is not config.batch else preset.accumulate)
    ds_config = resolved_ds_config(config, preset, batch, (processes, device), run_dir)
    if _is_local(config):
        if start is not None:
            check_inputs(start, files_of(task), resume.allowed)
        _check_records(config)
    return ds_config


def _is_local(config: RunConfig) -> bool:
    """Whether no dataset has to be fetched to look at the data."""
    items = [*config.data.train, *([config.data.eval] if config.data.eval else [])]
    return not any(is_hub_name(item.path) for item in items)


def _check_records(config: RunConfig) -> None:
    """Raise DataError where so many of the first records are bad that the files cannot be used, whatever follows."""
    unnamed = config.model.model_copy(update={"path": None, "config": None})  # records are read without its tokenizer
    task = make_task(config.model_copy(update={"model": unnamed}))
    if not isinstance(task, TextTask):
        return
    for items in (config.data.train, [config.data.eval] if config.data.eval else []):
        if items:
            judge(_first_records(task, task.source(items)), policy_of(config))


def _first_records(task: TextTask, source: Joined) -> Report:
    report = Report(read=len(source) + len(source.bad), bad=[*source.bad])
    for index in range(min(FIRST, len(source))):
        item = attempt(task.convert, source[index])
        if isinstance(item, BadRecord):
            report.bad.append(BadRow(source.where(index), item.reason))
    report.kept = report.read - len(report.bad)
    return report
