"""Commands of dstrain on run folders: report and status."""

from __future__ import annotations

import json
from pathlib import Path

import click

from dstrain.cli.command_group import GroupedCommand, echo
from dstrain.cli.options import PathArgument


@click.command(cls=GroupedCommand)
@click.argument("runs", type=PathArgument(path_type=Path), nargs=-1, required=True, metavar="RUN...")
@click.option(
    "--to",
    type=PathArgument(path_type=Path),
    metavar="FILE.html",
    help="File to write; default: report.html in the run folder, for several runs in the working folder.",
)
def report(runs: tuple[Path, ...], to: Path | None) -> None:
    """Write one HTML page with charts and verdicts of runs.

    Losses and metrics, learning rate, throughput, memory, events, checkpoints and configuration; several
    runs are overlaid, with a table of what differs between them. The page loads nothing from the network.
    """
    from dstrain.commands.runs.report import make_report

    echo(str(make_report(runs, to)))


@click.command(cls=GroupedCommand)
@click.argument("run", type=PathArgument(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: Path, as_json: bool) -> None:
    """Print whether a run is alive, where, how fast and until when.

    Exit code 0 for any run, alive or not: scripts read `state` of --json.
    """
    from dstrain.commands.runs.status import read_status, show_status

    found = read_status(run)
    echo(json.dumps(found) if as_json else show_status(found))
