"""Click options and command classes shared by several commands."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import click

from dstrain.errors import (
    DEBUG_ENV,
    EXIT_FAILED,
    EXIT_OUTPUT_CLOSED,
    DstrainError,
    UsageError,
    describe_unexpected,
    explain_system_error,
    format_traceback,
    is_debug,
    save_traceback,
)
from dstrain.process_setup import discard_closed_output, prepare_process

UNSUPPORTED_COMMANDS = {
    "doctor": "check a recipe on this machine with `dstrain train RECIPE --dry-run`",
}
"""Planned commands, and what to use until they exist."""


class _Count(click.IntRange):
    """Whole number up to a limit; click calls IntRange a `valid integer range` in its messages."""

    name = "integer"


COUNT = _Count(max=100_000)
LAUNCH_OPTIONS = (
    click.option(
        "--num-gpus",
        "--num_gpus",
        type=COUNT,
        help="Processes per host, one per GPU; default: all visible GPUs, or 1 on a CPU.",
    ),
    click.option(
        "--num-nodes",
        "--num_nodes",
        type=COUNT,
        help="Number of hosts, from the top of the hostfile.",
    ),
    click.option("--hostfile", type=click.Path(), help="File with one line per host: host1 slots=8"),
    click.option("--include", default="", help="GPUs to run on: localhost:0,2 or host1@host2:0,2"),
    click.option("--exclude", default="", help="GPUs not to use: localhost:1 or host2"),
    click.option(
        "--node-rank", "--node_rank", type=int, help="Index of this host in the hostfile, from 0; with --no-ssh."
    ),
    click.option("--master-addr", "--master_addr", help="Address of rank 0's host."),
    click.option(
        "--master-port", "--master_port", type=int, help="Rendezvous port on rank 0's host; default: a free one."
    ),
    click.option("--no-ssh", "--no_ssh", is_flag=True, help="You start the command on every host yourself."),
    click.option(
        "--launcher",
        type=click.Choice(["deepspeed", "openmpi", "ssh", "torchrun", "slurm"]),
        default="deepspeed",
        help="Program that starts the processes; default deepspeed, which uses pdsh if there is a hostfile.",
    ),
)
"""Processes and hosts: the fields of `dstrain.launch.command.LaunchOptions`."""
LAUNCH_OPTION_NAMES = frozenset(
    (
        "num_gpus",
        "num_nodes",
        "hostfile",
        "include",
        "exclude",
        "node_rank",
        "master_addr",
        "master_port",
        "no_ssh",
        "launcher",
    )
)
RECIPE_OPTIONS = (
    click.argument("recipe", required=False),
    click.option("--task", help="Packaged task, path of a task file, or dotted module."),
    click.option(
        "--ds-config",
        "--ds_config",
        metavar="NAME|PATH|auto",
        help="Preset or DeepSpeed JSON file; default: ds_config of the recipe.",
    ),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY=VALUE",
        help="Override a recipe key, such as optim.lr=2e-5; repeatable.",
    ),
)
TRAIN_OPTIONS = (
    click.option(
        "--run-dir", "--run_dir", type=click.Path(path_type=Path), help="Run folder; default: runs/NAME of the recipe."
    ),
    click.option(
        "--resume",
        default="auto",
        metavar="auto|never|DIR",
        show_default=True,
        help="Resume from the latest complete checkpoint.",
    ),
    click.option(
        "--allow-change",
        "allowed",
        multiple=True,
        metavar="KEY",
        help="Recipe key that may differ on resume; repeatable.",
    ),
    click.option("--dry-run", is_flag=True, help="Print recipe, DeepSpeed JSON and launch command; start nothing."),
)
PLAN_OPTIONS = (
    click.option(
        "--gpu-memory",
        "--gpu_memory",
        metavar="SIZE",
        help="Memory of one GPU, such as 24GiB; default: this machine's.",
    ),
    click.option("--gpus", type=click.IntRange(1, 1024), help="GPUs per host; default: those of this machine, or 1."),
    click.option("--nodes", type=click.IntRange(1, 100_000), default=1, show_default=True, help="Hosts."),
    click.option(
        "--model-shape",
        "--model_shape",
        metavar="NAME",
        help="Plan a packaged shape, such as llama-3.1-70b, instead of the recipe's model.",
    ),
)
FOLDER_TASK_OPTION = click.option(
    "--task", help="Packaged task, or the task file of the run: code in the folder is not run by itself."
)
MODEL_OPTIONS = (
    click.argument("run_or_model", type=click.Path(exists=True, path_type=Path)),
    FOLDER_TASK_OPTION,
    click.option("--step", default="best", metavar="N|best|last", show_default=True, help="Checkpoint of a run; last if there is no best."),
    click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a recipe key, such as batch.micro=8; repeatable."),
    click.option(
        "--ds-config", "--ds_config", metavar="NAME|PATH",
        help="Preset or DeepSpeed JSON for holding the model, such as zero3 (sharded). Default: as trained; replicated in one process.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print JSON."),
)  # fmt: skip
MODEL_OPTION_NAMES = ("task", "step", "overrides", "ds_config")
SAMPLING_OPTIONS = (
    click.option("--max-new-tokens", "--max_new_tokens", default=256, type=click.IntRange(1), show_default=True, help="Maximum number of tokens per answer."),
    click.option("--temperature", default=0.0, type=click.FloatRange(0), show_default=True, help="Sampling temperature; 0 decodes greedily."),
    click.option(
        "--top-p", "--top_p", default=1.0, type=click.FloatRange(0, 1, min_open=True),
        show_default=True, help="Nucleus sampling: sample from the most likely tokens with this total probability.",
    ),
    click.option("--seed", default=0, type=click.IntRange(0), show_default=True, help="Random seed for sampling."),
    click.option("--batch", default=8, type=click.IntRange(1), show_default=True, help="Prompts per batch."),
)  # fmt: skip
SAMPLING_OPTION_NAMES = ("max_new_tokens", "temperature", "top_p", "seed", "batch")
SCRATCH_OPTION = click.option(
    "--scratch", hidden=True, type=click.Path(path_type=Path), help="Set by dstrain for its worker processes."
)


class GroupedCommand(click.Command):
    """Command whose help lists the launch options under a separate heading."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for heading, of_launch in (("Options", False), ("Launch options", True)):
            options = [param for param in self.get_params(ctx) if isinstance(param, click.Option)]
            params = [option for option in options if (option.name in LAUNCH_OPTION_NAMES) == of_launch]
            if rows := [row for param in params if (row := param.get_help_record(ctx)) is not None]:
                with formatter.section(heading):
                    formatter.write_dl(rows)


class CommandGroup(click.Group):
    """Command group that turns DstrainErrors into one message and their exit code."""

    command_class = GroupedCommand

    def main(self, *args: Any, **kwargs: Any) -> Any:
        prepare_process()
        return super().main(*args, **kwargs)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] in UNSUPPORTED_COMMANDS:
            raise UsageError(f"dstrain {args[0]}: not supported yet; {UNSUPPORTED_COMMANDS[args[0]]}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return self._invoke_checked(ctx)
        except BrokenPipeError:
            # click would exit with 1, which says that a run failed. A broken pipe to another process is such a failure.
            if not discard_closed_output():
                raise
            ctx.exit(EXIT_OUTPUT_CLOSED)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            known = error if isinstance(error, DstrainError) else explain_system_error(error)
            _exit_with_error(ctx, error, known)

    def _invoke_checked(self, ctx: click.Context) -> Any:
        if ctx.params.pop("debug", False):
            os.environ[DEBUG_ENV] = "1"
        is_debug()
        if sys.flags.optimize > 1:
            problem = "Python runs without docstrings (-OO, PYTHONOPTIMIZE=2), which transformers needs"
            raise UsageError(f"{problem}; unset PYTHONOPTIMIZE, or set it to 1")
        return super().invoke(ctx)


def _exit_with_error(ctx: click.Context, error: Exception, known: DstrainError | None) -> NoReturn:
    """Print an error and exit with its code, also where nobody reads it.

    `known`: the error with a fix; None for an unexpected one, whose traceback is written to a file.
    """
    text = f"error: {known or _summarize(error)}"
    with contextlib.suppress(UsageError):  # of DSTRAIN_DEBUG, which may be the error to print
        text = format_traceback(error) + text if is_debug() else text
    try:
        click.echo(text, err=True)
    except BrokenPipeError:
        discard_closed_output()
    ctx.exit(EXIT_FAILED if known is None else known.exit_code)


def _summarize(error: Exception) -> str:
    """Return one line about an unexpected error, and where its traceback is."""
    what = f"unexpected {describe_unexpected(error)}; this is a bug of dstrain or of a library it uses; "
    if is_debug():
        return f"{what}report it with the traceback above"
    path = save_traceback(error)
    return f"{what}" + (
        f"the full traceback is in {path}" if path else "run `dstrain --debug ...` to see the traceback"
    )


def with_options(*groups: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds groups of options to a command."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed([option for group in groups for option in group]):
            command = option(command)
        return command

    return decorate


def pop_options(options: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Remove the options with these names from `options` and return them."""
    return {name: options.pop(name) for name in names}
