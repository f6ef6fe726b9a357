"""Checks of the selftest: their names, results, files, and the comparison of losses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dstrain.files import atomic_write

Phase = Literal["stop", "resume"]
State = Literal["ok", "failed", "skipped"]

CHECKS: Mapping[Phase, tuple[str, ...]] = {
    "stop": ("train", "stop"),
    "resume": ("resume", "losses", "export", "evaluate"),
}
"""Checks of each launch, in their order. The second launch has another number of processes."""
STEPS, STOP_AFTER = 8, 3
"""Steps of a run, and the step whose row sends the stop signal."""
TOLERANCE = 1e-4
"""Largest relative difference of a loss, in fp32: other numbers of processes add in another order."""


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """Result of one check of one preset."""

    preset: str
    check: str
    state: State
    detail: str = ""
    """A measured value of a check that passed, or why one failed or was skipped."""
    fix: str = ""
    """What to do; empty for a check that passed."""
    seconds: float = 0.0


def skip(preset: str, checks: Sequence[str], reason: str) -> list[CheckResult]:
    """Return results of checks that another failure made impossible."""
    return [CheckResult(preset=preset, check=check, state="skipped", detail=reason) for check in checks]


def result_path(folder: Path, phase: Phase, preset: str) -> Path:
    """Return the file with a preset's results of a launch; `preset` may be the path of a JSON."""
    return folder / "results" / f"{phase}-{run_name(preset)}.json"


def error_path(folder: Path, phase: Phase, preset: str, rank: int) -> Path:
    """Return the file with the error that ended a rank in a preset's checks."""
    return folder / "results" / f"{phase}-{run_name(preset)}-rank{rank}.txt"


def run_name(preset: str) -> str:
    """Return the preset as part of a file name: of a path the name without .json."""
    return Path(preset).name.removesuffix(".json")


def write_results(path: Path, results: Sequence[CheckResult]) -> None:
    """Write the results, whole or not at all: the launching process reads them while others are written."""
    path.parent.mkdir(exist_ok=True)
    atomic_write(path, json.dumps([asdict(result) for result in results]))


def read_results(path: Path) -> list[CheckResult]:
    """Return the results in a file; none if it does not exist."""
    if not path.is_file():
        return []
    return [CheckResult(**row) for row in json.loads(path.read_text(encoding="utf-8"))]


def compare_losses(rows: Sequence[Mapping[str, Any]], baseline: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """Compare the metrics of a resumed run with those of an unbroken run, row by row.

    Returns (largest relative difference of a loss, a sentence on what differs too much; empty if nothing does).
    """
    mine, theirs = (_losses(each) for each in (rows, baseline))
    if mine.keys() != theirs.keys() or not theirs:
        return float("inf"), f"its rows are {_names(mine)}, those of the unbroken run {_names(theirs)}"
    worst, where = 0.0, next(iter(theirs))
    for key, expected in theirs.items():
        difference = abs(mine[key] - expected) / max(abs(expected), 1e-12)
        if not difference <= worst:  # also a nan
            worst, where = difference, key
    if worst <= TOLERANCE:
        return worst, ""
    return worst, (
        f"the {where[0]} loss of step {where[1]} is {mine[where]:.8g}, that of the unbroken run {theirs[where]:.8g}: "
        f"a relative difference of {worst:.2g}, and rounding explains up to {TOLERANCE:g}"
    )


def _losses(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], float]:
    """Return the losses by split and step; a loss that is not finite is written as null."""
    return {
        (str(row["split"]), int(row["step"])): float("nan") if row["loss"] is None else float(row["loss"])
        for row in rows
    }


def _names(losses: Mapping[tuple[str, int], float]) -> str:
    return ", ".join(f"{split} {step}" for split, step in losses) or "none"
