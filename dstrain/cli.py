"""The command line. Heavy imports stand inside commands, so that --help answers at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from dstrain import __version__
from dstrain.errors import DstrainError, UsageError

LAUNCH_OPTIONS = (
    click.option("--num-gpus", "--num_gpus", type=int, help="Processes on this host; on a CPU just processes."),
    click.option("--num-nodes", "--num_nodes", type=int, help="Hosts to take from the top of the hostfile."),
    click.option("--hostfile", type=click.Path(), help="Lines of `host slots=8`."),
    click.option("--include", default="", help="GPUs to run on: localhost:0,2"),
    click.option("--exclude", default="", help="GPUs to leave alone: localhost:1"),
    click.option("--node-rank", "--node_rank", type=int, help="This host's place among the hosts."),
    click.option("--master-addr", "--master_addr", help="Address of rank 0's host."),
    click.option("--master-port", "--master_port", type=int, help="Port where the ranks meet; default: a free one."),
    click.option("--no-ssh", "--no_ssh", is_flag=True, help="Every host is given its own command."),
    click.option(
        "--launcher",
        type=click.Choice(["deepspeed", "torchrun", "slurm"]),
        default="deepspeed",
        help="What starts the processes; the run is the same.",
    ),
)


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that say on which processes a command runs."""
    for option in reversed(LAUNCH_OPTIONS):
        command = option(command)
    return command


def recipe_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """RECIPE, --task, --ds-config and --set."""
    for option in (
        click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key: optim.lr=2e-5"),
        click.option("--ds-config", "--ds_config", metavar="NAME|PATH|auto", help="Preset or DeepSpeed JSON."),
        click.option("--task", help="A packaged task, a file path, or a dotted module."),
        click.argument("recipe", required=False),
    ):
        command = option(command)
    return command


NOT_YET = {
    "generate": "export the model and use transformers",
    "prepare": "`dstrain data check FILE --task T` finds bad records; the token cache is made when training starts",
    "plan": "docs/memory.md says what to turn, and peak_memory_gib in metrics.jsonl what was used",
    "doctor": "`dstrain train RECIPE --dry-run` checks a recipe on this machine",
    "report": "metrics.jsonl and TensorBoard hold the numbers",
    "bench": "metrics.jsonl holds tokens_per_second and step_seconds",
}
"""Commands that come later, and what to do today."""


class Commands(click.Group):
    """Turns errors raised on purpose into one message and their exit code."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in NOT_YET:
            raise UsageError(f"dstrain {args[0]}: not supported yet; today {NOT_YET[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DstrainError as error:
            click.echo(f"error: {error}", err=True)
            ctx.exit(error.exit_code)
        except RuntimeError as error:
            if "home directory" not in str(error):  # what pathlib says of ~nobody
                raise
            click.echo("error: a path begins with ~, and no home folder is known; write it out, or set HOME", err=True)
            ctx.exit(UsageError.exit_code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="dstrain")
@click.option("--local_rank", "--local-rank", type=int, hidden=True, help="DeepSpeed's launcher puts it here.")
def main(local_rank: int | None) -> None:
    """Train reward models, policies and vision-language models on DeepSpeed."""


@main.command()
@recipe_options
@click.option("--run-dir", "--run_dir", type=click.Path(path_type=Path), help="Default: runs/NAME of the recipe.")
@click.option("--resume", default="auto", metavar="auto|never|DIR", help="Go on from the newest whole checkpoint.")
@click.option(
    "--allow-change", "allowed", multiple=True, metavar="KEY", help="A learning key that may differ on resume."
)
@click.option("--dry-run", is_flag=True, help="Print recipe, DeepSpeed JSON and launch command; start nothing.")
@launch_options
def train(
    recipe: str | None, task: str | None, ds_config: str | None, sets: tuple[str, ...], run_dir: Path | None,
    resume: str, allowed: tuple[str, ...], dry_run: bool, **launch: Any,
) -> None:  # fmt: skip
    """Train RECIPE: a YAML file or the name of a packaged recipe; ./recipe.yaml where left out."""
    from dstrain.commands.find import Wish
    from dstrain.commands.train import launch_or_train

    wish = Wish(
        recipe=recipe, task=task, ds_config=ds_config, sets=sets, run_dir=run_dir, resume=resume, allowed=allowed
    )
    sys.exit(launch_or_train(wish, launch, dry_run))


@main.command()
@click.argument("run_or_model", type=click.Path(exists=True, path_type=Path))
@click.option("--data", required=True, type=click.Path(), help="File to evaluate on.")
@click.option("--task", help="The task, for an exported folder.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key: batch.micro=8")
@click.option(
    "--step", default="best", metavar="N|best|last", help="Which checkpoint of a run; last where none is best."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def evaluate(run_or_model: Path, data: str, task: str | None, sets: tuple[str, ...], step: str, as_json: bool) -> None:
    """Metrics of a run's best or last checkpoint, or of an exported folder, on a file."""
    from dstrain.commands.evaluate import evaluate_model

    row = evaluate_model(run_or_model, data, task, sets, step)
    if as_json:
        click.echo(json.dumps(row))
    else:
        click.echo(
            "\n".join(
                f"{name:24} {value:.6g}" if isinstance(value, float) else f"{name:24} {value}"
                for name, value in row.items()
            )
        )


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--step", default="best", metavar="N|best|last", help="Which checkpoint; last where none is best.")
@click.option("--to", required=True, type=click.Path(path_type=Path), help="Folder to write.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="Override a key: data.eval=FILE to probe with")
@click.option("--merge-lora", is_flag=True, help="Write one model instead of base and adapter.")
def export(run: Path, step: str, to: Path, sets: tuple[str, ...], merge_lora: bool) -> None:
    """Write a Hugging Face folder that transformers loads, and prove it on a probe batch."""
    from dstrain.commands.export import export_model

    if merge_lora:
        raise UsageError("--merge-lora: LoRA is not supported yet; leave the flag out")
    proof = export_model(run, step, to, sets)
    click.echo(f"{to}: step {proof.step}, {proof.dtype}; reloaded, outputs differ by at most {proof.difference:.2g}")


@main.command()
@click.argument("name", required=False)
@click.option(
    "--adopt", type=click.Path(exists=True, path_type=Path), help="Turn a public DeepSpeed JSON into one of ours."
)
def presets(name: str | None, adopt: Path | None) -> None:
    """List the presets, or print one in full."""
    from dstrain.commands.lists import adopt_preset, list_presets

    if adopt is None:
        click.echo(list_presets(name))
        return
    text, notes = adopt_preset(adopt)
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
    from dstrain.commands.starter import starter_recipe

    text = starter_recipe(task)
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


@main.group()
def data() -> None:
    """Look at data files."""


@data.command()
@click.argument("file", type=click.Path())
@click.option("--task", required=True, help="The task that will read it.")
@click.option("--set", "sets", multiple=True, metavar="KEY=VALUE", help="As for train: data.columns={text: chosen}")
def check(file: str, task: str, sets: tuple[str, ...]) -> None:
    """Every bad record of FILE with its line and reason; exit 2 if any."""
    from dstrain.commands.data import check_file

    good, bad = check_file(file, task, sets)
    for row in bad:
        click.echo(f"{row.where}: {row.reason}")
    click.echo(f"{good} good records, {len(bad)} bad", err=bool(bad))
    sys.exit(2 if bad else 0)


@main.command()
@click.argument("run", type=click.Path(exists=True, path_type=Path))
@click.option("--verify", "read_all", is_flag=True, help="Read every file and compare its hash.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def checkpoints(run: Path, read_all: bool, as_json: bool) -> None:
    """Steps, size, world size, ZeRO stage, metric, whole or damaged."""
    from dstrain.commands.lists import list_checkpoints

    click.echo(list_checkpoints(run, read_all, as_json))


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    main(prog_name="dstrain")
