"""Sections of a report page, and the comparison of runs."""

from __future__ import annotations

import contextlib
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrain.errors import escape_controls, mask_secrets
from dstrain.report.page.verdicts import RunSummary, Verdict, format_number, format_share
from dstrain.report.run_history import RunHistory, is_number
from dstrain.report.run_log import task_metric_names
from dstrain.units import format_bytes, format_count, format_duration

MAX_DIFFERENCES = 300
IGNORED = ("environment.command", "environment.platform")
"""Keys that differ between any two runs and say nothing."""
PREFIXES = ("recipe", "ds_config", "environment")
ABSENT = "(absent)"
MAX_VALUE_LENGTH = 300
MAX_DEPTH = 20
"""Levels of keys; a deeper value is compared as a whole."""


def diff_settings(runs: Sequence[RunHistory]) -> list[tuple[str, list[str]]]:
    """Return (key, value of each run) for each key whose values differ; the recipe first."""
    flat = []
    for run in runs:
        blocks = zip(
            PREFIXES, (run.recipe, run.parse_json("ds_config.json"), run.parse_json("environment.json")), strict=True
        )
        flat.append(dict(pair for prefix, block in blocks for pair in _flatten(prefix, block)))
    keys = list(dict.fromkeys(key for values in flat for key in values))
    keys.sort(key=lambda key: PREFIXES.index(key.partition(".")[0]))  # of the same prefix in their order
    rows = [(key, [values.get(key, ABSENT) for values in flat]) for key in keys if not key.startswith(IGNORED)]
    return [row for row in rows if len(set(row[1])) > 1][:MAX_DIFFERENCES]


def describe_value(value: object) -> str:
    """Return a value of a recipe or an event as text."""
    try:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # a damaged file
        return "(nested too deeply)"


def _flatten(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value and prefix.count(".") < MAX_DEPTH:
        for key, item in value.items():
            yield from _flatten(f"{prefix}.{key}", item)
    else:
        text = describe_value(value)
        yield prefix, text if len(text) <= MAX_VALUE_LENGTH else text[:MAX_VALUE_LENGTH] + "…"


MAX_EVENTS_OF_A_KIND, MAX_EVENTS = 40, 600
MAX_DETAIL_LENGTH = 600
MAX_CHECKPOINTS = 200
MAX_OPEN_DIFFERENCES = 15
"""Longer tables of differences are folded: the charts would be below them."""
EVENT_LEVELS = {
    "failed": "bad",
    "out_of_memory": "bad",
    "warning": "warning",
    "stalled": "warning",
    "step_skipped": "warning",
    "parameters_without_update": "warning",
    "checkpoint_skipped": "warning",
    "micro_batch_reduced": "warning",
}


def escape(value: object) -> str:
    """Return a text for HTML, without passwords in URLs. Control characters become visible."""
    return html.escape(escape_controls(mask_secrets(str(value))))


def render_table(
    head: Sequence[str], rows: Sequence[Sequence[tuple[str, object]]], levels: Sequence[str] = (), kind: str = ""
) -> str:
    """Return a table; a cell is (class, text), `levels` are the classes of the rows and `kind` that of the table."""
    columns = [cell[0] for cell in rows[0]] if rows else [""] * len(head)
    titles = "".join(f'<th class="{name}">{escape(title)}</th>' for name, title in zip(columns, head, strict=True))
    body = ""
    for index, cells in enumerate(rows):
        texts = "".join(f'<td class="{name}">{escape(text)}</td>' for name, text in cells)
        body += f'<tr class="{levels[index] if levels else ""}">{texts}</tr>'
    table = f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll {kind}">{table}</div>'


def render_verdict_list(found: Sequence[Verdict]) -> str:
    """Return the list of verdicts."""
    items = "".join(
        f'<li class="{one.level}">{escape(one.text)}'
        + (f' <span class="advice">{escape(one.advice)}</span>' if one.advice else "")
        + "</li>"
        for one in found
    )
    return f'<ul class="verdicts">{items}</ul>'


def key_figures(run: RunSummary) -> list[tuple[str, str, str]]:
    """Return (name, value, note) of the numbers to see first."""
    history, progress, use = run.history, run.progress, run.time_use
    total = f"of {progress.total_steps}" if progress.total_steps else ""
    epoch = "" if progress.epoch is None else f"epoch {progress.epoch:.3g}"
    figures = [("step", str(progress.step), ", ".join(filter(None, [total, epoch]))), *_losses(run), *_best(run)]
    tokens, samples = (history.train.last_row.get(f"{name}_per_second") for name in ("tokens", "samples"))
    if is_number(tokens) and is_number(samples):
        figures.append(
            ("tokens per second", format_count(float(f"{tokens:.3g}")), f"{format_number(samples)} samples/s")
        )
    if use.total:
        left = progress.seconds_left if run.is_live else None
        minutes = format_duration(use.total).rpartition(" m ")
        took = f"{minutes[0]} m" if " h " in minutes[0] else format_duration(use.total)
        figures.append(("time", took, f"{format_duration(left)} left" if left else "all starts"))
    for name, title in (("peak_memory_gib", "device memory"), ("host_memory_gib", "host memory")):
        if is_number(value := history.train.last_row.get(name)):
            figures.append((title, f"{format_number(value)} GiB", "peak of a process"))
            break
    return figures


def _losses(run: RunSummary) -> Iterator[tuple[str, str, str]]:
    for split in ("train", "eval"):
        steps, values = run.column("loss", split)
        if len(values):
            lowest = f"lowest {format_number(values.min())} at step {int(steps[values.argmin()])}"
            yield f"{split} loss", format_number(values[-1]), lowest


def _best(run: RunSummary) -> Iterator[tuple[str, str, str]]:
    name = str(run.history.get_setting("eval.metric", "loss"))
    if name == "loss":
        name = next(iter(task_metric_names(run.history.eval.last_row)), "loss")
    steps, values = run.column(name, "eval")
    if name != "loss" and len(values):
        best = values.argmin() if run.is_lower_better(name) else values.argmax()
        yield (
            f"eval {name}",
            format_number(values[-1]),
            f"best {format_number(values[best])} at step {int(steps[best])}",
        )


def render_cards(run: RunSummary) -> str:
    """Return the key figures as cards."""
    cards = "".join(
        f'<div class="card"><div class="name">{escape(name)}</div><div class="value">{escape(value)}</div>'
        f'<div class="note">{escape(note)}</div></div>'
        for name, value, note in key_figures(run)
    )
    return f'<div class="cards">{cards}</div>'


def render_time_use(run: RunSummary) -> str:
    """Return where the time went, as a bar."""
    use = run.time_use
    if not use.total:
        return ""
    parts = (
        ("training", use.compute),
        ("waiting for data", use.data_wait),
        ("checkpoints", use.save_stall),
        ("evaluation", use.evaluation),
        ("starts, repeated steps and other", use.other),
    )
    bars, words, begin = "", "", 0.0
    for index, (name, seconds) in enumerate(parts):
        width = 1000 * seconds / use.total
        bars += f'<rect class="k{index}" x="{begin:.2f}" y="0" width="{width:.2f}" height="16"/>'
        begin += width
        share = f"{format_duration(seconds)}, {format_share(seconds / use.total)}"
        words += f'<span><span class="dot k{index}"></span>{escape(name)}: {escape(share)}</span>'
    image = (
        f'<svg class="bar" viewBox="0 0 1000 16" preserveAspectRatio="none" role="img" aria-label="time">{bars}</svg>'
    )
    return f'{image}<div class="parts">{words}</div>'


def render_events(history: RunHistory) -> str:
    """Return the table of events; of a kind with many, the first and last ones."""
    chosen, left_out = choose_events(history.events)
    rows = [
        [
            ("fixed soft", str(event.get("time", ""))[:19].replace("T", " ")),
            ("number", event.get("step", "")),
            ("fixed", event["event"]),
            ("text", _describe_event(event)),
        ]
        for event in chosen
    ]
    levels = [EVENT_LEVELS.get(event["event"], "") for event in chosen]
    note = f'<p class="soft small">{left_out} more events are in events.jsonl.</p>' if left_out else ""
    return render_table(("time (UTC)", "step", "event", "details"), rows, levels, "events") + note


def choose_events(events: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], int]:
    """Return the events to list and the number of those left out: a long run has thousands of saves."""
    places: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        places.setdefault(event["event"], []).append(index)
    half = MAX_EVENTS_OF_A_KIND // 2
    shown = sorted(k for of_kind in places.values() for k in {*of_kind[:half], *of_kind[-half:]})
    if len(shown) > MAX_EVENTS:
        shown = [*shown[: MAX_EVENTS // 2], *shown[-MAX_EVENTS // 2 :]]
    return [events[index] for index in shown], len(events) - len(shown)


def _describe_event(event: Mapping[str, Any]) -> str:
    parts = []
    for key, value in event.items():
        if key in ("time", "event", "step") or value in (None, [], {}):
            continue
        if is_number(value) and (
            key.endswith("bytes") or (event["event"] == "checkpoint_forecast" and key != "at_once")
        ):
            value = format_bytes(value)
        if isinstance(value, Mapping):
            text = "(" + ", ".join(f"{key} {describe_value(item)}" for key, item in value.items()) + ")"
        else:
            text = describe_value(value)
        parts.append(text if key in ("what", "how", "why") else f"{key} {text}")
    text = ", ".join(parts)
    return text if len(text) <= MAX_DETAIL_LENGTH else text[:MAX_DETAIL_LENGTH] + "…"


def render_data(history: RunHistory) -> str:
    """Return the table of the files of each split, with their images and columns, as the last start found them."""
    last = {event.get("split"): event for event in history.events if event["event"] == "data"}
    rows: list[list[tuple[str, object]]] = []
    for split, event in last.items():
        with contextlib.suppress(TypeError, KeyError, AttributeError):  # a damaged row has no such fields
            rows += [
                [("fixed", split), ("text", file), ("number", one["records"]), ("number", one["images"]),
                 ("text", ", ".join(one["used"])), ("text", ", ".join(one["unused"]))]
                for file, one in event["columns"].items()
            ]  # fmt: skip
    return (
        render_table(("split", "file", "records", "images", "columns read", "columns not used"), rows) if rows else ""
    )


def render_data_notes(history: RunHistory) -> str:
    """Return what the last start said of the samples of each split: how many were cut, dropped or taken as they stand."""
    last = {event.get("split"): event for event in history.events if event["event"] == "data"}
    items = ""
    for split, event in last.items():
        lines = event.get("described")
        if not isinstance(lines, list):  # a damaged row
            continue
        for line in lines:
            items += f"<li>{escape(f'{split}: {line}')}</li>"
    return f"<ul>{items}</ul>" if items else ""


def render_checkpoints(checkpoints: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of checkpoints, newest first."""
    if not checkpoints:
        return '<p class="soft">No checkpoint.</p>'
    rows = [
        [
            ("number", one["step"]),
            ("number", format_bytes(int(one["bytes"] or 0))),
            ("number", "" if one["world_size"] is None else one["world_size"]),
            ("number", "" if one["zero_stage"] is None else one["zero_stage"]),
            ("number", format_number(one["metric"]) if is_number(one["metric"]) else ""),
            ("text", f"{one['state']}{', best' if one['best'] else ''}"),
        ]
        for one in checkpoints[:MAX_CHECKPOINTS]
    ]
    return render_table(("step", "size", "processes", "ZeRO stage", "metric", "state"), rows)


def render_diff(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return the table of keys in which runs differ."""
    if not rows:
        return '<p class="soft">The recipes, DeepSpeed JSONs and environments are the same.</p>'
    cells = [[("key", key), *(("text", value) for value in values)] for key, values in rows]
    is_open = " open" if len(rows) <= MAX_OPEN_DIFFERENCES else ""
    table = render_table(("key", *names), cells)
    return f"<details{is_open}><summary>{len(rows)} keys differ</summary>{table}</details>"


def render_files(history: RunHistory) -> str:
    """Return recipe, DeepSpeed JSON and environment, folded."""
    titles = {"recipe.yaml": "Recipe", "ds_config.json": "DeepSpeed JSON", "environment.json": "Environment"}
    return "".join(
        f"<details><summary>{title}</summary><pre>{escape(history.texts[name])}</pre></details>"
        for name, title in titles.items()
        if history.texts.get(name)
    )
