"""Commands that train nothing: the memory plan, presets, tasks and recipes, starter recipes, completion scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from dstrain.cli.command_group import GroupedCommand, echo
from dstrain.cli.completion import complete_names, completion_script, preset_names, recipe_names, task_names
from dstrain.cli.options import MACHINE_OPTIONS, PLAN_OPTIONS, RECIPE_OPTIONS, PathArgument, with_options
from dstrain.errors import UsageError


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
    echo(report_as_json(report) if as_json else show_report(report))


@click.command(cls=GroupedCommand)
@click.argument("name", required=False, shell_complete=complete_names(preset_names))
@click.option(
    "--adopt", type=PathArgument(exists=True, path_type=Path), help="Convert a public DeepSpeed JSON to a preset."
)
def presets(name: str | None, adopt: Path | None) -> None:
    """List the presets, or print one."""
    from dstrain.commands.lists.presets import convert_preset_file, list_presets

    if adopt is None:
        echo(list_presets(name))
        return
    text, notes = convert_preset_file(adopt)
    click.echo(text, nl=False)
    echo("\n".join(notes), err=True)


@click.command(cls=GroupedCommand)
@click.argument("name", required=False, shell_complete=complete_names(task_names))
def tasks(name: str | None) -> None:
    """List the tasks, or print the options of one."""
    from dstrain.commands.lists.tasks import list_tasks

    echo(list_tasks(name))


@click.command(cls=GroupedCommand)
@click.argument("name", required=False, shell_complete=complete_names(recipe_names))
def recipes(name: str | None) -> None:
    """List the packaged recipes, or print one."""
    from dstrain.commands.lists.recipes import list_recipes

    echo(list_recipes(name))


@click.command(cls=GroupedCommand)
@click.argument("task", shell_complete=complete_names(task_names, or_file=True))
@with_options(MACHINE_OPTIONS)
@click.option("--to", type=PathArgument(path_type=Path), help="File to write; default: stdout.")
def init(task: str, gpus: int | None, gpu_memory: str | None, to: Path | None) -> None:
    """Write a commented starter recipe for TASK and this machine.

    Model, adapters, precision, preset and loader processes follow from the GPUs and cores, or from
    --gpus and --gpu-memory for another machine.
    """
    from dstrain.commands.init import render_recipe_template
    from dstrain.planner.hardware import detect_hardware

    text = render_recipe_template(task, detect_hardware(gpus, gpu_memory))
    if to is None:
        click.echo(text, nl=False)
    elif to.exists():
        raise UsageError(f"--to {to}: already exists; choose another name")
    else:
        try:
            to.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--to {to}: cannot be written ({error.strerror}); choose another name") from None
        click.echo(f"{to}: fill in data.train and data.eval, then `dstrain train {to}`")


@click.command(cls=GroupedCommand)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options, recipes, presets, tasks and recipe keys. Add it to ~/.bashrc or
    ~/.zshrc (after compinit), or write it to ~/.config/fish/completions/dstrain.fish.
    """
    click.echo(completion_script(ctx.find_root().command, shell))
