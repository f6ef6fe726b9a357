"""dstrain data: check, every bad record of a file; show, records as the model sees them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click

from dstrain.commands.recipe_args import TrainRequest, resolve_paths, resolve_recipe
from dstrain.config import read_recipe
from dstrain.config.schema import DatasetConfig, RunConfig, TrainDatasetConfig
from dstrain.data.encoding.conversations import SOFT_TOKEN_ID, describe_missing_end
from dstrain.data.prepare import MAX_ROWS_PER_REASON, ValidationReport, check_source, describe_examples, format_bad_rows
from dstrain.data.records import BadRow, describe_columns, warn_without_images
from dstrain.data.sources.base import ConcatSource, NotedSource, Source, check_columns_exist, list_unread
from dstrain.errors import Fault, RecipeError, TaskError, UsageError, escape_controls
from dstrain.files import match_files
from dstrain.host_limits import count_available_cores
from dstrain.tasks import TaskOptions, make_task
from dstrain.tasks.common.text import TextTask

NO_TOKENIZER_HINT = (
    "truncation by data.max_length depends on the tokenizer: `dstrain prepare` prints it, and so does this command with "
    "`--set model.path=FOLDER`"
)


TOKENS_HINT = "`--set model.path=FOLDER` shows the tokens too"


def _read_config(recipe: str | None, task: str | None, overrides: Sequence[str]) -> RunConfig:
    if recipe is not None:
        return resolve_recipe(TrainRequest(recipe=recipe, task=task, overrides=overrides)).config
    if task is None:
        raise UsageError("name the task that reads the file with --task, or a recipe with --recipe")
    return resolve_paths(read_recipe(None, overrides, task, options=TaskOptions()).config, Path.cwd())


def _find_item(config: RunConfig, file: str, recipe: str | None) -> tuple[TrainDatasetConfig, list[str]]:
    """Return how a file is read: as the item of the recipe that names it, and a line that says so.

    The recipe's item has the file's columns, media folder and split.
    """
    items: list[tuple[str, DatasetConfig]] = [(f"data.train.{at}", item) for at, item in enumerate(config.data.train)]
    items += [("data.eval", config.data.eval)] if config.data.eval is not None else []
    place = os.path.realpath(Path(file).expanduser())
    for key, item in items:
        paths = [item.path, *map(str, match_files(Path(item.path)))]
        if file == item.path or place in map(os.path.realpath, paths):
            known = item.model_dump(include=set(DatasetConfig.model_fields)) | {"path": file}
            settings = {name: value for name, value in known.items() if name != "path" and value is not None}
            shown = "".join(f", {name} {value}" for name, value in settings.items())
            return TrainDatasetConfig(**known), [f"read as {key} of {recipe}{shown}"] if recipe is not None else []
    is_other = recipe is not None and any(item.columns or item.media_dir for _, item in items)
    told = [f"{recipe} does not name this file: it is read with data.columns, without columns of another file"]
    return TrainDatasetConfig(path=file), told if is_other else []


def check_file(
    file: str,
    task: str | None,
    overrides: Sequence[str],
    show_progress: Callable[[int, int], None] = lambda done, total: None,
    recipe: str | None = None,
) -> tuple[ValidationReport, str]:
    """Return the validation report of a file, and a sentence on truncation. Raises TaskError without a format."""
    config = _read_config(recipe, task, overrides)
    made = make_task(config)
    parse = made.checks.parse_record
    if parse is None:
        raise TaskError(f"task {config.task}: has no record format to check; the task reads its records itself")
    item, told = _find_item(config, file, recipe)
    opened = made.open_source(item)
    check_columns_exist([opened])
    source = made.wrap_source(opened, item)
    found = check_source(source, parse, count_available_cores(), show_progress)
    told += list_unread(opened)
    if isinstance(source, NotedSource):
        told += source.describe_check()
    told += [f"warning: {line}" for line in warn_without_images(found.columns)] if made.needs_vision else []
    if made.model_source is None or not made.model_source.reads_text:
        return found, "\n".join(told)
    if config.model.path is None:
        return found, "\n".join([*told, NO_TOKENIZER_HINT])
    skipping = make_task(config.model_copy(update={"data": config.data.model_copy(update={"on_error": "skip"})}))
    assert skipping.prompts is not None, "it reads text"
    text_task: TextTask = skipping.prompts.task
    if made.model_source.can_generate:
        told += [f"warning: {line}" for line in describe_missing_end(text_task.tokenizer)]
    return found, "\n".join(filter(None, [*told, _describe_truncation(source, text_task, found)]))


def _describe_truncation(source: Source, task: TextTask, validation: ValidationReport) -> str:
    """Return how many valid records the tokenizer truncates; those that do not fit become bad records."""
    known = {row.location for row in validation.bad}
    if not validation.num_valid:
        return ""
    report = task.build_store(ConcatSource([source])).report
    validation.bad += [row for row in report.bad if row.location not in known]
    counts = {"kept": report.kept, "cuts": report.cuts}
    return "\n".join(describe_examples(counts))


def show_validation(validation: ValidationReport, show_all: bool = False, is_terminal: bool = True) -> tuple[str, str]:
    """Return (a line per bad record and note, their counts).

    A terminal gets the first ten of each reason, a file or a pipe every bad record and the first ten notes of each
    reason, unless `show_all`.
    """
    each = None if show_all or not is_terminal else MAX_ROWS_PER_REASON
    notes = [BadRow(row.location, f"note: {row.reason}") for row in validation.warnings]
    lines = format_bad_rows(validation.bad, each, None)
    lines += format_bad_rows(notes, None if show_all else MAX_ROWS_PER_REASON, None)
    if len(lines) < len(validation.bad) + len(notes):
        lines.append("`--all` lists every one")
    told = f", {len(notes)} note{'s' * (len(notes) != 1)} on records that can be used" if notes else ""
    total = f"{validation.num_valid} good records, {validation.read - validation.num_valid} bad{told}"
    return "\n".join(lines), "\n".join([total, *describe_columns(validation.columns)])


def show_file(
    file: str, recipe: str | None, task: str | None, overrides: Sequence[str], limit: int, use_color: bool
) -> Iterator[str]:
    """Yield the first `limit` records of a file as the model sees them, one text for each, then the packed row.

    Learnt tokens are green with `use_color`, else between \u27e6 and \u27e7. Series, structures and documents come first in
    a short form, which needs no tokenizer. Raises RecipeError without a tokenizer, TaskError.
    """
    config = _read_config(recipe, task, overrides)
    item, told = _find_item(config, file, recipe)
    changes = {"train": [item], "eval": None, "eval_fraction": 0.0, "max_samples": limit}
    data = config.data.model_copy(update=changes | {"on_error": "skip"})
    made = make_task(config.model_copy(update={"data": data}))
    yield from (f"--- {line}" for line in told)
    if made.describes_records:
        yield from made.show_records(limit)
    if made.prompts is None or made.model_source is None or not made.model_source.reads_text:
        if made.describes_records:
            return
        raise TaskError(f"task {config.task}: its records are not texts; `dstrain data check` lists the bad ones")
    text_task: TextTask = made.prompts.task
    if not text_task.model_source.is_named and not made.has_own_tokenizer:
        if made.describes_records:
            yield f"--- {TOKENS_HINT}"
            return
        raise RecipeError(
            Fault("model.path", "is not set, and the tokens depend on the model", "add --set model.path=FOLDER")
        )
    source = text_task.open_sources(text_task.training_items)
    store = text_task.build_store(source)
    for row in store.report.bad:
        yield f"--- {row.location}: cannot be used: {row.reason}"
    examples = [store[index] for index in range(len(store))]
    for example in examples:
        yield _show_example(text_task, source.location(example["sample"]), example, use_color)
    counts = {"kept": store.report.kept, "cuts": store.report.cuts}
    yield from (f"--- {line}" for line in describe_examples(counts))
    if examples:
        yield _show_batch(text_task, examples)


def _show_example(task: TextTask, location: str, example: Mapping[str, Any], use_color: bool) -> str:
    lines, names = list[str](), [name for name in task.token_columns if name in example]
    images = [f"{one.name}, {one.width} x {one.height}" for one in example.get("images", ())]
    for name in names:
        ids, mask = [int(token) for token in example[name]], _loss_mask(name, example)
        counts = f"{len(ids)} tokens" + ("" if mask is None else f", {sum(mask)} of them learnt")
        lines.append(f"--- {location}{f', {name}' * (len(names) > 1)}: {counts}")
        lines.append(_show_tokens(task, ids, mask, images, use_color))
    lines += [f"image {number}: {image}" for number, image in enumerate(images, 1)]
    numbers = [f"{name} {example[name]:g}" for name in ("margin", "desirable", "label") if name in example]
    return "\n".join([*lines, *([", ".join(numbers)] if numbers else [])])


def _loss_mask(name: str, example: Mapping[str, Any]) -> list[bool] | None:
    """Return which tokens of a column are learnt; None where the example does not say it."""
    mask = example.get("loss_mask" if name == "input_ids" else f"{name}_loss_mask")
    if mask is not None:
        return [bool(value) for value in mask]
    if "ends" in example:  # of a process reward model: the last token of each step
        ends = {int(place) for place in example["ends"]}
        return [place in ends for place in range(len(example[name]))]
    if "prompt_length" in example:
        return [place >= int(example["prompt_length"]) for place in range(len(example[name]))]
    return None


def _show_tokens(
    task: TextTask, ids: Sequence[int], mask: Sequence[bool] | None, images: Sequence[str], use_color: bool
) -> str:
    """Return the text of the tokens, with those that are learnt marked, and runs of image and soft tokens in short."""
    processor, tokenizer = task.model_source.vision_processor, task.tokenizer
    related = frozenset[int]() if processor is None else processor.image_related_ids
    kinds = [
        ("series" if token == SOFT_TOKEN_ID else "image" * (token in related), mask is not None and bool(mask[place]))
        for place, token in enumerate(ids)
    ]
    runs = [(kind, [place for place, _ in run]) for kind, run in groupby(enumerate(kinds), lambda one: one[1])]
    num_images = sum(kind == "image" for (kind, _), _ in runs)
    text, shown, start = "", 0, 0
    for (kind, is_learnt), places in runs:
        # Of the whole beginning: a tokenizer may write no blank before the first token of a text.
        end = places[-1] + 1
        before, after = ([token for token in ids[:at] if token != SOFT_TOKEN_ID] for at in (start, end))
        part = tokenizer.decode(after)[len(tokenizer.decode(before)) :]
        if kind == "image":
            shown += 1
            name = images[shown - 1] if num_images == len(images) else "a part of an image"
            part = f"<{name}: {len(places)} tokens>"
        if kind == "series":
            part = f"<series: {len(places)} soft tokens>"
        part, start = escape_controls(part), end
        if is_learnt:
            part = click.style(part, fg="green") if use_color else f"\u27e6{part}\u27e7"
        text += part
    return text


def _show_batch(task: TextTask, examples: Sequence[Mapping[str, Any]]) -> str:
    """Return how the records form a micro-batch."""
    mode = task.packing
    if not mode.is_packed:
        return f"--- {mode.message or 'batches are padded, not packed: batch.packing is false'}"
    size = min(task.recipe.batch.micro or len(examples), len(examples))
    groups = task.collate(examples[:size]).groups
    sizes = [
        f"{group.prefix} + ({', '.join(map(str, group.branches))})"
        if group.prefix
        else " + ".join(map(str, group.branches))
        for group in groups
    ]
    total = sum(group.tokens for group in groups)
    shared = "; a prefix + (its answers) is computed once" * any(group.prefix for group in groups)
    return f"--- packed row of {size} record{'s' * (size != 1)}: {total} tokens without padding: {', '.join(sizes)}{shared}"
