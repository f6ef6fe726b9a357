"""What can be known wrong of a run without torch, before a process is started or a folder is made for it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from dstrain.cache_dir import file_state, recall, remember
from dstrain.config import Recipe, RunConfig, resolve_batch
from dstrain.data.cache.build import attempt, judge
from dstrain.data.cache.token_store import Report
from dstrain.data.formats.messages import BadRecord
from dstrain.data.sources.open import BadRow, Joined
from dstrain.preset import Device, read_preset
from dstrain.tasks import make_task, packaged_tasks
from dstrain.tasks.common.bad_record_policy import policy_of
from dstrain.tasks.common.text import TextTask
from dstrain.train.ds_config import resolved_ds_config
from dstrain.train.resume.inputs import check_inputs, files_of
from dstrain.train.run_dir import Resume, batch_to_go_on_with, check_resume

MOST_BYTES = 256 << 20
"""Data files of more, all together, are left to the ranks: to read them twice would be felt."""
FIRST = 2000
"""Records that are read before the launch; the ranks read all."""


def check_launch(recipe: Recipe, run_dir: Path, resume: Resume, processes: int, device: Device) -> dict[str, Any]:
    """Check the recipe, the preset and the run folder. Returns the DeepSpeed JSON. Raises UsageError."""
    config = recipe.config
    task = make_task(config)
    task.check_named()
    preset = read_preset(config.ds_config)
    start = check_resume(run_dir, resume, config)
    asked = batch_to_go_on_with(config.batch, start, resume.allowed)
    batch = resolve_batch(asked, processes, preset.micro, None if asked is not config.batch else preset.accumulate)
    return resolved_ds_config(config, preset, batch, (processes, device), run_dir)


def check_data(config: RunConfig, run_dir: Path, resume: Resume) -> None:
    """Look at the data, where that is quick: small files that no earlier start has looked at. Raises UsageError.

    The ranks look at all of it, whatever its size.
    """
    items = [*config.data.train, *([config.data.eval] if config.data.eval else [])]
    files = [Path(item.path).expanduser() for item in items]
    if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) > MOST_BYTES:
        return
    if (start := check_resume(run_dir, resume, config)) is not None:
        check_inputs(start, files_of(make_task(config)), resume.allowed)
    data = config.data.model_dump(mode="json")
    judged = {"judged": FIRST, "task": config.task, "options": config.options, "data": data}
    if config.task not in packaged_tasks() or all(recall(file, judged) for file in files):
        return
    began, states = time.time_ns(), [file_state(file) for file in files]
    _check_records(config)
    for file, state in zip(files, states, strict=True):
        remember(file, judged, True, began, state)


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
