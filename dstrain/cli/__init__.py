"""Command line of dstrain. Heavy packages are imported inside commands to keep --help fast."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from dstrain import __version__
from dstrain.cli.command_group import CommandGroup, SubcommandGroup, echo
from dstrain.cli.options import (
    CHECKPOINT_OPTIONS,
    FOLDER_TASK_OPTION,
    LAUNCH_OPTIONS,
    MACHINE_OPTIONS,
    MODEL_OPTIONS,
    PLAN_OPTIONS,
    PRESETS,
    READER_OPTIONS,
    RECIPE_OPTIONS,
    RECIPES,
    SAMPLING_OPTIONS,
    SCRATCH_OPTION,
    STEPS,
    TASKS,
    TOKEN_OPTIONS,
    TRAIN_OPTIONS,
    PathArgument,
    complete_names,
    completion_script,
    launch_option,
    pop_fields,
    set_option,
    with_options,
)
from dstrain.errors import EXIT_DONE, EXIT_FAILED, EXIT_USAGE, UsageError, escape_controls
from dstrain.process_setup import limit_spinning

if TYPE_CHECKING:
    from dstrain.commands.run_job import Job


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(__version__, prog_name="dstrain")
@click.option("--local_rank", "--local-rank", type=int, hidden=True, help="Set by DeepSpeed's launcher.")
@click.option("--debug", is_flag=True, help="Print the traceback of an error; also: DSTRAIN_DEBUG=1.")
def main(local_rank: int | None, debug: bool = False) -> None:
    """Train reward models, policies and vision-language models on DeepSpeed.

    Exit codes: 0 done, 1 failed, 2 bad usage, recipe or data, 75 stopped by a signal after a
    checkpoint (start again).
    """
    limit_spinning()


@main.command()
@with_options(RECIPE_OPTIONS, TRAIN_OPTIONS, LAUNCH_OPTIONS)
def train(dry_run: bool, **options: Any) -> None:
    """Train a model.

    The argument RECIPE is a YAML file or the name of a packaged recipe; default: ./recipe.yaml.
    """
    from dstrain.commands.recipe_args import TrainRequest
    from dstrain.commands.train import launch_training, train_as_rank
    from dstrain.launch.topology import worker_from_env

    request = TrainRequest(**pop_fields(TrainRequest, options))
    worker = None if dry_run else worker_from_env(os.environ)
    sys.exit(launch_training(request, options, dry_run) if worker is None else train_as_rank(worker, request))


@main.command()
@with_options(MODEL_OPTIONS)
@click.option("--data", type=PathArgument(), required=True, help="Data file to evaluate on.")
@with_options(LAUNCH_OPTIONS, [SCRATCH_OPTION])
def evaluate(data: str, as_json: bool, scratch: Path | None, **options: Any) -> None:
    """Print metrics of a model on a data file.

    The argument is a run folder or an exported folder.
    """
    from dstrain.commands.evaluate import EvaluateJob, show_metrics
    from dstrain.commands.trained_model import ModelSelector

    job = EvaluateJob(selector=ModelSelector(**pop_fields(ModelSelector, options)), data=data)
    run_and_exit(job, options, scratch, json.dumps if as_json else show_metrics)


@main.command()
@with_options(MODEL_OPTIONS)
@click.option(
    "--data",
    type=PathArgument(),
    required=True,
    help="Data file: pairs, prompts with `completions`, or single answers.",
)
@click.option(
    "--out",
    type=PathArgument(),
    required=True,
    metavar="FILE|-",
    help="File to write, a line of JSON for each record; - for standard output.",
)
@with_options(LAUNCH_OPTIONS, [SCRATCH_OPTION])
def score(data: str, out: str, as_json: bool, scratch: Path | None, **options: Any) -> None:
    """Score each answer of a data file, record by record.

    A reward model gives rewards, a policy the log-probabilities of answers. The argument is a run
    folder or an exported folder.
    """
    from dstrain.commands.score import ScoreJob, show_scores
    from dstrain.commands.trained_model import ModelSelector

    job = ScoreJob(selector=ModelSelector(**pop_fields(ModelSelector, options)), data=data, out=out)
    run_and_exit(job, options, scratch, json.dumps if as_json else show_scores)


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
    texts: tuple[str, ...],
    images: tuple[str, ...],
    data: str | None,
    as_json: bool,
    scratch: Path | None,
    **options: Any,
) -> None:
    """Generate answers of a trained policy.

    Prompts come from --prompt or from the records of --data. The argument is a run folder or an
    exported folder.
    """
    from dstrain.commands.generate import GenerateJob, show_answers
    from dstrain.commands.trained_model import ModelSelector
    from dstrain.launch.plan import LaunchOptions

    selector, launch = ModelSelector(**pop_fields(ModelSelector, options)), pop_fields(LaunchOptions, options)
    job = GenerateJob(selector=selector, texts=texts, images=images, data=data, sampling=options)
    run_and_exit(job, launch, scratch, lambda rows: show_answers(rows, as_json))


@main.command()
@click.argument(
    "models", nargs=-1, required=True, metavar="RUN_OR_MODEL [OTHER]", type=PathArgument(exists=True, path_type=Path)
)
@with_options(CHECKPOINT_OPTIONS)
@click.option("--system", metavar="TEXT", help="System prompt.")
@with_options(TOKEN_OPTIONS)
def chat(
    models: tuple[Path, ...],
    task: str | None,
    step: str,
    overrides: tuple[str, ...],
    system: str | None,
    **sampling: Any,
) -> None:
    """Talk with a trained policy in the terminal.

    The arguments are run folders or exported folders; with two of them both answer each message. A
    line that begins with / is a command: /image PATH, /system TEXT, /temperature X, /reset, /help,
    /exit. Lines of a pipe are messages too.
    """
    from dstrain.commands.chat import open_chat, run_chat

    if len(models) > 2:
        raise UsageError(f"{len(models)} models: at most two can answer")
    run_chat(open_chat(models, task, step, overrides, system, sampling))


@main.command()
@with_options(RECIPE_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def prepare(scratch: Path | None, as_json: bool, **options: Any) -> None:
    """Tokenize, check and cache a recipe's data.

    For DPO also cache the reference log-probabilities. Training then starts at once.
    """
    from dstrain.commands.prepare import PrepareJob, show_prepared
    from dstrain.commands.recipe_args import TrainRequest

    job = PrepareJob(TrainRequest(**pop_fields(TrainRequest, options)))
    run_and_exit(job, options, scratch, json.dumps if as_json else show_prepared)


@main.command()
@with_options(RECIPE_OPTIONS, LAUNCH_OPTIONS, [SCRATCH_OPTION])
@click.option("--steps", default=20, type=click.IntRange(1), help="Steps to measure.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def bench(scratch: Path | None, steps: int, as_json: bool, **options: Any) -> None:
    """Measure speed and memory of a recipe's training steps.

    No checkpoint, metric or other file is left behind.
    """
    from dstrain.commands.bench import BenchJob, show_bench
    from dstrain.commands.recipe_args import TrainRequest
    from dstrain.commands.run_job import scratch_folder

    request = TrainRequest(**pop_fields(TrainRequest, options))
    # The folder of a launch is removed by the launching process.
    with scratch_folder() if scratch is None else nullcontext(scratch) as folder:
        job = BenchJob(request=request, steps=steps, run_dir=folder / "run")
        run_and_exit(job, options, scratch, json.dumps if as_json else show_bench)


def run_and_exit(
    job: Job, launch_options: Mapping[str, Any], scratch: Path | None, show: Callable[[Any], str]
) -> NoReturn:
    """Run the job, print its result, and exit."""
    from dstrain.commands.run_job import run_job

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
    shell_complete=complete_names(STEPS),
    help="Checkpoint; last if there is no best.",
)
@click.option("--to", required=True, type=PathArgument(path_type=Path), help="Folder to write.")
@with_options([FOLDER_TASK_OPTION])
@set_option("Override a recipe key, such as data.eval=FILE for probes.")
@click.option("--merge-lora", is_flag=True, help="Merge the adapters into the base and write one model.")
@click.option(
    "--max-shard-size",
    "--max_shard_size",
    metavar="SIZE",
    default="2GB",
    help="Largest file of weights, such as 5GB; adapters are one file.",
)
@click.option("--license", metavar="ID", help="License for the model card, such as apache-2.0.")
@click.option("--push-to-hub", "--push_to_hub", metavar="OWNER/NAME", help="Upload it to the Hugging Face Hub.")
@click.option("--private", is_flag=True, help="Create a private repository.")
@click.option("--dry-run", is_flag=True, help="Check it and list its files; leave nothing, use no network.")
def export(
    run: Path, step: str, to: Path, task: str | None, overrides: tuple[str, ...], merge_lora: bool,
    max_shard_size: str, license: str | None, push_to_hub: str | None, private: bool, dry_run: bool,
) -> None:  # fmt: skip
    """Export a run as a Hugging Face folder, with a model card.

    The folder is reloaded with transformers and verified on a probe batch before it is uploaded.
    """
    from dstrain.commands.export import export_model
    from dstrain.commands.publish import Publication

    named = [f"task={json.dumps(task)}"] if task else []
    target = Publication(repo_id=push_to_hub, private=private, license=license, dry_run=dry_run)
    report = export_model(run, step, to, [*named, *overrides], merge_lora, max_shard_size, target)
    echo(report.describe(to, target))


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


@main.command()
@click.argument("scored", type=PathArgument(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--to",
    type=PathArgument(path_type=Path),
    required=True,
    metavar="FILE",
    help="File to write, a line of JSON for each pair.",
)
@click.option(
    "--score",
    "column",
    default="score",
    metavar="NAME",
    help="Name of the score: score of a reward model, logp of a policy.",
)
@click.option(
    "--min-margin", "--min_margin", default=0.0, type=click.FloatRange(0), help="Least difference of the two scores."
)
@click.option(
    "--all", "all_pairs", is_flag=True, help="Write each pair of answers, not only the best against the worst."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def pairs(scored: Path, to: Path, column: str, min_margin: float, all_pairs: bool, as_json: bool) -> None:
    """Make preference pairs out of the scored answers of `dstrain score`.

    Each record gives its best answer as the chosen one and its worst as the rejected one. Ties,
    empty answers and repeated ones are left out.
    """
    from dstrain.commands.pairs import make_pairs, show_report

    report = make_pairs(scored, to, column, min_margin, all_pairs)
    echo(json.dumps(report.as_json()) if as_json else show_report(report, to))


@main.group(cls=SubcommandGroup)
def data() -> None:
    """Check data files, and show records as the model sees them."""


@data.command()
@click.argument("file", type=PathArgument())
@with_options(READER_OPTIONS)
@set_option("Override a recipe key, such as data.columns={text: chosen}.")
@click.option("--all", "every", is_flag=True, help="List every bad record, also on a terminal.")
def check(file: str, task: str | None, recipe: str | None, overrides: tuple[str, ...], every: bool) -> None:
    """List the bad records of FILE with line and reason; exit code 2 if there are any.

    On a terminal only the first ten of each kind are listed.
    """
    from dstrain.commands.data import check_file, show_validation

    progress = ProgressText()
    report, truncations = check_file(file, task, overrides, progress, recipe)
    progress.clear()
    lines, total = show_validation(report, every, is_terminal())
    if lines:
        echo(lines)
    echo("\n".join(filter(None, (total, truncations))), err=bool(report.bad))
    sys.exit(EXIT_USAGE if report.bad else EXIT_DONE)


@data.command()
@click.argument("file", type=PathArgument())
@with_options(READER_OPTIONS)
@set_option("Override a recipe key, such as model.path=FOLDER.")
@click.option("--limit", default=3, type=click.IntRange(1), help="Number of records.")
@click.option("--color/--no-color", default=None, help="Color or mark the learnt tokens; default: color on a terminal.")
def show(
    file: str, task: str | None, recipe: str | None, overrides: tuple[str, ...], limit: int, color: bool | None
) -> None:
    """Show records of FILE as the model sees them.

    The text is decoded from the tokens, special ones included. Learnt tokens are green, or between \u27e6 and \u27e7
    in a pipe. Images are named with their size. The last line says how the records are packed.
    """
    from dstrain.commands.data import show_file

    use_color = (is_terminal() and "NO_COLOR" not in os.environ) if color is None else color
    for text in show_file(file, recipe, task, overrides, limit, use_color):
        click.echo(text, color=use_color)


@main.command()
@click.argument("run", type=PathArgument(exists=True, path_type=Path))
@click.option("--verify", "read_all", is_flag=True, help="Read every file and compare its hash.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(run: Path, read_all: bool, as_json: bool) -> None:
    """List the checkpoints of a run.

    Prints step, size, world size, ZeRO stage, metric, and whether each is complete or damaged.

    With --verify, exit code 1 if one is damaged.
    """
    from dstrain.commands.lists import list_checkpoints

    lines, all_complete = list_checkpoints(run, read_all, as_json)
    echo(lines)
    sys.exit(EXIT_FAILED if read_all and not all_complete else EXIT_DONE)


@main.command()
@with_options(RECIPE_OPTIONS, PLAN_OPTIONS)
@click.option("--lines", "has_formulas", is_flag=True, help="Print each line with its formula and its source.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with every line of every preset.")
def plan(has_formulas: bool, as_json: bool, **options: Any) -> None:
    """Predict the memory of a recipe with every preset.

    Nothing is started, and data files need not exist. Prints what each process takes on its GPU, in
    host memory and on disk, which presets fit, and the one that ds_config: auto would take.
    """
    from dstrain.commands.plan import PlanRequest, make_report, report_as_json, show_report

    report = make_report(PlanRequest(**options))
    echo(report_as_json(report) if as_json else show_report(report, has_formulas))


@main.command()
@click.argument("name", required=False, shell_complete=complete_names(PRESETS))
@click.option(
    "--adopt", type=PathArgument(exists=True, path_type=Path), help="Convert a public DeepSpeed JSON to a preset."
)
def presets(name: str | None, adopt: Path | None) -> None:
    """List the presets, or print one."""
    from dstrain.commands.lists import convert_preset_file, list_presets

    if adopt is None:
        echo(list_presets(name))
        return
    text, notes = convert_preset_file(adopt)
    click.echo(text, nl=False)
    echo("\n".join(notes), err=True)


@main.command()
@click.argument("name", required=False, shell_complete=complete_names(TASKS))
def tasks(name: str | None) -> None:
    """List the tasks, or print the options of one."""
    from dstrain.commands.lists import list_tasks

    echo(list_tasks(name))


@main.command()
@click.argument("name", required=False, shell_complete=complete_names(RECIPES))
def recipes(name: str | None) -> None:
    """List the packaged recipes, or print one."""
    from dstrain.commands.lists import list_recipes

    echo(list_recipes(name))


@main.command()
@click.argument("task", required=False, shell_complete=complete_names(TASKS, or_file=True))
@with_options(MACHINE_OPTIONS)
@click.option(
    "--from",
    "configuration",
    type=PathArgument(exists=True, dir_okay=False, path_type=Path),
    help="Configuration of TRL, LLaMA-Factory, axolotl, ms-swift or align-anything (YAML, JSON, or a shell script).",
)
@click.option("--to", type=PathArgument(path_type=Path), help="File to write; default: stdout.")
def init(
    task: str | None, gpus: int | None, gpu_memory: str | None, configuration: Path | None, to: Path | None
) -> None:
    """Write a recipe: a starter for TASK and this machine, or from another trainer's configuration.

    In a starter, model, adapters, precision, preset and loader processes follow from the GPUs and cores, or from
    --gpus and --gpu-memory for another machine. With --from, each key of the file is in the recipe, or in a comment
    with the reason; TASK is needed if the file does not say the method.
    """
    if to is not None and to.exists():
        raise UsageError(f"--to {to}: already exists; choose another name")
    differences: list[str] = []
    if configuration is not None:
        from dstrain.commands.init_from import convert_file

        if gpus is not None or gpu_memory is not None:
            raise UsageError("--gpus and --gpu-memory: are for a starter recipe; leave them out with --from")
        converted = convert_file(configuration, task)
        text, hint, differences = converted.text, converted.describe(), converted.differences
    elif task is None:
        raise UsageError(
            "no TASK was given; name one (`dstrain tasks` lists them), or another trainer's file with --from"
        )
    else:
        from dstrain.commands.init import render_recipe_template
        from dstrain.planner.choose import detect_hardware

        text, hint = render_recipe_template(task, detect_hardware(gpus, gpu_memory)), "fill in data.train and data.eval"
    if to is None:
        click.echo(text, nl=False)
        if configuration is not None:
            echo(hint, err=True)
    else:
        try:
            to.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--to {to}: cannot be written ({error.strerror}); choose another name") from None
        click.echo(f"{to}: {hint}, then `dstrain train {to}`")
    for line in differences:
        echo(f"  differs: {line}", err=to is None)


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the completion script of a shell.

    It completes commands, options, recipes, presets, tasks and recipe keys. Add it to ~/.bashrc or
    ~/.zshrc (after compinit), or write it to ~/.config/fish/completions/dstrain.fish.
    """
    click.echo(completion_script(ctx.find_root().command, shell))


@main.command()
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
    from dstrain.commands.runs import make_report

    echo(str(make_report(runs, to)))


@main.command()
@click.argument("run", type=PathArgument(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def status(run: Path, as_json: bool) -> None:
    """Print whether a run is alive, where, how fast and until when.

    Exit code 0 for any run, alive or not: scripts read `state` of --json.
    """
    from dstrain.commands.runs import read_status, show_status

    found = read_status(run)
    echo(json.dumps(found) if as_json else show_status(found))


@main.command()
@launch_option(
    "--hostfile", type=PathArgument(), help="File with one line per host: host1 slots=8; default: this host."
)
@click.option(
    "--run-dir",
    "--run_dir",
    type=PathArgument(path_type=Path),
    default=Path("runs"),
    show_default=True,
    help="Folder of the runs, which all hosts must share.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--phase", type=click.Choice(["all-reduce"]), hidden=True, help="Set by dstrain for its processes.")
@with_options([SCRATCH_OPTION])
def doctor(hostfile: str | None, run_dir: Path, as_json: bool, phase: str | None, scratch: Path | None) -> None:
    """Find what would stop a run, here or on all hosts.

    Versions, GPUs, memory, disks, limits, compilers and kernels of each host; with --hostfile also
    ssh, clocks, the shared folder and the network, and an all-reduce over all ranks. Each problem has
    its fix. Exit code 1 if one would stop a run.
    """
    from dstrain.commands.doctor import AllReduceJob, findings_as_json, run_doctor, show_findings
    from dstrain.commands.run_job import run_job

    if phase is not None:
        sys.exit(run_job(AllReduceJob(), {}, scratch).exit_code)
    findings = run_doctor(hostfile, run_dir.absolute())
    echo(findings_as_json(findings) if as_json else show_findings(findings))
    sys.exit(EXIT_FAILED if any(finding.state == "fault" for finding in findings) else EXIT_DONE)


SELFTEST_PRESETS = ("zero0", "zero1", "zero2", "zero3")


@main.command()
@click.option(
    "--preset",
    "presets",
    multiple=True,
    metavar="NAME|PATH",
    shell_complete=complete_names(PRESETS, or_file=True),
    default=SELFTEST_PRESETS,
    help="Preset or DeepSpeed JSON to test; repeatable.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--keep", type=PathArgument(path_type=Path), help="New folder for runs and logs, kept; default: a temporary one."
)
def selftest(presets: tuple[str, ...], as_json: bool, keep: Path | None) -> None:
    """Prove this machine: train, stop, resume, export, evaluate.

    A tiny reward model trains with every ZeRO stage, is stopped by a signal and resumed by another
    number of processes, with the losses of a run without a break. Takes two to three minutes on two
    cores; no network. Exit code 1 if a check fails.
    """
    from dstrain.commands.environment import collect_lines, show_environment
    from dstrain.commands.selftest import report_as_json, run_selftest, show_report, work_folder

    with work_folder(keep) as folder:
        environment = collect_lines(folder)
        if not as_json:
            click.echo(f"{show_environment(environment)}\n")
        report = run_selftest(presets, folder, lambda line: click.echo(f"selftest: {line}", err=True), environment)
    click.echo(report_as_json(report) if as_json else f"\n{show_report(report)}")
    sys.exit(EXIT_DONE if report.passed else EXIT_FAILED)


@main.command()
@click.argument("model")
@set_option("Key of the model: model.revision, model.trust_remote_code or model.attn_implementation; repeatable.")
@click.option(
    "--to", "output", type=PathArgument(path_type=Path), metavar="FILE", help="Write the table as a page, .md or .html."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def verify(model: str, overrides: tuple[str, ...], output: Path | None, as_json: bool) -> None:
    """Prove what dstrain promises for a model's family.

    MODEL is a folder or a Hub id. Its config is made small: a few layers of each kind, narrow, with
    random weights and its own tokenizer or processor; its weights are not read. On the CPU of this
    machine the small model must compute alike in padded, packed and single rows, with ZeRO 2 and 3,
    with adapters and 4 bits, and after an export, whose tensors must be named as in the model's files.
    Takes up to three minutes on two cores. Exit code 1 if a promise does not hold.
    """
    from dstrain.commands import verify as command

    command.check_output(output)
    given = command.read_model_argument(model, overrides)
    report = command.verify_model(given, lambda line: click.echo(f"verify: {line}", err=True), model)
    if output is not None:
        command.write_page(report, output)
    echo(command.as_json(report) if as_json else command.show_table(report))
    sys.exit(EXIT_DONE if report.holds else EXIT_FAILED)
