"""Reader of a run folder: metrics as columns of numbers, events, and the files of its configuration."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeGuard

from dstrain.config.read import read_yaml
from dstrain.errors import RecipeError, UsageError, mask_secrets
from dstrain.files import open_regular_file, parse_json
from dstrain.report.run_log import MAX_LINE_BYTES, parse_row

READ_BYTES = 1 << 20
"""Bytes of metrics.jsonl that are read and parsed at a time."""
MAX_TEXT_BYTES = 1 << 20
"""Limit of a configuration file: a recipe of a gigabyte is none."""
MAX_COLUMNS = 200
"""Limit of the columns of a split: rows that name others are damaged, or of a task that invents names."""


class MetricColumns:
    """Columns of the rows of one split, in order of the file; a number that a row lacks is NaN."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d"), "time": array("d"), "epoch": array("d")}
        self.last_row: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.columns["step"])

    def append(self, row: Mapping[str, Any]) -> None:
        """Add the numbers of a row; `time` becomes seconds since 1970."""
        count = len(self)
        values = {name: float(number) for name, number in row.items() if is_number(number)}
        values["time"] = parse_time(row.get("time"))
        for name in values:
            if name not in self.columns and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = array("d", [math.nan]) * count
        for name, column in self.columns.items():
            column.append(values.get(name, math.nan))
        self.last_row = dict(row)


@dataclass
class RunHistory:
    """Content of a run folder, as far as it could be read. `refresh` reads what has been appended since."""

    run_dir: Path
    train: MetricColumns = field(default_factory=MetricColumns)
    eval: MetricColumns = field(default_factory=MetricColumns)
    events: list[dict[str, Any]] = field(default_factory=list)
    damaged_lines: int = 0
    """Lines of metrics.jsonl and events.jsonl that are not JSON objects, without a last line that is being written."""
    texts: dict[str, str] = field(default_factory=dict)
    """File name -> content of recipe.yaml, ds_config.json and environment.json, without passwords in URLs."""
    recipe: dict[str, Any] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def refresh(self) -> None:
        """Read the rows and events that were appended, and the configuration. Never raises for a damaged file."""
        for row in self._read_lines("metrics.jsonl"):
            if "step" in row and row.get("split") in ("train", "eval"):
                (self.train if row["split"] == "train" else self.eval).append(row)
        self.events += [row for row in self._read_lines("events.jsonl") if isinstance(row.get("event"), str)]
        before = self.texts.get("recipe.yaml")
        for name in ("recipe.yaml", "ds_config.json", "environment.json"):
            self.texts[name] = read_text(self.run_dir / name)
        if self.texts["recipe.yaml"] != before:
            self.recipe = _read_recipe(self.run_dir / "recipe.yaml") if self.texts["recipe.yaml"] else {}

    def parse_json(self, name: str) -> dict[str, Any]:
        """Return ds_config.json or environment.json as a mapping; empty if it cannot be read."""
        try:
            found = parse_json(self.texts.get(name, ""))
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    def get_setting(self, key: str, default: Any = None) -> Any:
        """Return a value of the recipe, such as that of `optim.lr`."""
        value: Any = self.recipe
        for word in key.split("."):
            value = value.get(word) if isinstance(value, dict) else None
        return default if value is None else value

    def find_events(self, *names: str) -> list[dict[str, Any]]:
        """Return the events with these names."""
        return [event for event in self.events if event["event"] in names]

    def _read_lines(self, name: str) -> Iterator[dict[str, Any]]:
        """Yield the rows that were appended to a file since the last call.

        A line without its end is being written: the next call yields it.
        """
        # Missing, or not readable for this user: the run has no rows to show.
        with contextlib.suppress(OSError), open_regular_file(self.run_dir / name) as file:
            file.seek(self._offsets.get(name, 0))
            rest = b""
            while len(rest) < MAX_LINE_BYTES and (chunk := file.read(READ_BYTES)):
                complete, newline, rest = (rest + chunk).rpartition(b"\n")
                self._offsets[name] = self._offsets.get(name, 0) + len(complete) + len(newline)
                for line in complete.splitlines():
                    row = parse_row(line)
                    self.damaged_lines += row is None
                    if row is not None:
                        yield row


def open_run(run_dir: Path) -> RunHistory:
    """Read a run folder. Raises UsageError (exit code 2) if the folder is none."""
    if not run_dir.is_dir():
        problem = "is not a folder" if run_dir.exists() else "does not exist"
        raise UsageError(f"{run_dir}: {problem}; give the folder of a run, such as runs/NAME")
    if not any((run_dir / name).exists() for name in ("events.jsonl", "metrics.jsonl", ".workers")):
        problem = "is not a run folder: it has neither events.jsonl nor metrics.jsonl"
        raise UsageError(f"{run_dir}: {problem}; give the folder of a run, such as runs/NAME")
    history = RunHistory(run_dir)
    history.refresh()
    return history


def is_number(value: object) -> TypeGuard[float]:
    """Return True for a finite number of JSON that fits a float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300


def parse_time(text: object) -> float:
    """Return seconds since 1970 of an ISO 8601 time; NaN if it is none."""
    try:
        return datetime.fromisoformat(text).timestamp() if isinstance(text, str) else math.nan
    except (ValueError, OverflowError, OSError):
        return math.nan


def read_text(path: Path) -> str:
    """Return the text of a file without passwords in URLs; empty if it cannot be read."""
    try:
        with open_regular_file(path) as file:
            return mask_secrets(file.read(MAX_TEXT_BYTES).decode(errors="replace"))
    except OSError:
        return ""


def _read_recipe(path: Path) -> dict[str, Any]:
    """Return the recipe; empty if it is damaged, or of more values than a recipe has."""
    try:
        return read_yaml(path).values
    except RecipeError:
        return {}
