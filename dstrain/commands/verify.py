"""dstrain verify: what dstrain promises for a model's family, proven with a small model of it on this machine."""

from __future__ import annotations

import html
import json
import os
import platform
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

from dstrain.commands.run_job import scratch_folder
from dstrain.commands.trained_model import quiet_libraries
from dstrain.config import read_recipe
from dstrain.config.schema import ModelConfig
from dstrain.errors import UsageError
from dstrain.files import atomic_write
from dstrain.host_limits import count_available_cores
from dstrain.models.weights import disable_transformers_logging
from dstrain.tasks import TaskOptions
from dstrain.verify.model import make_shrunk_model
from dstrain.verify.result import CheckResult
from dstrain.verify.run import run_checks

ALLOWED_KEYS = ("model.revision", "model.trust_remote_code", "model.attn_implementation")
"""Keys of --set: what says which model it is, and how transformers builds it."""
PACKAGES = ("torch", "transformers", "deepspeed", "peft")
COLUMNS = ("check", "result", "figure", "reason")
WIDTH = 118


@dataclass(frozen=True, kw_only=True)
class VerifyReport:
    """Everything that a verification has found."""

    model: str
    model_type: str
    small_model: str
    """How many layers and parameters the small model has, and whose tokenizer."""
    results: Sequence[CheckResult]
    versions: str
    cores: int
    date: str
    seconds: float

    @property
    def holds(self) -> bool:
        """True if every promise holds."""
        return all(result.holds for result in self.results)

    @property
    def verdict(self) -> str:
        """One sentence."""
        failed = [result.check for result in self.results if not result.holds]
        if failed:
            return f"{len(failed)} of {len(self.results)} checks failed: {', '.join(failed)}"
        return "every promise holds"


def read_model_argument(name: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """Return the model of the command line. Raises UsageError for another key than ALLOWED_KEYS."""
    for override in overrides:
        key = override.partition("=")[0].strip()
        if key not in ALLOWED_KEYS:
            raise UsageError(f"--set {key}: is not read here; verify takes {', '.join(ALLOWED_KEYS)}")
    folder = Path(name).expanduser()
    place = str(folder.absolute()) if folder.is_dir() else name  # a relative one looks like a Hub id
    recipe = read_recipe(None, [f"model.path={json.dumps(place)}", *overrides], "sft", None, TaskOptions())
    return recipe.config.model


def check_output(output: Path | None) -> None:
    """Raise UsageError for a page that cannot be written."""
    if output is None:
        return
    if output.suffix not in (".md", ".html"):
        raise UsageError(f"--to {output}: is no kind of page; name a file that ends in .md or .html")
    if not output.parent.is_dir():
        raise UsageError(f"--to {output}: there is no folder {output.parent}; create it")


def verify_model(model: ModelConfig, report_line: Callable[[str], None], name: str = "") -> VerifyReport:
    """Make a small model of this family and run every check; `name`: as the user wrote it. Raises UsageError for one that cannot be read or made."""
    start = time.monotonic()
    quiet_libraries()
    with scratch_folder() as work, _private_cache(work), disable_transformers_logging(True, warnings=True):
        report_line("making a small model of the family")
        shrunk = make_shrunk_model(model, work)
        results = [*run_checks(shrunk, report_line)]
        return VerifyReport(
            model=name or str(model.path),
            model_type=str(shrunk.config.model_type),
            small_model=shrunk.describe(),
            results=results,
            versions=", ".join(f"{name} {version(name)}" for name in PACKAGES),
            cores=count_available_cores(),
            date=date.today().isoformat(),
            seconds=time.monotonic() - start,
        )


@contextmanager
def _private_cache(work: Path) -> Iterator[None]:
    """Keep the records of the checks out of the user's cache."""
    before = os.environ.get("DSTRAIN_CACHE")
    os.environ["DSTRAIN_CACHE"] = str(work / "cache")
    try:
        yield
    finally:
        if before is None:
            del os.environ["DSTRAIN_CACHE"]
        else:
            os.environ["DSTRAIN_CACHE"] = before


def _figure(result: CheckResult) -> str:
    if result.figure is None:
        return ""
    return f"{result.figure:.1e}" if result.limit is None else f"{result.figure:.1e} (limit {result.limit:g})"


def _cells(report: VerifyReport) -> list[tuple[str, str, str, str]]:
    cells = []
    for result in report.results:
        state = result.state if result.holds else result.state.upper()
        cells.append((result.check, state, _figure(result), result.reason))
    return cells


def _about(report: VerifyReport) -> list[str]:
    return [
        f"{report.model}: {report.model_type}; checked with {report.small_model}",
        f"{report.versions}; Python {platform.python_version()}; CPU, {report.cores} cores; {report.date}",
    ]


def show_table(report: VerifyReport) -> str:
    """Return the table for a terminal, and the verdict."""
    cells = _cells(report)
    widths = [max(len(row[at]) for row in [COLUMNS, *cells]) for at in range(3)]
    lines = []
    for row in [COLUMNS, *cells]:
        start = "  ".join(f"{cell:{width}}" for cell, width in zip(row[:3], widths, strict=True))
        reason = textwrap.wrap(row[3], max(WIDTH - len(start), 40), break_long_words=False) or [""]
        lines.append(f"{start}  {reason[0]}".rstrip())
        lines += [f"{' ' * len(start)}  {rest}" for rest in reason[1:]]
    about = "\n".join(_about(report))
    return f"{about}\n\n" + "\n".join(lines) + f"\n\nverify: {report.verdict}, in {report.seconds:.0f} s"


def as_markdown(report: VerifyReport, heading: str = "#") -> str:
    """Return the page in Markdown."""
    lines = [f"{heading} dstrain verify {report.model}", "", *_about(report), ""]
    lines += [f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    lines += [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in _cells(report)]
    return "\n".join([*lines, "", f"{report.verdict.capitalize()}, in {report.seconds:.0f} s.", ""])


def as_html(report: VerifyReport) -> str:
    """Return the page as one HTML file without scripts and without links to other files."""
    rows = "".join(
        f'<tr class="{html.escape(row[1].lower())}">{"".join(f"<td>{html.escape(cell)}</td>" for cell in row)}</tr>\n'
        for row in _cells(report)
    )
    title = html.escape(f"dstrain verify {report.model}")
    about = "".join(f"<p>{html.escape(line)}</p>\n" for line in _about(report))
    header = "".join(f"<th>{name}</th>" for name in COLUMNS)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>{_STYLE}</style></head>\n'
        f"<body><h1>{title}</h1>\n{about}<table>\n<tr>{header}</tr>\n{rows}</table>\n"
        f"<p>{html.escape(report.verdict.capitalize())}, in {report.seconds:.0f} s.</p></body></html>\n"
    )


_STYLE = (
    "body{font-family:system-ui,sans-serif;margin:2em;max-width:75em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.3em .6em;text-align:left;vertical-align:top}"
    ".failed{background:#fdd}.ok td:nth-child(2){color:#070}"
)


def as_json(report: VerifyReport) -> str:
    """Return all results as JSON."""
    return json.dumps({"holds": report.holds, **asdict(report), "seconds": round(report.seconds, 1)}, indent=2)


def write_page(report: VerifyReport, output: Path) -> None:
    """Write the page in the form that the file's name says."""
    atomic_write(output, as_html(report) if output.suffix == ".html" else as_markdown(report))
