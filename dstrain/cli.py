"""The command line. Heavy imports stand inside commands, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dstrain import __version__
from dstrain.cli_options import (
    FOLDER_TASK_OPTION,
    LAUNCH_OPTIONS,
    MODEL_OPTION_NAMES,
    MODEL_OPTIONS,
    RECIPE_OPTIONS,
    SAMPLING_OPTION_NAMES,
    SAMPLING_OPTIONS,
    SCRATCH_OPTION,
    GroupedCommand,
    pop_options,
    with_options,
)
from dstrain.errors import DstrainError, UsageError, explain_system_error
from dstrain.process_setup import prepare_process

if TYPE_CHECKING:
    from dstrain.commands.run_job import Job

UNSUPPORTED_COMMANDS = {
    "plan": "docs/memory.md says what to turn, and peak_memory_gib in metrics.jsonl what was used",
    "doctor": "`dstrain train RECIPE --dry-run` checks a recipe on this machine",
    "report": "metrics.jsonl and TensorBoard hold the numbers",
    "bench": "metrics.jsonl holds tokens_per_second and step_seconds",
}
"""Commands that come later, and what to do today."""


class CommandGroup(click.Group):
    """Turns errors raised on purpose into one message and their exit code."""

    command_class = GroupedCommand

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_process()
        return super().main(*args, **kwargs)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in UNSUPPORTED_COMMANDS:
            raise UsageError(f"dstrain {args[0]}: not supported yet; today {UNSUPPORTED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            if sys.flags.optimize > 1:
                problem = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which transformers reads"
                raise UsageError(f"{problem}; unset PYTHONOPTIMIZE, or set it to 1")
            return super().invoke(ctx)
        except DstrainError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except (RuntimeError, OSError) as error:
            if (fault := explain_system_error(error)) is None:
                raise
            click.echo(f"error: {fault}", err=True)
            ctx.exit(fault.exit_code)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dstrain")
@click.option("--local_rank", "--local-rank", type=int, hidden=True, help="DeepSpeed's launcher puts it here.")
def main(local_rank: int | None) -> None:
    """Train reward models, policies and vision-language models on DeepSpeed."""


@main.command()
@with_options(RECIPE_OPTIONS)
@click.option("--run-dir", "--run_dir", type=click.Path(path_type=Path), help="Default: runs/NAME of the recipe.")
@click.option("--resume", default="auto", metavar="auto|never|DIR", help="Go on from the newest whole checkpoint.")
@click.option(
    "--allow-change", "allowed", multiple=True, metavar="KEY", help="A learning key that may differ on resume."
)
@click.option("--dry-run", is_flag=True, help="Print recipe, DeepSpeed JSON and launch command; start nothing.")
@with_options(LAUNCH_OPTIONS)
def train(
    recipe: str | None, task: str | None, ds_config: str | None, overrides: tuple[str, ...], run_dir: Path | None,
    resume: str, allowed: tuple[str, ...], dry_run: bool, **launch: Any,
) -> None:  # fmt: skip
    """Train RECIPE: a YAML file or the name of a packaged recipe; ./recipe.yaml where left out."""
    from dstrain.commands.recipe_args import TrainRequest
    from dstrain.commands.train import launch_or_train

    wish = TrainRequest(
        recipe=recipe,
        task=task,
        ds_config=ds_config,
        overrides=overrides,
        run_dir=run_dir,
        resume=resume,
        allowed_changes=allowed,
    )
    sys.exit(launch_or_train(wish, launch, dry_run))


@main.command()
@with_options(MODEL_OPTIONS)
@click.option("--data", required=True, help="File to evaluate on.")
@with_options(LAUNCH_OPTIONS, [SCRATCH_OPTION])
def evaluate(run_or_model: Path, data: str, as_json: bool, scratch: Path | None, **options: Any) -> None:
    """Metrics of a run's best or last checkpoint, or of an exported folder, on a file."""
    from dstrain.commands.evaluate import EvaluateJob, show_metrics
    from dstrain.commands.trained_model import ModelSelector

    job = EvaluateJob(
        selector=ModelSelector(folder=run_or_model, **pop_options(options, MODEL_OPTION_NAMES)), data=data
    )
    run_and_exit(job, options, scratch, json.dumps if as_json else show_metrics)


@main.command()
@with_options(MODEL_OPTIONS)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="A prompt; may be given several times.")
@click.option(
    "--image", "images", multiple=True, metavar="FILE", help="An image the prompts are about; several in order."
)
@click.option("--data", help="File whose records ask something.")
@with_options(SAMPLING_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
def generate(
    run_or_model: Path, texts: tuple[str, ...], images: tuple[str, ...], data: str | None, as_json: bool,
    scratch: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Answers of a trained policy to prompts or to a file's records, to look at what was learnt."""
    from dstrain.commands.generate import GenerateJob, show_answers
    from dstrain.commands.trained_model import ModelSelector

    choice = ModelSelector(folder=run_or_model, **pop_options(options, MODEL_OPTION_NAMES))
    job = GenerateJob(
        selector=choice, texts=texts, images=images, data=data, sampling=pop_options(options, SAMPLING_OPTION_NAMES)
    )
    run_and_exit(job, options, scratch, lambda rows: show_answers(rows, as_json))


@main.command()
@with_options(RECIPE_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prepare(
    recipe: str | None, task: str | None, ds_config: str | None, overrides: tuple[str, ...], scratch: Path | None,
    as_json: bool, **launch: Any,
) -> None:  # fmt: skip
    """Tokenise, check and cache RECIPE's data, and with DPO the reference's log-probabilities; training then starts at once."""
    from dstrain.commands.prepare import PrepareJob, show_prepared
    from dstrain.commands.recipe_args import TrainRequest

    job = PrepareJob(TrainRequest(recipe=recipe, task=task, ds_config=ds_config, overrides=overrides))
    run_and_exit(job, launch, scratch, json.dumps if as_json else show_prepared)


def run_and_exit(
    job: Job, launch_options: Mapping[str, Any], scratch: Path | None, show: Callable[[Any], str]
) -> NoReturn:
    """Run the job on its processes, print what came of it, and leave."""
    from dstrain.commands.run_job import run_job

    reply = run_job(job, launch_options, scratch)
    if reply.value is not None:
        click.echo(show(reply.value))
    sys.exit(reply.exit_code)


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--step", default="best", metavar="N|best|last", help="Which checkpoint; last where none is best.")
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@with_options([FOLDER_TASK_OPTION])
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key: data.eval=FILE to probe with"
)
@click.option("--merge-lora", is_flag=True, help="Write one model instead of base and adapter.")
def export(run: Path, step: str, to: Path, task: str | None, overrides: tuple[str, ...], merge_lora: bool) -> None:
    """Write a Hugging Face folder that transformers loads, and prove it on a probe batch."""
    from dstrain.commands.export import export_model

    named = [f"task={json.dumps(task)}"] if task else []
    proof = export_model(run, step, to, [*named, *overrides], merge_lora)
    click.echo(f"{to}: step {proof.step}, {proof.dtype}; reloaded, outputs differ by at most {proof.max_diff:.2g}")


@main.command()
@click.argument("name", required=False)
@click.option(
    "--adopt", type=click.Path(exists=True, path_type=Path), help="Turn a public DeepSpeed JSON into one of ours."
)
def presets(name: str | None, adopt: Path | None) -> None:
    """List the presets, or print one in full."""
    from dstrain.commands.lists import convert_preset_file, list_presets

    if adopt is None:
        click.echo(list_presets(name))
        return
    text, notes = convert_preset_file(adopt)
    click.echo(text, nl=False)
    click.echo("\n".join(notes), err=True)


@main.command()
@click.argument("name", required=False)
def tasks(name: str | None) -> None:
    """List the tasks, or print one's options."""
    from dstrain.commands.lists import list_tasks

    click.echo(list_tasks(name))


@main.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the packaged recipes, or print one in full."""
    from dstrain.commands.lists import list_recipes

    click.echo(list_recipes(name))


@main.command()
@click.argument("task")
@click.option("--to", type=click.Path(path_type=Path), help="File to write; default: print.")
def init(task: str, to: Path | None) -> None:
    """Write a commented starter recipe for TASK."""
    from dstrain.commands.init import render_recipe_template

    text = render_recipe_template(task)
    if to is None:
        click.echo(text, nl=False)
    elif to.exists():
        raise UsageError(f"--to {to}: exists already; choose another name")
    else:
        try:
            to.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--to {to}: cannot be written ({error.strerror}); choose another name") from None
        click.echo(f"{to}: fill in model.path and data.train, then `dstrain train {to}`")


def is_terminal() -> bool:
    """Whether somebody reads what is printed."""
    return sys.stdout.isatty()


@main.group()
def data() -> None:
    """Look at data files."""


@data.command()
@click.argument("file", type=click.Path())
@click.option("--task", required=True, help="The task that will read it.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As for train: data.columns={text: chosen}"
)
@click.option("--all", "every", is_flag=True, help="List every bad record on a terminal too.")
def check(file: str, task: str, overrides: tuple[str, ...], every: bool) -> None:
    """Every bad record of FILE with line and reason; exit 2 if any. A terminal is shown the first ten of each kind."""
    from dstrain.commands.data import check_file, show_validation

    found, cuts = check_file(file, task, overrides)
    lines, total = show_validation(found, every or not is_terminal())
    if lines:
        click.echo(lines)
    click.echo("\n".join(filter(None, (total, cuts))), err=bool(found.bad))
    sys.exit(2 if found.bad else 0)


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--verify", "read_all", is_flag=True, help="Read every file and compare its hash.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(run: Path, read_all: bool, as_json: bool) -> None:
    """Steps, size, world size, ZeRO stage, metric, whole or damaged; with --verify exit 1 where one is not whole."""
    from dstrain.commands.lists import list_checkpoints

    lines, whole = list_checkpoints(run, read_all, as_json)
    click.echo(lines)
    sys.exit(1 if read_all and not whole else 0)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(prog_name="dstrain")
