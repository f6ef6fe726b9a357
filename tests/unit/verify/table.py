"""The table of ten small families, each with the whole command.

python -m tests.unit.verify.table     writes docs/measurements/verify.md
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dstrain.commands.verify import VerifyReport, verify_model
from dstrain.config.schema import ModelConfig
from tests.unit.verify.families import CONFIGS, write_config
from tests.workers import ROOT

PAGE = ROOT / "docs/measurements/verify.md"
INTRO = """\
# Ten families verified

`python -m tests.unit.verify.table`, {about},
commit {commit}, {versions}.

Each model is a small config of its family, without weights and without a tokenizer. So the names of an export are
compared with those that transformers saves for the config; [Verify a model](../verify.md) says what each check does.
A cell is the largest relative difference, or why there is none: *padded* batches are not packed, *refused* by name
before a run starts, *skipped* because the model has no such part.

"""


def verify(family: str) -> VerifyReport:
    """Return the report of the whole command for one of CONFIGS."""
    with tempfile.TemporaryDirectory() as folder:
        return verify_model(ModelConfig(path=str(write_config(family, Path(folder) / family))), lambda line: None)


def render(reports: Sequence[VerifyReport], commit: str) -> str:
    """Return the page: a row for each check, a column for each family."""
    first = reports[0]
    about = f"CPU with {first.cores} cores and a load of {os.getloadavg()[2]:.0f}, {first.date}"
    lines = [f"| check | {' | '.join(report.model_type for report in reports)} |", "|---" * (len(reports) + 1) + "|"]
    for number, check in enumerate(result.check for result in first.results):
        found = [report.results[number] for report in reports]
        cells = [one.state if one.figure is None else f"{one.figure:.0e}" for one in found]
        marked = [
            f"{cell}, {one.state}" if one.state not in ("ok", cell) else cell
            for cell, one in zip(cells, found, strict=True)
        ]
        lines.append(f"| {check} | {' | '.join(marked)} |")
    lines.append(f"| seconds | {' | '.join(f'{report.seconds:.0f}' for report in reports)} |")
    reasons = dict.fromkeys(
        f"| {report.model_type} | {result.state} | {result.reason.removeprefix('batches are padded, not packed: ')} |"
        for report in reports
        for result in report.results
        if result.state in ("padded", "refused", "failed")
    )
    why = ["| model | result | why |", "|---|---|---|", *reasons]
    about_run = INTRO.format(about=about, commit=commit, versions=first.versions)
    return about_run + "\n".join([*lines, "", *why, ""])


def main() -> int:
    """Write the page; exit code 1 if a promise does not hold."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    reports = []
    for family in CONFIGS:
        print(family, file=sys.stderr)
        reports.append(verify(family))
    PAGE.write_text(render(reports, commit.stdout.strip()), encoding="utf-8")
    return 0 if all(report.holds for report in reports) else 1


if __name__ == "__main__":
    sys.exit(main())
