"""Comparison of runs: the keys of recipe, DeepSpeed JSON and environment in which they differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dstrain.report.run_history import RunHistory

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
    flat = [dict(_flatten_run(run)) for run in runs]
    keys = list(dict.fromkeys(key for values in flat for key in values))
    keys.sort(key=lambda key: PREFIXES.index(key.partition(".")[0]))  # of the same prefix in their order
    rows = [(key, [values.get(key, ABSENT) for values in flat]) for key in keys if not key.startswith(IGNORED)]
    return [row for row in rows if len(set(row[1])) > 1][:MAX_DIFFERENCES]


def _flatten_run(run: RunHistory) -> Iterator[tuple[str, str]]:
    for prefix, values in (
        (PREFIXES[0], run.recipe),
        (PREFIXES[1], run.parse_json("ds_config.json")),
        (PREFIXES[2], run.parse_json("environment.json")),
    ):
        yield from _flatten(prefix, values)


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
