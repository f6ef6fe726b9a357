"""Command `dstrain selftest`."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import click

from dstrain.cli.command_group import GroupedCommand
from dstrain.cli.completion import complete_names, preset_names
from dstrain.cli.options import SCRATCH_OPTION, PathArgument, with_options
from dstrain.errors import EXIT_DONE, EXIT_FAILED

DEFAULT = ("zero0", "zero1", "zero2", "zero3")


@click.command(cls=GroupedCommand)
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="NAME|PATH",
    shell_complete=complete_names(preset_names, or_file=True),
    default=DEFAULT,
    help="Preset or DeepSpeed JSON to test; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--keep", type=PathArgument(path_type=Path), help="New folder for runs and logs, kept; default: a temporary one."
)
@click.option("--phase", type=click.Choice(["stop", "resume"]), hidden=True, help="Set by dstrain for its processes.")
@click.option("--batch", type=int, default=8, hidden=True, help="Set by dstrain for its processes.")
@click.option("--processes", type=int, hidden=True, help="Set by dstrain for its processes.")
@with_options([SCRATCH_OPTION])
def selftest(
    presets: tuple[str, ...], as_json: bool, keep: Path | None, phase: str | None, batch: int, processes: int | None,
    scratch: Path | None,
) -> None:  # fmt: skip
    """Prove this machine: train, stop, resume, export, evaluate.

    A tiny reward model trains with every ZeRO stage: without a break, and stopped by a signal and
    resumed by another number of processes, with equal losses. Takes about a minute on two cores; no
    network. Exit code 1 if a check fails.
    """
    if phase is not None and keep is not None:
        sys.exit(_run_phase(phase, keep, presets, (batch, processes, scratch)))
    sys.exit(_run_all(presets, keep, as_json))


def _run_phase(
    phase: str, folder: Path, presets: tuple[str, ...], settings: tuple[int, int | None, Path | None]
) -> int:
    """Run one launch, or one process of it; `settings`: batch, processes and scratch folder."""
    from dstrain.commands.job.run_job import run_job
    from dstrain.commands.selftest.job import SelftestJob

    batch, processes, scratch = settings
    job = SelftestJob("stop" if phase == "stop" else "resume", folder, presets, batch)
    return run_job(job, {"num_gpus": processes}, scratch).exit_code


def _run_all(presets: tuple[str, ...], keep: Path | None, as_json: bool) -> int:
    """Run the selftest and print its report. Returns the exit code."""
    from dstrain.commands.selftest.run import describe_environment, run_selftest, work_folder
    from dstrain.commands.selftest.table import report_as_json, show_environment, show_report

    with work_folder(keep) as folder:
        environment = describe_environment(folder)
        if not as_json:
            click.echo(f"{show_environment(environment)}\n")
        report = run_selftest(presets, folder, lambda line: click.echo(f"selftest: {line}", err=True))
        report = replace(report, environment=environment)
    click.echo(report_as_json(report) if as_json else f"\n{show_report(report)}")
    return EXIT_DONE if report.passed else EXIT_FAILED
