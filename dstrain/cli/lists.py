"""Commands of dstrain that only read: the memory plan, and lists of presets, tasks and recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dstrain.cli.options import PLAN_OPTIONS, RECIPE_OPTIONS, GroupedCommand, with_options


@click.command(cls=GroupedCommand)
@with_options(RECIPE_OPTIONS, PLAN_OPTIONS)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every line of every preset.")
def plan(
    recipe: str | None,
    task: str | None,
    ds_config: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the memory of a recipe with every preset.

    Nothing is started, and data files need not exist. Prints what each process takes on its GPU, in
    host memory and on disk, which presets fit, and the one that ds_config: auto would take.
    """
    from dstrain.commands.plan import PlanRequest, make_report, report_as_json, show_report

    request = PlanRequest(recipe=recipe, task=task, ds_config=ds_config, overrides=overrides, **options)
    report = make_report(request)
    click.echo(report_as_json(report) if as_json else show_report(report))


@click.command(cls=GroupedCommand)
@click.argument("name", required=False)
@click.option(
    "--adopt", type=click.Path(exists=True, path_type=Path), help="Convert a public DeepSpeed JSON to a preset."
)
def presets(name: str | None, adopt: Path | None) -> None:
    """List the presets, or print one."""
    from dstrain.commands.lists import convert_preset_file, list_presets

    if adopt is None:
        click.echo(list_presets(name))
        return
    text, notes = convert_preset_file(adopt)
    click.echo(text, nl=False)
    click.echo("\n".join(notes), err=True)


@click.command(cls=GroupedCommand)
@click.argument("name", required=False)
def tasks(name: str | None) -> None:
    """List the tasks, or print the options of one."""
    from dstrain.commands.lists import list_tasks

    click.echo(list_tasks(name))


@click.command(cls=GroupedCommand)
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the packaged recipes, or print one."""
    from dstrain.commands.lists import list_recipes

    click.echo(list_recipes(name))
