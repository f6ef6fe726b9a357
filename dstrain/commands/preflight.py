"""Checks of recipe, preset, run folder and data before a launch, without torch."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from dstrain.cache import file_state, load_file_result, save_file_result
from dstrain.config import RunConfig
from dstrain.config.schema import ModelConfig
from dstrain.data.prepare import check_bad_records
from dstrain.data.records import BadRow, parse_record, try_parse
from dstrain.data.sources.base import ConcatSource
from dstrain.data.token_store import BuildReport
from dstrain.ds_config import Device, resolve_ds_config
from dstrain.errors import BadRecord, UsageError
from dstrain.files import match_files
from dstrain.models.quantization import OPTIMIZERS_8BIT
from dstrain.planner.memory import plan_memory
from dstrain.planner.shapes import check_group_patterns, read_base_shape, read_properties, read_shape
from dstrain.planner.workload import Cluster
from dstrain.preset import Preset
from dstrain.tasks import Task, builtin_tasks
from dstrain.tasks.common.judge import check_judge
from dstrain.tasks.common.record_task import policy_of
from dstrain.tasks.common.text import TextTask
from dstrain.training.copies import open_filesystem
from dstrain.training.input_digests import check_inputs_unchanged, digest_input_files
from dstrain.training.start import Start

MAX_CHECKED_BYTES = 256 << 20
"""Larger data files, in total, are only checked by the ranks: reading them twice would take
noticeable time."""
NUM_FIRST_RECORDS = 100
"""Number of records of each split that are read before the launch; the ranks read all."""
MAX_CHECKED_RECORDS = 2000
"""Number of records that are read where one of the first is bad: enough to tell whether there are too many of them."""


def check_launch(task: Task, start: Start, run_dir: Path, world_size: int, device: Device) -> dict[str, Any]:
    """Check what a run will probably start with. Returns the DeepSpeed JSON. Raises UsageError."""
    task.checks.required_keys()
    check_judge(task)
    if start.config.model.lora is not None or start.config.model.freeze or start.config.optim.groups:
        _check_names(start.config)
    if start.config.save.copy_to is not None:
        open_filesystem(start.config.save.copy_to)
    if start.config.optim.name in OPTIMIZERS_8BIT:
        cluster = Cluster(gpus_per_node=world_size, kind=device.kind, bf16=device.bf16)
        _check_8bit_partitions(start.config, start.preset, cluster)
    return resolve_ds_config(start.config, start.preset, start.batch, world_size, device, run_dir)


def _check_names(config: RunConfig) -> None:
    """Raise RecipeError for names of layers and parameters that the model lacks, where its config tells its parameters.

    These are model.lora.targets, model.freeze and optim.groups.
    """
    if not read_properties(config).is_known:
        return
    try:
        base = read_base_shape(config.model)
    except UsageError:  # the ranks read the model
        return
    is_told = base is not None and base.tensors and base.param_source == "config"
    if base is None or not is_told or any(".experts." in one.name for one in base.tensors):
        return
    shape = read_shape(config)
    check_group_patterns(shape, config.optim.groups)


def _check_8bit_partitions(config: RunConfig, preset: Preset, cluster: Cluster) -> None:
    """Raise RecipeError for a partition that an 8-bit optimizer cannot take, where the model's sizes can be read."""
    try:
        shape = read_shape(config)
    except UsageError:  # the ranks read the model
        return
    plan_memory(config, preset, cluster, shape)


def check_data(task: Task, start: Start, allowed_keys: Collection[str]) -> None:
    """Check small data files that no earlier start has checked. Raises UsageError.

    The ranks check all data, whatever its size.
    """
    config = task.recipe
    items = [*config.data.train, *([config.data.eval] if config.data.eval else [])]
    paths = [Path(item.path).expanduser() for item in items]
    files = [file for path in paths for file in (match_files(path) or [path])]
    # Hub datasets, and files that only other hosts have, are left to the ranks.
    if not all(file.is_file() for file in files) or sum(file.stat().st_size for file in files) > MAX_CHECKED_BYTES:
        return
    if start.point.checkpoint is not None:
        check_inputs_unchanged(start.point.checkpoint, digest_input_files(task), allowed_keys)
    data = config.data.model_dump(mode="json")
    cache_entry = {"checked_records": MAX_CHECKED_RECORDS, "task": config.task, "options": config.options, "data": data}
    if config.task not in builtin_tasks() or all(load_file_result(file, cache_entry) for file in files):
        return
    started_at, states = time.time_ns(), [file_state(file) for file in files]
    _check_records(task)
    # Only now: a file that was refused is read again at the next start.
    for file, state in zip(files, states, strict=True):
        save_file_result(file, cache_entry, True, started_at, state)


def _check_records(task: Task) -> None:
    """Raise DataError if too many of the first records are bad for the limit of all records."""
    config = task.recipe
    # Records are parsed without a tokenizer.
    task = replace(task, recipe=config.model_copy(update={"model": ModelConfig()}))
    if task.prompts is None:
        return
    text_task: TextTask = task.prompts.task
    for items in (config.data.train, [config.data.eval] if config.data.eval else []):
        if items:
            check_bad_records(_scan_first_records(text_task, text_task.open_sources(items)), policy_of(config))


def _scan_first_records(task: TextTask, source: ConcatSource) -> BuildReport:
    report = BuildReport(read=len(source) + len(source.bad_rows), bad=[*source.bad_rows])
    for index in range(min(MAX_CHECKED_RECORDS, len(source))):
        if index == NUM_FIRST_RECORDS and not report.bad:
            break
        record = try_parse(source.__getitem__, index)
        item = record if isinstance(record, BadRecord) else try_parse(parse_record, task.parse_record, record)
        if isinstance(item, BadRecord):
            report.bad.append(BadRow(source.location(index), item.reason))
    report.kept = report.read - len(report.bad)
    return report
