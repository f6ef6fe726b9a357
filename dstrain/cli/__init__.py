"""Command line of dstrain. Heavy packages are imported inside commands to keep --help fast."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dstrain import __version__
from dstrain.cli.command_group import CommandGroup, SubcommandGroup, echo
from dstrain.cli.completion import complete_names, step_names, task_names
from dstrain.cli.lists import completion, init, plan, presets, recipes, tasks
from dstrain.cli.options import (
    FOLDER_TASK_OPTION,
    LAUNCH_OPTIONS,
    MODEL_OPTION_NAMES,
    MODEL_OPTIONS,
    RECIPE_OPTIONS,
    SAMPLING_OPTION_NAMES,
    SAMPLING_OPTIONS,
    SCRATCH_OPTION,
    TRAIN_OPTIONS,
    PathArgument,
    pop_options,
    set_option,
    with_options,
)
from dstrain.cli.runs import report, status
from dstrain.cli.selftest import selftest
from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, escape_controls

if TYPE_CHECKING:
    from dstrain.commands.job.run_job import Job


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="dstrain")
@click.option("--local_rank", "--local-rank", type=int, hidden=True, help="Set by DeepSpeed's launcher.")
@click.option("--debug", is_flag=True, help="Print the traceback of an error; also: DSTRAIN_DEBUG=1.")
def main(local_rank: int | None, debug: bool = False) -> None:
    """Train reward models, policies and vision-language models on DeepSpeed.

    Exit codes: 0 done, 1 failed, 2 bad usage, recipe or data, 75 stopped by a signal after a
    checkpoint (start again).
    """


for command in (plan, presets, tasks, recipes, init, report, status, selftest, completion):
    main.add_command(command)


@main.command()
@with_options(RECIPE_OPTIONS, TRAIN_OPTIONS, LAUNCH_OPTIONS)
def train(
    recipe: str | None, task: str | None, ds_config: str | None, overrides: tuple[str, ...], run_dir: Path | None,
    resume: str, allowed: tuple[str, ...], dry_run: bool, **launch: Any,
) -> None:  # fmt: skip
    """Train a model.

    The argument RECIPE is a YAML file or the name of a packaged recipe; default: ./recipe.yaml.
    """
    from dstrain.commands.recipe.recipe_args import TrainRequest
    from dstrain.commands.train import launch_or_train

    request = TrainRequest(
        recipe=recipe, task=task, ds_config=ds_config, overrides=overrides, run_dir=run_dir, resume=resume,
        allowed_changes=allowed,
    )  # fmt: skip
    sys.exit(launch_or_train(request, launch, dry_run))


@main.command()
@with_options(MODEL_OPTIONS)
@click.option("--data", type=PathArgument(), required=True, help="Data file to evaluate on.")
@with_options(LAUNCH_OPTIONS, [SCRATCH_OPTION])
def evaluate(run_or_model: Path, data: str, as_json: bool, scratch: Path | None, **options: Any) -> None:
    """Print metrics of a model on a data file.

    The argument is a run folder or an exported folder.
    """
    from dstrain.commands.evaluate import EvaluateJob, show_metrics
    from dstrain.commands.models.trained_model import ModelSelector

    job = EvaluateJob(
        selector=ModelSelector(folder=run_or_model, **pop_options(options, MODEL_OPTION_NAMES)), data=data
    )
    run_and_exit(job, options, scratch, json.dumps if as_json else show_metrics)


@main.command()
@with_options(MODEL_OPTIONS)
@click.option("--prompt", "texts", multiple=True, metavar="TEXT", help="Prompt text; repeatable.")
@click.option(
    "--image",
    "images",
    type=PathArgument(),
    multiple=True,
    metavar="FILE",
    help="Image for the prompts; repeatable, in their order.",
)
@click.option("--data", type=PathArgument(), help="Data file; its records are used as prompts.")
@with_options(SAMPLING_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
def generate(
    run_or_model: Path, texts: tuple[str, ...], images: tuple[str, ...], data: str | None, as_json: bool,
    scratch: Path | None, **options: Any,
) -> None:  # fmt: skip
    """Generate answers of a trained policy.

    Prompts come from --prompt or from the records of --data. The argument is a run folder or an
    exported folder.
    """
    from dstrain.commands.generate import GenerateJob, show_answers
    from dstrain.commands.models.trained_model import ModelSelector

    selector = ModelSelector(folder=run_or_model, **pop_options(options, MODEL_OPTION_NAMES))
    job = GenerateJob(
        selector=selector, texts=texts, images=images, data=data, sampling=pop_options(options, SAMPLING_OPTION_NAMES)
    )
    run_and_exit(job, options, scratch, lambda rows: show_answers(rows, as_json))


@main.command()
@with_options(RECIPE_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prepare(
    recipe: str | None, task: str | None, ds_config: str | None, overrides: tuple[str, ...], scratch: Path | None,
    as_json: bool, **launch: Any,
) -> None:  # fmt: skip
    """Tokenize, check and cache a recipe's data.

    For DPO also cache the reference log-probabilities. Training then starts at once.
    """
    from dstrain.commands.prepare import PrepareJob, show_prepared
    from dstrain.commands.recipe.recipe_args import TrainRequest

    job = PrepareJob(TrainRequest(recipe=recipe, task=task, ds_config=ds_config, overrides=overrides))
    run_and_exit(job, launch, scratch, json.dumps if as_json else show_prepared)


@main.command()
@with_options(RECIPE_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
@click.option("--steps", default=20, type=click.IntRange(1), help="Steps to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(
    recipe: str | None, task: str | None, ds_config: str | None, overrides: tuple[str, ...], scratch: Path | None,
    steps: int, as_json: bool, **launch: Any,
) -> None:  # fmt: skip
    """Measure speed and memory of a recipe's training steps.

    No checkpoint, metric or other file is left behind.
    """
    from dstrain.commands.bench import BenchJob, bench_run_dir, show_bench
    from dstrain.commands.recipe.recipe_args import TrainRequest

    request = TrainRequest(recipe=recipe, task=task, ds_config=ds_config, overrides=overrides)
    with bench_run_dir(scratch) as run_dir:
        job = BenchJob(request=request, steps=steps, run_dir=run_dir)
        run_and_exit(job, launch, scratch, json.dumps if as_json else show_bench)


def run_and_exit(
    job: Job, launch_options: Mapping[str, Any], scratch: Path | None, show: Callable[[Any], str]
) -> NoReturn:
    """Run the job, print its result, and exit."""
    from dstrain.commands.job.run_job import run_job

    result = run_job(job, launch_options, scratch)
    if result.value is not None:
        text = show(result.value)
        click.echo(escape_controls(text) if is_terminal() else text)  # a file gets what the model wrote
    sys.exit(result.exit_code)


@main.command()
@click.argument("run", type=PathArgument(exists=True, path_type=Path))
@click.option(
    "--step",
    default="best",
    metavar="N|best|last",
    shell_complete=complete_names(step_names),
    help="Checkpoint; last if there is no best.",
)
@click.option("--to", required=True, type=PathArgument(path_type=Path), help="Folder to write.")
@with_options([FOLDER_TASK_OPTION])
@set_option("Override a recipe key, such as data.eval=FILE for probes.")
@click.option("--merge-lora", is_flag=True, help="Merge the adapters into the base and write one model.")
def export(run: Path, step: str, to: Path, task: str | None, overrides: tuple[str, ...], merge_lora: bool) -> None:
    """Export a run as a Hugging Face folder.

    The folder is reloaded with transformers and verified on a probe batch.
    """
    from dstrain.commands.export import export_model

    named = [f"task={json.dumps(task)}"] if task else []
    report = export_model(run, step, to, [*named, *overrides], merge_lora)
    step_text = "" if report.step is None else f"step {report.step}, "
    echo(f"{to}: {step_text}{report.dtype}; reloaded, outputs differ by at most {report.max_diff:.2g}")


def is_terminal() -> bool:
    """Return True if stdout is a terminal."""
    return sys.stdout.isatty()


class ProgressText:
    """`done of total` on a terminal, written at most once per second; nothing elsewhere."""

    def __init__(self) -> None:
        self._shown_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._shown_at > 1.0 and sys.stderr.isatty():
            self._shown_at = time.monotonic()
            click.echo(f"\r{done} of {total} records", nl=False, err=True)

    def clear(self) -> None:
        """Remove the line, before the results are written."""
        if sys.stderr.isatty():
            click.echo("\r\x1b[K", nl=False, err=True)


@main.group(cls=SubcommandGroup)
def data() -> None:
    """Check data files."""


@data.command()
@click.argument("file", type=PathArgument())
@click.option(
    "--task", required=True, shell_complete=complete_names(task_names, or_file=True), help="Task that reads the file."
)
@set_option("Override a recipe key, such as data.columns={text: chosen}.")
@click.option("--all", "every", is_flag=True, help="List every bad record, also on a terminal.")
def check(file: str, task: str, overrides: tuple[str, ...], every: bool) -> None:
    """List the bad records of FILE with line and reason; exit code 2 if there are any.

    On a terminal only the first ten of each kind are listed.
    """
    from dstrain.commands.data import check_file, show_validation

    progress = ProgressText()
    report, truncations = check_file(file, task, overrides, progress)
    progress.clear()
    lines, total = show_validation(report, every, is_terminal())
    if lines:
        echo(lines)
    echo("\n".join(filter(None, (total, truncations))), err=bool(report.bad))
    sys.exit(EXIT_USAGE if report.bad else EXIT_DONE)


@main.command()
@click.argument("run", type=PathArgument(exists=True, path_type=Path))
@click.option("--verify", "read_all", is_flag=True, help="Read every file and compare its hash.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(run: Path, read_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run.

    Prints step, size, world size, ZeRO stage, metric, and whether each is complete or damaged.

    With --verify, exit code 1 if one is damaged.
    """
    from dstrain.commands.lists.checkpoints import list_checkpoints

    lines, all_complete = list_checkpoints(run, read_all, as_json)
    echo(lines)
    sys.exit(EXIT_FAILED if read_all and not all_complete else EXIT_DONE)
