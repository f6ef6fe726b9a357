"""Table and JSON of a selftest's results."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from dstrain.commands.selftest.checks import CHECKS, TOLERANCE, CheckResult
from dstrain.commands.selftest.environment import EnvironmentLine

WIDTH = 100
COLUMNS = tuple(check for checks in CHECKS.values() for check in checks)


@dataclass(frozen=True, kw_only=True)
class SelftestReport:
    """Everything that a selftest has found."""

    environment: Sequence[EnvironmentLine]
    processes: tuple[str, str]
    """The processes of both launches, such as `2 processes on the CPU`."""
    results: Sequence[CheckResult]
    seconds: float

    @property
    def passed(self) -> bool:
        """True if every check passed."""
        return bool(self.results) and all(result.state == "ok" for result in self.results)


def show_environment(lines: Sequence[EnvironmentLine]) -> str:
    """Return a line per property, and its warning below."""
    shown = []
    for line in lines:
        shown.append(f"{line.name:14} {line.value}")
        shown += [f"{'':14} warning: {line.warning}"] if line.warning else []
    return "\n".join(shown)


def show_report(report: SelftestReport) -> str:
    """Return the table, a paragraph per failure, and a summary. The environment is not in it."""
    presets = list(dict.fromkeys(result.preset for result in report.results))
    found = {(result.preset, result.check): result for result in report.results}
    width = max(map(len, [*presets, "preset"]))
    lines = ["  ".join([f"{'preset':{width}}", *(f"{column:8}" for column in COLUMNS)]).rstrip()]
    for preset in presets:
        cells = [_cell(found.get((preset, column))) for column in COLUMNS]
        lines.append("  ".join([f"{preset:{width}}", *(f"{cell:8}" for cell in cells)]).rstrip())
    failures = [result for result in report.results if result.state == "failed"]
    for failure in failures:
        lines += ["", *_describe_failure(failure)]
    return "\n".join([*lines, "", _summary(report, len(failures))])


def _cell(result: CheckResult | None) -> str:
    """Return a check as a cell: the difference that was measured, ok, FAILED, or - where it was not made."""
    if result is None or result.state == "skipped":
        return "-"
    return "FAILED" if result.state == "failed" else result.detail or "ok"


def _describe_failure(failure: CheckResult) -> list[str]:
    text = [f"{failure.preset}, {failure.check}:", *failure.detail.splitlines()]
    reason = textwrap.wrap(" ".join(text), WIDTH, subsequent_indent="  ", break_long_words=False)
    fix = textwrap.wrap(f"what to do: {failure.fix}", WIDTH - 2, subsequent_indent="  ", break_long_words=False)
    return [*reason, *(f"  {line}" for line in fix)]


def _summary(report: SelftestReport, failures: int) -> str:
    first, second = report.processes
    how = f"trained with {first}, resumed with {second}; losses may differ by {TOLERANCE:g}, relatively"
    verdict = "passed" if report.passed else f"{failures} check{'s' * (failures != 1)} failed"
    return "\n".join([f"{how}", f"selftest: {verdict} in {report.seconds:.0f} s"])


def report_as_json(report: SelftestReport) -> str:
    """Return all results and the environment as JSON."""
    values = {
        "passed": report.passed,
        "environment": [asdict(line) for line in report.environment],
        "processes": list(report.processes),
        "tolerance": TOLERANCE,
        "results": [asdict(result) for result in report.results],
        "seconds": round(report.seconds, 1),
    }
    return json.dumps(values, indent=2)
